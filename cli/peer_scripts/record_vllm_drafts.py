"""What vLLM drafts with an EAGLE-3 head, token by token.

Runs in vLLM's environment for `specdec.cli.check_vllm`. One JSON object on stdin (`model`, `draft`, `prompts`
of token ids, `max_tokens`, `k`, `max_model_len`), one written to the file named as the only argument: for
every prompt the text and what was proposed after each step, in order, and vLLM's own counters. Prompts run
one at a time, so that a step proposes for one sequence.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

# proposals are read in this process
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def main(out: str) -> None:
    """Answer the prompts and write the record to `out`."""
    import vllm.v1.spec_decode.llm_base_proposer as proposer  # type: ignore[import-not-found]
    from vllm import LLM, SamplingParams

    setup: dict[str, Any] = json.load(sys.stdin)
    proposed: list[list[int]] = []
    original = proposer.SpecDecodeBaseProposer.propose

    def propose(self: Any, *args: Any, **keywords: Any) -> Any:
        tokens = original(self, *args, **keywords)
        proposed.append([int(token) for token in tokens[0].tolist()])
        return tokens

    proposer.SpecDecodeBaseProposer.propose = propose
    engine = LLM(
        model=setup["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=setup["max_model_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": setup["draft"],
            "num_speculative_tokens": setup["k"],
        },
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=setup["max_tokens"], ignore_eos=True, detokenize=False
    )
    # the engine tries itself out before the first prompt
    before = counters(engine)
    answers = []
    for prompt in setup["prompts"]:
        proposed.clear()
        found = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        tokens = [int(token) for token in found[0].outputs[0].token_ids]
        answers.append({"token_ids": tokens, "proposed": list(proposed)})
    after = counters(engine)
    result = {
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"vllm": vllm_version()},
        "counters": {name: after[name] - before[name] for name in COUNTERS},
        "answers": answers,
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


def counters(engine: Any) -> dict[str, int]:
    """The engine's own counts of speculative decoding, 0 where it has not counted yet."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    names = {name: f"vllm:spec_decode_{name}" for name in COUNTERS}
    return {name: int(found[full].value) if full in found else 0 for name, full in names.items()}


def vllm_version() -> str:
    """Of the package that was loaded: its distribution has another name on a processor."""
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main(sys.argv[1])
