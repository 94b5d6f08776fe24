"""The scoring pass equals scores computed text by text from a full forward, whatever the batching."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import hf
from specdec.errors import SpecdecError
from specdec.layer_select.cka import cka_from_hsic, hsic_matrix
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.entropy import TextStates, matrix_entropy
from specdec.layer_select.rows import normalize_rows
from specdec.layer_select.score import LayerScores, score_layers
from specdec.layer_select.texts import CalibrationText

# padded and unpadded forwards differ by fp32 rounding in attention; measured 2e-7 on entropies.
TOLERANCE = 1e-5


def random_texts(lengths: list[int], *, first_kept: int = 1) -> list[CalibrationText]:
    generator = torch.Generator().manual_seed(0)
    return [
        CalibrationText(
            token_ids=tuple(torch.randint(0, 256, (length,), generator=generator).tolist()),
            first_kept=first_kept,
        )
        for length in lengths
    ]


def states_one_by_one(model: Any, texts: list[CalibrationText]) -> list[Tensor]:
    """Measured states `[boundaries, kept, hidden]` of each text from its own unpadded forward."""
    found = []
    with hf.BoundaryTap(model, range(hf.num_decoder_layers(model) + 1)) as tap, torch.no_grad():
        for text in texts:
            model(torch.tensor([text.token_ids]))
            found.append(torch.stack([tap.states[b][0, text.first_kept :] for b in tap.boundaries]))
    return found


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return hf.load_hf_model(tiny_llama)


LENGTHS = [30, 7, 55, 24, 23, 9, 40]


def test_scores_equal_those_of_unpadded_forwards_without_the_dropped_positions(model: Any) -> None:
    """Catches padding or sink positions that leak in, and texts that swap places when sorted by length."""
    texts = random_texts(LENGTHS, first_kept=2)
    scores = score_layers(model, texts, ScoreConfig(batch_tokens=10_000, cka_rows=10_000))
    states = states_one_by_one(model, texts)
    expected = torch.stack([matrix_entropy(TextStates(states=one)) for one in states])
    assert torch.allclose(scores.text_values["matrix_entropy"], expected, atol=TOLERANCE)
    rows = normalize_rows(torch.cat(states, dim=1))
    assert torch.allclose(scores.cka(), cka_from_hsic(hsic_matrix(rows)), atol=1e-4)
    assert scores.tokens == sum(LENGTHS) - 2 * len(LENGTHS)
    assert (scores.num_layers, scores.hidden_size) == (4, 64)


def test_entropies_do_not_depend_on_the_batching_and_cka_hardly(model: Any) -> None:
    texts = random_texts([50] * 24)
    whole = score_layers(model, texts, ScoreConfig(batch_tokens=10_000, cka_rows=10_000))
    parts = score_layers(model, texts, ScoreConfig(batch_tokens=200, cka_rows=100))
    assert (whole.num_batches, parts.num_batches) == (1, 6)
    for name in whole.text_values:
        assert torch.allclose(whole.informativeness(name), parts.informativeness(name), atol=TOLERANCE)
    # both are unbiased estimates from the same 1,176 rows; they differ by sampling of row pairs.
    assert torch.allclose(whole.cka(), parts.cka(), atol=0.05)


def test_resampled_scores_are_those_of_the_repeated_batches(model: Any) -> None:
    scores = score_layers(model, random_texts([40] * 8), ScoreConfig(batch_tokens=80))
    counts = torch.tensor([0, 2, 1, 1])
    picked = [1, 1, 2, 3]
    per_batch = [scores.text_values["matrix_entropy"][scores.batch_of_text == b] for b in picked]
    assert torch.allclose(scores.informativeness("matrix_entropy", counts), torch.cat(per_batch).mean(dim=0))
    expected = cka_from_hsic(torch.stack([scores.hsic[b] for b in picked]).sum(dim=0))
    assert torch.allclose(scores.cka(counts), expected)


def test_progress_counts_measured_tokens_up_to_all_of_them(model: Any) -> None:
    seen: list[int] = []
    scores = score_layers(model, random_texts([40] * 5), ScoreConfig(batch_tokens=80), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == scores.tokens


def test_a_small_last_group_joins_the_one_before(model: Any) -> None:
    scores = score_layers(model, random_texts([41, 41, 6]), ScoreConfig(batch_tokens=40))
    assert scores.rows.tolist() == [40.0, 45.0]


def test_half_precision_targets_are_measured_in_fp32(tiny_llama: Path) -> None:
    model = hf.load_hf_model(tiny_llama, dtype="bfloat16")
    scores = score_layers(model, random_texts([30, 30]))
    assert torch.isfinite(scores.cka()).all()


def check_finite(scores: LayerScores) -> None:
    assert all(torch.isfinite(values).all() for values in scores.text_values.values())
    assert torch.isfinite(scores.cka()).all()


def test_constant_states_are_scored_zero_with_a_warning(tiny_model_factory: Callable[..., Path]) -> None:
    """One token repeated has the same embedding everywhere: no variation at boundary 0."""
    model = hf.load_hf_model(tiny_model_factory("llama"))
    texts = [CalibrationText(token_ids=(65,) * 20, first_kept=1)] * 2
    with pytest.warns(UserWarning, match=r"boundaries \[0"):
        scores = score_layers(model, texts)
    check_finite(scores)
    assert scores.informativeness("matrix_entropy")[0] == 0.0


def test_short_texts_are_scored_and_too_few_tokens_are_an_error(model: Any) -> None:
    check_finite(score_layers(model, random_texts([3, 3, 4])))
    with pytest.raises(SpecdecError, match="at least 4 measured tokens"):
        score_layers(model, random_texts([3]))


def test_states_that_are_not_finite_stop_the_pass_and_name_the_boundary(tiny_llama: Path) -> None:
    broken = hf.load_hf_model(tiny_llama)
    broken.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(SpecdecError, match="boundary 2 are not finite"):
        score_layers(broken, random_texts([20]))
