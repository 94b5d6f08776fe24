"""How an exported draft is served: the command for its engine, and the SERVING.md beside it.

Owns the words. The commands are the engines' own, of the versions that `formats` names; none is run here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from specdec import __version__
from specdec.drafts.checkpoint import StoredDraft
from specdec.drafts.export_config import SPECULATIVE_TOKENS
from specdec.drafts.format_ids import IDS, nested_ids
from specdec.drafts.formats import FORMATS, DraftFormat, refusal
from specdec.drafts.target_facts import TargetFacts


def serve_command(form: DraftFormat, folder: str, target: TargetFacts) -> str:
    """What starts the engine with target and draft; for the EAGLE repository, which has no server, Python."""
    model = target.served_as
    if form.name == "sglang":
        words = [
            *("python", "-m", "sglang.launch_server", "--model-path", model),
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", folder),
            *("--speculative-num-steps", str(SPECULATIVE_TOKENS), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(SPECULATIVE_TOKENS + 1)),
        ]
        return shlex.join(words)
    if form.name == "eagle":
        return (
            "from eagle.model.ea_model import EaModel; "
            f"model = EaModel.from_pretrained(base_model_path={model!r}, ea_model_path={folder!r}, "
            "use_eagle3=True, total_token=-1)"
        )
    settings = {"method": "eagle3", "model": folder, "num_speculative_tokens": SPECULATIVE_TOKENS}
    return shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(settings)])


_SETTINGS: dict[str, Sequence[str]] = {
    "vllm": (
        "`method` must be given: vLLM guesses it only from a path that contains `eagle3`.",
        "`num_speculative_tokens` is the length of the chain; raise it where acceptance at the "
        "last position is high, lower it for large batches.",
        "vLLM 0.32.0 on a processor drafted with an export of SmolLM2-135M's head what specdec drafts, token "
        "by token (`make check-vllm`).",
    ),
    "sglang": (
        "The command drafts a chain. For a tree: `--speculative-num-steps 4 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 16` (SGLang counts the root).",
        "Embeddings are the target's, whatever a draft folder holds.",
    ),
    "speculators": (
        "`vllm serve DIR` alone works as well: the config names the target under `verifier`; edit it when "
        "the target moves. `num_speculative_tokens` above overrides the config's.",
        "The speculators package itself needs transformers 5.19 or older.",
    ),
    "eagle": (
        "`total_token=-1` lets the repository choose the size of its tree; load the target in float16, as it "
        "does by default.",
        "Its loader ignores tensors and flags that it does not know, so keep the files as they are.",
    ),
}


def serving_text(draft: StoredDraft, form: DraftFormat, folder: str, target: TargetFacts) -> str:
    """The SERVING.md of an export."""
    config = draft.config
    command = serve_command(form, folder, target)
    fence = "python" if form.name == "eagle" else "sh"
    ids = {
        "vllm": f"`{IDS}` {list(config.boundaries)}: boundaries",
        "sglang": f"`eagle_config.{IDS}` "
        f"{nested_ids(config.boundaries, config.target_num_layers, target.model_type)}: as SGLang's "
        f"{target.model_type} reads them",
        "speculators": f"`{IDS}` {list(config.boundaries)}: boundaries",
        "eagle": "none stored: the repository always takes 2, N // 2 and N - 3",
    }[form.name]
    rows = "the target's own, written out" if config.lm_head == "target_rows" else "trained"
    flags = ", ".join(
        f"{name} {str(value).lower()}"
        for name, value in (
            ("fc_norm", config.fc_norm),
            ("norm_output", config.norm_output),
            ("norm_before_residual", config.norm_before_residual),
            ("norm_before_fc", config.norm_before_fc),
        )
    )
    refused = {name: refusal(config, other, target.model_type) for name, other in FORMATS.items()}
    lines = [
        f"# EAGLE-3 draft for {form.reader}",
        "",
        f"Exported by specdec {__version__} (`--to {form.name}`). The format was read from the code of "
        f"{form.versions}; other versions may read it otherwise. The engine itself was not run.",
        "",
        f"```{fence}",
        command,
        "```",
        "",
        "## Settings",
        "",
        *(f"- {line}" for line in _SETTINGS[form.name]),
        f"- Weights are {draft.dtype}, as trained; rows taken from the target are in the target's dtype. "
        "The engine casts them to its own.",
        f"- The head was made for {config.rope.max_position_embeddings} positions; longer texts are untried.",
        "",
        "## What it is",
        "",
        f"- Target: `{target.served_as}` ({target.model_type}, {config.target_num_layers} layers), "
        f"fingerprint `{target.fingerprint}`. With any other target drafts are wrong and the text is not.",
        f"- Taps: boundaries {list(config.boundaries)} (b: the residual stream after b layers). "
        f"Layer ids: {ids}.",
        f"- Norm flags: {flags}. A wrong one changes acceptance only; nothing reports it.",
        f"- Draft vocabulary: {config.draft_vocab_size} of {config.vocab_size} tokens; output rows: {rows}.",
        f"- Rotary embedding: {config.rope.rope_type}, theta {config.rope.theta:g}.",
        f"- Trained with the chat template of hash `{draft.contract.template_hash}`; serve with it.",
        "",
        "## What is refused",
        "",
        *(
            f"- `--to {name}`: {'can hold this head' if reason is None else f'refused: {reason}'}."
            for name, reason in refused.items()
        ),
        f"- `specdec import {shlex.quote(folder)} --from {form.name} --target TARGET --out DRAFT` reads it "
        "back, bit by bit; a missing, renamed or mis-shaped tensor is an error there.",
        "",
    ]
    return "\n".join(lines)
