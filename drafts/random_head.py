"""An EAGLE-3 head of random weights that fits the target at hand: the work of a real head, without its sense.

For measuring speed before any head was trained (`--draft random`, as a rule with `--simulate-acceptance`).
The shape is that of the published heads: the target's own layer sizes, taps at boundaries 2, N/2 and N-3,
32,000 draft tokens, an output head of its own. Owns that choice; does not know how heads are trained or
saved.
"""

from __future__ import annotations

import torch

from specdec.config import ModelConfig
from specdec.drafter import TargetView
from specdec.drafts.checkpoint import DraftContract, LoadedDraft
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab

# as in the heads that EAGLE-3's authors publish
DRAFT_VOCAB = 32_000
_INIT_STD = 0.02
SEED = 0


def random_boundaries(num_layers: int) -> tuple[int, ...]:
    """Boundaries 2, N/2 and N-3, as far as a small target has them."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(max(boundary, 0), num_layers) for boundary in wanted}))


def random_config(model: ModelConfig) -> Eagle3Config:
    """The shape of a published head, for this target."""
    return Eagle3Config(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope=model.rope,
        vocab_size=model.vocab_size,
        draft_vocab_size=min(DRAFT_VOCAB, model.vocab_size),
        boundaries=random_boundaries(model.num_layers),
        target_hidden_size=model.hidden_size,
        target_num_layers=model.num_layers,
        lm_head="own",
    )


def random_head(target: TargetView) -> LoadedDraft:
    """A head for a target, the same for every process and device of one kind."""
    config = random_config(target.config)
    vocab = DraftVocab(torch.arange(config.draft_vocab_size), config.vocab_size)
    with torch.random.fork_rng(devices=()):
        head = Eagle3Head(config, vocab, target.embed_tokens, target.head_weight)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                # numbers of half precision, so that the weights pack as those of a saved head do
                noise = torch.empty(parameter.shape, dtype=torch.float16)
                bound = _INIT_STD * 3**0.5
                parameter.copy_(noise.uniform_(-bound, bound, generator=generator))
    head.requires_grad_(False)
    contract = DraftContract(
        target_fingerprint=target.fingerprint,
        template_hash=target.template_hash or "none",
        training={"random": True, "seed": SEED},
    )
    return LoadedDraft(head.eval(), contract)
