"""Prompt lookup: continue the text as it went on after the same words before.

A drafter without weights. The last n tokens (longest n first) are looked up in the sequence itself;
what followed their most recent earlier occurrence is proposed as a chain. Source: prompt lookup decoding
(Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), vLLM's n-gram proposer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.config import SpecConfig
from specdec.drafter import DraftRequest
from specdec.tree import DraftTree, chain_tree


@dataclass
class _Index:
    """Where each n-gram of one sequence last ended; extended as the sequence grows."""

    indexed: int = 0
    last_end: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Proposes what followed the longest matching suffix of `ngram_min` to `ngram_max` tokens."""

    name = "ngram"
    boundaries: tuple[int, ...] = ()
    # what followed before is no law
    can_sample = False

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def makes_chains(self, spec: SpecConfig) -> bool:
        return True

    def relative_cost(self, spec: SpecConfig) -> float:
        # a dictionary look-up per step; below what a step's timing resolves
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        self._indices.pop(seq_id, None)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """A chain for each request, the root alone without a match."""
        return [self._chain(request) for request in requests]

    def _chain(self, request: DraftRequest) -> DraftTree:
        seq = request.seq
        tokens = seq.token_ids
        length = min(request.max_depth, request.max_nodes)
        spec = seq.spec
        assert spec is not None, "a sequence that does not speculate asked for a tree"
        index = self._indices.setdefault(seq.seq_id, _Index())
        self._extend(index, tokens, spec)
        for size in range(min(spec.ngram_max, len(tokens) - 1), spec.ngram_min - 1, -1):
            end = index.last_end.get(tuple(tokens[-size:]))
            if end is not None:
                return chain_tree(tokens[-1], _continuation(tokens, end, length))
        return chain_tree(tokens[-1], [])

    @staticmethod
    def _extend(index: _Index, tokens: list[int], spec: SpecConfig) -> None:
        """Index every n-gram that ends before the last token (the suffix itself must not match itself)."""
        for end in range(index.indexed + 1, len(tokens)):
            for size in range(spec.ngram_min, min(spec.ngram_max, end) + 1):
                index.last_end[tuple(tokens[end - size : end])] = end
        index.indexed = max(index.indexed, len(tokens) - 1)


def _continuation(tokens: list[int], end: int, length: int) -> list[int]:
    """`length` tokens after position `end`; a match that overlaps the suffix repeats with its period."""
    period = len(tokens) - end
    return [tokens[end + offset % period] for offset in range(length)]
