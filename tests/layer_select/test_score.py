"""The scoring pass equals scores computed text by text from a full forward, whatever the batching."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import hf
from specdec.errors import SpecdecError
from specdec.layer_select.cka import cka_from_hsic, hsic_pair
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.entropy import ESTIMATORS
from specdec.layer_select.estimators.sample import StateSample
from specdec.layer_select.estimators.spectral import matrix_entropy
from specdec.layer_select.evidence import block_influence, cosine_to_final
from specdec.layer_select.rows import normalize_rows
from specdec.layer_select.score import LayerScores, ScoreProgress, score_layers
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
    expected = torch.stack([matrix_entropy(StateSample(states=one)) for one in states])
    assert torch.allclose(scores.text_values["matrix_entropy"], expected, atol=TOLERANCE)
    rows = normalize_rows(torch.cat(states, dim=1))
    pair = hsic_pair(rows)
    assert torch.allclose(scores.cka(), cka_from_hsic(pair.debiased), atol=1e-4)
    assert torch.allclose(scores.cka(biased=True), cka_from_hsic(pair.biased), atol=1e-4)
    raw = torch.cat(states, dim=1)
    assert torch.allclose(scores.block_influence(), block_influence(raw), atol=TOLERANCE)
    assert torch.allclose(scores.cosine_to_final(), cosine_to_final(raw), atol=TOLERANCE)
    for name in ("gaussian_entropy", "channel_entropy", "histogram_entropy"):
        expected = ESTIMATORS[name].compute(StateSample(states=raw))
        assert torch.allclose(scores.values(name), expected, atol=1e-3)
    pooled = torch.stack([one.mean(dim=1) for one in states], dim=1)
    expected = ESTIMATORS["dataset_entropy"].compute(StateSample(states=pooled))
    assert torch.allclose(scores.values("dataset_entropy"), expected, atol=TOLERANCE)
    assert scores.tokens == sum(LENGTHS) - 2 * len(LENGTHS)
    assert (scores.num_layers, scores.hidden_size) == (4, 64)


def test_entropies_do_not_depend_on_the_batching_and_cka_hardly(model: Any) -> None:
    texts = random_texts([50] * 24)
    whole = score_layers(model, texts, ScoreConfig(batch_tokens=10_000, cka_rows=10_000))
    parts = score_layers(model, texts, ScoreConfig(batch_tokens=200, cka_rows=100))
    assert (whole.num_batches, parts.num_batches) == (1, 6)
    for name in (*whole.text_values, *whole.dataset_names, "channel_entropy"):
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


def test_dataset_entropy_of_a_resample_is_that_of_the_repeated_texts(model: Any) -> None:
    texts = random_texts([30] * 9)
    scores = score_layers(model, texts, ScoreConfig(batch_tokens=87))
    assert scores.batch_of_text.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert scores.pooled is not None
    rows = scores.pooled[:, [0, 1, 2, 0, 1, 2, 6, 7, 8]]
    # repeated by batch: the order of rows changes no spectrum.
    expected = ESTIMATORS["dataset_entropy"].compute(StateSample(states=rows))
    found = scores.informativeness("dataset_entropy", torch.tensor([2, 0, 1]))
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_progress_tells_tokens_rate_and_time_left(model: Any) -> None:
    seen: list[ScoreProgress] = []
    scores = score_layers(model, random_texts([40] * 5), ScoreConfig(batch_tokens=80), progress=seen.append)
    assert [now.done for now in seen] == [78, 195]
    assert all(now.total == scores.tokens == 195 and now.tokens_per_second > 0 for now in seen)
    assert seen[0].seconds_left == pytest.approx((195 - 78) / seen[0].tokens_per_second)
    assert seen[-1].seconds_left == 0


def test_batches_hold_one_domain_each_and_small_domains_are_put_together(model: Any) -> None:
    domains = ["prose", "code", "prose", "maths", "code", "chat", "prose", "code"]
    texts = [
        replace(text, domain=domain) for text, domain in zip(random_texts([41] * 8), domains, strict=True)
    ]
    scores = score_layers(model, texts, ScoreConfig(batch_tokens=100))
    assert scores.batch_domains == ("prose", "code", "mixed")
    assert scores.rows.tolist() == [120.0, 120.0, 80.0]
    code = score_layers(
        model, [text for text in texts if text.domain == "code"], ScoreConfig(batch_tokens=100)
    )
    counts = scores.domain_counts("code")
    assert torch.allclose(
        scores.values("matrix_entropy", counts), code.values("matrix_entropy"), atol=TOLERANCE
    )
    with pytest.raises(SpecdecError, match=r"domain \(law\) must be one of prose, code, mixed"):
        scores.domain_counts("law")


def test_only_the_estimators_asked_for_are_measured_and_others_are_named_as_missing(model: Any) -> None:
    texts = random_texts([30] * 4)
    config = ScoreConfig(estimators=("renyi_0.5", "logit_lens_entropy"), lens_tokens=40)
    scores = score_layers(model, texts, config)
    assert scores.names == ("renyi_0.5", "logit_lens_entropy")
    # sign: a decided lens is taken as richer.
    assert torch.equal(scores.informativeness("logit_lens_entropy"), -scores.values("logit_lens_entropy"))
    with pytest.raises(SpecdecError, match=r"was not measured; measured: renyi_0\.5"):
        scores.informativeness("matrix_entropy")
    assert score_layers(model, texts, ScoreConfig(estimators=("all",))).names != ()
    with pytest.raises(SpecdecError, match="surprise"):
        score_layers(model, texts, ScoreConfig(estimators=("surprise",)))
    with pytest.raises(SpecdecError, match="estimators"):
        ScoreConfig(estimators=())


def test_the_lens_of_the_last_boundary_is_the_entropy_of_the_targets_own_law(model: Any) -> None:
    texts = random_texts([30, 30, 30])
    config = ScoreConfig(estimators=("logit_lens_entropy",), lens_tokens=87)
    value = score_layers(model, texts, config).values("logit_lens_entropy")[-1]
    laws = [model(torch.tensor([text.token_ids])).logits[0, 1:].softmax(-1) for text in texts]
    entropy = torch.special.entr(torch.cat(laws)).sum(-1).mean()
    assert value.item() == pytest.approx(entropy.item() / math.log(272), abs=TOLERANCE)


def test_the_probe_sees_the_whole_pass_and_judges_subsets(model: Any) -> None:
    config = ScoreConfig(batch_tokens=200, probe_tokens=600, probe_heldout=150, probe_dims=16)
    scores = score_layers(model, random_texts([50] * 24), config)
    assert scores.probe is not None
    assert (scores.probe.rows, scores.probe.held_rows) == (600, 150)
    last, first = scores.probe.score([(2, 3, 4), (0,)])
    # boundary 4 is the feature of x_{t+1} but for its norm and the projection; boundary 0 is a token.
    assert last.overlap_next > first.overlap_next
    assert score_layers(model, random_texts([50] * 4)).probe is None


def test_measured_memory_and_its_bound_are_reported(model: Any) -> None:
    costs = score_layers(model, random_texts([40] * 5)).costs
    assert costs is not None
    assert (costs.tokens, costs.probe_seconds) == (195, 0.0)
    assert costs.peak_bytes > 2**26
    weights = sum(weight.numel() for weight in model.parameters()) * 4
    assert costs.bound_bytes > weights


@pytest.mark.parametrize("wrong", [272, -1])
def test_token_ids_of_another_tokenizer_are_refused_before_the_pass(model: Any, wrong: int) -> None:
    texts = [*random_texts([20]), CalibrationText(token_ids=(1, 2, 3, wrong, 4, 5), first_kept=1)]
    with pytest.raises(SpecdecError, match=rf"text 1 holds token id {wrong}, and the target has 0\.\.271"):
        score_layers(model, texts)


def test_too_few_rows_for_the_probe_are_an_error_before_the_pass_or_a_warning(model: Any) -> None:
    said: list[ScoreProgress] = []
    with pytest.raises(SpecdecError, match="24 rows to fit and 0 held out"):
        score_layers(model, random_texts([10] * 3 + [2]), ScoreConfig(probe_tokens=100), progress=said.append)
    assert said == []
    with pytest.warns(UserWarning, match="fitted on 72 rows, fewer than the 256 inputs"):
        score_layers(model, random_texts([26] * 4), ScoreConfig(probe_tokens=100))


def test_massive_activations_without_unit_rows_are_warned_of(tiny_llama: Path) -> None:
    loud = hf.load_hf_model(tiny_llama)
    loud.model.embed_tokens.weight[7] *= 1e4
    texts = [replace(text, token_ids=(*text.token_ids[:9], 7)) for text in random_texts([30] * 4)]
    with pytest.warns(UserWarning, match=r"boundaries \[0.*massive activations"):
        scores = score_layers(loud, texts, ScoreConfig(row_normalize=False))
    check_finite(scores)


def test_a_small_last_group_joins_the_one_before(model: Any) -> None:
    scores = score_layers(model, random_texts([41, 41, 6]), ScoreConfig(batch_tokens=40))
    assert scores.rows.tolist() == [40.0, 45.0]


def test_half_precision_targets_are_measured_in_fp32(tiny_llama: Path) -> None:
    model = hf.load_hf_model(tiny_llama, dtype="bfloat16")
    scores = score_layers(model, random_texts([30, 30]))
    assert torch.isfinite(scores.cka()).all()


def check_finite(scores: LayerScores) -> None:
    assert all(torch.isfinite(scores.values(name)).all() for name in scores.names)
    assert torch.isfinite(scores.block_influence()).all()
    assert torch.isfinite(scores.cka(biased=True)).all()
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
    with pytest.warns(UserWarning, match="3 texts have fewer than 4 measured positions"):
        check_finite(score_layers(model, random_texts([3, 3, 4])))
    with pytest.raises(SpecdecError, match="at least 4 measured tokens"):
        score_layers(model, random_texts([3]))


def test_states_that_are_not_finite_stop_the_pass_and_name_the_boundary(tiny_llama: Path) -> None:
    broken = hf.load_hf_model(tiny_llama)
    broken.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(SpecdecError, match="boundary 2 are not finite"):
        score_layers(broken, random_texts([20]))
