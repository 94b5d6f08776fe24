"""`specdec export`: write a draft for another serving engine.

Owns the command line and what is printed; formats and refusals are `specdec.drafts`'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.errors import UsageError


def export(
    draft: Annotated[str, typer.Argument(help="Draft folder, or the name of a shipped draft.")],
    to: Annotated[str, typer.Option("--to", help="vllm, sglang, speculators or eagle.")],
    target: Annotated[str, typer.Option(help="The target it was trained for: a folder, or a pulled name.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist yet.")],
    target_name: Annotated[
        str | None,
        typer.Option(
            help="What the engine is to load as the target, such as a hub id [default: its folder]."
        ),
    ] = None,
) -> None:
    """Write a draft in the format of another engine, with the command that serves it."""
    import json

    from specdec.cli.console import emit_json, say
    from specdec.cli.usage import usage_errors
    from specdec.drafts import LOOKUP, RANDOM, draft_folder, shipped_drafts
    from specdec.drafts.checkpoint import read_stored
    from specdec.drafts.export import make_export, require_free, write_export
    from specdec.drafts.export_serving import serve_command, serving_text
    from specdec.drafts.formats import require_format
    from specdec.drafts.target_facts import read_target_facts
    from specdec.hub import resolve_target
    from specdec.provenance import RunRecord

    with usage_errors({}):
        form = require_format("--to", to)
        require_free(out)
    if draft in (LOOKUP, RANDOM) or draft.startswith(f"{LOOKUP}+"):
        raise UsageError(
            f"DRAFT ({draft}) must be a trained head in a folder; engines have lookup of their own"
        )
    if not Path(draft).is_dir() and draft not in shipped_drafts():
        raise UsageError(
            f"DRAFT ({draft}) must be a folder that specdec train wrote, or a shipped draft "
            f"({', '.join(shipped_drafts())})"
        )
    stored = read_stored(draft_folder(draft))
    facts = read_target_facts(resolve_target(target), target_name)
    made = make_export(stored, form, facts)
    command = serve_command(form, str(out), facts)
    size = sum(tensor.nbytes for tensor in made.tensors.values())
    summary = {
        "draft": draft,
        "to": form.name,
        "format_read_from": form.versions,
        "boundaries": list(stored.config.boundaries),
        "dtype": stored.dtype,
        "tensors": len(made.tensors),
        "bytes": size,
        "target": facts.served_as,
        "target_fingerprint": facts.fingerprint,
        "serve": command,
    }
    record = RunRecord.collect(
        dtype=stored.dtype,
        template_hash=stored.contract.template_hash,
        extra={**summary, "contract": {"training": dict(stored.contract.training)}},
    )
    texts = {
        "SERVING.md": serving_text(stored, form, str(out), facts),
        "run.json": json.dumps(record.to_dict(), indent=2, ensure_ascii=False) + "\n",
    }
    write_export(out, made, stored, form, facts, texts)
    say(f"read back bit by bit; settings in {out / 'SERVING.md'}. To serve ({form.versions}):")
    print(command)
    emit_json({**summary, "out": str(out)})
