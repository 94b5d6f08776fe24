"""Repetition, frequency and presence penalties, on what a text holds at one place.

Definitions are vLLM's. Repetition (CTRL, arXiv 1909.05858; Hugging Face's too) divides a positive logit of
every id in prompt or output by r and multiplies a negative one; frequency and presence (OpenAI's) subtract
f times the count, and s once, for ids of the output alone. Order: repetition, frequency, presence.

Drafted tokens are never written into the counts: they are added to a copy for the one place that is asked
about.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling_params import SamplingParams


class TokenCounts:
    """What the committed text holds; follows a token list that only grows.

    Args:
        vocab_size: ids are below it.
        prompt_len: tokens of the list that are prompt.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, prompt_len: int, device: torch.device) -> None:
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._output = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._prompt_len = prompt_len
        self._counted = 0

    def at(self, token_ids: list[int], path: list[int]) -> tuple[Tensor, Tensor]:
        """Count the text and a drafted path behind it.

        Args:
            token_ids: committed tokens, prompt first; at least as many as in the call before.
            path: drafted tokens behind them.

        Returns:
            Which ids prompt or output hold, bool `[vocab]`, and how often the output does, float32 `[vocab]`.
        """
        assert len(token_ids) >= self._counted, "a text never becomes shorter"
        self._add(token_ids[self._counted : self._prompt_len], self._seen, None)
        self._add(token_ids[max(self._counted, self._prompt_len) :], self._seen, self._output)
        self._counted = len(token_ids)
        if not path:
            return self._seen, self._output
        seen, output = self._seen.clone(), self._output.clone()
        self._add(path, seen, output)
        return seen, output

    @staticmethod
    def _add(token_ids: list[int], seen: Tensor, output: Tensor | None) -> None:
        if not token_ids:
            return
        ids = torch.tensor(token_ids, device=seen.device)
        seen[ids] = True
        if output is not None:
            output.index_add_(0, ids, torch.ones(len(token_ids), device=seen.device))


def has_penalties(params: SamplingParams) -> bool:
    """Whether a request's logits depend on what its text holds."""
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def penalise(logits: Tensor, params: SamplingParams, seen: Tensor, output: Tensor) -> Tensor:
    """Apply a request's penalties to the logits of one place.

    Args:
        logits: float32 `[vocab]`.
        params: the three penalties.
        seen: as from `TokenCounts.at`.
        output: as from `TokenCounts.at`.
    """
    if params.repetition_penalty != 1.0:
        r = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
    if params.frequency_penalty != 0.0:
        logits = logits - params.frequency_penalty * output
    if params.presence_penalty != 0.0:
        logits = logits - params.presence_penalty * (output > 0)
    return logits
