"""`selection.json` keeps its schema: it round-trips, old files are read, unknown ones refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecdecError
from specdec.layer_select.artifact import FIELDS, SCHEMA, read_selection, write_selection
from specdec.layer_select.choose import choose_layers
from specdec.layer_select.config import ChooseConfig, ScoreConfig
from specdec.layer_select.document import selection_document
from specdec.layer_select.layer_scores import LayerScores

MakeScores = Callable[..., LayerScores]
README = Path(__file__).resolve().parents[2] / "layer_select" / "README.md"


def make_document(
    scores: LayerScores, config: ChooseConfig | None = None, probe: Any = None
) -> dict[str, Any]:
    config = config or ChooseConfig(resamples=10)
    return selection_document(
        scores,
        choose_layers(scores, config, probe=probe, model_type="llama"),
        score_config=ScoreConfig(),
        choose_config=config,
        target={"fingerprint": "0" * 64, "name": "made-up"},
        cost={"seconds": 1.5, "peak_memory_gib": 0.25},
        hashes={"calibration": "1" * 64},
        warnings=["something was noticed"],
    )


@pytest.mark.parametrize(
    "config",
    [
        ChooseConfig(resamples=10),
        ChooseConfig(resamples=0),
        ChooseConfig(num_layers=1, resamples=5),
        ChooseConfig(objective="probe", engine="sglang", forced=(3,), resamples=5),
        ChooseConfig(objective="entropy+cka,probe", forbidden=(2,), search="mmr", resamples=5),
        ChooseConfig(search="kdpp", min_gap=2, resamples=5),
    ],
)
def test_a_document_comes_back_from_its_file_as_it_was(
    made_up_scores: MakeScores, made_up_probe: Callable[..., Any], tmp_path: Path, config: ChooseConfig
) -> None:
    document = make_document(
        made_up_scores(9, domains=("prose",) * 3 + ("code",) * 3), config, made_up_probe(9)
    )
    path = tmp_path / "selection.json"
    write_selection(path, document)
    assert read_selection(path) == document
    assert tuple(document) == FIELDS
    assert document["schema"] == SCHEMA == "specdec.selection/2"


def test_every_field_is_documented() -> None:
    """Catches a field that was added without a word about it."""
    text = README.read_text(encoding="utf-8")
    for name in FIELDS:
        assert f"`{name}`" in text, name


def old_document() -> dict[str, Any]:
    """The fields of version 1, as the first release wrote them."""
    return {
        "schema": "specdec.selection/1",
        "target": {"fingerprint": "0" * 64, "name": "old", "num_layers": 4, "hidden_size": 8},
        "boundaries": [1, 3],
        "objective": {"boundaries": [1, 3], "value": 0.5},
        "lambda": 2.0,
        "estimator": "matrix_entropy",
        "search": "exhaustive",
        "scores": {"matrix_entropy": {"values": [0.1] * 5, "sign": 1}},
        "cka": [[1.0] * 5] * 5,
        "runners_up": [],
        "stability": None,
    }


@pytest.mark.parametrize("schema", ["specdec.selection/1", "specdec.selection/1.3"])
def test_files_of_the_first_version_are_still_read(tmp_path: Path, schema: str) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps({**old_document(), "schema": schema}))
    assert read_selection(path)["boundaries"] == [1, 3]


def test_a_minor_version_adds_fields_and_is_read(made_up_scores: MakeScores, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    document = {**make_document(made_up_scores(5)), "schema": "specdec.selection/2.7", "later": 1}
    path.write_text(json.dumps(document))
    assert read_selection(path)["later"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", r"has schema \(None\)"),
        ("{}", r"has schema \(None\)"),
        ('{"schema": 2}', r"has schema \(2\)"),
        ('{"schema": "specdec.selection/9"}', r"specdec\.selection/9\); this version reads"),
        ('{"schema": "specdec.selection/22"}', r"specdec\.selection/22\)"),
        ('{"schema": "specdec.selection/2x"}', r"specdec\.selection/2x\)"),
        ('{"schema": "specdec.draft/2"}', r"specdec\.draft/2\)"),
        ('{"schema": "specdec.selection/2", "boundaries": [1]}', "lacks target"),
    ],
)
def test_files_of_an_unknown_form_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "selection.json"
    path.write_text(content)
    with pytest.raises(SpecdecError, match=message):
        read_selection(path)


@pytest.mark.parametrize("boundaries", [[3, 3], [3, 1], [5], [-1, 2], [], [1.5], ["1"], [True], "13", None])
def test_boundaries_that_do_not_fit_the_target_are_refused(tmp_path: Path, boundaries: Any) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps({**old_document(), "boundaries": boundaries}))
    with pytest.raises(SpecdecError, match=r"distinct, ascending and in 0\.\.4"):
        read_selection(path)


@pytest.mark.parametrize("target", [{}, None, {"num_layers": "4"}])
def test_a_file_that_does_not_say_how_deep_its_target_is_is_refused(tmp_path: Path, target: Any) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps({**old_document(), "target": target}))
    with pytest.raises(SpecdecError, match="how many layers its target has"):
        read_selection(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"gone\.json\) cannot be read"):
        read_selection(tmp_path / "gone.json")
