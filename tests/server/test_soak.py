"""`specdec bench --url --duration` against our own server: its counters are what its clients saw."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main


@pytest.mark.parametrize("alone", [True, False])
def test_counters_reconcile_exactly_unless_somebody_else_asked_too(
    live: Any, tmp_path: Path, wait_for: Any, alone: bool
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "soak.json"
    prompts.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"say {i} the in an"}) + "\n" for i in range(5))
    )
    words = ["bench", "--url", live.url, "--data", str(prompts), "--concurrency", "3", "--duration", "1.5"]
    words += ["--max-tokens", "24", "--temperature", "1", "--cold", "--out", str(out)]
    if alone:
        words += ["--server-pid", str(os.getpid())]
    finished = live.metric("request_finished_total")

    ended = threading.Event()

    def ask_too() -> None:
        wait_for(lambda: live.metric("request_finished_total") > finished)
        while not ended.is_set():
            chat = [{"role": "user", "content": "a"}]
            live.post("/v1/chat/completions", {"messages": chat, "max_tokens": 2})
            # the tool waits for an idle server before and after
            time.sleep(0.2)

    intruder = threading.Thread(target=ask_too)
    if not alone:
        intruder.start()
    try:
        code = main(words)
    finally:
        ended.set()
    record = json.loads(out.read_text())
    counts = record["counters"]["counts"]
    assert record["completed"] >= 3
    assert record["verdict"]["counters"] is alone
    assert code == (0 if record["verdict"]["holds"] else 1)
    assert all(window["resident_bytes"] > 1e6 for window in record["windows"])
    if alone:
        assert counts["completion_tokens"]["server"] == record["completion_tokens"]
        assert counts["responses 200"]["server"] == record["completed"]
        assert counts["verify_steps"]["equal"]
    else:
        intruder.join()
        assert counts["responses 200"]["server"] > counts["responses 200"]["clients"]
