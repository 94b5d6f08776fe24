"""How a draft head's tree grows: which nodes get children, and which children.

Two ways. Best first, the dynamic tree of EAGLE-2 (arXiv:2406.16858, sections 4.1 and 4.2): the `top_k` best
nodes by path score grow at each depth, and the best `max_nodes` over all depths stay. Scores are
log-probabilities, or, coupled, those of winning the race that the target's own draw will run: the law
softmax(log q - log E) of the noise E at hand. Drawn: children come from q, so the shape must not depend on
what came out; it is fixed by draw ranks alone (`ranked_shape`). A request's own constraints and penalties
hold for the head's logits too, each node with its own path as history, or drafts would be spent on what the
target may not say. Does not know the head's layer or its cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specdec.drafter import DraftRequest
from specdec.drafts.vocab import DraftVocab
from specdec.errors import BadLogitsError
from specdec.sampling import as_law, process_logits
from specdec.tree import DraftTree, path_to
from specdec.verification.draws import draw_children

# how often recursive rejection goes on to the child of each draw rank, measured on MT-bench at temperature 1
# with the shipped draft (435 nodes of four children); it decides nothing but the shape of drawn trees
RANK_SHARES = (0.33, 0.09, 0.04, 0.03)
LATER_RANK_RATIO = 0.75


class TreeGrowth(ABC):
    """One sequence's tree under construction, in order of creation; node 0 is the root.

    Attributes:
        request: what was asked for.
        tokens: target id of each node.
        parents: parent of each node.
        scores: log-probability of the path to each node, as the growth counts it.
        frontier: nodes whose children come next.
    """

    def __init__(self, request: DraftRequest, vocab: DraftVocab, vocab_ids: list[int]) -> None:
        self.request = request
        self.tokens = [request.seq.token_ids[-1]]
        self.parents = [-1]
        self.scores = [0.0]
        self.frontier = [0]
        self._vocab = vocab
        self._vocab_ids = vocab_ids
        self._depth = 0

    def expand(self, logits: Tensor) -> list[int]:
        """Give the frontier its children and move it one level down, or empty it at the last one.

        Args:
            logits: the head's, one row for each frontier node `[frontier, draft vocab]`.

        Returns:
            For each node of the next frontier, its parent's row in `logits`.
        """
        parent_rows = self._add_children(self._processed(logits))
        self._depth += 1
        if self._depth >= self.request.max_depth:
            self.frontier = []
            return []
        return parent_rows

    def _processed(self, logits: Tensor) -> Tensor:
        """What the request makes of the head's logits; rows of -inf where it leaves nothing to say."""
        seq = self.request.seq
        if seq.processor is None:
            return logits
        processed = torch.full_like(logits, float("-inf"))
        for row, node in enumerate(self.frontier):
            wide = logits.new_full((self._vocab.vocab_size,), float("-inf"))
            wide[self._vocab.ids] = logits[row]
            path = [self.tokens[ancestor] for ancestor in path_to(self.parents, node)[1:]]
            # the target's own choice is made elsewhere; here it is only known that nothing can be drafted
            with suppress(BadLogitsError):
                processed[row] = seq.processor.process(wide, seq.token_ids, path)[self._vocab.ids]
        return processed

    def _add(self, parent: int, draft_id: int, score: float) -> int:
        self.tokens.append(self._vocab_ids[draft_id])
        self.parents.append(parent)
        self.scores.append(score)
        return len(self.tokens) - 1

    @abstractmethod
    def _add_children(self, logits: Tensor) -> list[int]:
        """Append children and set the next frontier; returns the parents' rows of the latter."""

    @abstractmethod
    def tree(self) -> DraftTree:
        """The finished tree."""


class BestFirstGrowth(TreeGrowth):
    """The most probable tokens, or the likeliest winners; the best nodes over all depths stay."""

    def _add_children(self, logits: Tensor) -> list[int]:
        best = self._log_scores(logits).topk(min(self.request.top_k, logits.shape[-1]), dim=-1)
        candidates = [
            (self.scores[node] + value, node, draft_id, row)
            for row, node in enumerate(self.frontier)
            for value, draft_id in zip(best.values[row].tolist(), best.indices[row].tolist(), strict=True)
            if value > float("-inf")
        ]
        candidates.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        added = [self._add(node, draft_id, score) for score, node, draft_id, _ in candidates]
        self.frontier = added[: self.request.top_k]
        return [row for _, _, _, row in candidates[: self.request.top_k]]

    def _log_scores(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1)

    def tree(self) -> DraftTree:
        """Keep the `max_nodes` best nodes; a parent is never worse than its child."""
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.scores[node], node))
        kept = [0, *sorted(order[: self.request.max_nodes])]
        where = {node: index for index, node in enumerate(kept)}
        return DraftTree(
            token_ids=[self.tokens[node] for node in kept],
            parents=[-1, *(where[self.parents[node]] for node in kept[1:])],
            log_probs=[self.scores[node] for node in kept],
        )


class CoupledGrowth(BestFirstGrowth):
    """Best first by the chance to win the target's race; the noise of a position is the same everywhere."""

    def _log_scores(self, logits: Tensor) -> Tensor:
        seq = self.request.seq
        q = process_logits(logits, seq.params)
        position = len(seq.token_ids) - 1 + self._depth
        noise = torch.from_numpy(seq.stream.exponentials(position, self._vocab.vocab_size))[self._vocab.ids]
        return torch.log_softmax(q.log() - noise.log(), dim=-1)


class DrawnGrowth(TreeGrowth):
    """Children drawn from q, in a shape that draw ranks alone decide."""

    def __init__(self, request: DraftRequest, vocab: DraftVocab, vocab_ids: list[int]) -> None:
        super().__init__(request, vocab, vocab_ids)
        assert request.mode in ("iid", "without_replacement"), f"{request.mode} is no way of drawing"
        self._shape = ranked_shape(request.max_depth, request.top_k, request.max_nodes)
        self._ranks: list[tuple[int, ...]] = [()]
        self._laws: dict[int, Tensor] = {}

    def _add_children(self, logits: Tensor) -> list[int]:
        request, seq = self.request, self.request.seq
        laws = process_logits(logits, seq.params)
        next_frontier, parent_rows = [], []
        for row, node in enumerate(self.frontier):
            count = self._shape.get(self._ranks[node], 0)
            # nothing to draw from: the request forbids it all, or the head computes NaN
            if count == 0 or not bool(laws[row].isfinite().all()):
                continue
            q = as_law(laws[row])
            position = len(seq.token_ids) - 1
            for rank, draft_id in enumerate(
                draw_children(q, count, request.mode, seq.stream, position, node)  # type: ignore[arg-type]
            ):
                child = self._add(node, draft_id, self.scores[node] + float(np.log(q[draft_id])))
                self._ranks.append((*self._ranks[node], rank))
                if self._ranks[child] in self._shape:
                    next_frontier.append(child)
                    parent_rows.append(row)
            self._laws[node] = laws[row]
        self.frontier = next_frontier
        return parent_rows

    def tree(self) -> DraftTree:
        """All nodes, with the law of those that have children; the rows of the others are never touched."""
        # numpy takes zeroed pages from the system, which cost nothing until they are written
        rows = torch.from_numpy(np.zeros((len(self.tokens), self._vocab.vocab_size)))
        for node, law in self._laws.items():
            rows[node, self._vocab.ids] = law
        return DraftTree(token_ids=self.tokens, parents=self.parents, log_probs=self.scores, draft_probs=rows)


@lru_cache(maxsize=256)
def ranked_shape(max_depth: int, top_k: int, max_nodes: int) -> dict[tuple[int, ...], int]:
    """Number of children of each inner node, nodes named by the draw ranks on the way to them.

    The `max_nodes` nodes a walk is likeliest to reach if at every node it goes on to the child of a rank as
    often as `RANK_SHARES` says; earlier ranks and shallower nodes first among equals.
    """
    reached: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(max_depth):
        level = {
            (*ranks, rank): value * _share(rank) for ranks, value in level.items() for rank in range(top_k)
        }
        # whatever is not among the best of its own level has no child among the best of all
        best = sorted(level, key=lambda ranks: (-level[ranks], ranks))[:max_nodes]
        level = {ranks: level[ranks] for ranks in best}
        reached.update(level)
    kept = sorted(reached, key=lambda ranks: (-reached[ranks], len(ranks), ranks))[:max_nodes]
    counts: dict[tuple[int, ...], int] = {}
    for ranks in kept:
        counts[ranks[:-1]] = counts.get(ranks[:-1], 0) + 1
    return counts


def _share(rank: int) -> float:
    later = max(0, rank - len(RANK_SHARES) + 1)
    return RANK_SHARES[rank - later] * LATER_RANK_RATIO**later


def start_growth(request: DraftRequest, vocab: DraftVocab, vocab_ids: list[int]) -> TreeGrowth:
    """The growth a request asks for; `vocab_ids` is `vocab.ids` as a list."""
    if request.mode == "deterministic":
        return BestFirstGrowth(request, vocab, vocab_ids)
    if request.mode == "coupled":
        return CoupledGrowth(request, vocab, vocab_ids)
    return DrawnGrowth(request, vocab, vocab_ids)
