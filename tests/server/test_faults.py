"""A broken engine: those whose step failed hear of it, others do not, and a dead thread ends the server."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

TEXT = "/v1/completions"
LONG = {"prompt": "the in", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def break_step(engine: Any, monkeypatch: pytest.MonkeyPatch, times: int, after: int = 0) -> None:
    """Let the engine's verification raise: `times` times, once `after` more steps are done."""
    verify = engine._verify
    left = [after, times]

    def failing(*arguments: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
        elif left[1] > 0:
            left[1] -= 1
            raise RuntimeError("injected")
        return verify(*arguments)

    monkeypatch.setattr(engine, "_verify", failing)


def test_a_failed_step_ends_its_requests_and_no_others(
    make_engine: Callable[..., Any], solo: Any, serving: Any, wait_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.sampling_params import SamplingParams

    [alone] = solo.generate(["the in"], SamplingParams(max_tokens=30, ignore_eos=True))
    with serving(make_engine(solo, max_num_seqs=2)) as server:
        answers: dict[str, Any] = {}

        def ask(name: str, tokens: int) -> threading.Thread:
            def run() -> None:
                answers[name] = server.post(TEXT, {**LONG, "max_tokens": tokens})

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        threads = [ask("one", 400), ask("two", 400)]
        wait_for(lambda: len(server.engine.scheduler.running) == 2)
        threads.append(ask("waiting", 30))
        wait_for(lambda: server.service.loop.outstanding == 3)
        break_step(server.engine, monkeypatch, times=1)
        for thread in threads:
            thread.join()
        for name in ("one", "two"):
            status, answer = answers[name]
            assert (status, answer["error"]["code"]) == (500, "engine_error")
        status, answer = answers["waiting"]
        assert (status, answer["choices"][0]["text"]) == (200, alone.text)
        server.wait_until_idle()
        assert server.request("GET", "/ready")[0] == 200
        assert server.metric("engine_failed_steps_total") == 1


def test_a_stream_gets_the_error_as_its_last_event(
    make_engine: Callable[..., Any], solo: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_engine(solo)) as server:
        break_step(server.engine, monkeypatch, times=1, after=5)
        events = server.events(TEXT, LONG)
        assert events[-1]["error"]["code"] == "engine_error"
        assert events[0]["choices"][0]["text"]
        server.wait_until_idle()


@pytest.mark.parametrize("kind", ["steps go on failing", "the thread is killed"])
def test_a_dead_engine_tells_everybody_and_ends_the_server(
    make_engine: Callable[..., Any],
    solo: Any,
    serving: Any,
    wait_for: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    with serving(make_engine(solo, max_num_seqs=1)) as server:
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(server.post(TEXT, LONG))) for _ in range(5)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.service.loop.outstanding == 5)
        if kind == "the thread is killed":

            def die() -> Any:
                raise SystemExit("killed")

            monkeypatch.setattr(server.engine, "step", die)
        else:
            break_step(server.engine, monkeypatch, times=10**6)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a client was left hanging"
        assert [status for status, _ in answers] == [500] * 5
        wait_for(lambda: server.server.should_exit)
        assert server.server.exit_code == 1
        assert server.service.not_ready is not None


def test_a_hung_engine_tells_everybody_and_ends_the_server(
    make_engine: Callable[..., Any],
    solo: Any,
    serving: Any,
    wait_for: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    with serving(make_engine(solo, max_num_seqs=2), step_timeout_s=0.3) as server:
        stream = server.connect(TEXT, {**LONG, "stream": True})
        wait_for(lambda: server.engine.scheduler.running)
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(server.post(TEXT, LONG))) for _ in range(5)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.service.loop.outstanding == 6)
        step = server.engine.step
        monkeypatch.setattr(server.engine, "step", lambda: (release.wait(60), step())[1])
        try:
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive(), "a client was left hanging"
            assert [status for status, _ in answers] == [500] * 5
            assert {answer["error"]["message"] for _, answer in answers} == {
                "the engine failed: a step took more than 0.3 s"
            }
            received = b""
            while data := stream.recv(1 << 16):
                received += data
            assert b'"code":"engine_error"' in received
            assert b"[DONE]" in received
            wait_for(lambda: server.server.should_exit)
            assert server.server.exit_code == 1
            assert not server.service.loop.join(), "the thread still hangs"
        finally:
            release.set()
            stream.close()


def test_waiting_for_work_is_no_hang(make_engine: Callable[..., Any], solo: Any, serving: Any) -> None:
    with serving(make_engine(solo), step_timeout_s=0.2) as server:
        assert server.post(TEXT, {**LONG, "max_tokens": 2})[0] == 200
        time.sleep(0.6)
        assert server.post(TEXT, {**LONG, "max_tokens": 2})[0] == 200
        assert server.service.loop.fault is None


def test_bad_logits_of_one_request_end_that_one_only(
    make_engine: Callable[..., Any], solo: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_engine(solo)) as server:
        verify = server.engine._verify

        def poisoned(plan: Any, trees: Any, output: Any) -> Any:
            for share, start in zip(plan, output.logits_start, strict=True):
                if share.seq.params.max_tokens == 401 and start >= 0 and share.seq.num_output >= 3:
                    output.logits[start] = float("nan")
            return verify(plan, trees, output)

        monkeypatch.setattr(server.engine, "_verify", poisoned)
        answers: dict[int, Any] = {}
        threads = [
            threading.Thread(
                target=lambda tokens=tokens: answers.update(
                    {tokens: server.post(TEXT, {**LONG, "max_tokens": tokens})}
                )
            )
            for tokens in (401, 40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers[401][0] == 500
        assert answers[40][0] == 200
        server.wait_until_idle()


def test_a_grammar_that_leaves_no_token_is_the_clients_400(live: Any) -> None:
    body = {**LONG, "max_tokens": 5, "allowed_token_ids": [40], "bad_words": []}
    status, answer = live.post(TEXT, {**body, "logit_bias": {"40": 1}})
    assert status == 200, answer
    pytest.importorskip("llguidance")
    status, answer = live.post(
        TEXT, {"prompt": "a", "max_tokens": 5, "allowed_token_ids": [40], "guided_regex": "[0-9]+"}
    )
    if status != 200:
        assert status == 400
        assert "no token can be chosen" in answer["error"]["message"]
    assert json.dumps(answer)
    live.wait_until_idle()
