"""The registry of informativeness estimators: one interface, a name for each, what its values mean.

Owns names, signs and normalisations. The formulas are in `estimators/`; models, texts and how boundaries are
combined are not known here.

"Entropy of hidden states" has at least six readings and even its sign is not settled (a high value can mean
rich or undecided), so every estimator says which of both its `sign` assumes, and selection files record it.
Orders of the Renyi entropy beyond the listed ones are spelled into the name: `renyi_0.5`, `dataset_renyi_4`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.estimators.channel import channel_entropy, channel_softmax_entropy
from specdec.layer_select.estimators.gaussian import gaussian_entropy
from specdec.layer_select.estimators.histogram import BINS, histogram_entropy
from specdec.layer_select.estimators.logit_lens import logit_lens_entropy
from specdec.layer_select.estimators.sample import StateSample
from specdec.layer_select.estimators.spectral import (
    effective_rank,
    effective_rank_roy_vetterli,
    matrix_renyi,
)

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One way to say how much a boundary tells.

    Attributes:
        name: Its key in the registry and in files.
        sign: +1 where a higher value is taken as richer, -1 where a lower one is.
        normalization: What the raw value is divided by.
        drop_bos: Whether the attention sink is removed first.
        level: What one sample is: a `text`, the mixed rows of a calibration `batch`, or the whole `dataset`
            with one mean state for each text.
        compute: One sample to one value a boundary, `[boundaries]`, float64, finite.
    """

    name: str
    sign: int
    normalization: str
    drop_bos: bool = True
    level: Literal["text", "batch", "dataset"] = "text"
    compute: Callable[[StateSample], Tensor]


def _renyi(alpha: float, *, name: str, level: Literal["text", "dataset"]) -> Estimator:
    """Matrix-based Renyi entropy of one order, over the tokens of a text or over texts."""
    rows = "tokens" if level == "text" else "texts"
    return Estimator(
        name=name,
        sign=1,
        normalization=f"ln min({rows}, hidden)",
        level=level,
        compute=partial(matrix_renyi, alpha=alpha),
    )


_LISTED = (
    _renyi(1.0, name="matrix_entropy", level="text"),
    _renyi(2.0, name="renyi_2", level="text"),
    Estimator(name="effective_rank", sign=1, normalization="min(tokens, hidden)", compute=effective_rank),
    Estimator(
        name="effective_rank_roy_vetterli",
        sign=1,
        normalization="min(tokens, hidden)",
        compute=effective_rank_roy_vetterli,
    ),
    _renyi(1.0, name="dataset_entropy", level="dataset"),
    _renyi(2.0, name="dataset_renyi_2", level="dataset"),
    # a decided lens is taken as the richer one: it already says what the target will say.
    Estimator(
        name="logit_lens_entropy",
        sign=-1,
        normalization="ln vocabulary",
        level="batch",
        compute=logit_lens_entropy,
    ),
    Estimator(
        name="histogram_entropy",
        sign=1,
        normalization=f"ln {BINS} bins",
        level="batch",
        compute=histogram_entropy,
    ),
    Estimator(
        name="gaussian_entropy", sign=1, normalization="hidden", level="batch", compute=gaussian_entropy
    ),
    Estimator(
        name="channel_entropy", sign=1, normalization="ln hidden", level="batch", compute=channel_entropy
    ),
    Estimator(
        name="channel_softmax_entropy",
        sign=1,
        normalization="ln hidden",
        level="batch",
        compute=channel_softmax_entropy,
    ),
)
ESTIMATORS: dict[str, Estimator] = {estimator.name: estimator for estimator in _LISTED}
_ORDERED = {"renyi_": "text", "dataset_renyi_": "dataset"}


def estimator_named(name: str) -> Estimator:
    """The estimator of that name, listed or of a spelled order; or an error listing the known ones."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    for prefix, level in _ORDERED.items():
        if name.startswith(prefix):
            alpha = _order(name, name.removeprefix(prefix))
            return _renyi(alpha, name=name, level="text" if level == "text" else "dataset")
    raise SpecdecError(
        f"estimator ({name}) must be one of {', '.join(ESTIMATORS)}, or renyi_ALPHA or dataset_renyi_ALPHA"
    )


def _order(name: str, text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not alpha > 0:
        raise SpecdecError(f"estimator ({name}) needs an order above 0 after renyi_, such as renyi_0.5")
    return alpha


def estimators_named(names: Iterable[str]) -> list[Estimator]:
    """The estimators of those names, each once; `all` stands for every listed one."""
    wanted: dict[str, Estimator] = {}
    for name in names:
        for each in ESTIMATORS if name == ALL else (name,):
            wanted.setdefault(each, estimator_named(each))
    return list(wanted.values())
