"""Blocks in files of one folder: `NAMESPACE/HASH-NEXT.kv`.

A file carries a checksum and its own key, is written whole or not at all, and a damaged, renamed or foreign
one is a miss. Files of other namespaces (targets, drafts, dtypes) count against the size cap, and the oldest
go first. One thread at a time; it waits for the disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specdec.cold_tiers import BlockKey, ColdBlock
from specdec.errors import SpecdecError

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32


class BlockFiles:
    """The files of one namespace.

    Args:
        folder: made if missing, readable by its owner alone: rows of a text are the text.
        limit_bytes: cap on all files of all namespaces.
        namespace: what makes rows exchangeable.

    Raises:
        SpecdecError: a folder that cannot be made or read.
    """

    def __init__(self, folder: Path, limit_bytes: int, namespace: str) -> None:
        self.limit_bytes = limit_bytes
        self.folder = folder / namespace
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = sorted(
                (status.st_mtime_ns, path, status.st_size)
                for path in folder.glob("*/*.kv")
                if (status := path.stat())
            )
            for path in self.folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecdecError(
                f"disk_cache_dir ({folder}) cannot be used: {error.strerror}; choose one you may write to"
            ) from error
        self._files: OrderedDict[Path, int] = OrderedDict((path, size) for _, path, size in found)
        self._size = sum(self._files.values())
        self._shrink()

    @property
    def size_bytes(self) -> int:
        return self._size

    def keys(self) -> list[BlockKey]:
        """Keys of the namespace's files."""
        return [key for path in self._files if (key := self._key_of(path)) is not None]

    def read(self, key: BlockKey) -> ColdBlock | None:
        """A block; None, and its file is gone, when it cannot be read or is not what was written."""
        path = self._path_of(key)
        if path not in self._files:
            return None
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            self._drop(path)
            return None
        block = _unpack(content, path.stem)
        if block is None:
            logger.warning("%s is damaged; its block is computed again", path)
            self._drop(path)
            return None
        self._files.move_to_end(path)
        return block

    def write(self, key: BlockKey, block: ColdBlock) -> list[BlockKey]:
        """Keep a block in a file; returns the keys given up for it, its own when it is larger than the cap.

        Raises:
            OSError: it could not be written, and nothing of it is left.
        """
        path = self._path_of(key)
        content = _pack(block, path.stem)
        if len(content) > self.limit_bytes:
            return [key]
        temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"
        try:
            # no fsync: a file that a crash cut short fails its checksum
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._size += len(content) - self._files.pop(path, 0)
        self._files[path] = len(content)
        return self._shrink()

    def _shrink(self) -> list[BlockKey]:
        given_up = []
        while self._size > self.limit_bytes:
            path = next(iter(self._files))
            self._drop(path)
            if (key := self._key_of(path)) is not None:
                given_up.append(key)
        return given_up

    def _drop(self, path: Path) -> None:
        self._size -= self._files.pop(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove %s: %s", path, error.strerror)

    def _path_of(self, key: BlockKey) -> Path:
        return self.folder / f"{key[0].hex()}-{key[1]}.kv"

    def _key_of(self, path: Path) -> BlockKey | None:
        """The key of one of this namespace's files, None for any other."""
        chain, _, next_token = path.stem.partition("-")
        if path.parent != self.folder:
            return None
        try:
            return bytes.fromhex(chain), int(next_token)
        except ValueError:
            return None


def _pack(block: ColdBlock, name: str) -> bytes:
    tensors = {"rows": block.rows} if block.state is None else {"rows": block.rows, "state": block.state}
    body = save({key: tensor.contiguous() for key, tensor in tensors.items()}, metadata={"name": name})
    return hashlib.sha256(name.encode() + body).digest() + body


def _unpack(content: bytes, name: str) -> ColdBlock | None:
    """A block from a file's content; None when it is not what was written under this name."""
    digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(name.encode() + body).digest() != digest:
        return None
    try:
        tensors = load(body)
    except SafetensorError:
        return None
    rows: Tensor | None = tensors.get("rows")
    if rows is None or rows.dtype is not torch.uint8:
        return None
    return ColdBlock(rows, tensors.get("state"))
