"""`make check-vllm`: whether vLLM drafts with an exported head what we draft with it, token by token.

Exports a draft (native and speculators format), serves each with vLLM's own code in vLLM's own environment,
and compares every proposed token with ours, step by step along the same text, greedy, one prompt at a time,
both engines in fp32. Owns that comparison and its record; exports are `specdec.drafts`', the program that
runs inside vLLM is `peer_scripts/record_vllm_drafts.py`. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.cli.comparing.peers import SCRIPTS, environment_of, parse_peer
from specdec.cli.console import emit_json, print_table, say
from specdec.cli.datasets import load_prompts
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import Drafter, DraftRequest, TargetView
from specdec.drafts import draft_folder
from specdec.drafts.checkpoint import load_draft, read_stored
from specdec.drafts.eagle3_drafter import Eagle3Drafter
from specdec.drafts.export import make_export, write_export
from specdec.drafts.formats import require_format
from specdec.drafts.target_facts import read_target_facts
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, write_json_atomic
from specdec.requests import PromptEncoder
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree

SCHEMA = "specdec.check-vllm/1"
FORMATS = ("vllm", "speculators")
# how far the two acceptance lengths may lie apart
ACCEPTANCE_TOLERANCE = 0.02
PEER_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Walk:
    """One engine's drafts along a text: what was proposed at each place, and how much of it came true."""

    proposed: dict[int, list[int]]
    accepted: int

    @property
    def steps(self) -> int:
        """Verify steps that had drafts."""
        return len(self.proposed)


def walk(text: Sequence[int], proposed: Sequence[Sequence[int]], length: int, k: int) -> Walk:
    """Follow proposals, in the order they were made, through the text that came out.

    The first token needs no draft. A proposal is made for the place after the tokens known so far; what of it
    agrees with the text is committed, and one more token with it.

    Args:
        text: the tokens of the answer, at least `k` more than `length`.
        proposed: what each step drafted.
        length: places below this count.
        k: drafts of a full step.
    """
    found, accepted, place = {}, 0, 1
    for tokens in proposed:
        if place >= length:
            break
        agreed = 0
        while agreed < len(tokens) and tokens[agreed] == text[place + agreed]:
            agreed += 1
        assert len(tokens) == k, "a step inside the text drafts a full chain"
        found[place] = list(tokens)
        accepted += agreed
        place += agreed + 1
    return Walk(found, accepted)


def our_answers(
    target: Path, draft: Path, prompts: Sequence[Sequence[int]], max_tokens: int, k: int
) -> list[tuple[list[int], list[list[int]]]]:
    """Text and proposals of every prompt, in plain fp32, with `k` more tokens than are compared."""
    proposals: list[list[int]] = []

    class Recorder(Eagle3Drafter):
        """The head as served, with a memory."""

        def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
            trees = super().propose(requests)
            proposals.extend(tree.token_ids[1:] for tree in trees)
            return trees

    def make(view: TargetView) -> Drafter:
        head = load_draft(draft, view.embed_tokens, view.head_weight, target_fingerprint=view.fingerprint)
        return Recorder(head, view)

    chain = SpecConfig(max_depth=k, top_k=1, max_nodes=k, adaptive=False)
    config = EngineConfig(spec=chain, weights="plain", max_num_seqs=1)
    engine = Engine(target, draft=make, config=config)
    params = SamplingParams(max_tokens=max_tokens + k + 1, ignore_eos=True)
    answers = []
    for prompt in prompts:
        proposals.clear()
        [result] = engine.generate([list(prompt)], params)
        answers.append((result.token_ids, list(proposals)))
    return answers


def vllm_answers(python: str, setup: dict[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    """What vLLM wrote and proposed.

    Raises:
        SpecdecError: it did not run to the end, with its last words.
    """
    peer = parse_peer(f"vllm:{python}" if python else "vllm")
    assert peer.python is not None, "vLLM has an environment of its own"
    out = folder / "vllm.json"
    done = subprocess.run(
        [peer.python, str(SCRIPTS / "record_vllm_drafts.py"), str(out)],
        input=json.dumps(setup),
        env=environment_of(peer, threads),
        capture_output=True,
        text=True,
        timeout=PEER_TIMEOUT_S,
    )
    if done.returncode != 0 or not out.is_file():
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise SpecdecError(f"vLLM ended with {done.returncode}: {words[-1] if words else 'without a word'}")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return found


def compare(
    ours: Sequence[tuple[list[int], list[list[int]]]], theirs: dict[str, Any], max_tokens: int, k: int
) -> dict[str, Any]:
    """Count equal texts and equal proposed tokens, and both acceptance lengths as vLLM defines them."""
    counts = {"texts_equal": 0, "proposed": 0, "proposed_equal": 0}
    steps, accepted = [0, 0], [0, 0]
    first_difference: dict[str, Any] | None = None
    for index, ((text, proposals), answer) in enumerate(zip(ours, theirs["answers"], strict=True)):
        counts["texts_equal"] += text[:max_tokens] == answer["token_ids"]
        mine = walk(text, proposals, max_tokens - k, k)
        other = walk(text, answer["proposed"], max_tokens - k, k)
        for side, one in enumerate((mine, other)):
            steps[side] += one.steps
            accepted[side] += one.accepted
        for place in sorted(mine.proposed.keys() | other.proposed.keys()):
            left, right = mine.proposed.get(place), other.proposed.get(place)
            equal = sum(a == b for a, b in zip(left or [], right or [], strict=False))
            counts["proposed"] += k
            counts["proposed_equal"] += equal
            if equal < k and first_difference is None:
                first_difference = {"prompt": index, "place": place, "specdec": left, "vllm": right}
    lengths = [1 + hits / count if count else None for hits, count in zip(accepted, steps, strict=True)]
    counted = theirs["counters"]
    return {
        "versions": theirs["versions"],
        "prompts": len(ours),
        **counts,
        "first_difference": first_difference,
        "verify_steps": {"specdec": steps[0], "vllm": steps[1]},
        "acceptance_length": {"specdec": _rounded(lengths[0]), "vllm": _rounded(lengths[1])},
        "vllm_counters": counted,
        "vllm_counted_acceptance_length": _rounded(
            1 + counted["num_accepted_tokens"] / counted["num_drafts"] if counted["num_drafts"] else None
        ),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def holds(found: dict[str, Any]) -> bool:
    """Whether every text and token agrees, and vLLM's own count of acceptance is ours within the bound."""
    counted, ours = found["vllm_counted_acceptance_length"], found["acceptance_length"]["specdec"]
    return (
        found["texts_equal"] == found["prompts"]
        and found["proposed_equal"] == found["proposed"]
        and counted is not None
        and ours is not None
        and abs(counted - ours) <= ACCEPTANCE_TOLERANCE
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 where it holds."""
    options = _options().parse_args(arguments)
    target, draft = resolve_target(options.target), draft_folder(options.draft)
    stored, facts = read_stored(draft), read_target_facts(target)
    encoder = PromptEncoder(target)
    chosen = load_prompts(options.data)[: options.limit]
    prompts = [list(encoder.encode([{"role": "user", "content": one.turns[0]}])) for one in chosen]
    say(f"specdec: {len(prompts)} prompts, {options.max_tokens} tokens each")
    ours = our_answers(target, draft, prompts, options.max_tokens, options.k)
    results: dict[str, Any] = {}
    for name in FORMATS:
        form = require_format("--to", name)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / f"eagle3-{name}"
            write_export(folder, make_export(stored, form, facts), stored, form, facts, {})
            say(f"vLLM with the {name} export; it takes a minute to start")
            setup = {
                "model": str(target.absolute()),
                "draft": str(folder),
                "prompts": prompts,
                "max_tokens": options.max_tokens,
                "k": options.k,
                "max_model_len": max(map(len, prompts)) + options.max_tokens + options.k + 1,
            }
            theirs = vllm_answers(options.python, setup, Path(scratch), options.threads)
        results[name] = compare(ours, theirs, options.max_tokens, options.k)
    rows = [
        [
            name,
            f"{found['texts_equal']}/{found['prompts']}",
            f"{found['proposed_equal']}/{found['proposed']}",
            found["acceptance_length"]["specdec"],
            found["acceptance_length"]["vllm"],
            found["vllm_counted_acceptance_length"],
        ]
        for name, found in results.items()
    ]
    columns = ["format", "texts", "proposed tokens", "acceptance", "vLLM's", "by its counters"]
    print_table(f"Equal to vLLM, greedy chain of {options.k}, fp32", columns, rows)
    passed = all(holds(found) for found in results.values())
    record = {
        "schema": SCHEMA,
        "holds": passed,
        "target": options.target,
        "draft": options.draft,
        "data": options.data,
        "max_tokens": options.max_tokens,
        "num_speculative_tokens": options.k,
        "definitions": {
            "proposed": "tokens drafted at places below max_tokens - k; both engines verify the same text",
            "acceptance_length": "1 + accepted / verify steps with drafts, at those places",
            "vllm_counted_acceptance_length": "the same from vLLM's counters, over whole answers",
        },
        "formats": results,
        "run": RunRecord.collect(dtype="float32").to_dict(),
    }
    if options.out is not None:
        write_json_atomic(options.out, record)
    emit_json({"holds": passed, "formats": {name: _short(found) for name, found in results.items()}})
    return 0 if passed else 1


def _short(found: dict[str, Any]) -> dict[str, Any]:
    keys = ("prompts", "texts_equal", "proposed", "proposed_equal", "acceptance_length")
    return {key: found[key] for key in keys}


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specdec.cli.check_vllm", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m", help="folder, or a name that pull knows")
    parser.add_argument("--draft", default="smollm2-135m", help="draft folder, or a shipped draft")
    parser.add_argument(
        "--python", default="", help="vLLM's interpreter [default: as specdec compare finds it]"
    )
    parser.add_argument("--data", default="mt_bench", help="prompt set")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--k", type=int, default=3, help="length of the chain")
    parser.add_argument("--threads", type=int, default=1, help="threads of vLLM")
    parser.add_argument("--out", type=Path, default=None, help="write the whole record (JSON)")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecdecError as error:
        say(f"error: {error}")
        sys.exit(1)
