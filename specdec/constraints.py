"""Which ids may come next by list: allowed ids, bad words, end tokens before min_tokens, logit bias.

Owns what follows from a request's lists and the text before a place; grammars are `specdec.grammar`'s.
Meanings are vLLM's: a bad word counts in the output alone, and its last token is what is forbidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.sampling_params import SamplingParams

FORBIDDEN = float("-inf")


class TokenConstraints:
    """The lists of one request, applied to the logits of one place.

    Args:
        params: allowed_token_ids, min_tokens and logit_bias are read.
        bad_words: token sequences, texts already encoded.
        stop_ids: ids that end the text.
    """

    def __init__(
        self, params: SamplingParams, bad_words: Iterable[tuple[int, ...]], stop_ids: Iterable[int]
    ) -> None:
        self._allowed = None if params.allowed_token_ids is None else torch.tensor(params.allowed_token_ids)
        self._min_tokens = params.min_tokens
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        # what precedes the last token of a bad word -> those last tokens, by length of what precedes
        self._bad: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in bad_words:
            by_prefix = self._bad.setdefault(len(word) - 1, {})
            by_prefix.setdefault(word[:-1], []).append(word[-1])
        self.context_len = max(self._bad, default=0)

    def apply(self, logits: Tensor, tail: list[int], num_output: int) -> Tensor:
        """Constrain the logits of one place.

        Args:
            logits: float32 `[vocab]`, written to.
            tail: the last `context_len` output tokens before the place, or all of them when they are fewer.
            num_output: output tokens before the place.
        """
        if self._allowed is not None:
            allowed = self._allowed.to(logits.device)
            logits = torch.full_like(logits, FORBIDDEN).index_copy_(0, allowed, logits[allowed])
        for length, by_prefix in self._bad.items():
            if length <= len(tail):
                logits[by_prefix.get(tuple(tail[len(tail) - length :]), [])] = FORBIDDEN
        if num_output < self._min_tokens:
            open_ended = logits.index_fill(0, self._stop_ids.to(logits.device), FORBIDDEN)
            # a grammar may leave the end as the only choice; then the text ends
            if bool(open_ended.amax() > FORBIDDEN):
                logits = open_ended
        if len(self._bias):
            logits.index_add_(0, self._bias_ids.to(logits.device), self._bias.to(logits.device))
        return logits
