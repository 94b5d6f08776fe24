"""Pictures show the choice, are drawn from the document alone, and leave global state alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecdecError
from specdec.layer_select import picture_theme
from specdec.layer_select.choose import choose_layers
from specdec.layer_select.config import ChooseConfig, ScoreConfig
from specdec.layer_select.document import selection_document
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.picture import draw_evidence, render_pictures
from specdec.layer_select.picture_files import picture_paths, write_pictures
from specdec.layer_select.picture_landscape import draw_landscape
from specdec.layer_select.picture_stability import draw_stability
from specdec.layer_select.picture_theme import PRINT, SCREEN, Theme

DOMAINS = ("prose", "prose", "code", "code", "maths", "chat")


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of few pixels: what they show is read from the figures."""
    monkeypatch.setattr(picture_theme, "DOTS_PER_INCH", 40)


@pytest.fixture
def document(made_up_scores: Callable[..., LayerScores]) -> dict[str, Any]:
    scores, config = made_up_scores(12, domains=DOMAINS), ChooseConfig(resamples=10, size_draws=5)
    return selection_document(
        scores,
        choose_layers(scores, config),
        score_config=ScoreConfig(),
        choose_config=config,
        target={"name": "made-up"},
        cost={},
        hashes={},
        warnings=[],
    )


def test_pictures_are_png_named_after_the_first_and_print_variants_follow(
    document: dict[str, Any], tmp_path: Path
) -> None:
    drawn = render_pictures(tmp_path / "s.png", document, print_too=True)
    names = ["s", "s-landscape", "s-stability", "s-print", "s-landscape-print", "s-stability-print"]
    assert [path.name for path in drawn] == [f"{name}.png" for name in names]
    assert list(drawn) == picture_paths(tmp_path / "s.png", print_too=True)
    assert not list(tmp_path.iterdir())
    write_pictures(drawn)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert len(set(drawn.values())) == 6


@pytest.mark.parametrize("theme", [SCREEN, PRINT])
def test_the_evidence_marks_every_chosen_boundary(document: dict[str, Any], theme: Theme) -> None:
    left, right, *_ = draw_evidence(document, theme).axes
    chosen = document["boundaries"]
    marked = {(line.get_xdata()[0], line.get_ydata()[0]) for line in left.lines}
    assert marked == {(x, y) for x in chosen for y in chosen}
    assert [text.get_text() for text in right.texts] == [f"b = {b}" for b in chosen]


def test_the_landscape_names_the_choice_and_the_references(document: dict[str, Any]) -> None:
    top, below = draw_landscape(document).axes
    labels = " ".join(label.get_text() for label in below.get_yticklabels())
    for word in ("chosen", "runner-up", "default", "uniform", "last third", "random"):
        assert word in labels
    assert sum(bar.get_height() for bar in top.patches) == document["landscape"]["sets"]


def test_the_stability_has_a_row_for_each_condition_and_hatching_on_paper(document: dict[str, Any]) -> None:
    top, below = draw_stability(document, PRINT).axes
    labels = [label.get_text() for label in below.get_yticklabels()]
    stability = document["stability"]
    count = len(stability["sizes"]) + len(stability["domains"]) + len(stability["estimators"])
    assert len(labels) == count
    assert any("only code" in label for label in labels)
    hatched = {round(bar.get_x() + bar.get_width() / 2) for bar in top.patches if bar.get_hatch()}
    assert hatched == set(document["boundaries"])


@pytest.mark.parametrize("config", [{"num_layers": 1, "resamples": 0}, {"num_layers": 2, "search": "kdpp"}])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_shallow_targets_without_resampling_or_references_can_be_drawn(
    made_up_scores: Callable[..., LayerScores], num_layers: int, config: dict[str, Any], tmp_path: Path
) -> None:
    chosen = ChooseConfig(**config)
    scores = made_up_scores(num_layers, num_batches=1)
    document = selection_document(
        scores,
        choose_layers(scores, chosen),
        score_config=ScoreConfig(),
        choose_config=chosen,
        target={"name": "shallow"},
        cost={},
        hashes={},
        warnings=[],
    )
    assert len(render_pictures(tmp_path / "s.png", document)) == 3


def test_drawing_leaves_pyplot_alone(document: dict[str, Any], tmp_path: Path) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    render_pictures(tmp_path / "s.png", document)
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == before


def test_a_picture_that_cannot_be_written_is_one_error(document: dict[str, Any], tmp_path: Path) -> None:
    drawn = render_pictures(tmp_path / "nowhere" / "s.png", document)
    with pytest.raises(SpecdecError, match="cannot be written"):
        write_pictures(drawn)
