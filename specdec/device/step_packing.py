"""A decoding step's plan as the arrays of its size class, and the results back as trees and paths.

Owns the choice of the class and the layout of what comes back. Host data only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from specdec.device.packing import Arrays
from specdec.kernels.step_records import StepClass, StepInputs
from specdec.kernels.tree_records import NO_PARENT, GrownTrees, GrowthLimits, RowParams, seed_bits
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree
from specdec.verification.block import BLOCK
from specdec.verification.coupled import COUPLED
from specdec.verification.result import VerifyResult
from specdec.verification.target_only import TARGET_ONLY

# sequences of a step are filled up to one of these
SEQUENCE_CLASSES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# first numbers of a sequence's line of results; then the path, the tokens and the parents
NUM_ACCEPTED, NEXT_TOKEN, IS_BONUS, FAILED, NUM_NODES, FIRST_OF_PATH = range(6)


def wanted_depth(share: ScheduledSequence) -> int:
    """Depth that a share's tree may have; 0 where it does not draft."""
    seq = share.seq
    if seq.spec is None or share.max_nodes == 0:
        return 0
    return max(0, min(seq.spec.max_depth, seq.remaining_tokens() - 1))


def most_accepted(share: ScheduledSequence) -> int:
    """Drafted tokens that a share's step can accept."""
    return min(wanted_depth(share), share.max_nodes)


def step_class(
    plan: list[ScheduledSequence],
    trees: list[DraftTree] | None,
    block_size: int,
    gained: list[int] | None = None,
) -> StepClass:
    """The smallest class that holds a plan.

    Args:
        plan: who works.
        trees: the host's, None if the device grows them.
        block_size: rows of a block.
        gained: tokens that each share's text may get before the step begins.
    """
    most = len(plan)
    sequences = next((size for size in SEQUENCE_CLASSES if size >= most), -(-most // 64) * 64)
    # of the settings, not of the step at hand: near its end a text needs less, and no class of its own
    drafting = [share.seq.spec for share in plan if share.max_nodes and share.seq.spec is not None]
    nodes = 1 + max((share.max_nodes for share in plan), default=0)
    depth = max((spec.max_depth for spec in drafting), default=0)
    if trees is not None:
        nodes = max(nodes, *(tree.num_nodes for tree in trees))
        depth = max(depth, *(tree.max_depth for tree in trees))
    grows = trees is None and bool(drafting)
    depth = min(depth, nodes - 1)
    ahead = gained or [0] * len(plan)
    if grows:
        # the true rows of what was gained
        depth = max(depth, *(more - 1 for share, more in zip(plan, ahead, strict=True) if share.max_nodes))
        nodes = max(nodes, depth + 1)
    # padding behind a tree is read and never used; it has to be in the table
    rows = max(share.seq.num_computed + more for share, more in zip(plan, ahead, strict=True)) + nodes
    tables = max(-(-rows // block_size), *(len(share.seq.block_table) for share in plan))
    return StepClass(
        sequences=sequences,
        nodes=nodes,
        depth=depth,
        width=max(spec.top_k for spec in drafting) if grows else 0,
        table_width=1 << max(0, tables - 1).bit_length(),
        coupled=any(share.seq.rule.rule is COUPLED for share in plan),
        block=any(share.seq.rule.rule is BLOCK for share in plan),
        target_only=any(share.seq.rule.rule is TARGET_ONLY for share in plan),
    )


def pack_inputs(
    plan: list[ScheduledSequence],
    trees: list[DraftTree] | None,
    size: StepClass,
    source: list[int] | None = None,
) -> Arrays:
    """The arrays of `step_inputs`, states and carry apart.

    `source` holds the places of the sequences in the step before, whose results are not known yet.
    """
    count, rows = size.sequences, size.depth + 1
    arrays: Arrays = {
        "active": np.zeros(count, dtype=np.bool_),
        "is_coupled": np.zeros(count, dtype=np.bool_),
        "is_block": np.zeros(count, dtype=np.bool_),
        "is_target_only": np.zeros(count, dtype=np.bool_),
        "follows": np.zeros(count, dtype=np.bool_),
        "draft_token_ids": np.zeros((count, rows), dtype=np.int64),
        "block_tables": np.zeros((count, size.table_width), dtype=np.int32),
    }
    for name in ("context_len", "top_k", "max_depth", "max_nodes", "draft_context", "draft_new", "law_top_k"):
        arrays[name] = np.zeros(count, dtype=np.int32)
    arrays["remaining"] = np.zeros(count, dtype=np.int32)
    for name in ("seeds", "root_token_ids", "source"):
        arrays[name] = np.zeros(count, dtype=np.int64)
    for name, value in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0)):
        arrays[name] = np.full(count, value, dtype=np.float64)
    if size.width == 0:
        arrays["tree_token_ids"] = np.zeros((count, size.nodes), dtype=np.int64)
        arrays["parents"] = np.full((count, size.nodes), NO_PARENT, dtype=np.int32)
        arrays["parents"][:, 0] = -1
        arrays["num_nodes"] = np.ones(count, dtype=np.int32)
    for index, share in enumerate(plan):
        seq, params = share.seq, share.seq.params
        values: dict[str, int | float | bool] = {
            "active": True,
            "is_coupled": seq.rule.rule is COUPLED,
            "is_block": seq.rule.rule is BLOCK,
            "is_target_only": seq.rule.rule is TARGET_ONLY,
            "context_len": seq.num_computed,
            "seeds": seed_bits(seq.stream.seed),
            "root_token_ids": seq.token_ids[-1],
            "remaining": seq.remaining_tokens(),
            "follows": source is not None,
            "source": source[index] if source is not None else 0,
            "temperature": params.temperature,
            "law_top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
        }
        if size.width and (depth := wanted_depth(share)):
            assert seq.spec is not None, "only a speculating sequence has a tree"
            first = seq.draft_computed
            new = seq.num_computed - first
            assert source is None or new == 0, "who drafts after a step has drafted in it"
            arrays["draft_token_ids"][index, :new] = seq.token_ids[first + 1 : first + new + 1]
            values |= {"draft_context": first, "draft_new": new, "max_depth": depth}
            values |= {"top_k": seq.spec.top_k, "max_nodes": share.max_nodes}
        for name, value in values.items():
            arrays[name][index] = value
        arrays["block_tables"][index, : len(seq.block_table)] = seq.block_table
        if size.width == 0:
            tree = trees[index] if trees is not None else None
            ids, parents = (tree.token_ids, tree.parents) if tree else ([seq.token_ids[-1]], [-1])
            arrays["tree_token_ids"][index, : len(ids)] = ids
            arrays["parents"][index, : len(ids)] = parents
            arrays["num_nodes"][index] = len(ids)
    return arrays


def step_inputs(sent: Mapping[str, Tensor], states: Tensor | None, carry: Tensor) -> StepInputs:
    """The record of `pack_inputs`' arrays on the device."""
    given = None
    if "parents" in sent:
        given = GrownTrees(
            token_ids=sent["tree_token_ids"],
            parents=sent["parents"],
            log_probs=sent["temperature"],  # nobody asks what the host's trees scored
            num_nodes=sent["num_nodes"],
        )
    return StepInputs(
        active=sent["active"],
        context_len=sent["context_len"],
        block_tables=sent["block_tables"],
        seeds=sent["seeds"],
        params=RowParams(
            temperature=sent["temperature"],
            top_k=sent["law_top_k"],
            top_p=sent["top_p"],
            min_p=sent["min_p"],
        ),
        is_coupled=sent["is_coupled"],
        is_block=sent["is_block"],
        is_target_only=sent["is_target_only"],
        limits=GrowthLimits(top_k=sent["top_k"], max_depth=sent["max_depth"], max_nodes=sent["max_nodes"]),
        root_token_ids=sent["root_token_ids"],
        remaining=sent["remaining"],
        follows=sent["follows"],
        carry=carry,
        draft_context=sent["draft_context"],
        draft_new=sent["draft_new"],
        draft_token_ids=sent["draft_token_ids"],
        states=states,
        given=given,
    )


def unpack_line(line: list[int], size: StepClass) -> tuple[DraftTree, VerifyResult | None]:
    """Tree and result of one sequence from its line; no result where its root's row was bad."""
    first_token = FIRST_OF_PATH + size.depth
    count, accepted = line[NUM_NODES], line[NUM_ACCEPTED]
    first_parent = first_token + size.nodes
    tree = DraftTree(
        token_ids=line[first_token : first_token + count], parents=line[first_parent : first_parent + count]
    )
    if line[FAILED]:
        return tree, None
    return tree, VerifyResult(
        accepted_nodes=line[FIRST_OF_PATH : FIRST_OF_PATH + accepted],
        next_token_id=line[NEXT_TOKEN],
        next_kind="bonus" if line[IS_BONUS] else "recovered",
    )
