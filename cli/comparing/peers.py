"""Other engines as a user names them, and each as a process that answers prompts batch by batch.

Owns the spellings (`vllm:PYTHON,method=ngram,k=3`), where an engine's environment is looked for, the process
and its environment variables. What an engine does with a prompt is the business of its program in
`peer_scripts/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, UsageError
from specdec.fetch import KNOWN_TARGETS

SCRIPTS = Path(__file__).resolve().parents[1] / "peer_scripts"
# one folder with an environment for each engine; `make peers` makes it
ENVIRONMENTS = "SPECDEC_PEERS"
DEFAULT_ENVIRONMENTS = ".peers"
# vLLM starts in about a minute on a free processor
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class PeerKind:
    """One engine that can be compared with.

    Attributes:
        script: its program in `peer_scripts/`; None: a server that is asked by URL.
        options: what may follow as `,KEY=VALUE`.
        own_environment: whether it is installed apart from specdec, under its own name.
        preset: options that the kind itself stands for.
        needs: options of which one must be given.
        takes_batches: whether it decodes several prompts at once.
        family: whose plain decoding its speed-up is taken against.
    """

    script: str | None
    options: tuple[str, ...] = ()
    own_environment: bool = False
    preset: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    takes_batches: bool = True
    family: str


KINDS: dict[str, PeerKind] = {
    "transformers": PeerKind(script="run_transformers.py", family="transformers"),
    "transformers-lookup": PeerKind(
        script="run_transformers.py", options=("lookup",), preset={"lookup": "5"}, family="transformers"
    ),
    "transformers-assisted": PeerKind(
        script="run_transformers.py",
        options=("assistant", "early_exit", "k"),
        needs=("assistant", "early_exit"),
        family="transformers",
    ),
    "vllm": PeerKind(
        script="run_vllm.py", options=("method", "k", "draft"), own_environment=True, family="vllm"
    ),
    "sglang": PeerKind(
        script="run_sglang.py", options=("method", "k", "draft"), own_environment=True, family="sglang"
    ),
    "llama.cpp": PeerKind(
        script="run_llama_cpp.py",
        options=("gguf", "lookup"),
        own_environment=True,
        takes_batches=False,
        family="llama.cpp",
    ),
    "url": PeerKind(script=None, family="url"),
}
# options by which an engine speculates; transformers then takes one prompt at a time
_SPECULATIVE = frozenset({"lookup", "method", "assistant", "early_exit"})
# and those that say how
_DRAFTING = frozenset({"k", "draft"})
# options that are folders or files
_PATHS = frozenset({"gguf", "draft", "assistant"})
SPELLING = (
    "transformers, transformers-lookup, transformers-assisted, vllm[:PYTHON], sglang[:PYTHON], "
    "llama.cpp[:PYTHON], each with ,KEY=VALUE, or url:URL"
)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One engine of a comparison. `name` has no path in it, so that a record shows none."""

    kind: str
    name: str
    python: str | None = None
    url: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Peers of one engine, apart from servers, of which each is its own."""
        return self.name if self.kind == "url" else KINDS[self.kind].family

    @property
    def is_plain(self) -> bool:
        """Whether it decodes without speculation, as far as is known."""
        return not _SPECULATIVE & set(self.options)

    @property
    def without_speculation(self) -> tuple[str | None, ...]:
        """Everything that decides its speed beside speculation: engine, environment and other options."""
        left_out = _SPECULATIVE | _DRAFTING
        options = sorted(f"{key}={value}" for key, value in self.options.items() if key not in left_out)
        return (self.family, self.python, *options)

    @property
    def takes_batches(self) -> bool:
        """Whether it decodes several prompts at once."""
        return KINDS[self.kind].takes_batches and (self.is_plain or self.family != "transformers")


def parse_peer(text: str) -> Peer:
    """Read one `--peer`.

    Raises:
        UsageError: no known engine, an option it has not, or an environment that is not there.
    """
    kind, _, rest = text.partition(":")
    if kind == "url":
        if not rest.startswith(("http://", "https://")):
            raise UsageError(f"--peer ({text}) must be url:http://HOST:PORT")
        return Peer(kind=kind, name=f"url {rest}", url=rest.rstrip("/"))
    words = text.split(",")
    kind, _, python = words[0].partition(":")
    if kind not in KINDS:
        raise UsageError(f"--peer ({text}) must be {SPELLING}")
    known = KINDS[kind]
    given: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in known.options or key in given:
            allowed = ", ".join(f"{name}=VALUE" for name in known.options) or "no options"
            raise UsageError(
                f"--peer ({text}): ({word}) must be one of {kind}'s options, each once: {allowed}"
            )
        given[key] = value
    if known.needs and not set(known.needs) & set(given):
        options = " or ".join(f"{name}=VALUE" for name in known.needs)
        raise UsageError(f"--peer ({text}) needs {options}")
    shown = "".join(f" {key}={Path(value).name}" for key, value in given.items())
    return Peer(
        kind=kind,
        name=kind + shown,
        python=_python(text, kind, python),
        options={**known.preset, **given},
    )


def _python(text: str, kind: str, python: str) -> str:
    """The interpreter of an engine's environment: as given, by the engine's name, or our own."""
    if not python and not KINDS[kind].own_environment:
        return sys.executable
    folder = Path(os.environ.get(ENVIRONMENTS) or DEFAULT_ENVIRONMENTS)
    path = Path(python).expanduser() if python else folder / kind / "bin" / "python"
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise UsageError(
            f"--peer ({text}): {path} is no Python; give {kind}:PYTHON, or make the environment (make peers) "
            f"and set {ENVIRONMENTS} to its folder"
        )
    # not resolved: the interpreter of a virtual environment is a link, and the place of the link decides
    return str(path.absolute())


def setup_of(
    peer: Peer,
    *,
    target: str,
    folder: Path,
    max_model_len: int,
    threads: int,
    dtype: str = "float32",
    device: str = "cpu",
    batch_size: int = 1,
) -> dict[str, Any]:
    """The setup line for an engine's program.

    Raises:
        UsageError: llama.cpp without a GGUF.
    """
    options: dict[str, Any] = dict(peer.options)
    if peer.kind == "llama.cpp" and "gguf" not in options:
        known = KNOWN_TARGETS.get(target)
        if known is None:
            raise UsageError(f"--peer ({peer.name}) needs gguf=FILE: no package is known to hold {target}")
        options |= {"package": known.package, "member": known.member}
    for key in _PATHS & set(peer.options):
        path = Path(peer.options[key]).expanduser()
        if not path.exists():
            raise UsageError(f"--peer ({peer.name}): {key} ({path}) does not exist")
        options[key] = str(path.absolute())
    return {
        "model": str(folder.absolute()),
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "batch_size": batch_size,
        "max_model_len": max_model_len,
        "options": options,
    }


def environment_of(peer: Peer, threads: int, device: str = "cpu") -> dict[str, str]:
    """Variables of an engine's process: threads for all, and what vLLM's processor build asks for."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    # ours is not theirs
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD"):
        variables.pop(name, None)
    if peer.kind != "vllm" or peer.python is None or device != "cpu":
        return variables
    preload = [
        *(Path(peer.python).parent.parent / "lib").glob("libiomp5.so"),
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1],
    ]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return variables | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # without it the engine runs one thread
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(path) for path in preload),
    }


class PeerProcess:
    """An engine's program, running until `close`.

    Args:
        peer: which engine.
        setup: its setup line (`setup_of`).
        threads: threads it may use.
        device: where it computes.

    Raises:
        SpecdecError: it did not start, with its last words.
    """

    def __init__(self, peer: Peer, setup: Mapping[str, Any], *, threads: int, device: str = "cpu") -> None:
        script = KINDS[peer.kind].script
        assert script is not None, "a server has no program of ours"
        assert peer.python is not None, "a program needs an interpreter"
        self.peer = peer
        self._last_lines: deque[str] = deque(maxlen=1)
        self._process = subprocess.Popen(
            [peer.python, str(SCRIPTS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_of(peer, threads, device),
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._remarks = threading.Thread(target=self._read_remarks, daemon=True)
        self._remarks.start()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._send(setup)
            self.facts: dict[str, Any] = self._receive(START_TIMEOUT_S)["ready"]
        except BaseException:
            self.close()
            raise

    def answer(
        self, names: Sequence[str], prompts: Sequence[list[int]], max_tokens: int
    ) -> tuple[list[list[int]], float]:
        """New tokens of prompts given at once, and the seconds that the engine's own call took.

        Raises:
            SpecdecError: the engine failed, or wrote another number of tokens.
        """
        self._send({"ids": list(names), "prompts": list(prompts), "max_tokens": max_tokens})
        record = self._receive(ANSWER_TIMEOUT_S)
        answers = [[int(token) for token in tokens] for tokens in record["token_ids"]]
        for name, tokens in zip(names, answers, strict=True):
            check_count(self.peer, name, len(tokens), max_tokens)
        return answers, float(record["seconds"])

    def close(self) -> None:
        """End the program; one that does not end by itself is stopped."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, record: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # a program that died says why when its answer is asked for
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(record) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_remarks(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._last_lines.append(line.strip())

    def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise SpecdecError(f"peer {self.peer.name} has said nothing for {timeout:g} s") from None
        if line is None:
            self._remarks.join(timeout=1.0)
            said = self._last_lines[-1] if self._last_lines else "without a word"
            raise SpecdecError(f"peer {self.peer.name} ended: {said}")
        record: dict[str, Any] = json.loads(line)
        if "error" in record:
            raise SpecdecError(f"peer {self.peer.name} failed: {record['error']}")
        return record


def check_count(peer: Peer, name: str, count: int, wanted: int) -> None:
    """Refuse an answer of another length than every engine was asked for.

    Raises:
        SpecdecError: naming peer and prompt.
    """
    if count != wanted:
        raise SpecdecError(
            f"peer {peer.name} wrote {count} tokens for prompt {name} instead of {wanted}: speeds of unequal "
            "texts cannot be compared"
        )
