"""Scheduler, blocks and prefix cache under random schedules; planted faults show that they can fail.

The runner is that of `conftest`: its rows say what they hold.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from specdec.blocks import BlockManager
from specdec.prefix_cache import Hit, PrefixCache
from specdec.prefix_index import PrefixIndex
from specdec.scheduler import Scheduler
from specdec.sequence import PrefixUse, Sequence

VOCAB = 3
HAPPENS = (
    *("preemptions", "length", "timeout", "error", "sieges", "pinned"),
    *("queries", "hits", "resumed", "evicted", "fetched", "copied"),
)
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


# steps for each request that is here within which they are served, whatever comes meanwhile: one in four
# admissions is by age, and a small pool holds one or two texts, each of which takes about a dozen steps
SIEGE = 100


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, steps, aborts, faults and time."""

    make_host: Callable[..., Any]
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.host = type(self).make_host(9, True, 0, 16, 0)

    @initialize(
        num_blocks=st.integers(9, 24),
        cached=st.integers(0, 5),
        cold_blocks=st.sampled_from([0, 0, 4, 30]),
        budget=st.sampled_from([16, 23, 64]),
        seed=st.integers(0, 1 << 16),
    )
    def start(self, num_blocks: int, cached: int, cold_blocks: int, budget: int, seed: int) -> None:
        self.host = type(self).make_host(num_blocks, cached > 0, cold_blocks, budget, seed)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        use=st.sampled_from(["draft", "draft", "target", "none"]),
        whole=st.booleans(),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        ttl=st.sampled_from([0.0, 5.0, 100.0]),
        deadline=st.sampled_from([None, None, None, 2.0, 9.0]),
    )
    def add(self, prompt: list[int], max_tokens: int, use: PrefixUse, whole: bool, **options: Any) -> None:
        self.host.add(
            prompt,
            max_tokens,
            use,
            whole,
            priority=options["priority"],
            cache_salt=options["salt"],
            kv_ttl_s=options["ttl"],
            deadline_s=options["deadline"],
        )

    @rule(count=st.integers(2, 6), seed=st.integers(0, 1 << 16))
    def burst(self, count: int, seed: int) -> None:
        """Several at once that begin alike."""
        rng = random.Random(seed)
        shared = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 18))]
        for _ in range(count):
            self.host.add(
                [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randrange(7)))],
                rng.randrange(1, 20),
                rng.choice(["draft", "draft", "target"]),
                rng.random() < 0.2,
                priority=rng.randrange(-1, 2),
                cache_salt=rng.choice([None, None, "a"]),
                kv_ttl_s=rng.choice([0.0, 20.0]),
            )

    @rule(which=st.integers(0, 30), max_tokens=st.integers(1, 12), more=PROMPTS)
    def next_turn(self, which: int, max_tokens: int, more: list[int]) -> None:
        """A talk goes on: its whole text and a few tokens more."""
        if self.host.finished:
            old = self.host.finished[which % len(self.host.finished)]
            prompt = [*old.token_ids, *more[:6]][:30]
            use = old.prefix_use
            self.host.add(prompt, max_tokens, use, cache_salt=old.options.cache_salt, kv_ttl_s=5.0)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.host.scheduler.has_work:
                self.host.step()
                self.host.audit()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        if self.host.open:
            self.host.abort(self.host.open[which % len(self.host.open)])

    @rule(which=st.integers(0, 30))
    def give_way(self, which: int) -> None:
        if running := self.host.scheduler.running:
            self.host.scheduler.preempt(running[which % len(running)])

    @rule(which=st.integers(0, 30))
    def fail(self, which: int) -> None:
        if running := self.host.scheduler.running:
            self.host.fail(running[which % len(running)])

    @rule()
    def break_step(self) -> None:
        self.host.break_step()

    @rule(length=st.integers(1, 30), tokens=st.integers(1, 8), wish=st.integers(0, 6))
    def besiege(self, length: int, tokens: int, wish: int) -> None:
        """More urgent requests than there is room for keep coming until all who were here are served."""
        here = list(self.host.open)
        if len(self.host.finished) % 7 != wish or not here:
            return  # a siege is long: not every time
        for _ in range(SIEGE * len(here)):
            while sum(seq not in here for seq in self.host.open) < 5:
                prompt = [self.host.rng.randrange(VOCAB) for _ in range(length)]
                self.host.add(prompt, tokens, "target", priority=-100)
            self.host.step()
            if all(seq.is_finished for seq in here):
                break
        assert all(seq.is_finished for seq in here), "a request starves beside urgent ones"
        type(self).seen["sieges"] += 1

    @rule(seconds=st.sampled_from([0.5, 3.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.host.now += seconds

    @invariant()
    def audit(self) -> None:
        self.host.audit()

    def teardown(self) -> None:
        self.host.drain()
        seen = type(self).seen
        seen["schedules"] += 1
        seen["requests"] += len(self.host.finished)
        seen["preemptions"] += self.host.scheduler.num_preemptions
        seen.update(seq.finish_reason for seq in self.host.finished)
        if self.host.prefixes is not None:
            seen.update(vars(self.host.prefixes.counts))
            seen["pinned"] += self.host.prefixes.num_pinned


def explore(host: Any, count: int) -> None:
    seen: Counter[str] = Counter()
    machine = type("HostMachine", (Machine,), {"make_host": host, "seen": seen})
    run_state_machine_as_test(
        seed(int(os.environ.get("SPECDEC_SEED", "0")))(machine),
        settings=settings(
            max_examples=count,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(seen))
    assert seen["schedules"] >= count
    assert all(seen[name] for name in HAPPENS), f"the schedules never came to some of it: {seen}"


def test_two_hundred_random_schedules_keep_every_row_true(schedule_host: Any) -> None:
    explore(schedule_host, 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_random_schedules_keep_every_row_true(schedule_host: Any) -> None:
    """SPECDEC_SCHEDULES says how many, SPECDEC_SEED which."""
    explore(schedule_host, int(os.environ.get("SPECDEC_SCHEDULES", "10000")))


def busy(make_host: Any, seed: int, steps: int = 120) -> Any:
    """A fixed busy schedule: few blocks, two tenants, talks that go on."""
    host = make_host(num_blocks=14, cached=True, cold_blocks=6, budget=32, seed=seed)
    rng = random.Random(seed)
    for _ in range(steps):
        if len(host.open) < 6:
            old = rng.choice(host.finished).token_ids if host.finished and rng.random() < 0.6 else []
            prompt = [
                *old[: rng.randrange(1, 24)],
                *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))),
            ]
            use: PrefixUse = rng.choice(["draft", "draft", "target"])
            salt, ttl = rng.choice([None, "a"]), rng.choice([0.0, 5.0])
            host.add(prompt, rng.randrange(1, 14), use, rng.random() < 0.2, cache_salt=salt, kv_ttl_s=ttl)
        host.step()
        host.audit()
        host.now += 1.0
    host.drain()
    return host


def busy_schedules(make_host: Any, count: int) -> list[Any]:
    return [busy(make_host, seed) for seed in range(count)]


def test_a_busy_schedule_uses_every_part(schedule_host: Any) -> None:
    hosts = busy_schedules(schedule_host, 6)
    counts = [host.prefixes.counts for host in hosts if host.prefixes is not None]
    assert all(sum(getattr(count, name) for count in counts) > 0 for name in vars(counts[0]))
    assert sum(host.scheduler.num_preemptions for host in hosts) > 0


def skip_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = PrefixCache._hashes

    def unsalted(self: PrefixCache, seq: Sequence, count: int) -> list[bytes]:
        if not seq.block_hashes:
            seq.block_hashes.append(b"")
        return hashes(self, seq, count)

    monkeypatch.setattr(PrefixCache, "_hashes", unsalted)


def index_an_unverified_token(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixCache.index

    def early(self: PrefixCache, seq: Sequence) -> None:
        computed, length, draft = seq.num_computed, len(seq.token_ids), seq.draft_computed
        seq.token_ids += [0, 1, 2]
        seq.num_computed, seq.draft_computed = computed + 2, max(draft, computed + 2) if draft else draft
        try:
            index(self, seq)
        except KeyError:
            pass
        finally:
            del seq.token_ids[length:]
            seq.num_computed, seq.draft_computed = computed, draft

    monkeypatch.setattr(PrefixCache, "index", early)


def forget_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block with draft rows serves every continuation."""
    find = PrefixCache._find

    def blind(self: PrefixCache, chain: bytes, seq: Sequence, end: int) -> Any:
        hit = find(self, chain, seq, end)
        return Hit(hit.key, hit.block, True) if hit is not None and not hit.exact else hit

    monkeypatch.setattr(PrefixCache, "_find", blind)


def keep_hashes_of_given_up_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def sticky(self: PrefixCache, count: int) -> list[int]:
        return self._order.take(count, self._clock())

    monkeypatch.setattr(PrefixCache, "evict", sticky)


def release_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = Scheduler.remove

    def twice(self: Scheduler, seq: Sequence) -> None:
        table = list(seq.block_table)
        remove(self, seq)
        self.blocks.release(table)

    monkeypatch.setattr(Scheduler, "remove", twice)


def leak_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def leaky(self: BlockManager, table: list[int]) -> None:
        if len(table) > 3:
            table.pop()
        release(self, table)

    monkeypatch.setattr(BlockManager, "release", leaky)


def keep_no_boundary_state(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = PrefixCache._restore_copy

    def wrong(self: PrefixCache, seq: Sequence, *rest: Any) -> bool:
        found = restore(self, seq, *rest)
        seq.pending_states = [torch.zeros_like(state) for state in seq.pending_states]
        return found

    monkeypatch.setattr(PrefixCache, "_restore_copy", wrong)


def copy_a_draft_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a block, its last draft row made for another next token."""
    longest = PrefixIndex.longest_part

    def greedy(self: PrefixIndex, parent: bytes, text: list[int], limit: int, *, with_draft: bool) -> Any:
        return longest(self, parent, text, limit, with_draft=False)

    monkeypatch.setattr(PrefixIndex, "longest_part", greedy)


def index_a_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The open block at a text's end, with the last token, which has no row."""
    index_end = PrefixCache.index_end

    def long(self: PrefixCache, seq: Sequence) -> None:
        seq.num_computed, seq.draft_computed = seq.num_computed + 1, seq.draft_computed + 1
        seq.token_ids.append(0)
        index_end(self, seq)
        seq.num_computed, seq.draft_computed = seq.num_computed - 1, seq.draft_computed - 1
        del seq.token_ids[-1]

    monkeypatch.setattr(PrefixCache, "index_end", long)


def promise_blocks_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "can_extend", lambda self, table, rows: True)


MUTATIONS = [
    skip_salt,
    index_an_unverified_token,
    forget_the_next_token,
    keep_hashes_of_given_up_blocks,
    release_twice,
    leak_a_block,
    keep_no_boundary_state,
    copy_a_draft_row_too_many,
    index_a_row_too_many,
    promise_blocks_that_are_not_there,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_planted_fault_is_found(
    schedule_host: Any, mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine can fail."""
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        busy_schedules(schedule_host, 6)
