"""The disk as a tier of cached blocks, behind a thread: no step of the engine waits for a file.

A block that is given up waits in a bounded queue for its write and is nowhere until its file is whole; one
that finds the queue full is lost, and computed again when it is wanted. A block is read when a request that
could use it is prepared (`stage`), and waits in bounded memory for the scheduler. A disk that hangs costs one
request its patience, then nobody. The thread lives while there is something to do.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from specdec.block_files import BlockFiles
from specdec.cold_tiers import BlockKey, ColdBlock, KeyIndex, Overflow

logger = logging.getLogger(__name__)

# memory for blocks on their way to the disk, and from it
QUEUED_BYTES = 256 << 20
STAGED_BYTES = 1 << 30


class DiskTier:
    """Blocks in files (see `BlockFiles`, which says what the arguments are).

    Args:
        folder: where.
        limit_bytes: cap on the files.
        namespace: what makes rows exchangeable.

    Raises:
        SpecdecError: a folder that cannot be made or read.
    """

    def __init__(self, folder: Path, limit_bytes: int, namespace: str) -> None:
        # of the worker alone from here on, but for its size
        self._files = BlockFiles(folder, limit_bytes, namespace)
        self._changed = threading.Condition()
        # all below is guarded by it
        self._on_disk = KeyIndex(self._files.keys())
        self._staged: OrderedDict[BlockKey, ColdBlock] = OrderedDict()
        self._at_hand = KeyIndex()
        self._staged_bytes = 0
        self._wanted: frozenset[BlockKey] = frozenset()
        # in line or under way
        self._reads: OrderedDict[BlockKey, None] = OrderedDict()
        self._writes: OrderedDict[BlockKey, ColdBlock] = OrderedDict()
        self._queued_bytes = 0
        self._working = False
        self._is_late = False
        self._is_full = False
        self.num_lost = 0

    @property
    def size_bytes(self) -> int:
        return self._files.size_bytes

    def variants(self, chain: bytes) -> Collection[int]:
        with self._changed:
            return self._at_hand.next_tokens(chain)

    def behind(self, chain: bytes) -> Collection[int]:
        with self._changed:
            return self._on_disk.next_tokens(chain)

    def holds(self, key: BlockKey) -> bool:
        with self._changed:
            return key in self._on_disk or key in self._writes

    def get(self, key: BlockKey) -> ColdBlock | None:
        with self._changed:
            return self._take_staged(key) if key in self._staged else None

    def put(self, key: BlockKey, block: ColdBlock) -> Overflow:
        with self._changed:
            if self._is_full or self._queued_bytes + block.size_bytes > QUEUED_BYTES:
                self.num_lost += 1
            else:
                self._writes[key] = block
                self._queued_bytes += block.size_bytes
                self._start_work()
        return []

    def stage(self, keys: list[BlockKey], wait_s: float) -> None:
        with self._changed:
            missing = [key for key in keys if key in self._on_disk and key not in self._staged]
            # while the disk owes somebody an answer, nobody else waits for it
            if not missing or self._is_late:
                return
            self._wanted = frozenset(keys)
            self._reads.update(dict.fromkeys(missing))
            self._start_work()
            if not self._changed.wait_for(lambda: self._reads.keys().isdisjoint(missing), wait_s):
                self._is_late = True
                logger.warning(
                    "%s gave %d of %d blocks within %g s; the others are computed again",
                    *(self._files.folder, len(missing) - len(self._reads), len(missing), wait_s),
                )

    def settle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._working, timeout_s)

    def _start_work(self) -> None:
        if not self._working:
            self._working = True
            threading.Thread(target=self._work, name="specdec-disk-cache", daemon=True).start()

    def _take_staged(self, key: BlockKey) -> ColdBlock:
        block = self._staged.pop(key)
        self._at_hand.discard(key)
        self._staged_bytes -= block.size_bytes
        return block

    # from here on: the worker, which holds the lock only between files

    def _work(self) -> None:
        try:
            while self._work_once():
                pass
        except BaseException:
            with self._changed:
                self._end_work()
            raise

    def _work_once(self) -> bool:
        """One file; False when there was nothing to do, and the thread is to end."""
        with self._changed:
            self._is_late = self._is_late and bool(self._reads)
            read = next(iter(self._reads), None)
            write = next(iter(self._writes.items()), None)
            if read is None and write is None:
                self._end_work()
                return False
        if read is not None:
            self._read(read)
        elif write is not None:
            self._write(*write)
        return True

    def _end_work(self) -> None:
        self._working = False
        self._reads.clear()
        self._changed.notify_all()

    def _read(self, key: BlockKey) -> None:
        block = self._files.read(key)
        with self._changed:
            if self._is_late:
                # nobody waits for the others any more
                self._reads.clear()
            self._reads.pop(key, None)
            if block is None:
                self._on_disk.discard(key)
            elif self._has_room(block.size_bytes):
                self._staged[key] = block
                self._at_hand.add(key)
                self._staged_bytes += block.size_bytes
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        """Make room for a staged block; blocks of the request that is waited for stay."""
        for key in list(self._staged):
            if self._staged_bytes + size_bytes <= STAGED_BYTES:
                break
            if key not in self._wanted:
                self._take_staged(key)
        return self._staged_bytes + size_bytes <= STAGED_BYTES

    def _write(self, key: BlockKey, block: ColdBlock) -> None:
        failed, given_up = None, []
        try:
            given_up = self._files.write(key, block)
        except OSError as error:
            failed = error
            logger.warning(
                "disk_cache_dir (%s): %s; no more blocks are written there, those that are there stay in use",
                *(self._files.folder, error.strerror),
            )
        with self._changed:
            if failed is not None:
                self._is_full = True
                self.num_lost += len(self._writes)
                self._writes.clear()
                self._queued_bytes = 0
                return
            del self._writes[key]
            self._queued_bytes -= block.size_bytes
            self._on_disk.add(key)
            for lost in given_up:
                self._on_disk.discard(lost)
