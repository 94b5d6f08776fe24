"""The commit as one Triton kernel: accepted rows to the front, all layers, keys and values, one launch.

Owns the kernel and its launch; signature and meaning are those of `reference_kv_moves`. Everything it needs
to know lies on the device: nothing waits for the host. A program owns some numbers of every row of one
(layer, keys or values, head) of one sequence and does all moves of that sequence: it reads all sources, waits
for its own threads, and then writes, so a row may be a source and a target. Rows of different sequences never
meet. Copies bits, whatever the dtype.

Letters: B sequences, DEPTH the power of two at or above the moves of a sequence, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase

# numbers a program holds between reading and writing: 16 for each of 128 threads
HELD = 2048
# integers by the size of what is copied: a move must not turn a NaN's bits or meet a dtype Triton lacks
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _commit_kernel(
    data_ptr,
    nodes_ptr,
    context_ptr,
    table_ptr,
    num_nodes,
    nodes_stride,
    table_stride,
    KV_HEADS,
    D,
    layer_stride,
    kind_stride,
    head_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    plane = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    moves = tl.arange(0, DEPTH)
    node = tl.load(nodes_ptr + seq * nodes_stride + moves, mask=moves < num_nodes, other=-1).to(tl.int64)
    # a row that is where it belongs is neither read nor written: nothing is done for a chain
    is_move = (node >= 0) & (node != moves + 1)
    if tl.max(is_move.to(tl.int32), 0) == 0:
        return
    root = tl.load(context_ptr + seq).to(tl.int64)
    source = root + node
    target = root + 1 + moves
    table = table_ptr + seq * table_stride
    source_block = tl.load(table + source // BLOCK_SIZE, mask=is_move, other=0).to(tl.int64)
    target_block = tl.load(table + target // BLOCK_SIZE, mask=is_move, other=0).to(tl.int64)
    source_slot = source_block * BLOCK_SIZE + source % BLOCK_SIZE
    target_slot = target_block * BLOCK_SIZE + target % BLOCK_SIZE

    head = (plane % KV_HEADS).to(tl.int64)
    kind = (plane // KV_HEADS % 2).to(tl.int64)
    layer = (plane // KV_HEADS // 2).to(tl.int64)
    base = data_ptr + layer * layer_stride + kind * kind_stride + head * head_stride
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    moved = is_move[:, None] & (dims < D)[None, :]
    rows = tl.load(base + source_slot[:, None] * slot_stride + dims[None, :], mask=moved, other=0)
    # other threads of this program may still be reading what this one is about to overwrite
    tl.debug_barrier()
    tl.store(base + target_slot[:, None] * slot_stride + dims[None, :], rows, mask=moved)


def _tile(depth: int, dim: int) -> tuple[int, int]:
    rows = triton.next_power_of_2(max(depth, 1))
    return rows, max(1, min(triton.next_power_of_2(dim), HELD // rows))


def commit_path(
    data: Tensor, accepted_nodes: Tensor, context_len: Tensor, block_tables: Tensor, *, block_size: int
) -> None:
    """See `reference_kv_moves.commit_path`."""
    layers, kinds, kv_heads, _, dim = data.shape
    assert kinds == 2, "a layer has keys and values"
    assert data.stride(4) == 1, "a row of a head is one piece of memory"
    assert accepted_nodes.stride(1) == block_tables.stride(1) == 1, "a sequence's numbers lie side by side"
    batch, depth = accepted_nodes.shape
    if batch == 0 or depth == 0:
        return
    rows, columns = _tile(depth, dim)
    _commit_kernel[(layers * 2 * kv_heads, batch, triton.cdiv(dim, columns))](
        data.view(_BITS[data.element_size()]),
        accepted_nodes,
        context_len,
        block_tables,
        depth,
        accepted_nodes.stride(0),
        block_tables.stride(0),
        kv_heads,
        dim,
        data.stride(0),
        data.stride(1),
        data.stride(2),
        data.stride(3),
        BLOCK_SIZE=block_size,
        DEPTH=rows,
        BLOCK_D=columns,
    )


def compile_cases() -> list[CompileCase]:
    """Depth 8 over 16-bit rows of 128 numbers, chains of 64 over eight-bit rows, and their scales."""
    cases = []
    for name, kind, depth, dim in (
        ("16-bit", "*i16", 8, 128),
        ("8-bit", "*u8", 64, 128),
        ("scales", "*i32", 64, 1),
    ):
        rows, columns = _tile(depth, dim)
        # the launcher makes a constant of every integer that is 1
        single = {"D": 1, "slot_stride": 1} if dim == 1 else {}
        strides = ["layer_stride", "kind_stride", "head_stride", "D", "slot_stride"]
        integers = [*strides, "num_nodes", "nodes_stride", "table_stride", "KV_HEADS"]
        cases.append(
            CompileCase(
                name=f"kv_moves/commit-{name}",
                kernel=_commit_kernel,
                signature={
                    "data_ptr": kind,
                    "nodes_ptr": "*i64",
                    "context_ptr": "*i32",
                    "table_ptr": "*i32",
                    **{integer: "i32" for integer in integers if integer not in single},
                },
                constants={"BLOCK_SIZE": 16, "DEPTH": rows, "BLOCK_D": columns} | single,
                aligned=("data_ptr", *(stride for stride in strides if stride not in single)),
            )
        )
    return cases
