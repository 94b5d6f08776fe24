"""transformers `generate` as a peer: greedy; plain, with lookup, or assisted by another model or itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# beside this file, which is how the peer's own Python finds it
from peer_protocol import Answer, serve  # type: ignore[import-not-found]


def load(setup: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Load the model.

    Options: `lookup` N drafts N tokens by prompt lookup; `assistant` FOLDER drafts with another model of the
    same tokenizer, `early_exit` LAYER with the target's own first layers, both `k` tokens at a time.
    """
    import torch
    import transformers

    torch.set_num_threads(setup["threads"])
    dtype, device = getattr(torch, setup["dtype"]), setup["device"]

    def model_of(folder: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        # every engine writes the same number of tokens; an end token is a token like others
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    model = model_of(setup["model"])
    options = setup["options"]
    extra: dict[str, Any] = {}
    if lookup := options.get("lookup"):
        extra["prompt_lookup_num_tokens"] = int(lookup)
    if folder := options.get("assistant"):
        extra["assistant_model"] = model_of(folder)
    if layer := options.get("early_exit"):
        extra["assistant_early_exit"] = int(layer)
    if length := options.get("k"):
        drafting = extra.get("assistant_model", model).generation_config
        drafting.num_assistant_tokens = int(length)
        drafting.num_assistant_tokens_schedule = "constant"

    @torch.inference_mode()
    def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
        )
        output = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **extra)
        new: list[list[int]] = output[:, width:].tolist()
        return new

    # the assistant's name, not its place on this machine
    shown = {name: Path(value).name if name in ("assistant",) else value for name, value in options.items()}
    facts = {
        "engine": f"transformers {transformers.__version__}",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "weights": setup["dtype"],
        "settings": {"attention": model.config._attn_implementation, **shown},
    }
    return facts, answer


if __name__ == "__main__":
    serve(load)
