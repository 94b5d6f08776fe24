"""How an objective is spelled: weighted terms, free of torch so that settings can be checked at once.

Owns the grammar. Does not know what a term is worth; see `objective`.

An objective is a comma-separated list of terms, each with an optional weight: `entropy+cka`, `probe`,
`entropy+cka=0.5,probe=0.5`, `effective_rank+cka`. `entropy` stands for the estimator set beside it. Weights
are divided by their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.errors import SpecdecError

PROBE = "probe"
CKA_SUFFIX = "+cka"
ENTROPY = "entropy"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of an objective.

    Attributes:
        estimator: The informativeness estimator weighed against CKA; None is the ridge probe.
        weight: Its part of the whole; weights of an objective sum to 1.
    """

    estimator: str | None
    weight: float

    @property
    def name(self) -> str:
        """As it is spelled in an objective and in files."""
        return PROBE if self.estimator is None else self.estimator + CKA_SUFFIX


def parse_objective(text: str, estimator: str) -> tuple[Term, ...]:
    """Read an objective.

    Args:
        text: terms as in the module's docstring.
        estimator: what `entropy` stands for.
    """
    found: dict[str | None, float] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        try:
            weight = float(number) if equals else 1.0
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise SpecdecError(f"objective ({text}): weight ({number}) of {name} must be a number above 0")
        source = _estimator_of(name, text, estimator)
        if source in found:
            raise SpecdecError(f"objective ({text}) names {name} twice; give each term once")
        found[source] = weight
    total = sum(found.values())
    return tuple(Term(estimator=source, weight=weight / total) for source, weight in found.items())


def _estimator_of(name: str, text: str, estimator: str) -> str | None:
    if name == PROBE:
        return None
    base = name.removesuffix(CKA_SUFFIX)
    if base == name or not base:
        raise SpecdecError(
            f"objective ({text}): {name or 'an empty term'} must be {PROBE}, {ENTROPY}{CKA_SUFFIX} or "
            f"ESTIMATOR{CKA_SUFFIX}, each with an optional weight as in {ENTROPY}{CKA_SUFFIX}=0.5,{PROBE}=0.5"
        )
    return estimator if base == ENTROPY else base
