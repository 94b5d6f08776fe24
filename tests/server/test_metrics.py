"""The counters are the sums of what responses report, and the dashboard shows nothing that is not there."""

import json
import re
import threading
from importlib.resources import files
from typing import Any

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
COUNTS = {
    "verify_steps": "spec_decode_num_verify_steps_total",
    "num_spec_steps": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "committed": "spec_decode_num_committed_tokens_total",
}


def ask_everything(live: Any) -> list[dict[str, Any]]:
    """Responses to a mix of requests at once: whole and streamed, several choices, exact and lossy."""
    turn = [{"role": "user", "content": "the sky"}]
    bodies: list[tuple[str, dict[str, Any]]] = []
    for index in range(4):
        bodies += [
            (TEXT, {"prompt": ["the", "in the"], "n": 2, "seed": index, "max_tokens": 9 + index}),
            (CHAT, {"messages": turn, "temperature": 0, "max_tokens": 20}),
            (CHAT, {"messages": turn, "seed": index, "speculative": {"enabled": False}, "max_tokens": 7}),
            (
                CHAT,
                {
                    "messages": turn,
                    "seed": index,
                    "speculative": {"verification": "lenience"},
                    "max_tokens": 9,
                },
            ),
            (CHAT, {"messages": turn, "max_tokens": 1}),
        ]
    answers: list[dict[str, Any]] = []

    def ask(path: str, body: dict[str, Any], stream: bool) -> None:
        if stream:
            answers.append(live.events(path, {**body, "stream_options": {"include_usage": True}})[-1])
        else:
            answers.append(live.post(path, body)[1])

    threads = [
        threading.Thread(target=ask, args=(path, body, index % 2 == 0))
        for index, (path, body) in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == len(bodies)
    live.wait_until_idle()
    return answers


def test_counters_are_the_sums_of_the_responses(live: Any) -> None:
    answers = ask_everything(live)
    speculation = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for name, metric in COUNTS.items():
        assert live.metric(metric) == sum(each[name] for each in speculation), name
    for lossy in (True, False):
        drafted = sum(each["drafted"] for each in speculation if each["lossy"] is lossy)
        assert live.metric("spec_decode_num_draft_tokens_total", lossy=str(lossy).lower()) == drafted > 0
    for depth in range(3):
        accepted = sum(
            each["accepted_per_depth"][depth]
            for each in speculation
            if len(each["accepted_per_depth"]) > depth
        )
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert live.metric(name, position=str(depth)) == accepted
    usage = [answer["usage"] for answer in answers]
    assert live.metric("prompt_tokens_total") == sum(each["prompt_tokens"] for each in usage)
    tokens = sum(each["completion_tokens"] for each in usage)
    assert live.metric("generation_tokens_total") == tokens
    sequences = 4 * (4 + 4)
    assert live.metric("request_finished_total") == sequences
    # the first token comes from reading the prompt, every other from a verify step
    assert live.metric("spec_decode_num_committed_tokens_total") == tokens - sequences
    assert live.metric("inter_token_latency_seconds_count") == tokens - sequences
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
        assert live.metric(f"{name}_count") == sequences, name
    assert live.metric("num_requests_running") == live.metric("num_requests_waiting") == 0
    assert live.metric("kv_cache_usage_perc") == 0
    assert live.metric("engine_steps_total") > 0
    assert live.metric("http_requests_total", route=CHAT, code="200") == 16


def test_the_text_is_prometheus_own_format(live: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    _, headers, data = live.request("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(data.decode())}
    assert "specdec:spec_decode_num_drafts" in names
    assert all(name.startswith(("specdec:", "process_")) for name in names)
    assert "process_resident_memory_bytes" in names


def test_the_dashboard_uses_metrics_that_exist(live: Any) -> None:
    ask_everything(live)
    dashboard = json.loads(files("specdec.server").joinpath("data/grafana.json").read_text("utf-8"))
    text = live.request("GET", "/metrics")[2].decode()
    there = set(re.findall(r"^(specdec:\w+)", text, re.MULTILINE))
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(targets) > 15
    used = {name for expr in targets for name in re.findall(r"specdec:\w+", expr)}
    assert used <= there, sorted(used - there)
    labels = set(re.findall(r"(\w+)=~?\"", " ".join(targets)))
    assert labels <= {"model", "instance", "job", "code", "part", "state", "lossy", "rule", "position", "le"}


@pytest.mark.parametrize("log_prompts", [False, True])
def test_log_lines_hold_texts_only_when_asked(
    make_engine: Any, solo: Any, serving: Any, log_prompts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    caplog.set_level(logging.INFO, "specdec.server")
    with serving(make_engine(solo), log_prompts=log_prompts) as server:
        server.post(TEXT, {"prompt": "secret words", "max_tokens": 3})
        server.post(TEXT, {"prompt": "secret words", "temperature": "secret words"})
    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]
    assert [line["status"] for line in lines] == [200, 400]
    assert lines[0]["completion_tokens"] <= 3
    assert ("secret" in str(lines)) is log_prompts
