"""The ridge probe is scikit-learn's Ridge on the same rows, and its shortcuts change nothing."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from specdec import hf
from specdec.errors import SpecdecError
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.held_out_fit import HeldOutFit
from specdec.layer_select.probe_sums import ProbeCollector, ProbeSums, planned_rows
from specdec.layer_select.readout import Readout
from specdec.layer_select.ridge import ridge_solve, unit_rms
from specdec.layer_select.ridge_probe import PENALTIES, RidgeProbe

TOLERANCE = 1e-6
BOUNDARIES, HIDDEN, VOCAB = 5, 6, 19
HEAD = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs `[rows, blocks * dims]` and outputs `[2, rows, hidden]`, related, with means."""
    generator = torch.Generator().manual_seed(seed)
    law = torch.Generator().manual_seed(99)
    width = (BOUNDARIES + 1) * HIDDEN
    inputs = torch.randn(count, width, generator=generator, dtype=torch.float64) + 0.5
    weights = torch.randn(2, width, HIDDEN, generator=law, dtype=torch.float64) / 4
    noise = torch.randn(2, count, HIDDEN, generator=generator, dtype=torch.float64)
    return inputs, inputs @ weights + 0.3 * noise + 2


@pytest.fixture(scope="module")
def sums() -> ProbeSums:
    made = ProbeSums.empty(BOUNDARIES + 1, HIDDEN, HIDDEN, dtype=torch.float64, device=torch.device("cpu"))
    for seed in (1, 2, 3):
        made.add(*rows(60, seed))
        made.hold_out(*rows(15, seed + 10))
    return made


@pytest.fixture(scope="module")
def probe(sums: ProbeSums) -> RidgeProbe:
    return RidgeProbe(sums, num_boundaries=BOUNDARIES, logits_of_features=lambda f: f @ HEAD)


def columns(subset: tuple[int, ...], *, token: bool) -> list[int]:
    blocks = [*subset, BOUNDARIES] if token else list(subset)
    return [block * HIDDEN + offset for block in blocks for offset in range(HIDDEN)]


@pytest.mark.parametrize("subset", [(0,), (2, 4), (0, 1, 3), (0, 1, 2, 3, 4)])
def test_predictions_overlaps_and_variance_are_those_of_scikit_learn_on_the_same_rows(
    probe: RidgeProbe, subset: tuple[int, ...]
) -> None:
    """Catches a lost intercept, a swapped output, the token given to the first regression."""
    fit = [torch.cat(part, dim=-2).numpy() for part in zip(*(rows(60, s) for s in (1, 2, 3)), strict=True)]
    held = [
        torch.cat(part, dim=-2).numpy() for part in zip(*(rows(15, s) for s in (11, 12, 13)), strict=True)
    ]
    (score,) = probe.score([subset])
    for which, overlap in ((0, score.overlap_next), (1, score.overlap_second)):
        used = columns(subset, token=bool(which))
        model = Ridge(alpha=probe.penalty).fit(fit[0][:, used], fit[1][which])
        expected = model.predict(held[0][:, used])
        predicted = probe.predict(subset, second=bool(which)).numpy()
        assert np.allclose(predicted, expected, atol=TOLERANCE)
        p, q = (torch.softmax(torch.from_numpy(each) @ HEAD, -1) for each in (held[1][which], expected))
        assert overlap == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), abs=TOLERANCE)
        if which:
            left = ((held[1][which] - expected) ** 2).sum()
            spread = ((held[1][which] - held[1][which].mean(axis=0)) ** 2).sum()
            assert score.explained == pytest.approx(1 - left / spread, abs=TOLERANCE)


def test_explained_variance_of_every_subset_is_held_out_and_that_of_its_score(probe: RidgeProbe) -> None:
    """Catches variance on the rows of the fit, which rises with every input, and rows in another order."""
    subsets = [s for size in range(1, BOUNDARIES + 1) for s in combinations(range(BOUNDARIES), size)]
    values = probe.explained(subsets).tolist()
    scores = probe.score(subsets)
    assert values == pytest.approx([score.explained for score in scores], abs=TOLERANCE)


def test_output_directions_that_are_kept_are_those_the_inputs_move_most() -> None:
    """Two of four rotated directions carry nearly everything; leaving out the others changes little."""
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    weights = torch.randn(9, 4, dtype=torch.float64) * torch.tensor([3.0, 2.0, 0.01, 0.01]) @ rotation
    x, held = torch.randn(80, 9, dtype=torch.float64), torch.randn(40, 9, dtype=torch.float64)
    fit = HeldOutFit(gram=x.mT @ x, cross=x.mT @ (x @ weights), inputs=held, outputs=held @ weights, size=3)
    few = fit.in_leading_directions(2)
    assert few.cross.shape == (9, 2)
    subsets = [(0,), (1, 2), (0, 1, 2)]
    whole = fit.explained(subsets, 0.5)
    assert torch.allclose(few.explained(subsets, 0.5), whole, atol=1e-3)
    assert (whole.diff() > 0).all()
    assert fit.in_leading_directions(4) is fit


def test_the_penalty_is_the_best_of_those_offered_and_grows_when_inputs_say_nothing() -> None:
    """Catches one fixed penalty, under which few rows rank sets by how well they fit noise."""
    noise = ProbeSums.empty(BOUNDARIES + 1, HIDDEN, HIDDEN, dtype=torch.float64, device=torch.device("cpu"))
    for _ in range(2):
        noise.add(torch.randn(60, 36, dtype=torch.float64), torch.randn(2, 60, HIDDEN, dtype=torch.float64))
        noise.hold_out(
            torch.randn(30, 36, dtype=torch.float64), torch.randn(2, 30, HIDDEN, dtype=torch.float64)
        )
    made = RidgeProbe(noise, num_boundaries=BOUNDARIES, logits_of_features=lambda f: f @ HEAD)
    assert made.penalty == max(PENALTIES) * made.rows


def test_ridge_solver_agrees_with_scikit_learn() -> None:
    x, y = torch.randn(40, 9, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64)
    weights = ridge_solve(x.mT @ x, x.mT @ y, torch.tensor(1.3, dtype=torch.float64))
    expected = Ridge(alpha=1.3, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_.T
    assert np.allclose(weights.numpy(), expected, atol=TOLERANCE)


def test_too_few_rows_and_wrong_subsets_are_errors_that_say_so(probe: RidgeProbe) -> None:
    made = ProbeSums.empty(2, 3, 3, dtype=torch.float64, device=torch.device("cpu"))
    with pytest.raises(SpecdecError, match="0 rows to fit and 0 held out"):
        RidgeProbe(made, num_boundaries=1, logits_of_features=lambda f: f)
    with pytest.raises(SpecdecError, match=r"boundary \(5\) must be in 0\.\.4"):
        probe.score([(2, 5)])
    with pytest.raises(SpecdecError, match="distinct and ascending"):
        probe.explained([(3, 2)])


def collect(model: Any, texts: list[Tensor], config: ScoreConfig, batches: list[list[int]]) -> ProbeSums:
    total = sum(len(ids) for ids in texts)
    boundaries = hf.num_decoder_layers(model) + 1
    collector = ProbeCollector(
        Readout(model),
        num_boundaries=boundaries,
        hidden_size=model.config.hidden_size,
        total_rows=total,
        config=config,
        dtype=torch.float64,
    )
    first = 0
    with hf.BoundaryTap(model, range(boundaries)) as tap, torch.no_grad():
        for index, members in enumerate(batches):
            states = []
            for member in members:
                model(texts[member][None])
                states.append(torch.stack([tap.states[b][0] for b in tap.boundaries]))
            collector.add(index, first, [texts[member] for member in members], states)
            first += len(members)
    return collector.sums


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return hf.load_hf_model(tiny_llama)


def test_rows_pair_the_states_at_t_and_the_next_token_with_the_features_at_t_and_after(model: Any) -> None:
    """Catches rows paired one position off, pairs across texts, and fit rows among the held-out."""
    texts = [torch.randint(0, 256, (length,)) for length in (9, 14, 5, 11, 1, 7)]
    # as many rows as there are: every pair of every fit text, and of every fourth text held out.
    config = ScoreConfig(probe_tokens=10_000, probe_heldout=10_000, probe_dims=64)
    sums = collect(model, texts, config, [[0, 1, 2, 3], [4, 5]])
    assert sums.rows == 8 + 13 + 4 + 0 + 6
    assert sum(map(len, sums.held_inputs)) == 10
    assert planned_rows([[9, 14, 5, 11], [1, 7]], config) == (31, 10)
    with hf.BoundaryTap(model, range(5)) as tap, torch.no_grad():
        output = model(texts[3][None], output_hidden_states=True)
        inputs = torch.cat([unit_rms(tap.states[b][0, :-1]) for b in range(5)], dim=1)
        token = unit_rms(model.get_input_embeddings()(texts[3][1:]))
    expected = torch.cat([inputs, token], dim=1).double()
    final = output.hidden_states[-1][0].double()
    assert torch.allclose(sums.held_inputs[0], expected, atol=1e-5)
    assert torch.allclose(sums.held_outputs[0], torch.stack([final[:-1], final[1:]]), atol=1e-4)


def test_a_budget_below_all_rows_is_spread_over_the_batches(model: Any) -> None:
    texts = [torch.randint(0, 256, (41,)) for _ in range(8)]
    config = ScoreConfig(probe_tokens=80, probe_heldout=20, probe_dims=16)
    sums = collect(model, texts, config, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert sums.rows == 80
    assert [len(part) for part in sums.held_inputs] == [10, 10]
    assert sums.gram.shape == (6 * 16, 6 * 16)
    assert planned_rows([[41] * 4] * 2, config) == (80, 20)
    # the projection keeps the mean square, so one penalty suits every width.
    assert (sums.gram.diagonal().mean() / sums.rows).item() == pytest.approx(1.0, abs=0.25)


def test_a_projection_is_shared_by_all_boundaries(model: Any) -> None:
    """Catches one projection each, under which two equal boundaries would look like two views."""
    texts = [torch.randint(0, 256, (30,)) for _ in range(4)]
    config = ScoreConfig(probe_tokens=200, probe_dims=16)
    collector = ProbeCollector(
        Readout(model), num_boundaries=2, hidden_size=64, total_rows=120, config=config
    )
    same = torch.randn(1, 30, 64).repeat(2, 1, 1)
    collector.add(0, 0, texts, [same] * 4)
    first, second = collector.sums.gram[:16, :16], collector.sums.gram[16:32, 16:32]
    assert torch.allclose(first, second, rtol=1e-5)
