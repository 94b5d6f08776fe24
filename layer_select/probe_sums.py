"""Sums for the ridge probe, gathered in the scoring pass.

Owns which rows the probe sees, the projection of states, and the Gram and cross sums. Solves nothing.

A row is a position t of a text whose next position is measured too. Its inputs are the states of all
boundaries at t, each scaled to unit root mean square and projected, and the embedding of token x_{t+1},
treated alike. Its outputs are the target's pre-head features (after the final norm) at t, which decide
x_{t+1}, and at t+1, which decide x_{t+2}.

All boundaries share one random projection: with one each, neighbouring boundaries, nearly equal, would show a
subset more directions of the same state than a tap of it holds. It is left out where the target is no wider
than `probe_dims`. Texts are split: every fourth is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.config import MIN_ROWS, ScoreConfig
from specdec.layer_select.readout import Readout
from specdec.layer_select.ridge import unit_rms

# every fourth text is held out: 128 of 512 are enough to tell subsets apart, the rest feeds the fit.
HELD_OUT_EVERY = 4


@dataclass(kw_only=True)
class ProbeSums:
    """Running sums over fit rows, and the held-out rows themselves.

    Attributes:
        gram: Sum of x x^T over all blocks, `[blocks * dims, blocks * dims]`; the last block is the token's.
        cross: Sums of x y^T for both outputs, `[2, blocks * dims, hidden]`: of t, then of t + 1.
        input_sum: `[blocks * dims]`.
        output_sum: `[2, hidden]`.
        rows: Fit rows.
        held_inputs: `[rows, blocks * dims]` of each batch.
        held_outputs: `[2, rows, hidden]` of each batch.
    """

    gram: Tensor
    cross: Tensor
    input_sum: Tensor
    output_sum: Tensor
    rows: int = 0
    held_inputs: list[Tensor] = field(default_factory=list)
    held_outputs: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(
        cls, num_blocks: int, dims: int, hidden: int, *, dtype: torch.dtype, device: torch.device
    ) -> ProbeSums:
        """Sums over nothing."""
        width = num_blocks * dims
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        return cls(
            gram=zeros(width, width),
            cross=zeros(2, width, hidden),
            input_sum=zeros(width),
            output_sum=zeros(2, hidden),
        )

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add fit rows: inputs `[rows, blocks * dims]`, outputs `[2, rows, hidden]`."""
        self.gram.addmm_(inputs.mT, inputs)
        for which in range(2):
            self.cross[which].addmm_(inputs.mT, outputs[which])
        self.input_sum += inputs.sum(dim=0)
        self.output_sum += outputs.sum(dim=1)
        self.rows += len(inputs)

    def hold_out(self, inputs: Tensor, outputs: Tensor) -> None:
        """Keep held-out rows, shaped as in `add`."""
        self.held_inputs.append(inputs)
        self.held_outputs.append(outputs)


def planned_rows(batches: Sequence[Sequence[int]], config: ScoreConfig) -> tuple[int, int]:
    """Rows a `ProbeCollector` will fit on and hold out, known before anything is measured.

    Args:
        batches: measured positions of each text of each batch, in the order of the pass.
        config: of the pass.
    """
    total, first, found = sum(map(sum, batches)), 0, [0, 0]
    for kept in batches:
        for is_held, budget in enumerate((config.probe_tokens, config.probe_heldout)):
            rows = sum(max(n - 1, 0) for i, n in enumerate(kept) if _held_out(first + i) == bool(is_held))
            found[is_held] += min(round(budget / total * sum(kept)), rows)
        first += len(kept)
    return found[0], found[1]


def require_probe_rows(rows: int, held: int) -> None:
    """Refuse a probe of too few rows to fit or to judge."""
    if rows < MIN_ROWS or held < MIN_ROWS:
        raise SpecdecError(
            f"the ridge probe has {rows} rows to fit and {held} held out; at least {MIN_ROWS} of each are "
            "needed: give more or longer texts (every fourth is held out), or leave the probe out "
            "(--no-probe; probe_tokens=0 in Python)"
        )


def _held_out(text: int) -> bool:
    return text % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


class ProbeCollector:
    """Turns the states of one batch into fit and held-out rows, a fixed part of every batch."""

    def __init__(
        self,
        readout: Readout,
        *,
        num_boundaries: int,
        hidden_size: int,
        total_rows: int,
        config: ScoreConfig,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._readout, self._config = readout, config
        self._fit_share = config.probe_tokens / total_rows
        self._held_share = config.probe_heldout / total_rows
        self.num_boundaries = num_boundaries
        self.dims = min(config.probe_dims, hidden_size)
        self.projection = _projection(hidden_size, self.dims, config.seed)
        self.sums = ProbeSums.empty(
            num_boundaries + 1, self.dims, hidden_size, dtype=dtype, device=readout.device
        )

    @torch.no_grad()
    def add(self, batch_index: int, first_text: int, ids: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Read one batch.

        Args:
            batch_index: position of the batch in the pass; seeds which rows are read.
            first_text: position of the batch's first text among all texts; decides who is held out.
            ids: measured token ids of each text, `[kept]`.
            states: their states, `[boundaries, kept, hidden]`.
        """
        held = [_held_out(first_text + index) for index in range(len(ids))]
        batch_rows = sum(len(each) for each in ids)
        for is_held, share in ((False, self._fit_share), (True, self._held_share)):
            texts = [index for index, flag in enumerate(held) if flag == is_held]
            picked = self._pick(
                [ids[index] for index in texts], round(share * batch_rows), 2 * batch_index + is_held
            )
            chosen = [(texts[index], rows) for index, rows in enumerate(picked) if len(rows)]
            if not chosen:
                continue
            inputs = torch.cat([self._inputs(ids[index], states[index], rows) for index, rows in chosen])
            outputs = torch.cat([self._outputs(states[index], rows) for index, rows in chosen], dim=1)
            (self.sums.hold_out if is_held else self.sums.add)(inputs, outputs)

    def _pick(self, ids: list[Tensor], wanted: int, stream: int) -> list[Tensor]:
        """Positions of each text, ascending, `wanted` over all of them; the last of a text has no next."""
        lengths = [max(len(each) - 1, 0) for each in ids]
        generator = torch.Generator().manual_seed((self._config.seed << 32) + stream)
        chosen = torch.randperm(sum(lengths), generator=generator)[:wanted].sort().values
        ends = torch.tensor(lengths).cumsum(0)
        starts = ends - torch.tensor(lengths)
        return [
            chosen[(chosen >= low) & (chosen < high)] - low for low, high in zip(starts, ends, strict=True)
        ]

    def _inputs(self, ids: Tensor, states: Tensor, rows: Tensor) -> Tensor:
        """Projected unit states of all boundaries and the next token's, `[rows, blocks * dims]`."""
        dtype, device = self.sums.gram.dtype, states.device
        at = rows.to(device)
        embedding = self._readout.embed(ids[rows + 1]).to(device)
        blocks = torch.cat([states[:, at], embedding.to(states.dtype).unsqueeze(0)]).to(dtype)
        projected = unit_rms(blocks)
        if self.projection is not None:
            projected = projected @ self.projection.to(device, dtype)
        return projected.transpose(0, 1).flatten(1)

    def _outputs(self, states: Tensor, rows: Tensor) -> Tensor:
        """Pre-head features at t and t + 1, `[2, rows, hidden]`."""
        at = rows.to(states.device)
        features = [self._readout.features(states[-1, at + shift]) for shift in (0, 1)]
        return torch.stack(features).to(self.sums.gram.dtype)


def _projection(hidden: int, dims: int, seed: int) -> Tensor | None:
    """Orthonormal columns `[hidden, dims]`, which keep the mean square; None where nothing is cut."""
    if dims == hidden:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(hidden, dims, generator=generator, dtype=torch.float64)).Q
