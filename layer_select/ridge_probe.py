"""The ridge probe: how well a linear draft with these taps would do, for any subset of boundaries.

Owns the regression on cached sums and its three scores. Does not know how rows were gathered (`probe_sums`)
or how a subset is chosen.

The pre-head feature at t+1 is ridge-regressed from the unit states of the subset at t and the embedding of
x_{t+1}; the target's head turns the prediction into a law, and its overlap sum_v min(p, p_hat) with the
target's law on held-out rows is what a sampled token of that draft would be accepted with. It is the
conditional a draft head must model at its first step. A second regression, from the taps alone to the feature
at t, says how much of x_{t+1} the taps know by themselves.

Two stages: `explained` compares many subsets by the variance of the feature that their fit explains on
held-out rows, from the cached Gram; `score` predicts whole features and applies the head, for the best few
hundred.
The penalty is one for all subsets, the best of a few on sets spread over the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.hf import check_boundaries
from specdec.layer_select.held_out_fit import HeldOutFit
from specdec.layer_select.probe_sums import ProbeSums, require_probe_rows
from specdec.layer_select.readout import BLOCK_ELEMENTS
from specdec.layer_select.ridge import ridge_solve

# predictions of this many subsets are held while the head is applied, so that p is computed once for them.
SUBSETS_TOGETHER = 16
# leading output directions that `explained` keeps; solving for all of a feature's would double its cost.
MAX_OUTPUTS = 128
# penalties to choose from, of the mean squared input: little for many rows, much for few.
PENALTIES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class ProbeScore:
    """What the probe says of one subset, on held-out rows.

    Attributes:
        overlap_next: E sum_v min(p, p_hat) for x_{t+1}, from the taps at t alone.
        overlap_second: The same for x_{t+2}, from the taps at t and the token x_{t+1}: a draft's first step.
        explained: Share of the variance of the feature at t+1 that the second regression explains.
    """

    overlap_next: float
    overlap_second: float
    explained: float


class RidgeProbe:
    """Scores subsets of boundaries from sums; holds the target only to apply its head."""

    def __init__(
        self,
        sums: ProbeSums,
        *,
        num_boundaries: int,
        logits_of_features: Callable[[Tensor], Tensor],
    ) -> None:
        held = sum(len(part) for part in sums.held_inputs)
        require_probe_rows(sums.rows, held)
        self.num_boundaries = num_boundaries
        self.rows, self.held_rows = sums.rows, held
        self._dims = len(sums.gram) // (num_boundaries + 1)
        self._logits = logits_of_features
        self._input_mean = sums.input_sum / sums.rows
        self._output_mean = sums.output_sum / sums.rows
        # centred sums: the regression has an intercept.
        self._gram = sums.gram - torch.outer(sums.input_sum, self._input_mean)
        self._cross = sums.cross - sums.input_sum[None, :, None] * self._output_mean[:, None, :]
        self._held_outputs = torch.cat(sums.held_outputs, dim=1)
        self._fit = HeldOutFit(
            gram=self._gram,
            cross=self._cross[1],
            inputs=torch.cat(sums.held_inputs) - self._input_mean,
            outputs=self._held_outputs[1] - self._output_mean[1],
            size=self._dims,
        ).in_leading_directions(MAX_OUTPUTS)
        self.penalty = self._best_penalty()
        self._overlaps: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}
        self._by_row: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def explained(self, subsets: Sequence[tuple[int, ...]]) -> Tensor:
        """Share of the feature's variance at t+1 that each subset explains on held-out rows, `[subsets]`.

        Of its `MAX_OUTPUTS` leading directions; `score` tells that of all.
        """
        self._check(subsets)
        return self._fit.explained([(*subset, self.num_boundaries) for subset in subsets], self.penalty)

    def _best_penalty(self) -> float:
        """The penalty under which early, middle and late boundaries explain most, together and alone."""
        last = self.num_boundaries - 1
        spread = tuple(sorted({last // 4, last // 2, last}))
        sets = [(*subset, self.num_boundaries) for subset in (spread, *((block,) for block in spread))]
        # of the mean square of an input, which is 1 by construction.
        scaled = [penalty * self.rows for penalty in PENALTIES]
        return max(scaled, key=lambda penalty: float(self._fit.explained(sets, penalty).sum()))

    def score(self, subsets: Sequence[tuple[int, ...]]) -> list[ProbeScore]:
        """Overlaps and explained variance of each subset on held-out rows."""
        self._check(subsets)
        keys = [tuple(subset) for subset in subsets]
        wanted = [(key, which) for key in dict.fromkeys(keys) for which in (0, 1)]
        wanted = [each for each in wanted if each not in self._overlaps]
        for low in range(0, len(wanted), SUBSETS_TOGETHER):
            self._measure(wanted[low : low + SUBSETS_TOGETHER])
        return [
            ProbeScore(
                overlap_next=self._overlaps[key, 0][0],
                overlap_second=self._overlaps[key, 1][0],
                explained=self._overlaps[key, 1][1],
            )
            for key in keys
        ]

    def overlap_by_row(self, subsets: Sequence[tuple[int, ...]]) -> Tensor:
        """Overlap for x_{t+2} on every held-out row, `[subsets, rows]`, float64, for resampling."""
        self.score(subsets)
        return torch.stack([self._by_row[tuple(subset), 1] for subset in subsets])

    def predict(self, subset: Sequence[int], *, second: bool) -> Tensor:
        """Held-out predictions of the feature at t+1 (`second`) or t, `[rows, hidden]`."""
        blocks = [*subset, self.num_boundaries] if second else list(subset)
        columns = self._fit.columns(blocks)
        weights = ridge_solve(
            self._gram[columns][:, columns],
            self._cross[int(second), columns],
            torch.tensor(self.penalty, dtype=torch.float64, device=self._gram.device),
        )
        return self._fit.inputs[:, columns] @ weights + self._output_mean[int(second)]

    def _check(self, subsets: Sequence[tuple[int, ...]]) -> None:
        for subset in subsets:
            check_boundaries(subset, self.num_boundaries - 1)

    def _measure(self, wanted: list[tuple[tuple[int, ...], int]]) -> None:
        """Overlap and held-out explained variance of some (subset, output) pairs."""
        predictions = [self.predict(subset, second=bool(which)) for subset, which in wanted]
        overlaps: list[list[Tensor]] = [[] for _ in wanted]
        for rows in self._row_blocks():
            laws = [self._law(self._held_outputs[which, rows]) for which in (0, 1)]
            for index, (_, which) in enumerate(wanted):
                guess = self._law(predictions[index][rows])
                overlap = torch.minimum(laws[which], guess).sum(dim=-1, dtype=torch.float64)
                overlaps[index].append(overlap.cpu())
        for index, each in enumerate(wanted):
            actual = self._held_outputs[each[1]]
            left = (actual - predictions[index]).double().square().sum()
            spread = (actual - actual.mean(dim=0)).double().square().sum()
            # features that do not vary leave nothing to explain.
            share = 1.0 - float(left / spread) if spread > 0 else 0.0
            self._by_row[each] = torch.cat(overlaps[index])
            self._overlaps[each] = (float(self._by_row[each].mean()), share)

    def _law(self, features: Tensor) -> Tensor:
        return self._logits(features).softmax(dim=-1)

    def _row_blocks(self) -> list[slice]:
        vocab = self._logits(self._held_outputs[1, :1]).shape[-1]
        step = max(1, BLOCK_ELEMENTS // vocab)
        return [slice(low, low + step) for low in range(0, self.held_rows, step)]
