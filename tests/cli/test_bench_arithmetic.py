"""Every figure of a bench on scripted drafts, to the last digit; counts reconcile with tokens in random runs.

The engine here steps as it is told, with the real sequences, commits, stop rules and counters. Only tensors
are left out: what is drafted and how much of it the rule accepts is a script, as is the clock, so that
whatever `specdec bench` makes of it can be reckoned by hand.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from specdec.acceptance import commit_tokens
from specdec.cli import bootstrap
from specdec.cli.benching import observe as observe_module
from specdec.cli.benching.figures import answer_records, row_figures
from specdec.cli.benching.measure import BenchPrompt, Interleaved, engine_decoder
from specdec.detokenize import IncrementalDetokenizer
from specdec.random_streams import RandomStream
from specdec.sequence import SamplingParams, Sequence
from specdec.step_times import StepTimes
from specdec.tree import chain_tree
from specdec.verification.registry import rule_named
from specdec.verification.result import VerifyResult

EOS = 500
WRONG = 999
# seconds of a step by part: propose, target, verify (commit included), commit, and what no part counts
PARTS = (0.25, 1.0, 0.5, 0.125, 0.25)
STEP_S = PARTS[0] + PARTS[1] + PARTS[2] + PARTS[4]


class Letters:
    """Token 7 reads as the letter h, and so on."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


class _Counting:
    def record(self, *counts: object) -> None:
        """Decide nothing."""


@dataclass(frozen=True)
class Step:
    """A step of one sequence: how many tokens are drafted in a chain, and how many of them accepted."""

    drafted: int
    accepted: int


class ScriptedEngine:
    """What `observe` needs of an engine.

    Args:
        text: the token at a place of an answer, whatever the drafts.
        script: steps of each sequence added, in order; the last one goes on for ever.
        stop_ids: end tokens.
    """

    def __init__(
        self,
        text: Callable[[int], int],
        script: Callable[[int], list[Step]],
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.text, self.script, self.stop_ids = text, script, frozenset(stop_ids)
        self.now = 0.0
        self.times = StepTimes()
        self.open: list[tuple[Sequence, list[Step]]] = []
        self.added = 0

    def clock(self) -> float:
        """Seconds of the script."""
        return self.now

    def add(self, prompt: list[int], params: SamplingParams) -> Sequence:
        seq = Sequence(
            seq_id=self.added,
            prompt_len=len(prompt),
            token_ids=list(prompt),
            params=params,
            spec=None,
            stream=RandomStream(0),
            max_len=len(prompt) + (params.max_tokens or 1),
            stop_ids=frozenset() if params.ignore_eos else self.stop_ids,
            detokenizer=IncrementalDetokenizer(Letters(), [], params.stop, 0),
            controller=cast(Any, _Counting()),
            rule=rule_named("greedy", {}),
        )
        self.open.append((seq, list(self.script(self.added))))
        self.added += 1
        return seq

    def step(self) -> None:
        """One step of every sequence; the first of each reads its prompt."""
        self.now += STEP_S
        self.times.propose += PARTS[0]
        self.times.target += PARTS[1]
        self.times.verify += PARTS[2]
        self.times.commit += PARTS[3]
        self.times.steps += 1
        for seq, steps in self.open:
            place = seq.num_output
            step = Step(0, 0) if not place else steps.pop(0) if len(steps) > 1 else steps[0]
            ahead = [self.text(place + index) for index in range(step.accepted + 1)]
            drafts = ahead[: step.accepted] + [WRONG] * (step.drafted - step.accepted)
            result = VerifyResult(
                accepted_nodes=list(range(1, step.accepted + 1)),
                next_token_id=ahead[-1],
                next_kind="bonus" if step.accepted == step.drafted else "recovered",
            )
            tree = chain_tree(seq.token_ids[-1], drafts)
            commit_tokens(seq, tree, result, cast(Any, None), was_prefill=not place)
        self.open = [(seq, steps) for seq, steps in self.open if not seq.is_finished]

    def abort(self, sequences: list[Sequence]) -> None:
        assert all(seq.is_finished for seq in sequences), "every sequence was decoded to its end"


def chains(*accepted: int, drafted: int = 3) -> list[Step]:
    return [Step(drafted, count) for count in accepted]


def measured(
    monkeypatch: pytest.MonkeyPatch,
    engines: dict[str, ScriptedEngine],
    prompts: list[BenchPrompt],
    repeats: int = 1,
    **params: Any,
) -> Interleaved:
    """Every prompt in one batch, each engine on its own clock."""
    run = Interleaved(
        rows=prompts,
        batches=[0] * len(prompts),
        results={name: [[] for _ in prompts] for name in engines},
        warm_up={name: [] for name in engines},
    )
    for name, engine in engines.items():
        monkeypatch.setattr(observe_module.time, "perf_counter", engine.clock)
        decode = engine_decoder(cast(Any, engine), SamplingParams(**params))
        for _ in range(repeats):
            for index, one in enumerate(decode(prompts)):
                run.results[name][index].append(one)
    return run


def prompt(name: str, length: int = 10, category: str = "c") -> BenchPrompt:
    return BenchPrompt(id=name, category=category, token_ids=list(range(length)))


def counting(place: int) -> int:
    return place


def plain() -> ScriptedEngine:
    return ScriptedEngine(counting, lambda number: [Step(0, 0)])


def test_the_textbook_chain_to_the_last_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """B65: accept lengths [0, 1, 3, 3, 2] at k = 3 behind 120 tokens; one token ends the prompt."""
    fast = ScriptedEngine(counting, lambda number: chains(0, 1, 3, 3, 2))
    run = measured(
        monkeypatch, {"plain": plain(), "fast": fast}, [prompt("p", 120)], max_tokens=15, ignore_eos=True
    )
    row = row_figures("fast", run)
    found = row["acceptance"]
    assert (found["verify_steps"], found["drafted"], found["accepted"], found["committed"]) == (5, 15, 9, 14)
    assert (row["tokens"], found["first_tokens"], row["prompt_tokens"]) == (15, 1, 120)
    assert found["acceptance_length"] == found["acceptance_length_mean_of_answers"] == 14 / 5
    assert found["accepted_per_step"] == 9 / 5
    assert found["acceptance_rate"] == found["acceptance_rate_per_node"] == 9 / 15
    assert found["acceptance_per_depth"] == [4 / 5, 3 / 5, 2 / 5]
    assert found["acceptance_per_depth_conditional"] == [4 / 5, 3 / 4, 2 / 3]
    # roots at answer places 1, 2, 4, 8, 12 and at texts of 121, 122, 124, 128, 132 tokens
    assert [(one["from"], one["to"], one["verify_steps"]) for one in found["by_position"]] == [(0, 16, 5)]
    before, behind = found["by_context"]
    assert (before["from"], before["to"], before["verify_steps"], before["committed"]) == (0, 128, 3, 7)
    assert (behind["from"], behind["to"], behind["verify_steps"], behind["committed"]) == (128, 256, 2, 7)
    assert (before["acceptance_length"], before["acceptance_rate"]) == (7 / 3, 4 / 9)
    assert (behind["acceptance_length"], behind["acceptance_rate"]) == (7 / 2, 5 / 6)
    # six passes against fifteen
    assert row["seconds"] == 6 * STEP_S
    assert row["tokens_per_second"] == 15 / (6 * STEP_S)
    assert row["speedup"] == pytest.approx(15 / 6, abs=1e-15)
    assert row["decode_tokens_per_second"] == 14 / (5 * STEP_S)
    assert row["decode_speedup"] == pytest.approx(14 / 5, abs=1e-15)
    assert row["total_tokens_per_second"] == 135 / (6 * STEP_S)
    assert row["identical"] == row["equal_lengths"] == 1
    assert row["speedup_interval"] is None


def test_latencies_and_step_times_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = ScriptedEngine(counting, lambda number: chains(0, 1, 3, 3, 2))
    run = measured(monkeypatch, {"plain": fast}, [prompt("p")], max_tokens=15, ignore_eos=True)
    row = row_figures("plain", run)
    latency = row["latency"]
    assert latency["ttft_ms"]["median"] == 1000 * STEP_S
    assert latency["e2el_ms"]["p99"] == 6000 * STEP_S
    assert latency["tpot_ms"]["mean"] == 5000 * STEP_S / 14
    assert (latency["itl_ms"]["n"], latency["itl_ms"]["mean"]) == (5, 1000 * STEP_S)
    # one entry a token: 1 of a whole step, 2 of a half, 8 of a quarter, 3 of a third
    tokens = latency["itl_token_ms"]
    assert tokens["n"] == 14
    assert tokens["mean"] == pytest.approx(5000 * STEP_S / 14, abs=1e-9)
    assert tokens["p50"] == 1000 * STEP_S / 4
    assert row["step_time"]["steps"] == 6
    assert row["step_time"]["shares"] == {
        "draft": 0.125,
        "verify": 0.5,
        "sample": 0.1875,
        "commit": 0.0625,
        "host": 0.125,
    }
    assert row["energy"] is None
    record = answer_records("plain", run)[0]
    assert (record["ttft_ms"], record["e2el_ms"]) == ([2000.0], [12000.0])
    assert record["finish_reason"] == "length"


def test_an_end_token_inside_an_accepted_run_counts_what_was_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """B64: [d1, d2, EOS, d4, d5] and bonus, all matching: 5 accepted by the rule, 3 committed."""
    engine = ScriptedEngine(
        lambda place: EOS if place == 3 else place, lambda number: [Step(5, 5)], stop_ids=[EOS]
    )
    run = measured(monkeypatch, {"plain": engine}, [prompt("p")], max_tokens=50)
    row = row_figures("plain", run)
    found = row["acceptance"]
    assert (found["accepted"], found["committed"], found["acceptance_length"]) == (5, 3, 3.0)
    assert row["tokens"] == 4
    assert run.results["plain"][0][0].token_ids == [0, 1, 2, EOS]
    assert run.results["plain"][0][0].finish_reason == "stop"


def test_a_stop_string_inside_a_run_cuts_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters a b c d e f: the string "de" ends within the second step."""
    engine = ScriptedEngine(counting, lambda number: [Step(3, 1), Step(3, 3)])
    run = measured(monkeypatch, {"plain": engine}, [prompt("p")], max_tokens=50, stop=["de"])
    found = row_figures("plain", run)["acceptance"]
    assert run.results["plain"][0][0].text == "abc"
    # a | b c | d e (f g cut off)
    assert (found["verify_steps"], found["accepted"], found["committed"]) == (2, 4, 4)
    assert found["acceptance_length"] == 2.0


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_no_drafts_and_one_token_answers_have_no_rates(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B66: null and valid JSON, 1.0 with steps and null without; a one-token answer has no TPOT."""
    engines = {"plain": plain(), "none": ScriptedEngine(counting, lambda number: [Step(0, 0)])}
    prompts = [prompt("p"), prompt("q")]
    run = measured(monkeypatch, engines, prompts, repeats=2, max_tokens=max_tokens, ignore_eos=True)
    row = json.loads(json.dumps(row_figures("none", run), allow_nan=False))
    found = row["acceptance"]
    assert found["acceptance_rate"] is None
    assert found["acceptance_rate_interval"] is None
    assert found["acceptance_per_depth"] == []
    assert row["speedup"] == 1.0
    if max_tokens == 1:
        assert found["acceptance_length"] is None
        assert found["acceptance_length_interval"] is None
        assert found["acceptance_length_mean_of_answers"] is None
        assert found["by_position"] == found["by_context"] == []
        assert (row["latency"]["tpot_ms"], row["latency"]["itl_ms"]) == (None, None)
        assert (row["decode_tokens_per_second"], row["decode_speedup"]) == (None, None)
        assert row["repeatability"]["acceptance_length_range"] is None
    else:
        assert found["acceptance_length"] == 1.0
        assert row["repeatability"]["acceptance_lengths"] == [1.0, 1.0]
        assert row["repeatability"]["within_interval"] == 0
    assert found["first_tokens"] == 2


def test_categories_sum_to_the_whole_and_intervals_resample_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two turns of one conversation are one draw: with one conversation there is no interval."""
    scripts = [chains(0), chains(3), chains(1)]
    engine = ScriptedEngine(counting, lambda number: scripts[number])
    prompts = [prompt("a", category="x"), prompt("b", category="y"), prompt("a", 30, category="x")]
    run = measured(monkeypatch, {"plain": engine}, prompts, max_tokens=9, ignore_eos=True)
    row = row_figures("plain", run)
    found = row["acceptance"]
    assert (row["prompts"], row["answers"]) == (2, 3)
    # 8 tokens behind the first: 8 steps of 1, 2 of 4, 4 of 2
    assert found["acceptance_length_by_category"] == {"x": 16 / 12, "y": 4.0}
    assert [one["answers"] for one in found["by_category"]] == [2, 1]
    for name in ("verify_steps", "drafted", "accepted", "committed"):
        assert sum(one[name] for one in found["by_category"]) == found[name]
    assert found["acceptance_length_mean_of_answers"] == (1 + 4 + 2) / 3
    # the resampled values are those of "a" alone, of "b" alone, and of both
    low, high = found["acceptance_length_interval"]
    assert (low, high) == (16 / 12, 4.0)
    alone = measured(monkeypatch, {"plain": plain()}, [prompt("a"), prompt("a", 30)], max_tokens=3)
    assert row_figures("plain", alone)["acceptance"]["acceptance_length_interval"] is None


def test_decoding_speed_leaves_out_what_came_before_the_last_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of two, 5 tokens each: every token but the two first ones, in the time of the steps behind."""
    run = measured(monkeypatch, {"plain": plain()}, [prompt("a"), prompt("b")], max_tokens=5, ignore_eos=True)
    row = row_figures("plain", run)
    assert row["tokens_per_second"] == 10 / (5 * STEP_S)
    assert row["decode_tokens_per_second"] == 8 / (4 * STEP_S)


def test_repeats_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs twice as slowly in one repeat of three: its speed-up is half and lies outside."""
    fast = ScriptedEngine(counting, lambda number: chains(3))
    run = measured(
        monkeypatch,
        {"plain": plain(), "fast": fast},
        [prompt("a"), prompt("b")],
        repeats=3,
        max_tokens=9,
        ignore_eos=True,
    )
    run = replace(run, batches=[0, 1])
    for repeats in run.results["fast"]:
        repeats[1] = replace(repeats[1], seconds=2 * repeats[1].seconds)
    row = row_figures("fast", run)
    found = row["repeatability"]
    assert found["speedups"] == [3.0, 1.5, 3.0]
    assert row["speedup"] == 3.0
    assert (found["within_interval"], found["identical_texts"], found["acceptance_length_range"]) == (2, 2, 0)
    # every interval here has no width, and the third repeat is followed by the first, its equal
    assert found["within_width"] == 0
    # answers of one batch share their time: alone it has no spread to tell
    assert row_figures("fast", replace(run, batches=[0, 0]))["speedup_interval"] is None


def test_a_thousand_random_runs_reconcile_with_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """B64, B38: whatever ends an answer, emitted = committed + first tokens, and every bucket sums to it."""
    # the sums need no intervals, which take most of the time
    monkeypatch.setattr(bootstrap, "RESAMPLES", 2)
    rng = random.Random(8)
    endings = set()
    for _ in range(1000):
        end = rng.choice([None, rng.randrange(40)])
        engine = ScriptedEngine(
            _text(end),
            _random_script(rng),
            stop_ids=[EOS],
        )
        prompts = [
            BenchPrompt(id=str(number), category=rng.choice("xyz"), token_ids=[1] * rng.randint(1, 300))
            for number in range(rng.randint(1, 4))
        ]
        stop = rng.choice([(), ("jk",), ("c", "zz")])
        run = measured(monkeypatch, {"plain": engine}, prompts, max_tokens=rng.randint(1, 40), stop=stop)
        row = row_figures("plain", run)
        answers = [repeats[0] for repeats in run.results["plain"]]
        emitted = sum(len(one.token_ids) for one in answers)
        found = row["acceptance"]
        endings |= {one.finish_reason for one in answers}
        assert row["tokens"] == emitted == found["committed"] + found["first_tokens"]
        assert found["first_tokens"] == len(prompts)
        assert emitted - len(prompts) == sum(one.decode_tokens for one in answers)
        for buckets in ("by_category", "by_position", "by_context"):
            for name in ("verify_steps", "drafted", "accepted", "committed"):
                assert sum(one[name] for one in found[buckets]) == found[name]
            assert sum(one["depths_drafted"] for one in found[buckets]) == sum(found["steps_per_depth"])
        assert found["accepted"] == sum(found["accepted_per_depth"])
        assert sum(one["tokens"] for one in answer_records("plain", run)) == emitted
        latency = row["latency"]
        assert (latency["itl_token_ms"] or {"n": 0})["n"] == emitted - len(prompts)
        assert found["committed"] <= found["accepted"] + found["verify_steps"]
        json.dumps(row, allow_nan=False)
    assert endings == {"stop", "length"}


def _text(end: int | None) -> Callable[[int], int]:
    return lambda place: EOS if place == end else place % 26


def _random_script(rng: random.Random) -> Callable[[int], list[Step]]:
    def script(number: int) -> list[Step]:
        drafted = [rng.randrange(7) for _ in range(40)]
        return [Step(count, rng.randint(0, count)) for count in drafted]

    return script
