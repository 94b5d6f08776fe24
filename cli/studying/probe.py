"""The ridge probe's word on every tap set of a study, on the study's own training conversations.

Owns the file that keeps it, so that a report made again does not measure again. Does not know how the probe
works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from specdec.cli.console import progress
from specdec.cli.studying.scores import Score
from specdec.errors import SpecdecError
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.score import require_measurable, score_layers
from specdec.layer_select.texts import CalibrationText
from specdec.provenance import read_json, write_json_atomic
from specdec.train.study import Study
from specdec.train.study_arms import TapSet

FILE_NAME = "probe.json"
NAMES = {
    "overlap_second": "ridge probe, overlap of x(t+2)",
    "overlap_next": "ridge probe, overlap of x(t+1)",
    "explained": "ridge probe, variance explained",
}


def probe_scores(work: Study, tap_sets: Sequence[TapSet], tokens: int) -> dict[str, Score]:
    """Measure the sets that `probe.json` does not hold yet.

    Args:
        work: the study.
        tap_sets: what to score.
        tokens: positions the probe is fitted on.
    """
    path = work.out / FILE_NAME
    contract = {"study": work.hash, "tokens": tokens}
    kept = read_json(path) if path.exists() else {}
    known = dict(kept["sets"]) if kept.get("contract") == contract else {}
    missing = [taps.boundaries for taps in tap_sets if _key(taps.boundaries) not in known]
    if missing:
        texts, config = probe_texts(work, tokens)
        with progress("ridge probe", sum(text.num_kept for text in texts)) as bar:
            scores = score_layers(work.model, texts, config, progress=lambda now: bar.update(now.done))
        assert scores.probe is not None, "probe tokens were asked for"
        for boundaries, found in zip(missing, scores.probe.score(missing), strict=True):
            known[_key(boundaries)] = asdict(found)
        write_json_atomic(path, {"contract": contract, "sets": known})
    return {title: _score(known, field) for field, title in NAMES.items()}


def probe_texts(work: Study, tokens: int) -> tuple[list[CalibrationText], ScoreConfig]:
    """What the probe reads and how: the training conversations, whole.

    Raises:
        SpecdecError: too few for a probe.
    """
    texts = [CalibrationText(token_ids=s.token_ids, first_kept=1) for s in work.training]
    config = ScoreConfig(
        tokens=sum(text.num_kept for text in texts), probe_tokens=tokens, estimators=("renyi_2",)
    )
    try:
        require_measurable(texts, config)
    except SpecdecError as error:
        raise SpecdecError(
            f"--probe-tokens ({tokens}) needs more training conversations, or 0: {error}"
        ) from error
    return texts, config


def _score(known: dict[str, dict[str, float]], field: str) -> Score:
    return lambda boundaries: known[_key(boundaries)][field]


def _key(boundaries: tuple[int, ...]) -> str:
    return "-".join(str(boundary) for boundary in boundaries)
