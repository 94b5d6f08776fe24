"""Where cached blocks go when the pool gives them up: memory of the host, then files.

A tier has a size cap and gives up its least recently used blocks, the host's to the disk. A file carries a
checksum and its own key, is written whole or not at all, and a damaged, renamed or foreign one is a miss.
Does not know tokens: a block's key is the chained hash of its text, which already holds the tenant's salt.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specdec.errors import SpecdecError

logger = logging.getLogger(__name__)

BlockKey = tuple[bytes, int]  # chained hash, next token of the draft rows
DIGEST_BYTES = 32


@dataclass(frozen=True)
class ColdBlock:
    """A block outside the pool: its rows as bytes, and the target's taps of its last row."""

    rows: Tensor
    state: Tensor | None

    @property
    def size_bytes(self) -> int:
        return self.rows.nbytes + (self.state.nbytes if self.state is not None else 0)


Overflow = list[tuple[BlockKey, ColdBlock]]


class Tier(Protocol):
    """A size-capped store of blocks."""

    def found(self) -> Iterable[BlockKey]:
        """Keys of what it held from the start."""
        ...

    def get(self, key: BlockKey) -> ColdBlock | None:
        """A block, now the most recently used one; None when it is gone or damaged."""
        ...

    def put(self, key: BlockKey, block: ColdBlock) -> Overflow:
        """Keep a block; returns those given up for it (a tier that destroys them returns none)."""
        ...

    def holds(self, key: BlockKey) -> bool: ...

    @property
    def size_bytes(self) -> int: ...


class HostTier:
    """Blocks in the host's memory."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._blocks: OrderedDict[BlockKey, ColdBlock] = OrderedDict()
        self._size = 0

    @property
    def size_bytes(self) -> int:
        return self._size

    def found(self) -> Iterable[BlockKey]:
        return ()

    def holds(self, key: BlockKey) -> bool:
        return key in self._blocks

    def get(self, key: BlockKey) -> ColdBlock | None:
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: BlockKey, block: ColdBlock) -> Overflow:
        if block.size_bytes > self.limit_bytes:
            return [(key, block)]
        self._blocks[key] = block
        self._size += block.size_bytes
        given_up: Overflow = []
        while self._size > self.limit_bytes:
            oldest, cold = self._blocks.popitem(last=False)
            self._size -= cold.size_bytes
            given_up.append((oldest, cold))
        return given_up


class DiskTier:
    """Blocks in files of one folder: `NAMESPACE/HASH-NEXT.kv`.

    Files of other namespaces (targets, drafts, dtypes) count against the size cap, and the oldest go first.

    Args:
        folder: made if missing, readable by its owner alone: rows of a text are the text.
        limit_bytes: cap on all files.
        namespace: what makes rows exchangeable.

    Raises:
        SpecdecError: a folder that cannot be made or read.
    """

    def __init__(self, folder: Path, limit_bytes: int, namespace: str) -> None:
        self.limit_bytes = limit_bytes
        self._own = folder / namespace
        try:
            self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = sorted((path.stat().st_mtime_ns, path) for path in folder.glob("*/*.kv"))
            for path in self._own.glob(".*.tmp"):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecdecError(
                f"disk_cache_dir ({folder}) cannot be used: {error.strerror}; choose one you may write to"
            ) from error
        self._files: OrderedDict[Path, int] = OrderedDict((path, path.stat().st_size) for _, path in found)
        self._size = sum(self._files.values())
        self._keys = {
            key: path for path in self._files if path.parent == self._own and (key := _key_of(path))
        }
        self._broken = False
        self._shrink()

    @property
    def size_bytes(self) -> int:
        return self._size

    def found(self) -> Iterable[BlockKey]:
        return list(self._keys)

    def holds(self, key: BlockKey) -> bool:
        return key in self._keys

    def get(self, key: BlockKey) -> ColdBlock | None:
        path = self._keys.get(key)
        if path is None:
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

    def put(self, key: BlockKey, block: ColdBlock) -> Overflow:
        if self._broken:
            return []
        path = self._own / f"{key[0].hex()}-{key[1]}.kv"
        temporary = self._own / f".{path.name}.{os.getpid()}.tmp"
        content = _pack(block, path.stem)
        if len(content) > self.limit_bytes:
            return []
        try:
            # no fsync: a file that a crash cut short fails its checksum
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            self._broken = True
            logger.warning("%s: %s; nothing more goes to the disk cache", self._own, error.strerror)
            if temporary.parent.is_dir():
                temporary.unlink(missing_ok=True)
            return []
        self._size += len(content) - self._files.pop(path, 0)
        self._files[path] = len(content)
        self._keys[key] = path
        self._shrink()
        return []

    def _shrink(self) -> None:
        while self._size > self.limit_bytes:
            self._drop(next(iter(self._files)))

    def _drop(self, path: Path) -> None:
        self._size -= self._files.pop(path)
        if path.parent == self._own and (key := _key_of(path)) is not None:
            self._keys.pop(key, None)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove %s: %s", path, error.strerror)


class ColdTiers:
    """Tiers from the warmest to the coldest."""

    def __init__(self, tiers: list[Tier]) -> None:
        self._tiers = tiers
        self._variants: dict[bytes, set[int]] = {}
        for tier in tiers:
            for key in tier.found():
                self._note(key)

    @property
    def sizes_bytes(self) -> list[int]:
        return [tier.size_bytes for tier in self._tiers]

    def variants(self, chain: bytes) -> Collection[int]:
        """Next tokens under which a block of this text may be found."""
        return self._variants.get(chain, ())

    def holds(self, key: BlockKey) -> bool:
        return any(tier.holds(key) for tier in self._tiers)

    def get(self, key: BlockKey) -> ColdBlock | None:
        for depth, tier in enumerate(self._tiers):
            block = tier.get(key)
            if block is not None:
                if depth:
                    # used again: it becomes warm; a copy stays where it was
                    self._put(key, block, 0, depth)
                return block
        self._lose(key)
        return None

    def put(self, key: BlockKey, block: ColdBlock) -> None:
        """Keep a block the pool gave up."""
        self._note(key)
        self._put(key, block, 0, len(self._tiers))

    def _put(self, key: BlockKey, block: ColdBlock, first: int, last: int) -> None:
        going = [(key, block)]
        for tier in self._tiers[first:last]:
            going = [lost for each in going if not tier.holds(each[0]) for lost in tier.put(*each)]
        for lost, _ in going:
            self._lose(lost)

    def _note(self, key: BlockKey) -> None:
        self._variants.setdefault(key[0], set()).add(key[1])

    def _lose(self, key: BlockKey) -> None:
        chain, next_token = key
        if not self.holds(key) and chain in self._variants:
            self._variants[chain].discard(next_token)
            if not self._variants[chain]:
                del self._variants[chain]


def _key_of(path: Path) -> BlockKey | None:
    chain, _, next_token = path.stem.partition("-")
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
