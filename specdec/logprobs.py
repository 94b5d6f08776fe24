"""Log-probabilities of the tokens of an answer.

They are those of the target itself: log-softmax of its logits before penalties, masks, temperature and
filters (vLLM's default, `raw_logprobs`). They do not depend on what was drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """One output token.

    Attributes:
        token_id: the token that was written.
        logprob: its log-probability.
        rank: 1 for the target's most probable token, 2 for the next, ...
        top: the most probable ids with their log-probabilities, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens and of the best ones beside them.

    Args:
        logits: `[tokens, vocab]`, the target's at the place of each token.
        token_ids: the tokens.
        num_top: how many of the best to add; at most the vocabulary.
    """
    laws = torch.log_softmax(logits.float(), dim=-1)
    chosen = laws.gather(-1, torch.tensor(token_ids, device=laws.device)[:, None])
    ranks = (laws > chosen).sum(dim=-1) + 1
    best, best_ids = laws.topk(min(num_top, laws.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(
            token_ids, chosen[:, 0].tolist(), ranks.tolist(), best_ids.tolist(), best.tolist(), strict=True
        )
    ]
