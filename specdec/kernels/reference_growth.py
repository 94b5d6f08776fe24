"""Best-first growth of whole batches of draft trees in plain torch: what the kernels of `growth` must equal.

Owns `specdec.drafts.growth`'s BestFirstGrowth and CoupledGrowth for trees on a device: the `top_k` best of
the frontier's children by path score become the next frontier, and the best `max_nodes` over all levels stay,
in the order -score, node, draft id. Scores are float64 throughout; the host takes float32 log-probabilities,
so two paths whose scores lie within about 1e-6 may change places. Among equal logits at the border of a row's
top_k the lowest id is taken. A row no token can be chosen from has no children. Nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.kernels.reference_sampling_rows import row_probs
from specdec.kernels.reference_streams import exponentials
from specdec.kernels.tree_records import NO_PARENT, GrowingTrees, GrownTrees, GrowthLimits, GrowthRaces

_BITS = 64


def _values(logits: Tensor, depth: int, vocab_ids: Tensor, vocab: int, races: GrowthRaces | None) -> Tensor:
    """What children are compared by, up to a constant of each row, float64 `[batch, rows, draft vocab]`."""
    values = logits.double()
    if races is not None:
        noise = exponentials(races.seeds, races.roots + depth, count=vocab)[:, vocab_ids].log()
        won = row_probs(logits.flatten(0, 1), races.laws).view(logits.shape).log() - noise.unsqueeze(1)
        won = won.masked_fill(races.laws.bad.view(logits.shape[:2]).unsqueeze(-1), -torch.inf)
        values = torch.where(races.is_coupled.view(-1, 1, 1), won, values)
    bad = values.amax(-1, keepdim=True).isfinite().logical_not()
    return values.masked_fill(bad, -torch.inf)


def grow_level(
    trees: GrowingTrees,
    logits: Tensor,
    limits: GrowthLimits,
    *,
    depth: int,
    vocab_ids: Tensor,
    vocab: int,
    races: GrowthRaces | None = None,
) -> tuple[GrowingTrees, Tensor]:
    """Give every frontier its children and move it one level down; it is empty below a tree's last level.

    Args:
        trees: under construction, with room for the children.
        logits: the head's, `[batch, rows, draft vocab]`, one row for each of the first `rows` frontier nodes;
            rows without a node may hold anything.
        limits: of each request.
        depth: of the frontier, from 0.
        vocab_ids: int64 `[draft vocab]`, target id of each draft id, ascending.
        vocab: size of the target's vocabulary.
        races: for trees that grow by races.

    Returns:
        The trees, and for each node of the next frontier its parent's row, int32 `[batch, width]`; 0 where
        there is no node.
    """
    batch, rows, draft_vocab = logits.shape
    width = trees.frontier.shape[1]
    nodes = trees.frontier[:, :rows]
    values = _values(logits, depth, vocab_ids, vocab, races)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    best = values.gather(-1, order)
    log_mass = values.logsumexp(-1, keepdim=True)
    grows = (nodes >= 0) & (depth < limits.max_depth).unsqueeze(1)
    rank = torch.arange(order.shape[-1], device=logits.device)
    valid = (best > -torch.inf) & grows.unsqueeze(-1) & (rank < limits.top_k.view(-1, 1, 1))
    above = trees.scores.gather(1, nodes.clamp(min=0).long()).unsqueeze(-1)
    scores = torch.where(valid, above + (best - log_mass), -torch.inf).flatten(1)
    row_of = torch.arange(rows, device=logits.device).view(1, -1, 1).expand_as(order).flatten(1)
    # by id within a row, then by score: the tie order of the host
    by_id = (row_of * draft_vocab + order.flatten(1)).argsort(dim=1)
    by_score = scores.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
    chosen = by_id.gather(1, by_score)
    num_added = valid.flatten(1).sum(1)

    # place of each new node among the candidates, for every place of the tree
    place = torch.arange(trees.scores.shape[1], device=logits.device) - trees.num_nodes.unsqueeze(1)
    is_new = (place >= 0) & (place < num_added.unsqueeze(1))
    source = chosen.gather(1, place.clamp(min=0, max=chosen.shape[1] - 1))
    parents = nodes.gather(1, row_of.gather(1, source))
    tokens = vocab_ids[order.flatten(1).gather(1, source)]
    trees.token_ids.copy_(torch.where(is_new, tokens, trees.token_ids))
    trees.parents.copy_(torch.where(is_new, parents, trees.parents))
    trees.scores.copy_(torch.where(is_new, scores.gather(1, source), trees.scores))

    slot = torch.arange(width, device=logits.device)
    goes_on = torch.minimum(num_added, limits.top_k) * (depth + 1 < limits.max_depth)
    is_next = slot < goes_on.unsqueeze(1)
    frontier = (trees.num_nodes.unsqueeze(1) + slot).masked_fill(~is_next, -1).int()
    source = chosen.gather(1, slot.clamp(max=chosen.shape[1] - 1).expand(batch, -1))
    parent_rows = row_of.gather(1, source).masked_fill(~is_next, 0).int()
    num_nodes = (trees.num_nodes + num_added).int()
    return replace(trees, num_nodes=num_nodes, frontier=frontier), parent_rows


def prune_trees(trees: GrowingTrees, limits: GrowthLimits, *, rows: int) -> GrownTrees:
    """Keep the root and the `max_nodes` best nodes, in order of creation.

    A parent is never worse than its child, so a kept node's ancestors are kept.

    Args:
        trees: under construction.
        limits: of each request.
        rows: nodes to pad to, the root included; more than every `max_nodes`.
    """
    node = torch.arange(trees.scores.shape[1], device=trees.scores.device)
    drafted = (node > 0) & (node < trees.num_nodes.unsqueeze(1))
    scores = trees.scores.masked_fill(~drafted, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, node.expand_as(order))
    kept = (drafted & (rank < limits.max_nodes.unsqueeze(1))) | (node == 0)
    index = kept.long().cumsum(1) - 1
    num_nodes = kept.sum(1)
    # nodes that stay come first, each group in its own order
    source = torch.nn.functional.pad(kept.logical_not().byte().sort(dim=1, stable=True).indices, (0, rows))
    source = source[:, :rows]
    is_node = torch.arange(rows, device=node.device) < num_nodes.unsqueeze(1)
    parents = trees.parents.gather(1, source)
    moved = index.gather(1, parents.clamp(min=0).long()).int()
    return GrownTrees(
        token_ids=trees.token_ids.gather(1, source).masked_fill(~is_node, 0),
        parents=torch.where(parents >= 0, moved, parents).masked_fill(~is_node, NO_PARENT),
        log_probs=trees.scores.gather(1, source).masked_fill(~is_node, -torch.inf),
        num_nodes=num_nodes.int(),
    )


def tree_masks(parents: Tensor, *, max_depth: int) -> tuple[Tensor, Tensor]:
    """Depth of every node, and which nodes it sees, itself and its ancestors, as bits.

    Args:
        parents: int32 `[batch, rows]`; rows that are no node see themselves.
        max_depth: no tree is deeper.

    Returns:
        Depths int32 `[batch, rows]`, and int64 `[batch, rows, words]`, bit j % 64 of word j // 64 for node j.
    """
    rows = parents.shape[1]
    node = torch.arange(rows, device=parents.device).expand_as(parents)
    words = torch.arange((rows + _BITS - 1) // _BITS, device=parents.device)
    seen = torch.zeros((*parents.shape, words.shape[0]), dtype=torch.int64, device=parents.device)
    depths = torch.zeros_like(parents)
    for level in range(max_depth + 1):
        is_node = node >= 0
        bit = torch.ones_like(node) << (node.clamp(min=0) % _BITS)
        here = is_node.unsqueeze(-1) & (node.unsqueeze(-1) // _BITS == words)
        seen |= torch.where(here, bit.unsqueeze(-1), 0)
        depths += is_node if level > 0 else 0
        node = torch.where(is_node, parents.gather(1, node.clamp(min=0)).long(), -1)
    return depths, seen
