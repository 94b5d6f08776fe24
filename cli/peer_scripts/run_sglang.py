"""SGLang as a peer, in its own process: plain, ngram, or an EAGLE-3 draft that was exported for it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

# beside this file, which is how the peer's own Python finds it
from peer_protocol import Answer, serve  # type: ignore[import-not-found]


def load(setup: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Start the engine; options: `method` ngram or eagle3, `k` drafted tokens, `draft` the head's folder."""
    import sglang  # type: ignore[import-not-found]

    options = setup["options"]
    speculative: dict[str, Any] = {}
    if method := options.get("method"):
        drafted = int(options.get("k", 3))
        # the root is counted there
        speculative = {
            "speculative_algorithm": method.upper(),
            "speculative_num_draft_tokens": drafted + 1,
        }
        if method != "ngram":
            speculative |= {
                "speculative_num_steps": drafted,
                "speculative_eagle_topk": 1,
                "speculative_draft_model_path": options["draft"],
            }
    engine = sglang.Engine(
        model_path=setup["model"],
        dtype=setup["dtype"],
        device=setup["device"].partition(":")[0],
        context_length=setup["max_model_len"],
        max_running_requests=max(8, setup["batch_size"]),
        # token ids in, token ids out
        skip_tokenizer_init=True,
        # no prompt is answered from an earlier round
        disable_radix_cache=True,
        **speculative,
    )

    def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return [[int(token) for token in one["output_ids"]] for one in outputs]

    facts = {
        "engine": f"SGLang {sglang.__version__}",
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"sglang": sglang.__version__},
        "weights": setup["dtype"],
        "settings": {
            "radix_cache": False,
            # the draft's name, not its place on this machine
            **{key: Path(value).name if "path" in key else value for key, value in speculative.items()},
        },
    }
    return facts, answer


if __name__ == "__main__":
    serve(load)
