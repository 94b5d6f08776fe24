"""llama.cpp as a peer, through llama-cpp-python: plain, or with its prompt lookup."""

from __future__ import annotations

from importlib.metadata import files, version
from pathlib import Path
from typing import Any

# beside this file, which is how the peer's own Python finds it
from peer_protocol import Answer, serve  # type: ignore[import-not-found]


def gguf_of(options: dict[str, Any]) -> Path:
    """The weights: a file, or the member of an installed package."""
    if "gguf" in options:
        return Path(options["gguf"])
    package, member = options["package"], options["member"]
    for file in files(package) or ():
        if str(file) == member:
            return Path(str(file.locate()))
    raise FileNotFoundError(f"package {package} has no {member}; install it, or give gguf=FILE")


def load(setup: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Load the GGUF; option `lookup` N drafts N tokens by prompt lookup."""
    from llama_cpp import Llama  # type: ignore[import-not-found]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

    options = setup["options"]
    path = gguf_of(options)
    lookup = int(options.get("lookup", 0))
    model = Llama(
        model_path=str(path),
        n_ctx=setup["max_model_len"],
        n_gpu_layers=0 if setup["device"] == "cpu" else -1,
        n_threads=setup["threads"],
        n_threads_batch=setup["threads"],
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
        verbose=False,
    )

    def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return [write(prompt, max_tokens) for prompt in prompts]

    def write(token_ids: list[int], max_tokens: int) -> list[int]:
        # no prompt is answered from an earlier round
        model.reset()
        new: list[int] = []
        for token in model.generate(token_ids, temp=0.0):
            new.append(int(token))
            if len(new) == max_tokens:
                break
        return new

    kind = model.metadata.get("general.file_type", "?")
    facts = {
        "engine": f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})",
        "versions": {"llama-cpp-python": version("llama-cpp-python")},
        "weights": path.name,
        "settings": {"file_type": kind, "threads": setup["threads"], "lookup": lookup},
    }
    return facts, answer


if __name__ == "__main__":
    serve(load)
