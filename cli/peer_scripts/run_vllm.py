"""vLLM as a peer, in its own process: plain, ngram, or an EAGLE-3 draft that was exported for it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

# beside this file, which is how the peer's own Python finds it
from peer_protocol import Answer, serve  # type: ignore[import-not-found]


def load(setup: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Start the engine; options: `method` ngram or eagle3, `k` drafted tokens, `draft` the head's folder."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    options = setup["options"]
    speculative = None
    if method := options.get("method"):
        speculative = {"method": method, "num_speculative_tokens": int(options.get("k", 3))}
        if method == "ngram":
            speculative |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        else:
            speculative["model"] = options["draft"]
    engine = LLM(
        model=setup["model"],
        dtype=setup["dtype"],
        # compiled graphs take minutes to start on a processor
        enforce_eager=setup["device"] == "cpu",
        max_model_len=setup["max_model_len"],
        max_num_seqs=max(8, setup["batch_size"]),
        # no prompt is answered from an earlier round
        enable_prefix_caching=False,
        speculative_config=speculative,
    )

    def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[int(token) for token in one.outputs[0].token_ids] for one in outputs]

    import torch
    import vllm

    facts = {
        "engine": f"vLLM {vllm.__version__}",
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"vllm": vllm.__version__},
        "weights": setup["dtype"],
        "settings": {
            "enforce_eager": setup["device"] == "cpu",
            "prefix_caching": False,
            "threads": torch.get_num_threads(),
            # the draft's name, not its place on this machine
            "speculative": speculative and {key: Path(str(value)).name for key, value in speculative.items()},
        },
    }
    return facts, answer


if __name__ == "__main__":
    serve(load)
