"""`specdec import`: take over a draft that was trained or exported elsewhere.

Owns the command line and what is printed; formats and refusals are `specdec.drafts`'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.errors import UsageError


def import_draft(
    folder: Annotated[Path, typer.Argument(help="Folder of the other engine's draft.")],
    source: Annotated[str, typer.Option("--from", help="vllm, sglang, speculators or eagle.")],
    target: Annotated[str, typer.Option(help="The target it was trained for: a folder, or a pulled name.")],
    out: Annotated[Path, typer.Option(help="Draft folder to write; must not exist yet.")],
) -> None:
    """Read a draft in the format of another engine and write it as one of ours."""
    from specdec.cli.console import emit_json, say
    from specdec.cli.usage import usage_errors
    from specdec.drafts.checkpoint import write_draft
    from specdec.drafts.export import require_free
    from specdec.drafts.foreign import read_foreign
    from specdec.drafts.formats import require_format
    from specdec.drafts.target_facts import read_target_facts
    from specdec.hf import load_tokenizer, template_hash
    from specdec.hub import resolve_target
    from specdec.provenance import RunRecord

    with usage_errors({}):
        form = require_format("--from", source)
        require_free(out)
    if not folder.is_dir():
        raise UsageError(f"DIR ({folder}) is not a folder; give one that holds config.json and weights")
    if _is_ours(folder):
        raise UsageError(f"DIR ({folder}) is a draft of specdec already; give it to --draft as it is")
    target_folder = resolve_target(target)
    facts = read_target_facts(target_folder)
    template = template_hash(load_tokenizer(target_folder))
    found = read_foreign(folder, form, facts, template)
    for remark in found.remarks:
        say(f"note: {remark}")
    write_draft(out, found.draft)
    config = found.draft.config
    summary = {
        "from": form.name,
        "format_read_from": form.versions,
        "boundaries": list(config.boundaries),
        "dtype": found.draft.dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "lm_head": config.lm_head,
        "remarks": list(found.remarks),
        "target_fingerprint": facts.fingerprint,
        "out": str(out),
    }
    RunRecord.collect(dtype=found.draft.dtype, template_hash=template, extra=summary).write(out / "run.json")
    emit_json(summary)


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a draft as specdec writes it."""
    from specdec.drafts.checkpoint import read_draft_config
    from specdec.errors import SpecdecError

    try:
        read_draft_config(folder)
    except SpecdecError:
        return False
    return True
