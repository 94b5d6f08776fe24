"""The ragged batch as tensors on the device, as kernels read it.

Owns `DeviceBatch` and its making from the host's description (`specdec.attention`); the device-resident
step makes the same thing without the host. Says nothing about layers: every layer of a pass reads one batch.
Masks are bit-packed, 64 new rows a word. Needs no Triton.

Every tensor may be longer than what is in use, so that one captured graph serves many batches: sequences
past the real ones have no queries (`query_start` repeats its last value) and `context_len` 0, rows past
`query_start[B]` belong to no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention import SequenceAttention

WORD_BITS = 64


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """T rows of B sequences.

    Attributes:
        query_start: int32 [B + 1], first row of every sequence; the last entry ends the last sequence.
        context_len: int32 [B], committed rows, visible to all queries of the sequence (inside a window);
            row i of them stands at position i.
        block_tables: int32 [B, max_blocks], padded with -1.
        mask_words: int64 [T, W], bit j % 64 of word j // 64 of row t: query t sees new row j of its sequence.
            Not read, and zero, for the rows of chains.
        positions: int32 [T], absolute positions of the queries.
        slots: int64 [T], where a row's keys and values go; -1 stores nothing.
        block_size: rows of a block.
        new_len: int32 [B], uncommitted rows of a sequence, its queries being the last of them; None when
            the queries are all.
        new_positions: int32 [B, max_new], positions of the new rows, read by a sliding window only; None when
            the new rows are the queries, whose positions are known.
        chain: bool [B], sequences whose queries see every new row up to their own, as a prompt chunk does;
            None when no sequence is marked as such.
        max_queries: no sequence has more queries than this; the host's knowledge, which sizes tiles.
    """

    query_start: Tensor
    context_len: Tensor
    block_tables: Tensor
    mask_words: Tensor
    positions: Tensor
    slots: Tensor
    block_size: int
    new_len: Tensor | None = None
    new_positions: Tensor | None = None
    chain: Tensor | None = None
    max_queries: int | None = None

    @property
    def num_sequences(self) -> int:
        return self.context_len.shape[0]

    @property
    def max_len(self) -> int:
        """No sequence has more rows than its block table can name."""
        return self.block_tables.shape[1] * self.block_size


def pack_bits(mask: Tensor, num_words: int) -> Tensor:
    """Bool [rows, columns] -> int64 [rows, num_words], column j in bit j % 64 of word j // 64."""
    rows, columns = mask.shape
    assert columns <= num_words * WORD_BITS, f"{columns} columns do not fit {num_words} words"
    bits = torch.zeros(rows, num_words * WORD_BITS, dtype=torch.bool, device=mask.device)
    bits[:, :columns] = mask
    # the weights are distinct powers of two, the last one the sign: their sum is their bitwise or
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=mask.device) << torch.arange(
        WORD_BITS, device=mask.device
    )
    return (bits.view(rows, num_words, WORD_BITS) * weights).sum(-1)


def unpack_bits(words: Tensor, columns: int) -> Tensor:
    """Int64 [rows, W] -> bool [rows, columns]; the inverse of `pack_bits`."""
    shifts = torch.arange(WORD_BITS, device=words.device)
    return ((words[..., None] >> shifts) & 1).flatten(1)[:, :columns].bool()


def device_batch(
    batch: Sequence[SequenceAttention],
    *,
    block_size: int,
    num_rows: int | None = None,
    device: torch.device | str = "cpu",
) -> DeviceBatch:
    """Pack the host's description; one copy to the device per tensor.

    Args:
        batch: sequences in row order, without gaps between their rows.
        block_size: rows of a block of the pool.
        num_rows: T, when the pass has padding rows after the last sequence.
        device: where the kernels run.
    """
    count = len(batch)
    covered = batch[-1].query_start + batch[-1].num_queries if count else 0
    rows = covered if num_rows is None else num_rows
    assert rows >= covered, f"{covered} rows of sequences in a pass of {rows} rows"
    starts = [seq.query_start for seq in batch] + [covered]
    assert all(seq.num_queries == starts[i + 1] - starts[i] for i, seq in enumerate(batch)), (
        "rows leave a gap"
    )
    tables = [_block_table(seq, block_size) for seq in batch]
    block_tables = torch.full((count, max(map(len, tables), default=1)), -1, dtype=torch.int32)
    max_new = max((seq.num_new for seq in batch), default=1)
    new_positions = torch.zeros(count, max_new, dtype=torch.int32)
    chain = torch.tensor([_is_chain(seq) for seq in batch], dtype=torch.bool)
    widest = max(
        (seq.num_new for seq, plain in zip(batch, chain.tolist(), strict=True) if not plain), default=1
    )
    mask_words = torch.zeros(rows, -(-widest // WORD_BITS), dtype=torch.int64)
    positions = torch.zeros(rows, dtype=torch.int32)
    slots = torch.full((rows,), -1, dtype=torch.int64)
    for index, seq in enumerate(batch):
        start, end = seq.query_start, seq.query_start + seq.num_queries
        block_tables[index, : len(tables[index])] = tables[index]
        new_positions[index, : seq.num_new] = torch.tensor(seq.new_positions, dtype=torch.int32)
        positions[start:end] = torch.tensor(seq.query_positions, dtype=torch.int32)
        slots[start:end] = _query_slots(seq)
        if not chain[index]:
            mask = seq.mask
            if mask is None:
                mask = torch.ones(seq.num_queries, seq.num_new, dtype=torch.bool)
            mask_words[start:end] = pack_bits(mask.cpu(), mask_words.shape[1])

    def put(tensor: Tensor) -> Tensor:
        if torch.device(device).type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    all_queries = all(seq.num_new == seq.num_queries for seq in batch)
    return DeviceBatch(
        query_start=put(torch.tensor(starts, dtype=torch.int32)),
        context_len=put(torch.tensor([seq.context_len for seq in batch], dtype=torch.int32)),
        block_tables=put(block_tables),
        mask_words=put(mask_words),
        positions=put(positions),
        slots=put(slots),
        block_size=block_size,
        new_len=None if all_queries else put(torch.tensor([seq.num_new for seq in batch], dtype=torch.int32)),
        new_positions=None if all_queries else put(new_positions),
        chain=put(chain) if bool(chain.any()) else None,
        max_queries=max((seq.num_queries for seq in batch), default=1),
    )


def _block_table(seq: SequenceAttention, block_size: int) -> Tensor:
    """Blocks of the sequence's rows, int32."""
    length = seq.context_len + seq.num_new
    if isinstance(seq.slots, slice):
        first = seq.slots.start // block_size
        return torch.arange(first, first + -(-length // block_size), dtype=torch.int32)
    return (seq.slots[:length:block_size] // block_size).to(device="cpu", dtype=torch.int32)


def _query_slots(seq: SequenceAttention) -> Tensor:
    """Slots of the query rows, which are the last of the sequence's new rows."""
    end = seq.context_len + seq.num_new
    if isinstance(seq.slots, slice):
        return torch.arange(seq.slots.start + end - seq.num_queries, seq.slots.start + end)
    return seq.slots[end - seq.num_queries : end].cpu()


def _is_chain(seq: SequenceAttention) -> bool:
    """Whether query i sees exactly the new rows up to its own."""
    if seq.mask is None:
        return seq.num_queries == 1
    shape = (seq.num_queries, seq.num_new)
    lower = torch.ones(shape, dtype=torch.bool).tril_(seq.num_new - seq.num_queries)
    return bool(torch.equal(seq.mask.cpu(), lower))
