"""Every way in which a draft head may differ from plain EAGLE-3: the one list of them.

Owns the names, what has a variant, and which formats' readers implement it. A head is served here in all of
them; a format whose reader lacks one refuses it with the reason (`formats.refusal`). Sources of the last
column: the readers named in `formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdec.drafts.config import Eagle3Config


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant.

    Attributes:
        present: Whether a head has it.
        formats: Names of the formats that hold it.
        elsewhere: What happens to it in the others, for people.
    """

    present: Callable[[Eagle3Config], bool]
    formats: frozenset[str]
    elsewhere: str


_IGNORED = "(true) is not implemented there and would be ignored without a word"
VARIANTS: Mapping[str, Variant] = {
    "fc_norm": Variant(
        present=lambda config: config.fc_norm,
        formats=frozenset({"vllm", "sglang", "speculators"}),
        elsewhere=_IGNORED,
    ),
    "norm_output": Variant(
        present=lambda config: config.norm_output,
        formats=frozenset({"vllm", "sglang", "speculators"}),
        elsewhere=_IGNORED,
    ),
    "norm_before_residual": Variant(
        present=lambda config: config.norm_before_residual,
        formats=frozenset({"vllm", "speculators"}),
        elsewhere=_IGNORED,
    ),
    "norm_before_fc": Variant(
        present=lambda config: config.norm_before_fc,
        formats=frozenset({"vllm", "sglang", "speculators"}),
        elsewhere=_IGNORED,
    ),
    "attention_bias": Variant(
        present=lambda config: config.attention_bias,
        formats=frozenset({"vllm", "speculators"}),
        elsewhere=_IGNORED,
    ),
    "qk_norm": Variant(
        present=lambda config: config.qk_norm,
        formats=frozenset({"vllm", "speculators"}),
        elsewhere=_IGNORED,
    ),
    "embed": Variant(
        present=lambda config: config.embed == "own",
        formats=frozenset({"vllm", "speculators", "eagle"}),
        elsewhere="(own) is overwritten there by the target's embeddings",
    ),
    "hidden_size": Variant(
        present=lambda config: config.hidden_size != config.target_hidden_size,
        formats=frozenset({"vllm", "eagle"}),
        elsewhere="(not the target's) is impossible there: heads have the target's width",
    ),
    "embed_proj": Variant(
        present=lambda config: config.projects_embeddings,
        formats=frozenset(),
        elsewhere="(the target's embeddings brought to another width) exists in specdec alone; train it with "
        "--embed own",
    ),
    "out_proj": Variant(
        present=lambda config: config.projects_output,
        formats=frozenset(),
        elsewhere="(the target's output rows read from another width) exists in specdec alone; train it with "
        "--lm-head own",
    ),
}


def unheld(config: Eagle3Config, form: str) -> str | None:
    """Why a format cannot hold a head's variants; None where it can."""
    for name, variant in VARIANTS.items():
        if variant.present(config) and form not in variant.formats:
            return f"{name} {variant.elsewhere}"
    return None
