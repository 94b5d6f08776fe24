"""`specdec select-layers`: choose the boundaries a draft head should read, and write why.

Owns the command line of layer selection: options, progress, the table, the files. Does not
know how boundaries are scored or chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.outputs import require_writable
from specdec.errors import SpecdecError, UsageError
from specdec.layer_select.config import ChooseConfig, ScoreConfig

if TYPE_CHECKING:
    from specdec.layer_select.choose import LayerSelection
    from specdec.layer_select.score import LayerScores, ScoreProgress

SCORE = ScoreConfig()
CHOOSE = ChooseConfig()


def select_layers(
    target: Annotated[str, typer.Argument(help="Folder, or a name that pull knows.")],
    num_layers: Annotated[int, typer.Option(help="Boundaries to choose.")] = CHOOSE.num_layers,
    data: Annotated[
        str, typer.Option(help="Calibration set: responses.jsonl, prompts, a .txt, or a bundled name.")
    ] = "train",
    tokens: Annotated[int, typer.Option(help="Token positions to measure.")] = SCORE.tokens,
    diversity: Annotated[
        float, typer.Option("--lambda", help="Weight of mean pairwise CKA against informativeness.")
    ] = CHOOSE.diversity_weight,
    estimator: Annotated[str, typer.Option(help="Informativeness estimator.")] = CHOOSE.estimator,
    min_gap: Annotated[
        int, typer.Option(help="Smallest distance between chosen boundaries.")
    ] = CHOOSE.min_gap,
    allowed: Annotated[
        str | None, typer.Option(help="Boundaries that may be chosen, as 2-28 or 1,4,8-12 (default 1..N).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Selection file to write.")] = Path("selection.json"),
    picture: Annotated[Path | None, typer.Option(help="PNG of the evidence and the choice.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of the target: float32, bfloat16, float16.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampling and resampling.")] = 0,
) -> None:
    """Choose the boundaries a draft head should read, by entropy and CKA."""
    score_config = ScoreConfig(tokens=tokens, seed=seed)
    choose_config = ChooseConfig(
        num_layers=num_layers,
        diversity_weight=diversity,
        estimator=estimator,
        min_gap=min_gap,
        allowed=None if allowed is None else _parse_boundaries(allowed),
        seed=seed,
    )
    for option, path in (("--out", out), ("--picture", picture)):
        if path is not None:
            require_writable(option, path)

    import warnings

    from specdec import hf, hub, provenance
    from specdec.cli.console import emit_json, progress, say
    from specdec.cli.datasets import text_file
    from specdec.layer_select import artifact, choose, entropy, score, texts

    entropy.estimator_named(estimator)
    folder = hub.resolve_target(target)
    tokenizer = hf.load_tokenizer(folder)
    calibration = texts.read_texts(text_file(data), tokenizer, score_config)
    measured = sum(text.num_kept for text in calibration)
    notes = []
    if measured < tokens:
        notes.append(f"calibration set has {measured} measured positions, {tokens} were asked for")
    model = hf.load_hf_model(folder, dtype=dtype).to(_device(device))
    choose.allowed_boundaries(hf.num_decoder_layers(model), choose_config)
    with (
        progress("scoring boundaries (tokens)", total=measured) as bar,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UserWarning)
        scores = score.score_layers(model, calibration, score_config, progress=_rate_reporter(bar.update))
    notes += [str(warning.message) for warning in caught if warning.category is UserWarning]
    selection = choose.choose_layers(scores, choose_config)
    for note in notes:
        say(f"warning: {note}")

    hashes = {
        "calibration": texts.texts_hash(calibration),
        "template": hf.template_hash(tokenizer),
        "config": provenance.sha256_file(folder / "config.json"),
    }
    document = artifact.selection_document(
        scores,
        selection,
        score_config=score_config,
        choose_config=choose_config,
        target={"fingerprint": provenance.folder_fingerprint(folder), "name": Path(target).name},
        cost={"seconds": round(scores.seconds, 2), "peak_memory_gib": _peak_memory_gib()},
        hashes=hashes,
        warnings=notes,
    )
    artifact.write_selection(out, document)
    if picture is not None:
        from specdec.layer_select.picture import write_picture

        write_picture(picture, document)
    provenance.RunRecord.collect(
        dtype=dtype,
        seeds={"seed": seed},
        template_hash=hashes["template"],
        data_hash=hashes["calibration"],
        defaults=document["settings"],
        extra={"cost": document["cost"], "boundaries": document["boundaries"]},
    ).write(out.with_name(f"{out.stem}.run.json"))
    _print_tables(document, scores, selection)
    emit_json(
        {
            "boundaries": document["boundaries"],
            "objective": document["objective"]["value"],
            "subset_frequency": None if selection.stability is None else selection.stability.subset_frequency,
            "runner_up": document["runners_up"][0]["boundaries"] if document["runners_up"] else None,
            "tokens": scores.tokens,
            "seconds": document["cost"]["seconds"],
            "peak_memory_gib": document["cost"]["peak_memory_gib"],
            "out": str(out),
            "picture": None if picture is None else str(picture),
        }
    )


def _parse_boundaries(text: str) -> tuple[int, ...]:
    """Read 1,4,8-12 as boundaries."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--allowed ({text}) must be boundaries and ranges like 1,4,8-12")
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(sorted(set(found)))


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device ({name}) must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecdecError("--device (cuda) is not available here; use cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _rate_reporter(update: Callable[..., None]) -> Callable[[ScoreProgress], None]:
    """Turn the state of the pass into a bar position with rate and time left beside it."""

    def report(now: ScoreProgress) -> None:
        update(now.done, note=f"{now.tokens_per_second:.0f} tokens/s, {now.seconds_left:.0f} s left")

    return report


def _peak_memory_gib() -> float:
    """Most resident memory of this process so far, plus the most its GPU held."""
    import resource
    import sys

    import torch

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_available():
        peak += torch.cuda.max_memory_allocated()
    return round(peak / 2**30, 3)


def _print_tables(document: dict[str, Any], scores: LayerScores, selection: LayerSelection) -> None:
    from specdec.cli.console import print_table

    stability = selection.stability
    names = list(document["scores"])
    chosen = set(selection.boundaries)
    print_table(
        f"{document['target']['name']}: scores by boundary, {scores.tokens} tokens, "
        f"{document['cost']['texts']} texts",
        ["boundary", *names, "in resamples", "chosen"],
        [
            [
                boundary,
                *(document["scores"][name]["values"][boundary] for name in names),
                None if stability is None else stability.boundary_frequency[boundary],
                "*" if boundary in chosen else "",
            ]
            for boundary in range(scores.num_layers + 1)
        ],
    )
    rivals = [document["objective"], *document["runners_up"]]
    print_table(
        f"best subsets, lambda {document['lambda']:g}",
        ["boundaries", "J", "mean z", "mean CKA"],
        [
            [
                ", ".join(map(str, rival["boundaries"])),
                rival["value"],
                rival["mean_informativeness_z"],
                rival["mean_pairwise_cka"],
            ]
            for rival in rivals
        ],
    )
