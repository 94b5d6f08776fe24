"""The choice of K boundaries from their scores: the decision, its rivals and how sure it is.

Owns the order of the questions and the result. Knows scores only as numbers per boundary; does not know
models, texts or files. The objective is told in `objective`, the searches in `search`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.layer_select.agreement import Agreement, rank_agreement
from specdec.layer_select.config import ChooseConfig
from specdec.layer_select.constraints import Feasible, feasible_sets
from specdec.layer_select.landscape import Landscape, survey
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.objective import Subset
from specdec.layer_select.probe_table import SubsetProbe
from specdec.layer_select.references import reference_subsets
from specdec.layer_select.search import Chooser, SearchOutcome
from specdec.layer_select.stability import (
    OtherChoice,
    SizeStability,
    Stability,
    bootstrap,
    by_domain,
    by_estimator,
    by_size,
)
from specdec.layer_select.sweep import LambdaSweep, sweep_lambda
from specdec.layer_select.terms import PROBE

# the choice and its nearest rivals, whose overlap is measured for the report whatever the objective is.
MEASURED_RIVALS = 3


@dataclass(frozen=True, kw_only=True)
class LayerSelection:
    """The decision with what speaks for and against it.

    Attributes:
        best: The chosen set.
        runners_up: Next best sets by what the search maximises.
        search: The search that was used; `auto` is resolved.
        compared: Every search on the same evidence, with gaps.
        sets: The constraints, resolved.
        landscape: The objective over all sets, with reference sets.
        sweep: The choice by lambda; None where it does not depend on lambda.
        stability: Bootstrap of batches; None when not asked for or with a single batch.
        sizes: The choice by calibration size.
        domains: The choice by domain.
        estimators: The choice by estimator.
        agreement: Kendall's tau between rankings of boundaries.
        explained: Variance the probe explains from each boundary 0..N alone; None where it was not run.
    """

    best: Subset
    runners_up: tuple[Subset, ...]
    search: str
    compared: tuple[SearchOutcome, ...]
    sets: Feasible
    landscape: Landscape
    sweep: LambdaSweep | None
    stability: Stability | None
    sizes: tuple[SizeStability, ...]
    domains: tuple[OtherChoice, ...]
    estimators: tuple[OtherChoice, ...]
    agreement: Agreement
    explained: tuple[float, ...] | None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The chosen boundaries, ascending."""
        return self.best.boundaries


def choose_layers(
    scores: LayerScores,
    config: ChooseConfig | None = None,
    *,
    probe: SubsetProbe | None = None,
    model_type: str | None = None,
) -> LayerSelection:
    """Choose boundaries that are informative and unlike one another, or that a probe predicts best from.

    Args:
        scores: the evidence.
        config: how to choose.
        probe: scores sets; that of the scores when None. Needed when the objective has a probe part,
            reported otherwise.
        model_type: the target's, for engine limits.
    """
    config = config or ChooseConfig()
    sets = feasible_sets(scores.num_layers, config, model_type)
    chooser = Chooser(scores, config, sets, scores.probe if probe is None else probe)
    if chooser.probe is not None:
        # before the choice: a rule's measured value must be able to win.
        for taps in reference_subsets(scores.num_layers, config.num_layers).values():
            chooser.probe.measure(torch.tensor([taps]))
    rows = chooser.settle()
    objective = chooser.objective()
    if chooser.probe is not None:
        chooser.probe.measure(rows[:MEASURED_RIVALS])
    explained = _explained(chooser)
    rankings = {name: scores.informativeness(name).tolist() for name in scores.names}
    if explained is not None:
        rankings[PROBE] = list(explained)
    ranked = objective.subsets(rows)
    chosen = ranked[0].boundaries
    return LayerSelection(
        best=ranked[0],
        runners_up=tuple(ranked[1:]),
        search=chooser.search,
        compared=tuple(chooser.compare(objective)),
        sets=sets,
        landscape=survey(chooser, objective),
        sweep=sweep_lambda(chooser, chosen),
        stability=bootstrap(chooser, chosen),
        sizes=by_size(chooser, chosen),
        domains=by_domain(chooser, chosen),
        estimators=by_estimator(chooser, chosen),
        agreement=rank_agreement(rankings, sets.allowed),
        explained=explained,
    )


def _explained(chooser: Chooser) -> tuple[float, ...] | None:
    """What the probe explains from one boundary alone."""
    if chooser.probe is None:
        return None
    single = torch.arange(chooser.scores.num_layers + 1)[:, None]
    return tuple(chooser.probe.explained(single).tolist())
