"""The same load by two generators on one server, turn by turn: ours, and vLLM's bench client.

What a generator says of a server should not depend on who wrote it. Both send the same prompts, as many
tokens each, with as many clients, greedy; each turn with a cache salt of its own, so that nobody finds the
other's prompts in the prefix cache.

    python -m specdec.cli.peer_scripts.beside_vllm_bench --url http://localhost:8000/v1 \
        --target smollm2-135m --vllm-python .peers/vllm/bin/python --out beside_vllm_bench.json
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
from math import inf
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from specdec.cli.console import emit_json, print_table
from specdec.cli.datasets import load_prompts, prompt_file
from specdec.cli.loading.plan import LoadPlan
from specdec.cli.loading.run import run_load
from specdec.cli.outputs import require_writable
from specdec.errors import SpecdecError
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, sha256_file, write_json_atomic

SCHEMA = "specdec.beside-vllm-bench/1"
CLIENT = Path(__file__).with_name("vllm_bench_client.py")
_TIMEOUT_S = 1800
_COUNTS = ("completed", "output_tokens", "request_throughput", "output_throughput")
_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms")


def beside(
    url: Annotated[str, typer.Option(help="The server: http://HOST:PORT/v1.")],
    target: Annotated[str, typer.Option(help="What it serves: vLLM's client reads its tokenizer.")],
    vllm_python: Annotated[Path, typer.Option(help="Python of vLLM's environment (make peers).")],
    out: Annotated[Path, typer.Option(help="Write both clients' figures (JSON).")],
    data: Annotated[str, typer.Option(help="Prompt set; first turns are sent.")] = "mt_bench",
    limit: Annotated[int, typer.Option(min=1, help="Use only the first prompts.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Times each generator has its turn.")] = 3,
) -> None:
    """Send one load by our generator and by vLLM's, and show both tables."""
    require_writable("--out", out)
    prompts = [prompt.turns[0] for prompt in load_prompts(data)[:limit]]
    found: dict[str, list[dict[str, float]]] = {"specdec": [], "vllm": []}
    versions = {"vllm": _version(vllm_python)}
    for _ in range(turns):
        plan = _plan(url, data, limit, concurrency, max_tokens)
        ours = run_load(plan)
        found["specdec"].append(_ours(ours["points"][0]))
        model = ours["model"]
        found["vllm"].append(_theirs(vllm_python, url, model, target, prompts, concurrency, max_tokens))
    names = list(found["specdec"][0])
    medians = {
        who: {name: median(turn[name] for turn in each) for name in names} for who, each in found.items()
    }
    rows = [[name, medians["specdec"][name], medians["vllm"][name], _ratio(medians, name)] for name in names]
    print_table(
        f"{data}, {limit} prompts, {concurrency} clients, {max_tokens} tokens each; medians of {turns} turns",
        ["", "specdec bench --url", "vllm bench serve", "ratio"],
        rows,
    )
    record = RunRecord.collect(
        seeds={},
        data_hash=sha256_file(prompt_file(data)),
        defaults={"limit": limit, "concurrency": concurrency, "max_tokens": max_tokens, "turns": turns},
    )
    summary = {
        "schema": SCHEMA,
        "data": data,
        "prompts": len(prompts),
        "versions": versions,
        "medians": medians,
    }
    write_json_atomic(out, {**summary, "turns": found, "run": record.to_dict()})
    emit_json(summary)


def _ratio(medians: dict[str, dict[str, float]], name: str) -> float | None:
    theirs = medians["vllm"][name]
    return medians["specdec"][name] / theirs if theirs else None


def _plan(url: str, data: str, limit: int, concurrency: int, max_tokens: int) -> LoadPlan:
    return LoadPlan(
        url=url,
        model=None,
        endpoint="chat",
        concurrency=(concurrency,),
        request_rate=inf,
        shared_prefix=0,
        prefix_groups=1,
        turns=1,
        think_time=0.0,
        cold=True,
        ignore_eos=True,
        goodput={},
        extra_body={},
        request_timeout=600.0,
        data=data,
        limit=limit,
        max_tokens=max_tokens,
        temperature=0.0,
        seed=0,
        warm_up=1,
        out=None,
    )


def _ours(point: dict[str, Any]) -> dict[str, float]:
    counts = {**point, "output_tokens": point["completion_tokens"]}
    return {name: counts[name] for name in _COUNTS} | {
        f"{key}_{name}": point[name][key] for name in _LATENCIES for key in ("median", "p99")
    }


def _theirs(
    python: Path,
    url: str,
    model: str,
    target: str,
    prompts: list[str],
    concurrency: int,
    max_tokens: int,
) -> dict[str, float]:
    """One turn of vLLM's client.

    Raises:
        SpecdecError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        custom = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"prompt": text, "output_tokens": max_tokens}) + "\n" for text in prompts]
        custom.write_text("".join(lines), encoding="utf-8")
        words = [str(python), str(CLIENT), "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        words += ["--base-url", url.rstrip("/").removesuffix("/v1"), "--model", model]
        words += ["--tokenizer", str(resolve_target(target)), "--dataset-name", "custom"]
        words += ["--dataset-path", str(custom), "--skip-chat-template", "--disable-shuffle"]
        words += ["--custom-output-len", str(max_tokens), "--num-prompts", str(len(prompts))]
        words += ["--max-concurrency", str(concurrency), "--ignore-eos", "--temperature", "0"]
        words += ["--num-warmups", "1", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
        words += ["--extra-body", json.dumps({"cache_salt": secrets.token_hex(8)})]
        words += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        # nothing is fetched: the prompts and the tokenizer are here
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(words, env=quiet, capture_output=True, text=True, timeout=_TIMEOUT_S)
        result = Path(folder) / "result.json"
        if done.returncode or not result.exists():
            raise SpecdecError(f"vLLM's client failed: {done.stderr.strip()[-500:]}")
        said: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    counts = {**said, "output_tokens": said["total_output_tokens"]}
    return {name: counts[name] for name in _COUNTS} | {
        f"{key}_{name}": said[f"{key}_{name}"] for name in _LATENCIES for key in ("median", "p99")
    }


def _version(python: Path) -> str:
    code = "import vllm; print(vllm.__version__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise SpecdecError(f"--vllm-python ({python}) has no vLLM: {done.stderr.strip()[-300:]}")
    return done.stdout.split()[-1]


if __name__ == "__main__":
    typer.run(beside)
