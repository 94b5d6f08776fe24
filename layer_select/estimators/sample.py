"""States of one text, or rows of one batch, at several boundaries: what every estimator is given.

Owns the preparation that estimators share (centring, unit rows, the Gram and its spectrum), computed once.
Does not know estimators, models or texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.layer_select.rows import center, normalize_rows


@dataclass(frozen=True, kw_only=True)
class StateSample:
    """States of the same positions at several boundaries.

    Attributes:
        states: `[boundaries, rows, hidden]`, sink and padding positions removed.
        center: Subtract the sample's mean state before a Gram.
        row_normalize: Scale states to unit length, after centring.
        over_logits: The target's own way from states `[rows, hidden]` before its final norm to logits
            `[rows, vocabulary]`, handed to a function block by block; only the logit lens asks for it.
        lens_rows: Rows that the logit lens reads, the first after a seeded shuffle.
        max_coordinates: Coordinates that the histogram reads, chosen by the seed.
        seed: Seed of what is left out.
    """

    states: Tensor
    center: bool = True
    row_normalize: bool = True
    over_logits: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] | None = None
    lens_rows: int = 64
    max_coordinates: int = 256
    seed: int = 0

    @property
    def max_rank(self) -> int:
        """The largest rank the Gram matrix can have."""
        return min(self.states.shape[-2:])

    @cached_property
    def prepared(self) -> Tensor:
        """States centred and scaled as asked, `[boundaries, rows, hidden]`."""
        states = center(self.states) if self.center else self.states
        return normalize_rows(states) if self.row_normalize else states

    @cached_property
    def scaled(self) -> Tensor:
        """States scaled but not centred, for estimators that centre by coordinate."""
        return normalize_rows(self.states) if self.row_normalize else self.states

    @cached_property
    def gram(self) -> Tensor:
        """The smaller Gram of the prepared states, `[boundaries, rank, rank]`, float64."""
        return smaller_gram(self.prepared)

    @cached_property
    def spectrum(self) -> Tensor:
        """Gram eigenvalues divided by their sum, `[boundaries, min(rows, hidden)]`, float64."""
        return _spectrum(self.gram)


def smaller_gram(states: Tensor) -> Tensor:
    """X X^T or X^T X, whichever is smaller, `[..., rank, rank]`, float64: they share their non-zero spectrum.

    The product is cheap in the states' own precision; what is done with it needs the digits.
    """
    rows, hidden = states.shape[-2:]
    return (states @ states.mT if rows <= hidden else states.mT @ states).double()


def gram_spectrum(states: Tensor) -> Tensor:
    """Eigenvalues of the Gram of states `[..., rows, hidden]` divided by its trace.

    Returns:
        `[..., min(rows, hidden)]`, float64, summing to 1, or all zero where all states are zero.
    """
    return _spectrum(smaller_gram(states))


def _spectrum(gram: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0)
    trace = eigenvalues.sum(dim=-1, keepdim=True)
    return eigenvalues / torch.where(trace == 0, torch.ones_like(trace), trace)
