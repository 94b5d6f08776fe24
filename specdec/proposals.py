"""Asking a drafter for the trees of a step, and telling the budget of nodes what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from specdec.drafter import Drafter, DraftRequest
from specdec.node_budget import NodeBudget
from specdec.rule_choice import draft_mode
from specdec.scheduler import ScheduledSequence
from specdec.speculation import grown_depth
from specdec.tree import DraftTree, chain_tree
from specdec.verification.result import VerifyResult


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
        # a tree that was cut is not grown deeper than its nodes reach; whole ones keep their shape
        depth = spec.max_depth if share.seq.needs_whole_trees else grown_depth(spec, share.max_nodes)
        depth = min(depth, share.seq.remaining_tokens() - 1)
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


def tell_budget(
    budget: NodeBudget,
    plan: list[ScheduledSequence],
    trees: list[DraftTree],
    results: SequenceOf[VerifyResult | None],
    seconds: Mapping[str, float] | None,
) -> None:
    """Tell what a step drafted and accepted, before it is committed; steps that read prompts tell nothing.

    Args:
        budget: of the engine.
        plan: who worked.
        trees: their trees.
        results: what was accepted of them.
        seconds: by part, where they were timed.
    """
    if any(share.is_prefill for share in plan):
        return
    verified = [
        (share.seq, tree.num_drafted, len(result.accepted_nodes) if result is not None else 0)
        for share, tree, result in zip(plan, trees, results, strict=True)
    ]
    if seconds is None:
        budget.ran(verified)
    else:
        budget.ran(verified, seconds["target"] + seconds["verify"], seconds["propose"])
