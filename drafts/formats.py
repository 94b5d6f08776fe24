"""The formats in which other engines read an EAGLE-3 draft, and what each of them cannot say.

Owns one literal row per format: names, rotary types, the versions it was read from; and the refusal of a head
that a format's engine would serve wrongly. Layer ids are `format_ids`', configs `export_config`'s, and which
format holds which kind of head is `variants`'.

Read from code: vLLM 0.33.0 (`llama_eagle3.py`, `configs/speculators`), SGLang 0.5.23 (`llama_eagle3.py`),
SafeAILab/EAGLE cb7e084 (`cnets.py`), speculators 0.9.0. Run: vLLM 0.32.0 (`cli/check_vllm.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdec.config import SUPPORTED_ROPE_TYPES
from specdec.drafts.config import LLAMA_KIND, QWEN3_KIND, Eagle3Config
from specdec.drafts.variants import unheld
from specdec.engine_limits import engine_limit
from specdec.errors import SpecdecError

# SafeAILab's scaled rotary classes are built without the theta of the config, so with this one
EAGLE_SCALED_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class DraftFormat:
    """One format.

    Attributes:
        name: As the command line spells it.
        reader: Who reads it, for people.
        versions: What its description was read from.
        layer: How the one decoder layer is called in tensor names, ours being `midlayer`.
        architecture: What `architectures` says in an export.
        accepted: What `architectures` may say in an import; empty where the reader does not look at it.
        ships_embeddings: Whether a reader needs the target's embeddings beside the head.
        rope_types: Rotary types that its reader has.
    """

    name: str
    reader: str
    versions: str
    layer: str
    architecture: str
    accepted: frozenset[str]
    ships_embeddings: bool
    rope_types: tuple[str, ...]


FORMATS: Mapping[str, DraftFormat] = {
    "vllm": DraftFormat(
        name="vllm",
        reader="vLLM",
        versions="vLLM 0.33.0",
        layer="midlayer",
        architecture=LLAMA_KIND[0],
        accepted=frozenset({LLAMA_KIND[0], "Eagle3LlamaForCausalLM", "LlamaForCausalLM", QWEN3_KIND[0]}),
        ships_embeddings=False,
        rope_types=SUPPORTED_ROPE_TYPES,
    ),
    "sglang": DraftFormat(
        name="sglang",
        reader="SGLang",
        versions="SGLang 0.5.23, SpecForge a6b6b02",
        layer="midlayer",
        architecture="LlamaForCausalLMEagle3",
        # NeMo's heads carry the second name, and ids that mean what SGLang's mean
        accepted=frozenset({"LlamaForCausalLMEagle3", "LlamaEagle3DraftModel"}),
        ships_embeddings=False,
        rope_types=SUPPORTED_ROPE_TYPES,
    ),
    "speculators": DraftFormat(
        name="speculators",
        reader="vLLM and the speculators package",
        versions="speculators 0.9.0, vLLM 0.33.0",
        layer="layers.0",
        architecture="Eagle3DraftModel",
        accepted=frozenset({"Eagle3DraftModel", "Eagle3Speculator"}),
        ships_embeddings=True,
        rope_types=SUPPORTED_ROPE_TYPES,
    ),
    "eagle": DraftFormat(
        name="eagle",
        reader="SafeAILab's EAGLE repository",
        versions="SafeAILab/EAGLE cb7e084",
        layer="midlayer",
        architecture="LlamaForCausalLM",
        accepted=frozenset(),
        ships_embeddings=False,
        rope_types=("default", "linear", "dynamic"),
    ),
}


def require_format(option: str, name: str) -> DraftFormat:
    """The format of that name, or an error that lists them."""
    if name not in FORMATS:
        raise SpecdecError(f"{option} ({name}) must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def refusal(config: Eagle3Config, form: DraftFormat, model_type: str) -> str | None:
    """Why the format's reader would not serve this head as it was trained; None where it does.

    Args:
        config: the head's.
        form: the format.
        model_type: the target's.
    """
    boundaries, depth = list(config.boundaries), config.target_num_layers
    try:
        limit = engine_limit(form.name, depth, model_type)
    except SpecdecError as error:
        return str(error)
    if limit.num_layers is not None and config.num_taps != limit.num_layers:
        return f"it serves {limit.num_layers} taps and this head reads {config.num_taps} {boundaries}"
    outside = [b for b in boundaries if b not in limit.boundaries]
    if outside:
        return (
            f"boundary {outside[0]} of {boundaries} cannot be captured on a {model_type} target of {depth} "
            f"layers: {limit.reason}"
        )
    if (lacking := unheld(config, form.name)) is not None:
        return lacking
    if config.rope.rope_type not in form.rope_types:
        return (
            f"rope_type ({config.rope.rope_type}) is not implemented there; it has "
            f"{', '.join(form.rope_types)}"
        )
    if (
        form.name == "eagle"
        and config.rope.rope_type != "default"
        and config.rope.theta != EAGLE_SCALED_THETA
    ):
        return (
            f"rope_theta ({config.rope.theta:g}) is ignored there for rope_type "
            f"{config.rope.rope_type}, which always gets {EAGLE_SCALED_THETA:g}"
        )
    return None


def require_representable(config: Eagle3Config, form: DraftFormat, model_type: str) -> None:
    """Refuse an export whose reader would serve another head than the one that was trained.

    Raises:
        SpecdecError: with the reason, and the formats that can hold this head.
    """
    reason = refusal(config, form, model_type)
    if reason is None:
        return
    others = [name for name, other in FORMATS.items() if refusal(config, other, model_type) is None]
    way_out = f"export it --to {' or '.join(others)}" if others else "serve it with specdec serve"
    raise SpecdecError(
        f"--to {form.name} ({form.reader}) cannot hold this head: {reason}; {way_out}, or train one for it "
        f"(select-layers --engine {form.name} keeps to what it captures)"
    )
