"""`specdec select-layers`: choose the boundaries a draft head should read, and write why.

Owns the command line of layer selection: options, progress, the files. Does not know how boundaries are
scored or chosen; the tables are in `selection_tables`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.datasets import calibration_files
from specdec.cli.outputs import (
    require_not_input,
    require_own_beside,
    require_own_record,
    require_own_result,
    require_writable,
)
from specdec.cli.usage import flags_of, named_flags, usage_errors
from specdec.engine_limits import ENGINES
from specdec.errors import SpecdecError, UsageError
from specdec.layer_select.config import SEARCHES, ChooseConfig, ScoreConfig
from specdec.layer_select.picture_files import picture_paths, write_pictures
from specdec.loading import require_loading

if TYPE_CHECKING:
    from specdec.layer_select.layer_scores import LayerScores
    from specdec.layer_select.score import ScoreProgress
    from specdec.layer_select.texts import CalibrationText

SCORE = ScoreConfig()
CHOOSE = ChooseConfig()
FLAGS = flags_of(
    {**vars(SCORE), **vars(CHOOSE)},
    {
        "diversity_weight": "--lambda",
        "dpp_weight": "--theta",
        "forced": "--force",
        "forbidden": "--forbid",
        "dtype": "--dtype",
        "device_map": "--device-map",
    },
)
# eight rows for each of the 1,024 inputs that three taps and the token have.
PROBE_TOKENS = 8192
# no target is that deep; a range to a typing slip must not fill memory.
MAX_BOUNDARY = 10_000


def select_layers(
    target: Annotated[str, typer.Argument(help="Folder, or a name that pull knows.")],
    num_layers: Annotated[int, typer.Option(help="Boundaries to choose.")] = CHOOSE.num_layers,
    data: Annotated[
        str,
        typer.Option(
            help="Calibration texts: calibration (prose, code, maths, chat), responses.jsonl, prompts, a "
            ".txt, a bundled name, or several as prose=FILE,code=FILE."
        ),
    ] = "calibration",
    tokens: Annotated[int, typer.Option(help="Token positions to measure.")] = SCORE.tokens,
    objective: Annotated[
        str,
        typer.Option(help="What is maximised: entropy+cka, probe, or a mix: entropy+cka=0.5,probe=0.5."),
    ] = CHOOSE.objective,
    estimator: Annotated[
        str, typer.Option(help="Informativeness estimator that entropy stands for.")
    ] = CHOOSE.estimator,
    estimators: Annotated[
        str | None, typer.Option(help="Estimators to measure beside it: names with commas, or all.")
    ] = None,
    diversity: Annotated[
        float, typer.Option("--lambda", help="Weight of mean pairwise CKA against informativeness.")
    ] = CHOOSE.diversity_weight,
    search: Annotated[str, typer.Option(help=f"One of {', '.join(SEARCHES)}.")] = CHOOSE.search,
    theta: Annotated[
        float, typer.Option(help="Weight of informativeness in the kernel of kdpp.")
    ] = CHOOSE.dpp_weight,
    min_gap: Annotated[
        int, typer.Option(help="Smallest distance between chosen boundaries.")
    ] = CHOOSE.min_gap,
    allowed: Annotated[
        str | None, typer.Option(help="Boundaries that may be chosen, as 2-28 or 1,4,8-12 (default 1..N).")
    ] = None,
    force: Annotated[str | None, typer.Option(help="Boundaries that must be chosen.")] = None,
    forbid: Annotated[str | None, typer.Option(help="Boundaries that must not be chosen.")] = None,
    engine: Annotated[
        str | None, typer.Option(help=f"Choose what this engine can capture: {', '.join(ENGINES)}.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Fit the ridge probe of next-token overlap.")
    ] = True,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples; 0 for none.")] = CHOOSE.resamples,
    out: Annotated[Path, typer.Option(help="Selection file to write.")] = Path("selection.json"),
    picture: Annotated[
        Path | None, typer.Option(help="PNG of the evidence; NAME-landscape and NAME-stability beside it.")
    ] = None,
    print_pictures: Annotated[
        bool, typer.Option("--print-pictures", help="Pictures for paper as well, as NAME-print.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="File that holds the pass after every batch; continued if it exists.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of the target: float32, bfloat16, float16.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="Spread the target over devices: auto, balanced, sequential.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling and resampling.")] = 0,
) -> None:
    """Choose the boundaries a draft head should read, and write why."""
    with usage_errors(FLAGS):
        choose_config = ChooseConfig(
            num_layers=num_layers,
            objective=objective,
            estimator=estimator,
            diversity_weight=diversity,
            search=search,
            dpp_weight=theta,
            min_gap=min_gap,
            allowed=None if allowed is None else _parse_boundaries("--allowed", allowed),
            forced=() if force is None else _parse_boundaries("--force", force),
            forbidden=() if forbid is None else _parse_boundaries("--forbid", forbid),
            engine=engine,
            resamples=resamples,
            seed=seed,
        )
        score_config = replace(
            ScoreConfig(tokens=tokens, probe_tokens=PROBE_TOKENS if probe else 0, seed=seed),
            estimators=_measured(choose_config, estimators),
        )
        require_loading(dtype, device_map)
    _require_consistent(choose_config, probe, device, device_map, picture, print_pictures)
    files = calibration_files(data)
    pictures = _require_outputs(out, picture, print_pictures, resume, list(files.values()))

    import time
    import warnings

    from specdec.cli.console import emit_json, progress, say

    # the libraries alone take long enough on a busy machine to look stuck.
    say(f"reading calibration texts and {target}")
    from specdec import hf, hub, provenance
    from specdec.cli.selection_tables import print_selection, summary
    from specdec.layer_select import artifact, choose, document, score, texts
    from specdec.layer_select.constraints import feasible_sets
    from specdec.layer_select.entropy import estimators_named
    from specdec.layer_select.search import resolved_search

    with usage_errors(FLAGS):
        estimators_named(score_config.estimators)
    folder = hub.resolve_target(target)
    tokenizer = hf.load_tokenizer(folder)
    with named_flags(FLAGS):
        calibration = texts.read_domains(files, tokenizer, score_config)
    score.require_measurable(calibration, score_config)
    measured = sum(text.num_kept for text in calibration)
    notes = []
    if measured < tokens:
        notes.append(f"calibration set has {measured} measured positions, {tokens} were asked for")
    model = hf.load_hf_model(folder, dtype=dtype, device_map=device_map)
    if device_map is None:
        model = model.to(_device(device))
    model_type = provenance.read_json(folder / "config.json").get("model_type")
    # what cannot be chosen is refused before minutes of measuring.
    with named_flags(FLAGS):
        resolved_search(feasible_sets(hf.num_decoder_layers(model), choose_config, model_type), choose_config)
    with (
        progress("scoring boundaries (tokens)", total=measured) as bar,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UserWarning)
        scores = score.score_layers(
            model, calibration, score_config, progress=_reporter(bar.update), resume=resume
        )
    say("choosing boundaries" + (" and fitting the ridge probe to many sets" if probe else ""))
    started = time.perf_counter()
    selection = choose.choose_layers(scores, choose_config, model_type=model_type)
    choose_seconds = time.perf_counter() - started
    notes += [str(warning.message) for warning in caught if warning.category is UserWarning]
    for note in notes:
        say(f"warning: {note}")

    hashes = {
        "calibration": texts.texts_hash(calibration),
        "template": hf.template_hash(tokenizer),
        "config": provenance.sha256_file(folder / "config.json"),
    }
    made = document.selection_document(
        scores,
        selection,
        score_config=score_config,
        choose_config=choose_config,
        target={"fingerprint": provenance.folder_fingerprint(folder), "name": Path(target).name},
        cost={**_cost(scores, choose_seconds), "data": data, "domains": _domain_tokens(calibration)},
        hashes=hashes,
        warnings=notes,
    )
    drawn = {}
    if picture is not None:
        from specdec.layer_select.picture import render_pictures

        # drawn before the first file is written: a failure leaves earlier files as they were.
        drawn = render_pictures(picture, made, print_too=print_pictures)
    artifact.write_selection(out, made)
    write_pictures(drawn)
    provenance.RunRecord.collect(
        dtype=dtype,
        seeds={"seed": seed},
        template_hash=hashes["template"],
        data_hash=hashes["calibration"],
        defaults=made["settings"],
        extra={"cost": made["cost"], "boundaries": made["boundaries"]},
    ).write(out.with_name(f"{out.stem}.run.json"))
    print_selection(made)
    emit_json(
        {
            **summary(made),
            "out": str(out),
            "picture": str(pictures[0]) if pictures else None,
            "pictures": [str(path) for path in pictures],
        }
    )


def _measured(config: ChooseConfig, also: str | None) -> tuple[str, ...]:
    """Estimators to measure: those of the objective first, then those asked for or the default ones."""
    others = SCORE.estimators if also is None else tuple(name.strip() for name in also.split(","))
    named = [config.estimator, *(term.estimator for term in config.terms if term.estimator is not None)]
    return tuple(dict.fromkeys([*named, *others]))


def _require_consistent(
    config: ChooseConfig,
    probe: bool,
    device: str,
    device_map: str | None,
    picture: Path | None,
    print_pictures: bool,
) -> None:
    """Refuse options that contradict each other."""
    if not probe and any(term.estimator is None for term in config.terms):
        raise UsageError(f"--objective ({config.objective}) needs the probe; drop --no-probe")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device ({device}) must be auto, cpu or cuda")
    if device_map is not None and device != "auto":
        raise UsageError(f"--device ({device}) and --device-map ({device_map}) exclude each other; give one")
    if print_pictures and picture is None:
        raise UsageError("--print-pictures needs --picture, the name they are made from")


def _require_outputs(
    out: Path, picture: Path | None, print_pictures: bool, resume: Path | None, inputs: list[Path]
) -> list[Path]:
    """Refuse places that cannot be written, collide or are read; the pictures that will be made."""
    record = out.with_name(f"{out.stem}.run.json")
    named = [("--out", out), ("--out", record)]
    with usage_errors({"picture": "--picture"}):
        pictures = [] if picture is None else picture_paths(picture, print_too=print_pictures)
    named += [("--picture", path) for path in pictures]
    if resume is not None:
        named.append(("--resume", resume))
    for option, path in named:
        require_writable(option, path)
        for file in inputs:
            require_not_input(option, path, {"--data": file})
    require_own_result("--out", out, "selection")
    require_own_record("--out", out, record)
    for path in pictures[1:]:
        require_own_beside("--picture", pictures[0], path)
    seen: dict[Path, str] = {}
    for option, path in named:
        if path.resolve() in seen:
            raise UsageError(
                f"{option} ({path}) is written by {seen[path.resolve()]} as well; name another file"
            )
        seen[path.resolve()] = option
    return pictures


def _parse_boundaries(option: str, text: str) -> tuple[int, ...]:
    """Read 1,4,8-12 as boundaries."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"{option} ({text}) must be boundaries and ranges like 1,4,8-12")
        low, high = int(first), int(last if dash else first)
        if high > MAX_BOUNDARY:
            raise UsageError(f"{option} ({text}) names boundary {high}; no target has over {MAX_BOUNDARY}")
        found += range(low, high + 1)
    return tuple(sorted(set(found)))


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise SpecdecError("--device (cuda) is not available here; use cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _reporter(update: Callable[..., None]) -> Callable[[ScoreProgress], None]:
    """Move the bar, with the rate and the time left beside it."""

    def report(progress: ScoreProgress) -> None:
        rate, left = progress.tokens_per_second, progress.seconds_left
        update(progress.done, note=f"{rate:.0f} tokens/s, {left:.0f} s left")

    return report


def _cost(scores: LayerScores, choose_seconds: float) -> dict[str, Any]:
    from specdec.layer_select.cost import LARGE_TARGETS, estimate_cost, peak_bytes

    costs = scores.costs
    assert costs is not None, "a scoring pass says what it took"
    return {
        "seconds": round(costs.seconds, 2),
        "probe_seconds": round(costs.probe_seconds, 2),
        "choose_seconds": round(choose_seconds, 2),
        "tokens_per_second": round(costs.tokens / max(costs.seconds, 1e-9), 1),
        "peak_memory_gib": round(peak_bytes() / 2**30, 3),
        "bound_memory_gib": round(costs.bound_bytes / 2**30, 3),
        "computed_h200": {
            name: estimate_cost(shape, scores.config).rounded() for name, shape in LARGE_TARGETS.items()
        },
    }


def _domain_tokens(texts: list[CalibrationText]) -> dict[str, int]:
    """Measured positions by domain; empty where texts carry none."""
    found: dict[str, int] = {}
    for text in texts:
        if text.domain:
            found[text.domain] = found.get(text.domain, 0) + text.num_kept
    return found
