"""transformers `generate` as a peer: greedy, one prompt at a time, plain or with prompt lookup."""

from __future__ import annotations

from typing import Any

# beside this file, which is how the peer's own Python finds it
from peer_protocol import Answer, serve  # type: ignore[import-not-found]


def load(setup: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Load the model; option `lookup` N drafts N tokens by prompt lookup."""
    import torch
    import transformers

    torch.set_num_threads(setup["threads"])
    dtype = getattr(torch, setup["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(setup["model"], dtype=dtype).eval()
    config = model.generation_config
    # every engine writes the same number of tokens; an end token is a token like others
    config.eos_token_id = None
    config.pad_token_id = 0
    extra = {}
    if lookup := setup["options"].get("lookup"):
        extra["prompt_lookup_num_tokens"] = int(lookup)

    @torch.inference_mode()
    def answer(token_ids: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([token_ids])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **extra
        )
        new: list[int] = output[0, len(token_ids) :].tolist()
        return new

    facts = {
        "engine": f"transformers {transformers.__version__}",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "weights": setup["dtype"],
        "settings": {"attention": model.config._attn_implementation, **extra},
    }
    return facts, answer


if __name__ == "__main__":
    serve(load)
