"""Asking a drafter for the trees of a step."""

from __future__ import annotations

from specdec.drafter import Drafter, DraftRequest
from specdec.rule_choice import draft_mode
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree, chain_tree


def propose_trees(drafter: Drafter | None, plan: list[ScheduledSequence]) -> list[DraftTree]:
    """A tree for every share; the root alone where nothing is drafted."""
    trees = [chain_tree(share.seq.token_ids[-1], []) for share in plan]
    if drafter is None:
        return trees
    requests: list[DraftRequest] = []
    where: list[int] = []
    for index, share in enumerate(plan):
        spec = share.seq.spec
        if spec is None or share.max_nodes == 0 or share.is_prefill:
            continue
        depth = min(spec.max_depth, share.seq.remaining_tokens() - 1)
        requests.append(
            DraftRequest(
                seq=share.seq,
                max_nodes=share.max_nodes,
                max_depth=depth,
                top_k=spec.top_k,
                mode=draft_mode(share.seq.rule),
            )
        )
        where.append(index)
    if requests:
        for index, tree in zip(where, drafter.propose(requests), strict=True):
            trees[index] = tree
    return trees
