"""Cached blocks on a disk: nobody waits for it, and what is not whole there is not there."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import disk_tier
from specdec.block_files import BlockFiles
from specdec.cold_tiers import BlockKey, ColdBlock, ColdTiers, HostTier
from specdec.disk_space import check_disk_cache
from specdec.disk_tier import DiskTier
from specdec.errors import SpecdecError

LIMIT = 1 << 20
ROWS = 1000


def key(number: int, next_token: int = 7) -> BlockKey:
    return bytes([number]) * 32, next_token


def block(number: int) -> ColdBlock:
    return ColdBlock(torch.full((ROWS,), number, dtype=torch.uint8), torch.full((4,), float(number)))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = DiskTier(tmp_path, LIMIT, "here")
    yield made
    assert made.settle(20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Call with the name of an operation of `BlockFiles`: it waits for the event from then on."""
    events = []

    def shut(operation: str) -> threading.Event:
        done = getattr(BlockFiles, operation)
        event = threading.Event()
        events.append(event)

        def waiting(*arguments: Any) -> Any:
            assert event.wait(20)
            return done(*arguments)

        monkeypatch.setattr(BlockFiles, operation, waiting)
        return event

    yield shut
    for event in events:
        event.set()


def test_a_block_is_there_once_its_file_is_whole(
    tier: DiskTier, gate: Callable[[str], threading.Event]
) -> None:
    writing = gate("write")
    assert tier.put(key(1), block(1)) == []
    assert tier.holds(key(1)), "or it would be queued twice"
    assert (list(tier.variants(key(1)[0])), list(tier.behind(key(1)[0])), tier.get(key(1))) == ([], [], None)
    writing.set()
    assert tier.settle(20)
    assert (list(tier.variants(key(1)[0])), list(tier.behind(key(1)[0])), tier.get(key(1))) == ([], [7], None)
    tier.stage([key(1), key(2)], 20)
    assert list(tier.variants(key(1)[0])) == [7]
    found = tier.get(key(1))
    assert found is not None
    assert found.state is not None
    assert torch.equal(found.rows, block(1).rows)
    assert torch.equal(found.state, torch.full((4,), 1.0))
    assert tier.get(key(1)) is None, "it was taken; the file stays"
    assert tier.holds(key(1))


def test_a_disk_that_hangs_costs_one_request_its_patience(
    tier: DiskTier, gate: Callable[[str], threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        tier.put(key(number), block(number))
    assert tier.settle(20)
    reading = gate("read")
    with caplog.at_level(logging.WARNING):
        tier.stage([key(0), key(1)], 0.01)
        tier.stage([key(2)], 1e9)  # returns, though the disk still hangs
    assert [record.getMessage().split("; ")[1] for record in caplog.records] == [
        "the others are computed again"
    ]
    tier.put(key(9), block(9))
    reading.set()
    assert tier.settle(20)
    tier.stage([key(1), key(2), key(9)], 20)
    assert [tier.get(key(number)) is not None for number in (1, 2, 9)] == [True] * 3


def test_a_queue_without_room_loses_blocks_and_holds_nobody_up(
    tier: DiskTier, gate: Callable[[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "QUEUED_BYTES", 2 * block(0).size_bytes)
    writing = gate("write")
    for number in range(5):
        tier.put(key(number), block(number))
    assert tier.num_lost == 3
    writing.set()
    assert tier.settle(20)
    assert [tier.holds(key(number)) for number in range(5)] == [True, True, False, False, False]


def test_staged_blocks_stay_within_their_memory_and_the_first_of_a_text_go_last(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "STAGED_BYTES", 2 * block(0).size_bytes)
    for number in range(5):
        tier.put(key(number), block(number))
    assert tier.settle(20)
    tier.stage([key(4)], 20)
    tier.stage([key(number) for number in range(4)], 20)
    at_hand = [number for number in range(5) if tier.variants(key(number)[0])]
    assert at_hand == [0, 1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_one_warning_and_what_is_there_stays_in_use(
    tier: DiskTier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    tier.put(key(1), block(1))
    assert tier.settle(20)
    whole = Path.write_bytes

    def half_written(path: Path, content: bytes) -> int:
        whole(path, content[: len(content) // 2])
        raise OSError(number, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half_written)
    with caplog.at_level(logging.WARNING):
        for each in range(2, 6):
            tier.put(key(each), block(each))
            assert tier.settle(20)
    assert len(caplog.records) == 1
    assert "No space left on device; no more blocks are written there" in caplog.text
    assert [path.suffix for path in (tmp_path / "here").iterdir()] == [".kv"]
    assert tier.num_lost == 4
    tier.stage([key(1), key(2)], 20)
    assert (tier.get(key(1)) is None, tier.get(key(2)) is None) == (False, True)


def test_what_memory_gives_up_goes_to_the_disk_and_comes_back_into_memory(tmp_path: Path) -> None:
    host = HostTier(2 * block(0).size_bytes)
    tiers = ColdTiers([host, DiskTier(tmp_path, LIMIT, "here")])
    for number in range(4):
        tiers.put(key(number), block(number))
        assert tiers.settle()
    assert [host.holds(key(number)) for number in range(4)] == [False, False, True, True]
    assert tiers.get(key(0)) is None, "it lies on the disk alone"
    tiers.stage([key(0)])
    assert tiers.get(key(0)) is not None
    assert host.holds(key(0)), "used again: it is warm"
    assert all(tiers.holds(key(number)) for number in range(4))


def test_a_folder_that_cannot_hold_the_blocks_is_refused_by_name(tmp_path: Path) -> None:
    check_disk_cache(tmp_path / "new", LIMIT)
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecdecError, match=r"disk_cache_dir \(.*file\) cannot be written to: "):
        check_disk_cache(tmp_path / "file", LIMIT)
    with pytest.raises(SpecdecError, match=r"GB for blocks, less than disk_cache_gb \(1e\+09\); lower that"):
        check_disk_cache(tmp_path, 10**18)


def test_a_full_disk_is_known_before_anything_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SpecdecError, match="cannot be written to: No space left on device; choose"):
        check_disk_cache(tmp_path, LIMIT)
