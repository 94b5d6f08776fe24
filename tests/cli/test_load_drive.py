"""Load in virtual time: a scripted server whose every delay is known, on a loop whose clock jumps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest

from specdec.cli.datasets import Prompt
from specdec.cli.loading.client import RequestFailed
from specdec.cli.loading.drive import REFUSED_PAUSE_S, Asking, Load, LoadRecord, drive, keep_busy
from specdec.cli.loading.figures import acceptance_of, figures_of
from specdec.cli.loading.traffic import Conversation, make_traffic, prefix_texts

ASKING = Asking(chat=True, common={"model": "m"})


class JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: the time it was to wait has passed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for nobody"
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that runs hours in no time."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


@dataclass
class Scripted:
    """Answers `tokens` tokens in one event after each of `delays`; notes who was there at once."""

    delays: Sequence[float] = (0.5, 0.1, 0.3)
    tokens: int = 7
    fails: Callable[[dict[str, Any]], RequestFailed | None] = lambda body: None
    usage: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most: int = 0
    here: int = 0

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.bodies.append(body)
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            failure = self.fails(body)
            if failure is not None:
                await asyncio.sleep(0.2)
                raise failure
            for number, delay in enumerate(self.delays):
                await asyncio.sleep(delay)
                last = number == len(self.delays) - 1
                delta = {"content": f"[{number}]"}
                yield {"choices": [{"delta": delta, "finish_reason": "length" if last else None}]}
            # behind the last token, and in no latency
            await asyncio.sleep(0.05)
            if self.usage:
                yield {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": self.tokens}}
        finally:
            self.here -= 1


def held(server: Scripted, conversations: Sequence[Conversation], clients: int | None = None) -> Load:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(drive(server, conversations, ASKING, clients=clients))


def conversations(count: int, **options: Any) -> list[Conversation]:
    settings = {"turns": 1, "prefixes": (), "request_rate": float("inf"), "think_time": 0.0, "seed": 0}
    prompts = [Prompt(id=f"p{i}", category="none", turns=(f"say {i}",)) for i in range(count)]
    return make_traffic(prompts, **{**settings, **options})


def test_latencies_are_those_of_vllms_bench() -> None:
    """Catches a tpot over chunks in place of tokens, and a first token that counts twice."""
    load = held(Scripted(), conversations(3))
    figures = figures_of(load, requests=3, goodput={})
    assert figures["completed"] == 3
    for name, expected in (("ttft_ms", 500), ("tpot_ms", 400 / 6), ("e2el_ms", 900)):
        assert figures[name]["n"] == 3
        for key in ("mean", "median", "p50", "p99"):
            assert figures[name][key] == pytest.approx(expected), (name, key)
        assert figures[name]["std"] == pytest.approx(0, abs=1e-6)
    assert figures["itl_ms"]["n"] == 6
    assert figures["itl_ms"]["mean"] == pytest.approx(200)
    assert figures["itl_ms"]["p90"] == pytest.approx(300)
    assert load.duration_s == pytest.approx(0.95)
    assert figures["output_throughput"] == pytest.approx(21 / 0.95)
    assert figures["total_token_throughput"] == pytest.approx(54 / 0.95)
    assert figures["request_throughput"] == pytest.approx(3 / 0.95)


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    figures = figures_of(held(Scripted(delays=(0.5,), tokens=1), conversations(2)), requests=2, goodput={})
    assert figures["tpot_ms"] is None
    assert figures["itl_ms"] is None
    assert figures["ttft_ms"]["median"] == pytest.approx(500)


@pytest.mark.parametrize(("clients", "duration"), [(1, 5.7), (2, 2.85), (4, 1.9), (None, 0.95)])
def test_clients_bound_what_is_under_way(clients: int | None, duration: float) -> None:
    """Six answers of 0.95 s each; waiting for a client is in no latency and is reported beside them."""
    server = Scripted()
    load = held(server, conversations(6), clients)
    figures = figures_of(load, requests=6, goodput={})
    assert server.most == (clients or 6)
    assert load.duration_s == pytest.approx(duration)
    assert figures["e2el_ms"]["p99"] == pytest.approx(900)
    late = [0.95 * (index // (clients or 6)) for index in range(6)]
    assert [record.late_s for record in load.records] == pytest.approx(late)
    assert figures["in_flight"] == pytest.approx(6 * 0.9 / duration)


def test_turns_carry_the_conversation_and_pauses_hold_their_client() -> None:
    server = Scripted()
    pauses = (2.0, 3.0)
    talks = [
        Conversation(id=name, turns=("a", "b", "c"), arrives_s=0.0, pauses_s=pauses, seed=0) for name in "xy"
    ]
    load = held(server, talks, clients=1)
    # one after the other: three answers and two pauses each
    assert load.duration_s == pytest.approx(2 * (3 * 0.95 + 5))
    assert [record.turn for record in load.records] == [0, 1, 2, 0, 1, 2]
    assert [record.sent_s for record in load.records[:3]] == pytest.approx([0, 2.95, 6.9])
    assert all(record.late_s == pytest.approx(0) for record in load.records[:3])
    spoken = [(message["role"], message["content"]) for message in server.bodies[2]["messages"]]
    answer = ("assistant", "[0][1][2]")
    assert spoken == [("user", "a"), answer, ("user", "b"), answer, ("user", "c")]


def test_failures_are_counted_by_kind_and_end_their_conversation() -> None:
    def fails(body: dict[str, Any]) -> RequestFailed | None:
        said = body["messages"]
        if said[0]["content"].endswith("1") and len(said) > 1:
            return RequestFailed("http 429", "full")
        return RequestFailed("timeout", "slow") if said[0]["content"].endswith("2") else None

    load = held(Scripted(fails=fails), conversations(3, turns=3))
    figures = figures_of(load, requests=9, goodput={})
    assert figures["errors"] == {"http 429": 1, "timeout": 1}
    # three turns of the first, one of the second; the third's other two were never sent
    assert (figures["completed"], figures["unsent"]) == (4, 3)
    assert figures["ttft_ms"]["n"] == 4


def test_tokens_that_the_server_does_not_count_are_no_whole_answer() -> None:
    """Catches counting chunks where usage is missing: a chunk may hold several tokens."""
    figures = figures_of(held(Scripted(usage=False), conversations(2)), requests=2, goodput={})
    assert figures["errors"] == {"no usage": 2}
    assert figures["output_throughput"] == 0


def test_goodput_counts_answers_within_every_limit() -> None:
    slow = Scripted(fails=lambda body: None)
    load = held(slow, conversations(4), clients=4)
    load.records[0].first_s = load.records[0].sent_s + 0.7
    at = {"ttft": 600.0, "e2el": 900.1}
    assert figures_of(load, requests=4, goodput=at)["request_goodput"] == pytest.approx(3 / 0.95)
    assert figures_of(load, requests=4, goodput={"e2el": 899.0})["request_goodput"] == 0
    assert figures_of(load, requests=4, goodput={})["request_goodput"] is None


def test_percentiles_are_linear_as_numpys() -> None:
    rng = np.random.default_rng(0)
    records = [
        LoadRecord(
            conversation="x",
            turn=0,
            sent_s=1.0,
            first_s=1 + first,
            last_s=9.0,
            completion_tokens=5,
            gaps_s=[],
        )
        for first in rng.exponential(size=37)
    ]
    found = figures_of(Load(records=records, duration_s=9.0), requests=37, goodput={})["ttft_ms"]
    values = [1000 * (record.first_s - 1) for record in records if record.first_s is not None]
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(np.percentile(values, percent))


def test_the_same_seed_makes_the_same_traffic_at_the_rate_asked_for() -> None:
    count, rate, pause = 4000, 5.0, 2.0
    one = conversations(count, request_rate=rate, turns=2, think_time=pause)
    assert one == conversations(count, request_rate=rate, turns=2, think_time=pause)
    assert one != conversations(count, request_rate=rate, turns=2, think_time=pause, seed=1)
    gaps = np.diff([each.arrives_s for each in one])
    assert one[0].arrives_s == 0
    assert gaps.min() >= 0
    # exponential: mean and deviation are alike; 4000 draws put both within 5 %
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.05)
    assert np.mean([each.pauses_s[0] for each in one]) == pytest.approx(pause, rel=0.05)
    assert {each.arrives_s for each in conversations(5)} == {0.0}


def test_requests_go_out_when_they_are_due() -> None:
    talks = conversations(20, request_rate=3.0)
    load = held(Scripted(), talks)
    sent = {record.conversation: record.sent_s for record in load.records}
    assert [sent[talk.id] for talk in talks] == pytest.approx([talk.arrives_s for talk in talks])


def test_groups_share_their_prefix_and_no_other() -> None:
    prefixes = prefix_texts(30, 3)
    talks = conversations(7, prefixes=prefixes)
    assert len(set(prefixes)) == 3
    for index, talk in enumerate(talks):
        assert talk.turns[0] == f"{prefixes[index % 3]}\n\nsay {index}"
    assert {len(prefix.split()) for prefix in prefixes} == {30}


def test_missing_turns_are_those_of_the_prompts_behind() -> None:
    talks = conversations(3, turns=2)
    assert [talk.turns for talk in talks] == [("say 0", "say 1"), ("say 1", "say 2"), ("say 2", "say 0")]


def test_acceptance_is_summed_from_ours_and_from_vllms_counts() -> None:
    ours = {"verify_steps": 10, "drafted": 30, "accepted": 12, "committed": 21, "num_spec_steps": 9}
    vllms = {"num_spec_steps": 5, "num_draft_tokens": 15, "num_accepted_draft_tokens": 10}
    records = [
        LoadRecord(conversation="x", turn=0, sent_s=0.0, speculation=one)
        for one in (ours, vllms, None, {"num_spec_steps": None})
    ]
    found = acceptance_of(records)
    assert found == {
        "requests": 2,
        "verify_steps": 15,
        "drafted": 45,
        "accepted": 22,
        "committed": 36,
        "acceptance_length": 36 / 15,
        "acceptance_rate_per_node": 22 / 45,
    }
    assert acceptance_of(records[2:]) is None


def test_clients_are_busy_until_the_end_and_begin_nothing_behind_it() -> None:
    server = Scripted()
    endless = ((one, ASKING) for _ in count() for one in conversations(2))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        load = runner.run(keep_busy(server, endless, clients=3, seconds=9.0))
    # an answer takes 0.95 s, so each client begins ten
    assert len(load.records) == 30
    assert server.most == 3
    assert max(record.sent_s for record in load.records) < 9.0
    assert load.duration_s == pytest.approx(9.5)


def test_a_server_that_refuses_is_not_asked_as_fast_as_it_refuses() -> None:
    server = Scripted(fails=lambda body: RequestFailed("http 429", "full"))
    endless = ((one, ASKING) for _ in count() for one in conversations(2))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        load = runner.run(keep_busy(server, endless, clients=1, seconds=9.9))
    # each is refused after 0.2 s
    assert len(load.records) == 25
    assert REFUSED_PAUSE_S == 0.2


def test_how_long_a_refusal_took_is_in_a_figure_of_its_own() -> None:
    server = Scripted(fails=lambda body: RequestFailed("http 429", "full"))
    figures = figures_of(held(server, conversations(2)), requests=2, goodput={})
    assert figures["failed_ms"]["n"] == 2
    assert figures["failed_ms"]["p99"] == pytest.approx(200)
    assert figures["ttft_ms"] is None
    assert figures_of(held(Scripted(), conversations(1)), requests=1, goodput={})["failed_ms"] is None
