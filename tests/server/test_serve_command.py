"""`specdec serve` as a process: what is wrong is one line within moments, signals are obeyed."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main


def run_main(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr of one command line."""
    code = main(["serve", *words])
    return code, capsys.readouterr().err


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused here is refused before a model is opened."""

    def opened(*arguments: Any) -> Any:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("specdec.cli.serve_run.start", opened)


@pytest.mark.usefixtures("no_engine")
def test_a_port_in_use_is_said_at_once(served_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = run_main(capsys, str(served_target), "--port", str(port))
    assert code == 1
    assert len(said.splitlines()) == 1
    assert said.startswith(f"error: 127.0.0.1:{port} cannot be listened on: Address already in use; choose")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--host", "192.0.2.1"], 1, "cannot be listened on"),
        (["--port", "70000"], 2, "--port"),
        (["--max-num-seqs", "0"], 2, "--max-num-seqs"),
        (["--max-model-len", "99999"], 1, "--max-model-len (99999) exceeds the target's context (2048)"),
        (["--lossy", "--exact"], 2, "--exact"),
        (["--shape", "chain:3"], 2, "--shape needs --draft"),
        (["--draft", "ngram", "--shape", "chain:0"], 2, "--shape"),
        (["--draft", "ngram", "--speculative-config", "{}"], 2, "exclude"),
        (["--speculative-config", "{}"], 2, "--speculative-config needs method or model"),
        (["--speculative-config", '{"method":"ngram","num_spec_tokens":3}'], 2, "num_spec_tokens"),
        (["--speculative-config", '{"method":"ngram","num_speculative_tokens":0}'], 2, "max_depth (0)"),
        (
            ["--speculative-config", '{"model":"x","num_steps":3}'],
            2,
            "eagle_topk, num_draft_tokens is missing",
        ),
        (
            ["--speculative-config", '{"model":"x","num_steps":3,"eagle_topk":2,"num_draft_tokens":3}'],
            2,
            "must be at least num_steps + 1 (4)",
        ),
        (["--speculative-config", '{"method":"eagle3"}'], 2, "needs model"),
        (["--knob", "a=1"], 2, "--knob"),
        (["--log-level", "loud"], 2, "--log-level"),
        (["--api-key", ""], 2, "--api-key"),
        (["--api-key-file", "nowhere"], 2, "--api-key-file"),
        (["--ssl-keyfile", "key.pem"], 1, "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "nowhere.pem"], 1, "nowhere.pem"),
        (["--device", "tpu"], 2, "--device"),
        (["--drain-timeout", "-1"], 2, "--drain-timeout"),
        (["--timeout", "0"], 2, "--timeout"),
        (["--step-timeout", "-1"], 2, "--step-timeout"),
        (["--max-connections", "0"], 2, "--max-connections"),
        (["--disk-cache-gb", "1"], 2, "--disk-cache-gb needs --disk-cache-dir"),
        (["--disk-cache-dir", "/dev/null"], 1, "--disk-cache-dir (/dev/null) cannot be written to: "),
        (
            ["--disk-cache-dir", ".", "--disk-cache-gb", "1e8"],
            1,
            "less than --disk-cache-gb (1e+08); lower that",
        ),
        (["--disk-cache-dir", "x", "--no-prefix-cache"], 2, "--disk-cache-dir"),
        (
            ["--otlp-traces-endpoint", "localhost:4317"],
            1,
            "--otlp-traces-endpoint (localhost:4317) must be http",
        ),
    ],
)
def test_wrong_options_are_one_line_that_names_them(
    served_target: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    got, said = run_main(capsys, str(served_target), "--port", "0", *words)
    assert got == code, said
    assert len(said.splitlines()) == 1
    assert says in said


@pytest.mark.usefixtures("no_engine")
def test_an_unreadable_target_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_text("")
    for target in (tmp_path, tmp_path / "nothing"):
        code, said = run_main(capsys, str(target), "--port", "0")
        assert code == 1
        assert said.startswith("error: ")
        assert len(said.splitlines()) == 1


def test_speculative_configs_of_other_engines_mean_what_they_mean_there() -> None:
    from specdec.cli.speculative_config import parse_speculative_config

    vllm = parse_speculative_config('{"method":"eagle3","model":"head","num_speculative_tokens":3}')
    assert (vllm.draft, vllm.spec.max_depth, vllm.spec.top_k, vllm.spec.max_nodes) == ("head", 3, 1, 3)
    # SGLang counts the root
    sglang = parse_speculative_config(
        '{"speculative_num_steps":3,"speculative_eagle_topk":4,"speculative_num_draft_tokens":16,"model":"head"}'
    )
    assert (sglang.spec.max_depth, sglang.spec.top_k, sglang.spec.max_nodes) == (3, 4, 15)
    lookup = parse_speculative_config('{"method":"ngram","prompt_lookup_max":3,"num_speculative_tokens":5}')
    assert (lookup.draft, lookup.spec.ngram_max, lookup.spec.max_depth) == ("ngram", 3, 5)
    block = parse_speculative_config('{"model":"eagle-x","rejection_sample_method":"block"}')
    assert (block.draft, block.rule) == ("eagle-x", "block")


def started(target: Path, code: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, ready, and its address."""
    line = ["serve", str(target), "--draft", "ngram", "--port", "0", "--served-model-name", "t", *words]
    running = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys; from specdec.cli.main import main; sys.exit(main(sys.argv[1:]))",
            *line,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SPECDEC_API_KEY": "k"},
    )
    assert running.stderr is not None
    for said in running.stderr:
        if said.startswith("{") and (event := json.loads(said))["event"] == "ready":
            return running, event["url"]
    pytest.fail(f"the server ended with {running.wait()}")


@pytest.fixture
def process(served_target: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    running, url = started(served_target, "")
    yield running, url
    running.kill()
    running.wait()


HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer k"}
ENDLESS = {"prompt": "the", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def test_clients_of_a_killed_server_hear_of_it_at_once(process: tuple[subprocess.Popen[str], str]) -> None:
    """After kill -9 no process holds a client's connection open, and the exit code is not 0."""
    running, url = process
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(ENDLESS).encode(), HEADERS)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data: {")
        running.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    assert running.wait(20) == -signal.SIGKILL
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health", timeout=60)


# a C function called with Python's lock held, as a broken extension would hang
HANGS = """
import ctypes
from specdec.engine import Engine
Engine.step = lambda self: ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.slow
def test_a_hang_that_stops_the_event_loop_too_ends_the_process(served_target: Path) -> None:
    running, url = started(served_target, HANGS, "--step-timeout", "1")
    try:
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(ENDLESS).encode(), HEADERS)
        with pytest.raises((http.client.HTTPException, OSError)):
            urllib.request.urlopen(request, timeout=60).read()
        _, log = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1
    assert "Timeout" in log
    assert "specdec-engine" in log or "engine_loop.py" in log


def test_sigterm_lets_a_request_finish_and_ends_with_a_summary(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    running, url = process
    body = {"prompt": "the", "max_tokens": 300, "ignore_eos": True}
    answers: list[dict[str, Any]] = []
    first = threading.Event()

    def ask() -> None:
        stream = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        request = urllib.request.Request(f"{url}/v1/completions", stream.encode(), HEADERS)
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    answers.append(json.loads(line[6:]))
                    first.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert first.wait(60)
    running.send_signal(signal.SIGTERM)
    thread.join(60)
    assert answers[-1]["usage"]["completion_tokens"] == 300
    out, log = running.communicate(timeout=60)
    assert running.returncode == 0
    summary = json.loads(out.splitlines()[-1])
    assert summary["sequences"] == 1
    assert summary["completion_tokens"] == 300
    assert summary["fault"] is None
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["event"] for line in lines] == ["draining", "request"]
    assert lines[1]["completion_tokens"] == 300
