"""The arithmetic of a soak: windows, drift, memory, and counters that agree or are said not to."""

from __future__ import annotations

import pytest

from specdec.cli.loading.counters import Counters, reconcile
from specdec.cli.loading.drive import LoadRecord
from specdec.cli.loading.windows import (
    WARM_WINDOWS,
    WINDOWS,
    MemorySample,
    memory_by_window,
    steadiness,
    throughput_by_window,
    verdict,
)


def answered(sent: float, first: float, last: float, tokens: int) -> LoadRecord:
    record = LoadRecord(conversation="p", turn=0, sent_s=sent, first_s=first, last_s=last)
    record.prompt_tokens, record.completion_tokens, record.finish_reason = 5, tokens, "length"
    return record


def test_tokens_lie_in_the_windows_they_were_written_in() -> None:
    records = [
        answered(0.0, 0.5, 2.5, 20),  # 10 a second
        answered(3.0, 3.2, 3.2, 4),  # at once
        answered(9.5, 9.5, 11.5, 10),  # half of it behind the end
    ]
    failed = answered(5.0, 5.0, 6.0, 99)
    failed.error = "timeout"
    rates = throughput_by_window([*records, failed], float(WINDOWS))
    assert rates == pytest.approx([5, 10, 5, 4, 0, 0, 0, 0, 0, 2.5])


def test_drift_and_spread_leave_the_warm_up_out() -> None:
    rising = [1.0, 1.0, *(100 + 10 * step for step in range(WINDOWS - WARM_WINDOWS))]
    found = steadiness(rising)
    assert found["drift"] == pytest.approx(70 / 135)
    assert found["spread"] == pytest.approx(35 / 135)
    assert steadiness([1.0] * WARM_WINDOWS + [7.0] * (WINDOWS - WARM_WINDOWS)) == pytest.approx(
        {"drift": 0, "spread": 0}, abs=1e-9
    )


STEADY = [50.0] * WINDOWS
EQUAL = {"equal": True}


@pytest.mark.parametrize(
    ("last", "rates", "counters", "errors", "fails"),
    [
        (101.9, STEADY, EQUAL, {"http 429": 3}, None),
        (102.1, STEADY, EQUAL, {}, "memory"),
        (100.0, [*STEADY[:-1], 47.0], EQUAL, {}, "throughput"),
        (100.0, [*STEADY[:-1], 0.0], EQUAL, {}, "throughput"),
        (100.0, STEADY, {"equal": False}, {}, "counters"),
        (100.0, STEADY, None, {}, "counters"),
        (100.0, STEADY, EQUAL, {"timeout": 1}, "answers"),
        (None, STEADY, EQUAL, {}, "memory"),
    ],
)
def test_the_verdict_holds_only_when_every_part_was_seen_and_holds(
    last: float | None,
    rates: list[float],
    counters: dict[str, bool] | None,
    errors: dict[str, int],
    fails: str,
) -> None:
    memory: list[float | None] = [10.0, 10.0, *[100.0] * (WINDOWS - WARM_WINDOWS - 1), last]
    found = verdict(rates, memory, counters, errors)
    assert found["holds"] is (fails is None)
    for part in ("memory", "throughput", "counters", "answers"):
        assert bool(found[part]) is (part != fails), part


def test_memory_is_the_median_of_a_windows_samples() -> None:
    samples = [MemorySample(at, size) for at, size in ((0.1, 5), (0.2, 7), (0.3, 900), (9.99, 4), (10.0, 99))]
    assert memory_by_window(samples, 10.0) == [7.0, *[None] * 8, 4.0]


TEXT = """# HELP specdec:generation_tokens_total Tokens written.
specdec:generation_tokens_total {written}
specdec:prompt_tokens_total {read}
specdec:http_requests_total{{code="200",route="/v1/chat/completions"}} {whole}
specdec:http_requests_total{{code="429",route="/v1/chat/completions"}} {refused}
specdec:http_requests_total{{code="200",route="/metrics"}} 99.0
specdec:request_finished_total{{finished_reason="length"}} {ended}
specdec:request_finished_total{{finished_reason="abort"}} 0.0
specdec:num_requests_running 1.0
specdec:num_requests_waiting 2.0
odd{{path="a\\"b, {{c}}"}} 1e3
"""


def counted(written: int, read: int, whole: int, refused: int, ended: int) -> Counters:
    return Counters(TEXT.format(written=written, read=read, whole=whole, refused=refused, ended=ended))


def test_counters_are_read_and_compared_one_by_one() -> None:
    before, after = counted(100, 50, 9, 1, 9), counted(130, 60, 11, 2, 11)
    assert (before.num_here, before.total("odd"), before.prefix) == (3, 1000, "specdec:")
    refused = LoadRecord(conversation="r", turn=0, sent_s=1.0, error="http 429")
    records = [answered(0, 1, 2, 20), answered(0, 1, 2, 10), refused]
    found = reconcile(before, after, records, "/v1/chat/completions")
    assert found is not None
    assert found["equal"]
    assert found["counts"]["completion_tokens"] == {"server": 30, "clients": 30, "equal": True}
    assert found["counts"]["responses 429"] == {"server": 1, "clients": 1, "equal": True}
    assert found["ends_no_client_saw"] == 0
    lost = reconcile(before, after, records[1:], "/v1/chat/completions")
    assert lost is not None
    assert {name for name, one in lost["counts"].items() if not one["equal"]} == {
        *("responses 200", "prompt_tokens", "completion_tokens", "finished length")
    }
    assert reconcile(Counters(""), Counters("go_threads 3"), records, "/v1/chat/completions") is None
