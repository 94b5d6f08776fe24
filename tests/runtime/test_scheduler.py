"""Who comes first, who gives way, who is kept: the scheduler's promises, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.sequence import SequenceStatus

VOCAB = 3
SIZE = 4


def test_nobody_starves_beside_a_stream_of_urgent_requests(schedule_host: Any) -> None:
    """One admission in four is by age; a request that gave way three times comes first."""
    host = schedule_host(num_blocks=12, cached=True, cold_blocks=0, budget=32, seed=1)
    late = [host.add([0, 1, 2] * 4, 12, priority=1000) for _ in range(3)]
    for step in range(400):
        while len([seq for seq in host.open if seq not in late]) < 8:
            host.add([step % VOCAB, 1] * 5, 10, priority=-5)
        host.step()
        host.audit()
        if all(seq.is_finished for seq in late):
            break
    assert all(seq.is_finished for seq in late), "requests of low priority starve"


def test_a_long_prompt_is_read_beside_a_stream_of_urgent_ones(schedule_host: Any) -> None:
    """Admitted is not served: one step in four reads first for the request that came first."""
    host = schedule_host(num_blocks=60, cached=True, cold_blocks=0, budget=16, seed=1)
    late = host.add([0, 1, 2] * 10, 2, priority=1000)
    for step in range(200):
        while len(host.open) < 8:
            host.add([step % VOCAB, (step // 3) % VOCAB, 1, (step // 9) % VOCAB] * 10, 2, priority=-5)
        host.step()
        host.audit()
        if late.is_finished:
            break
    assert late.is_finished, "a request that holds blocks is never read"


def test_lower_priority_values_come_first_and_equal_ones_in_order_of_arrival(schedule_host: Any) -> None:
    host = schedule_host(num_blocks=24, cached=False, cold_blocks=0, budget=64, seed=1)
    order = [host.add([0, 1], 1, priority=priority) for priority in (5, 0, 0, -3, 5)]
    host.scheduler.config = EngineConfig(block_size=SIZE, max_num_seqs=1, max_batch_tokens=16)
    host.drain()
    # the fourth admission is by age
    assert [order.index(seq) for seq in host.finished] == [3, 1, 2, 0, 4]


def test_prompts_keep_a_part_of_each_step_while_many_decode(schedule_host: Any) -> None:
    host = schedule_host(num_blocks=24, cached=False, cold_blocks=0, budget=16, seed=1)
    talkers = [host.add([0], 60) for _ in range(3)]
    for _ in range(3):
        host.step()
    newcomer = host.add([1] * 8, 1)
    for _ in range(3):
        host.step()
    assert newcomer.is_finished
    assert not all(seq.is_finished for seq in talkers)


def test_an_admitted_prompt_holds_the_blocks_of_its_whole_text(schedule_host: Any) -> None:
    """Two long prompts that do not fit together: the second one is not promised what the first will need."""
    host = schedule_host(num_blocks=9, cached=False, cold_blocks=0, budget=16, seed=1)
    first, second = host.add([0] * 30, 2), host.add([1] * 30, 2)
    host.step()
    assert (len(first.block_table), len(second.block_table)) == (8, 0)
    host.drain()
    assert host.scheduler.num_preemptions == 0


def test_pins_outlive_newer_blocks_end_on_time_and_never_stop_a_live_request(schedule_host: Any) -> None:
    host = schedule_host(num_blocks=12, cached=True, cold_blocks=0, budget=64, seed=1)

    def cached_tokens(prompt: list[int], **options: Any) -> int:
        seq = host.add(prompt, 1, **options)
        host.drain()
        return seq.num_cached_tokens

    talk = [0, 1, 2, 2] * 2 + [0]
    assert cached_tokens(talk, kv_ttl_s=40.0) == 0
    assert host.prefixes is not None
    # two blocks and the open one behind them, the last token of which has no row
    assert host.prefixes.num_pinned == 3
    for filler in range(5):
        cached_tokens([1] * (filler + 1) + [2] * 30)
    # newer unpinned blocks went first
    assert cached_tokens(talk, kv_ttl_s=40.0) == 8
    host.now += 41.0
    assert host.prefixes.num_pinned == 0
    cached_tokens([1, 1, 1, 1, 2, 2, 2, 2] * 4 + [0] * 8)
    assert cached_tokens(talk) == 0
    # the cap of the server: 50 seconds here
    cached_tokens(talk, kv_ttl_s=1e6)
    host.now += 51.0
    assert host.prefixes.num_pinned == 0
    # everything pinned, and yet there is room for a request that needs the whole pool
    cached_tokens(talk, kv_ttl_s=40.0)
    assert cached_tokens([2, 0] * 23) == 0
    assert cached_tokens(talk) == 0


def test_the_pin_that_ends_first_goes_first(schedule_host: Any) -> None:
    host = schedule_host(num_blocks=16, cached=True, cold_blocks=0, budget=64, seed=1)
    texts = {ttl: [int(ttl) % VOCAB] * 5 + [1, 2] for ttl in (30.0, 10.0, 20.0)}
    for ttl, prompt in texts.items():
        host.add(prompt, 1, kv_ttl_s=ttl)
        host.drain()
    found = []
    for blocks in (12, 14):
        host.add([2, 1] * (2 * blocks - 1), 1)
        host.drain()
        kept = []
        for ttl, prompt in texts.items():
            seq = host.add(prompt, 1, kv_ttl_s=ttl)
            match = host.prefixes._match(seq) if host.prefixes else []
            host.abort(seq)
            kept += [ttl] if match else []
        found.append(kept)
    assert found == [[30.0, 20.0], [30.0]]


def test_a_tenant_that_pins_much_and_long_does_not_push_out_the_pins_of_another(schedule_host: Any) -> None:
    host = schedule_host(num_blocks=16, cached=True, cold_blocks=0, budget=64, seed=1)

    def kept(prompt: list[int], salt: str) -> int:
        probe = host.add(prompt, 1, cache_salt=salt)
        found = len(host.prefixes._match(probe))
        host.abort(probe)
        return found

    small = [0, 1, 2, 2] * 2 + [0]
    host.add(small, 1, cache_salt="small", kv_ttl_s=5.0)
    host.drain()
    for turn in range(3):
        host.add([turn, 1, 2, 2] * 4 + [0], 1, cache_salt="large", kv_ttl_s=50.0)
        host.drain()
    assert host.prefixes.num_pinned == 8
    # more than is unpinned, so that pinned blocks are given up too
    host.add([2, 1] * 21, 1)
    host.drain()
    assert kept(small, "small") == 2
    assert host.prefixes.num_pinned < 8


@pytest.mark.parametrize("use", ["target", "draft"])
def test_what_gives_way_is_swapped_to_the_hosts_memory_and_back(schedule_host: Any, use: str) -> None:
    """Its blocks go to the colder tier when another text takes the pool; only the open one is lost."""
    host = schedule_host(num_blocks=12, cached=True, cold_blocks=30, budget=64, seed=1)
    seq = host.add([0, 1, 2, 2, 1] * 5, 20, use, priority=5)
    for _ in range(4):
        host.step()
    done = seq.num_indexed * SIZE
    assert not seq.is_finished
    assert done > 0
    host.scheduler.preempt(seq)
    host.add([2, 1] * 21, 1, priority=-5)
    while len(host.open) > 1:
        host.step()
        host.audit()
    assert host.prefixes.counts.evicted >= seq.num_preemptions
    while seq.status is not SequenceStatus.RUNNING:
        host.step()
    assert host.prefixes.counts.fetched > 0
    assert host.prefixes.counts.resumed >= done
    host.drain()


def test_a_deadline_ends_a_request_wherever_it_is(schedule_host: Any) -> None:
    host = schedule_host(num_blocks=24, cached=True, cold_blocks=0, budget=16, seed=3)
    running = host.add([0] * 30, 40, deadline_s=5.0)
    host.step()
    waiting = [host.add([1] * 40, 40, deadline_s=5.0) for _ in range(6)]
    patient = host.add([2] * 5, 3)
    host.now = 5.0
    host.step()
    assert {seq.finish_reason for seq in [running, *waiting]} == {"timeout"}
    host.drain()
    assert patient.finish_reason == "length"
