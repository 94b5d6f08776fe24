"""A selection in the form of its file.

Owns how scores and decision become the fields of `selection.json` (`artifact`, documented in
`layer_select/README.md`). Does not compute or write anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specdec.layer_select.artifact import SCHEMA
from specdec.layer_select.choose import LayerSelection
from specdec.layer_select.config import ChooseConfig, ScoreConfig
from specdec.layer_select.entropy import estimator_named
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.objective import Subset

# the evidence is noise far above this; six digits keep the file readable.
DIGITS = 6


def selection_document(
    scores: LayerScores,
    selection: LayerSelection,
    *,
    score_config: ScoreConfig,
    choose_config: ChooseConfig,
    target: Mapping[str, Any],
    cost: Mapping[str, Any],
    hashes: Mapping[str, str],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Put scores and decision into the file's form.

    Args:
        scores: the evidence.
        selection: the decision.
        score_config: how boundaries were measured.
        choose_config: how they were chosen.
        target: fingerprint and name; layer count and width are added here.
        cost: seconds and memory; measured tokens are added here.
        hashes: of calibration set, template and whatever else the caller knows.
        warnings: what was noticed on the way.
    """
    engine = selection.sets.engine
    document = {
        "schema": SCHEMA,
        "target": {**target, "num_layers": scores.num_layers, "hidden_size": scores.hidden_size},
        "boundaries": list(selection.boundaries),
        "objective": {
            "terms": {term.name: term.weight for term in choose_config.terms},
            **_subset(selection.best),
        },
        "lambda": choose_config.diversity_weight,
        "lambda_sweep": None if selection.sweep is None else asdict(selection.sweep),
        "estimator": choose_config.estimator,
        "search": selection.search,
        "searches": [asdict(outcome) for outcome in selection.compared],
        "constraints": {
            "min_gap": selection.sets.min_gap,
            "allowed": list(selection.sets.allowed),
            "forced": list(selection.sets.forced),
            "forbidden": sorted(set(choose_config.forbidden)),
            "engine": None if engine is None else engine.engine,
            "engine_reason": None if engine is None else engine.reason,
        },
        "scores": {
            name: {
                "values": scores.values(name).tolist(),
                "sign": estimator_named(name).sign,
                "normalization": estimator_named(name).normalization,
                "level": estimator_named(name).level,
                "drop_bos": estimator_named(name).drop_bos and score_config.drop_first > 0,
            }
            for name in scores.names
        },
        "evidence": {
            "block_influence": scores.block_influence().tolist(),
            "cosine_to_final": scores.cosine_to_final().tolist(),
            "probe_explained": selection.explained,
            "probe_correlation": selection.landscape.probe_correlation,
        },
        "cka": scores.cka().tolist(),
        "agreement": asdict(selection.agreement),
        "runners_up": [_subset(subset) for subset in selection.runners_up],
        "references": {
            reference.name: {**_subset(reference.subset), "better": reference.better}
            for reference in selection.landscape.references
        },
        "landscape": {
            name: value for name, value in asdict(selection.landscape).items() if name != "references"
        },
        "stability": {
            "bootstrap": None if selection.stability is None else asdict(selection.stability),
            "sizes": [asdict(size) for size in selection.sizes],
            "domains": [asdict(choice) for choice in selection.domains],
            "estimators": [asdict(choice) for choice in selection.estimators],
        },
        "cost": {"tokens": scores.tokens, "texts": len(scores.batch_of_text), **cost},
        "settings": {"score": asdict(score_config), "choose": asdict(choose_config)},
        "warnings": list(warnings),
        "hashes": dict(hashes),
    }
    return {name: _plain(value) for name, value in document.items()}


def _subset(subset: Subset) -> dict[str, Any]:
    return {
        "boundaries": list(subset.boundaries),
        "value": subset.objective,
        "mean_informativeness_z": subset.informativeness,
        "mean_pairwise_cka": subset.redundancy,
        "probe_explained": subset.explained,
        "probe": None
        if subset.probe is None
        else {
            "overlap_next": subset.probe.overlap_next,
            "overlap_second": subset.probe.overlap_second,
            "explained": subset.probe.explained,
        },
    }


def _plain(value: Any) -> Any:
    """What JSON gives back for it: lists for tuples, floats rounded."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
