"""Where a result came from, and files written whole or not at all.

Owns the run record (``run.json``), atomic text and JSON writes, and the hashes by which a draft knows its
target. Knows nothing of models beyond the layout of a safetensors file and a few keys of ``config.json``.

The fingerprint of a model folder hashes tensors, not files: splitting the same weights into other shards,
or another library version writing another header, gives the same fingerprint.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec.errors import SpecdecError, writing

RUN_SCHEMA = "specdec.run/1"

_PACKAGES = ("specdec", "torch", "transformers", "tokenizers", "safetensors", "triton", "numpy", "gguf")
# keys that change what the same weights compute and that every transformers version spells alike
_ESSENTIAL_KEYS = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "sliding_window",
    "vocab_size",
)
_CHUNK_BYTES = 1 << 22
# stands in the place of weights in the folder of a random target (see random_target.py)
RANDOM_WEIGHTS_FILE = "random_weights.json"


def sha256_text(text: str) -> str:
    """Hash a string's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: str | Path) -> str:
    """Hash a file's bytes without holding them in memory."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


@contextmanager
def held_alone(lock: Path, what: str) -> Iterator[None]:
    """Keep other runs from `what` while the block runs, by a lock file beside it.

    Raises:
        SpecdecError: another run holds it, or the lock file cannot be made.
    """
    held = FileLock(lock)
    with writing(what):
        try:
            held.acquire(timeout=0)
        except Timeout as error:
            raise SpecdecError(f"{what} is being written by another run; wait or name another") from error
    try:
        yield
    finally:
        held.release()


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, sees the old file or the new one, nothing between."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old file or the new one, nothing between."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary.parent.is_dir():
            temporary.unlink(missing_ok=True)
        raise SpecdecError(
            f"cannot write {path}: {error.strerror}; choose a folder you may write to"
        ) from error


def write_json_atomic(path: str | Path, obj: Any) -> None:
    """Write indented JSON atomically; a NaN is the program's mistake and is refused."""
    write_text_atomic(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read a safetensors file's table of tensors and check it against the file's size.

    Returns:
        The table (name to dtype, shape and data_offsets, without the metadata entry) and the byte at which
        tensor data starts.

    Raises:
        SpecdecError: The file is truncated or is no safetensors file.
    """
    size = path.stat().st_size
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 10 or not 2 <= length <= size - 8:
            raise SpecdecError(f"{path} is no safetensors file, or is cut off in its header; fetch it again")
        try:
            table = json.loads(handle.read(length))
            table.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SpecdecError(f"{path} is no safetensors file: its header does not parse") from error
    if size != 8 + length + end:
        raise SpecdecError(
            f"{path} has {size} bytes but its header promises {8 + length + end}; "
            "the file is truncated or damaged, fetch it again"
        )
    return table, 8 + length


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say which file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SpecdecError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpecdecError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def folder_fingerprint(folder: str | Path) -> str:
    """Hash what a model folder computes with: every tensor, and the config keys that change the arithmetic.

    The answer is remembered in the cache by file sizes and times, since a large target takes minutes.
    """
    folder = Path(folder).resolve()
    config = read_json(folder / "config.json")
    if (folder / RANDOM_WEIGHTS_FILE).is_file():
        weights = read_json(folder / RANDOM_WEIGHTS_FILE)
        return sha256_text(json.dumps([weights, _essential(config)], sort_keys=True))
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise SpecdecError(
            f"{folder} holds no .safetensors file; specdec pull {folder} converts other formats"
        )
    stats = [(shard.name, shard.stat().st_size, shard.stat().st_mtime_ns) for shard in shards]
    key = sha256_text(json.dumps([str(folder), stats, _essential(config)], sort_keys=True))
    remembered = _read_fingerprints()
    if key not in remembered:
        remembered[key] = _fingerprint(shards, config)
        _write_fingerprints(remembered)
    return remembered[key]


def _fingerprint(shards: list[Path], config: Mapping[str, Any]) -> str:
    rows: list[tuple[str, str, list[int], str]] = []
    for shard in shards:
        table, start = read_safetensors_header(shard)
        with open(shard, "rb") as handle:
            for name, entry in table.items():
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue  # some versions store the tied copy, some do not
                begin, end = entry["data_offsets"]
                handle.seek(start + begin)
                digest = hashlib.sha256()
                for offset in range(begin, end, _CHUNK_BYTES):
                    digest.update(handle.read(min(_CHUNK_BYTES, end - offset)))
                rows.append((name, entry["dtype"], entry["shape"], digest.hexdigest()))
    return sha256_text(json.dumps([sorted(rows), _essential(config)], sort_keys=True))


def _essential(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: config[key] for key in _ESSENTIAL_KEYS if config.get(key) is not None}
    # older folders keep rope_theta at the top and rope_scaling beside it, newer ones one rope_parameters
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    kept["rope"] = {name: value for name, value in rope.items() if value is not None}
    return kept


def cache_home() -> Path:
    """The folder specdec keeps its own files in: ``$SPECDEC_HOME``, or ``~/.cache/specdec``."""
    return Path(os.environ.get("SPECDEC_HOME") or Path.home() / ".cache" / "specdec")


def _read_fingerprints() -> dict[str, str]:
    try:
        return dict(json.loads((cache_home() / "fingerprints.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # a memo, not a record: without it the hash is computed again


def _write_fingerprints(remembered: Mapping[str, str]) -> None:
    try:
        write_json_atomic(cache_home() / "fingerprints.json", dict(remembered))
    except SpecdecError:
        return  # a read-only home costs time at the next call, never the answer


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide numbers; null for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state() -> dict[str, Any]:
    """Revision of the checkout this code runs from, and whether it was changed since; nulls elsewhere."""
    root = Path(__file__).resolve().parents[1]

    def ask(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # an installed copy inside somebody's repository must not borrow that repository's revision
        if Path(ask("rev-parse", "--show-toplevel")).resolve() != root:
            return {"revision": None, "dirty": None}
        return {"revision": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "dirty": None}


@dataclass
class _Beginning:
    """When this process's run began, and from which revision; None until it is asked for."""

    started_at: str | None = None
    git: dict[str, Any] | None = None

    def note(self) -> None:
        if self.started_at is None:
            self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
            self.git = git_state()


_BEGINNING = _Beginning()


def begin_run() -> None:
    """Note time and revision now: a long run must not record what the checkout has become meanwhile."""
    _BEGINNING.note()


def hardware() -> dict[str, Any]:
    """Processor, cores usable by this process, memory, and CUDA devices by name."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if sys.platform != "win32" else None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1) if memory else None,
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
    }


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run was, complete enough to repeat it.

    Attributes:
        command: The command line, program name first without its folder.
        started_at: UTC, ISO 8601.
        versions: See :func:`versions`.
        git: See :func:`git_state`.
        hardware: See :func:`hardware`.
        dtype: Precision of the computation.
        seeds: Every seed, by its purpose.
        template_hash: Hash of the chat template, null where no chat was rendered.
        data_hash: Hash of the input data, null where there was none.
        defaults: Every setting that changes the result and was not given, written out.
        extra: What only this command has to say.
    """

    command: list[str]
    started_at: str
    versions: dict[str, str | None]
    git: dict[str, Any]
    hardware: dict[str, Any]
    dtype: str | None = None
    seeds: dict[str, int] = field(default_factory=dict)
    template_hash: str | None = None
    data_hash: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def collect(
        cls,
        *,
        dtype: str | None = None,
        seeds: Mapping[str, int] | None = None,
        template_hash: str | None = None,
        data_hash: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> "RunRecord":
        """Add what the machine knows (command, versions, hardware) and the beginning to what is given."""
        begin_run()
        assert _BEGINNING.started_at is not None, "a run that has begun has a time"
        return cls(
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            started_at=_BEGINNING.started_at,
            versions=versions(),
            git=dict(_BEGINNING.git or {}),
            hardware=hardware(),
            dtype=dtype,
            seeds=dict(seeds or {}),
            template_hash=template_hash,
            data_hash=data_hash,
            defaults=dict(defaults or {}),
            extra=dict(extra or {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values, with its schema name first."""
        return {"schema": RUN_SCHEMA, **asdict(self)}

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, atomically."""
        write_json_atomic(path, self.to_dict())
