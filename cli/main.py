"""The `specdec` program: which commands exist, and how a failure is shown.

Owns the table of commands and the exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 stopped
by a signal with the work saved. A user's mistake is one line ``error: ...`` on stderr, without a traceback
(SPECDEC_DEBUG=1 shows it). Knows nothing of what a command does.

How a command file looks. ``cli/<name>.py`` holds one function named like the file, added to ``_COMMANDS``
below. Its module top imports only the standard library, typer, ``specdec.errors`` and other modules that are
as light, since every ``--help`` pays for it; torch, transformers and the rest of specdec are imported inside
the function. The first docstring line is what ``specdec --help`` lists. Wrong values raise SpecdecError (exit
1), or UsageError when the command line itself is at fault (exit 2). The result goes out through
``specdec.cli.console``: progress and remarks on stderr, tables on stdout, ``emit_json`` last::

    from pathlib import Path
    from typing import Annotated, cast

    import typer


    def bench(
        target: Annotated[str, typer.Argument(help="Folder, or a name that pull knows.")],
        max_tokens: Annotated[int, typer.Option(help="Tokens to write for each prompt.")] = 128,
    ) -> None:
        \"\"\"Measure acceptance and speed against no speculation.\"\"\"
        from specdec.cli.console import emit_json, progress
        from specdec.engine import Engine

        ...
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, cast

import typer

from specdec import __version__
from specdec.cli.audit import audit
from specdec.cli.bench import bench
from specdec.cli.compare import compare
from specdec.cli.demo import demo
from specdec.cli.export import export
from specdec.cli.first_words import first_words
from specdec.cli.generate import generate
from specdec.cli.import_draft import import_draft
from specdec.cli.load_sweep import load_sweep
from specdec.cli.pull import pull
from specdec.cli.regenerate import regenerate
from specdec.cli.replay import replay
from specdec.cli.report import report
from specdec.cli.rules import rules
from specdec.cli.select_layers import select_layers
from specdec.cli.serve import serve
from specdec.cli.study import study
from specdec.cli.sweep import sweep
from specdec.cli.train import train
from specdec.cli.watch import watch
from specdec.errors import SpecdecError, StoppedError, UsageError
from specdec.provenance import begin_run

app = typer.Typer(
    name="specdec",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_INTERRUPTED, _STOPPED = 130, 143
# what is answered without reading anything
_QUICK = {"-h", "--help", "--version"}
# typer carries its own copy of click from 0.26 on and used the installed one before; this is either's
_WRONG_USAGE: tuple[type[BaseException], ...] = typer.BadParameter.__bases__

_COMMANDS: dict[str, Callable[..., None]] = {
    "pull": pull,
    "select-layers": select_layers,
    "regenerate": regenerate,
    "train": train,
    "study": study,
    "export": export,
    "import": import_draft,
    "generate": generate,
    "serve": serve,
    "bench": bench,
    "compare": compare,
    "replay": replay,
    "audit": audit,
    "sweep": sweep,
    "load-sweep": load_sweep,
    "report": report,
    "watch": watch,
    "rules": rules,
    "demo": demo,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Speculative decoding with draft heads that read the layers chosen by entropy and CKA."""
    begin_run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: The words after ``specdec``; the process's own when None.
    """
    # libraries' own remarks and bars would mix with ours; a user who set these keeps them
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and words and not _QUICK & set(words) and os.environ.get("RANK", "0") == "0":
        first_words.watch(f"specdec {words[0]}")
    try:
        outcome = app(args=words or ["--help"], prog_name="specdec", standalone_mode=False)
        # typer 0.29 turns an interrupt into this exit code, older ones raise Abort
        if outcome == _INTERRUPTED:
            return _fail("interrupted", _INTERRUPTED)
        return outcome if isinstance(outcome, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except _WRONG_USAGE as error:
        return _fail(_usage_message(error), 2)
    except UsageError as error:
        return _fail(str(error), 2)
    except StoppedError as error:
        return _fail(str(error), _STOPPED)
    except SpecdecError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        # the reader of our stdout has left; python must not complain again while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # a write to an open file (a full disk, a quota) carries no name
        place = "a file could not be read or written" if error.filename is None else error.filename
        return _fail(f"{place}: {error.strerror or error}", 1)


def _usage_message(error: BaseException) -> str:
    # every usage error has the context and the message of a BadParameter, the one that typer exports
    usage = cast(typer.BadParameter, error)
    command = usage.ctx.command_path if usage.ctx else "specdec"
    return f"{usage.format_message()} (see {command} --help)"


def _fail(message: str, code: int) -> int:
    if os.environ.get("SPECDEC_DEBUG") == "1" and sys.exc_info()[0] is not None:
        traceback.print_exc()
    first_words.said()
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
