"""One load by two generators: both send the same prompts, and neither finds the other's in a cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# in the place of vLLM's Python: notes what it is asked for and answers as its bench client does
STAND_IN = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    print("9.9.9")
    sys.exit()
words = sys.argv[2:]
said = dict(zip(words, words[1:]))
prompts = [json.loads(line) for line in open(said["--dataset-path"])]
with open({notes!r}, "a") as notes:
    notes.write(json.dumps({{**said, "prompts": prompts}}) + "\\n")
count, tokens = len(prompts), sum(prompt["output_tokens"] for prompt in prompts)
result = {{"completed": count, "total_output_tokens": tokens}}
result |= {{"request_throughput": 2.0, "output_throughput": 8.0}}
for name in ("ttft_ms", "tpot_ms", "itl_ms"):
    result |= {{f"median_{{name}}": 1.0, f"p99_{{name}}": 3.0}}
json.dump(result, open(said["--result-dir"] + "/" + said["--result-filename"], "w"))
"""


def test_both_generators_send_the_same_load(live: Any, served_target: Path, tmp_path: Path) -> None:
    from specdec.cli.peer_scripts.beside_vllm_bench import beside

    data, notes, python = tmp_path / "prompts.jsonl", tmp_path / "notes.jsonl", tmp_path / "python"
    texts = [f"say {number} the in an" for number in range(5)]
    data.write_text(
        "".join(json.dumps({"id": f"p{at}", "prompt": text}) + "\n" for at, text in enumerate(texts))
    )
    python.write_text(STAND_IN.format(python=sys.executable, notes=str(notes)))
    python.chmod(0o755)
    out = tmp_path / "beside.json"
    finished = live.metric("generation_tokens_total")
    beside(
        url=f"{live.url}/v1",
        target=str(served_target),
        vllm_python=python,
        out=out,
        data=str(data),
        limit=4,
        concurrency=2,
        max_tokens=4,
        turns=2,
    )
    record = json.loads(out.read_text())
    asked = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [[prompt["prompt"] for prompt in one["prompts"]] for one in asked] == [texts[:4]] * 2
    assert {one["--max-concurrency"] for one in asked} == {"2"}
    assert {one["--model"] for one in asked} == {"tiny"}
    assert len({json.loads(one["--extra-body"])["cache_salt"] for one in asked}) == 2
    ours, theirs = record["medians"]["specdec"], record["medians"]["vllm"]
    assert list(ours) == list(theirs)
    assert (
        (ours["completed"], ours["output_tokens"])
        == (theirs["completed"], theirs["output_tokens"])
        == (4, 16)
    )
    # the warm-up of each turn, and two turns
    assert live.metric("generation_tokens_total") - finished == 2 * (4 + 16)
    assert record["versions"] == {"vllm": "9.9.9"}
