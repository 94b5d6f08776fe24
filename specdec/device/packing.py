"""A step's work as the arrays that kernels read: tokens, positions, slots, block tables, tree masks.

Owns the ragged layout of the device path: each sequence's uncomputed committed tokens, then the drafted nodes
of its tree; padding rows at the end. Host data only. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.device.staging import Staging
from specdec.kernels.device_batch import WORD_BITS, DeviceBatch
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class PackedStep:
    """Arrays of one pass and where each sequence's rows are.

    Attributes:
        arrays: what goes to the device; see `send`.
        row_start: per sequence, its first row.
        logits_start: per sequence, its first row of logits; -1 for a chunk that stops short of the root.
        num_wanted: rows of logits.
        max_queries: rows of the longest share.
    """

    arrays: Arrays
    row_start: list[int]
    logits_start: list[int]
    num_wanted: int
    max_queries: int

    def send(self, staging: Staging, block_size: int) -> tuple[Tensor, DeviceBatch, Tensor]:
        """Token ids [T], the batch, and the rows whose logits are wanted, on the device."""
        sent = staging.put(self.arrays)
        batch = DeviceBatch(
            query_start=sent["query_start"],
            context_len=sent["context_len"],
            block_tables=sent["block_tables"],
            mask_words=sent["mask_words"],
            positions=sent["positions"],
            slots=sent["slots"],
            chain=sent["chain"],
            block_size=block_size,
            max_queries=self.max_queries,
        )
        return sent["token_ids"], batch, sent["wanted"]


def row_slots(block_table: list[int], block_size: int, start: int, count: int) -> NDArray[np.int64]:
    """Slots of rows start .. start + count - 1 of a sequence."""
    rows = np.arange(start, start + count)
    return np.asarray(block_table, dtype=np.int64)[rows // block_size] * block_size + rows % block_size


def ancestor_words(parents: list[int], num_words: int) -> NDArray[np.int64]:
    """Self-or-ancestor mask of a tree, bit j of word j // 64 for node j: [nodes, num_words]."""
    words = np.zeros((len(parents), num_words), dtype=np.uint64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            words[node] = words[parent]
        words[node, node // WORD_BITS] |= np.uint64(1 << (node % WORD_BITS))
    return words.view(np.int64)


def padded_tables(tables: list[list[int]]) -> NDArray[np.int32]:
    """Block tables side by side, -1 behind their ends, width a power of two (few shapes to compile for)."""
    width = 1 << max(0, max(map(len, tables)) - 1).bit_length()
    padded = np.full((len(tables), width), -1, dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def pack_step(
    plan: list[ScheduledSequence], trees: list[DraftTree], block_size: int, row_multiple: int
) -> PackedStep:
    """Pack a plan and its trees (one per sequence; the root alone where nothing was drafted).

    Args:
        plan: who works, on how many committed tokens.
        trees: what was drafted behind them.
        block_size: rows of a block.
        row_multiple: the pass is padded to a multiple of so many rows.
    """
    counts = [share.num_rows + tree.num_drafted for share, tree in zip(plan, trees, strict=True)]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    total = int(starts[-1])
    rows = total + -total % row_multiple
    widest = max(
        (tree.num_nodes for tree in trees if not tree.is_chain),
        default=1,
    )
    token_ids = np.zeros(rows, dtype=np.int64)
    positions = np.zeros(rows, dtype=np.int32)
    slots = np.full(rows, -1, dtype=np.int64)
    mask_words = np.zeros((rows, -(-widest // WORD_BITS)), dtype=np.int64)
    chain = np.array([tree.is_chain for tree in trees], dtype=np.bool_)
    wanted: list[NDArray[np.int64]] = []
    logits_start: list[int] = []
    num_wanted = 0
    for index, (share, tree) in enumerate(zip(plan, trees, strict=True)):
        seq, start, end = share.seq, int(starts[index]), int(starts[index + 1])
        context, root = seq.num_computed, start + share.num_rows - 1
        assert tree.num_drafted == 0 or share.num_rows == 1, "a tree is drafted only from a computed context"
        token_ids[start : root + 1] = seq.token_ids[context : context + share.num_rows]
        token_ids[root + 1 : end] = tree.token_ids[1:]
        positions[start : root + 1] = np.arange(context, context + share.num_rows)
        positions[root:end] = context + share.num_rows - 1 + np.asarray(tree.depths)
        slots[start:end] = row_slots(seq.block_table, block_size, context, end - start)
        if not chain[index]:
            mask_words[start:end] = ancestor_words(tree.parents, mask_words.shape[1])
        logits_start.append(num_wanted if share.reaches_root else -1)
        if share.reaches_root:
            wanted.append(np.arange(root, end))
            num_wanted += end - root
    arrays: Arrays = {
        "token_ids": token_ids,
        "positions": positions,
        "slots": slots,
        "query_start": starts,
        "context_len": np.array([share.seq.num_computed for share in plan], dtype=np.int32),
        "block_tables": padded_tables([share.seq.block_table for share in plan]),
        "mask_words": mask_words,
        "chain": chain,
        "wanted": np.concatenate(wanted) if wanted else np.zeros(0, dtype=np.int64),
    }
    return PackedStep(arrays, starts[:-1].tolist(), logits_start, num_wanted, max(counts))
