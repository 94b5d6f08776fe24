"""The kernels beside attention at the sizes of one verify pass: norms, stores, commits, laws, walks, losses.

On a card each is measured beside its own reference in plain torch; on a processor the reference is what
serves, and torch's own fused call stands beside it where there is one. `bytes` counts each input read once
and each output written once. Owns the inputs and the counts; knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec.cli.micro.shapes import OURS, KernelCase, MicroShape, tree_parents
from specdec.kernels import kernel
from specdec.kernels.tree_records import (
    GrowthLimits,
    RowParams,
    TreeRows,
    growth_capacity,
    start_trees,
)
from specdec.models.rope import RotaryEmbedding

_REFERENCE = "reference in torch"
# tokens whose draft loss is measured in one call, and the draft vocabulary of published heads
_LOSS_SLOTS = {"cpu": 64, "cuda": 2048}
_DRAFT_VOCAB = 32_000
# accepted nodes a sequence commits in the commit's case
_COMMITTED = 4
_EPS = 1e-5
# children of a node in EAGLE-2's trees
_GROWTH_WIDTH = 8


def kernel_cases(shape: MicroShape) -> list[KernelCase]:
    """Every kernel beside attention, at the sizes of a verify pass."""
    return [
        *norm_cases(shape),
        rope_store_case(shape),
        commit_case(shape),
        *row_cases(shape),
        *growth_cases(shape),
        draft_loss_case(shape),
    ]


def _case(
    shape: MicroShape,
    name: str,
    size: str,
    numbers: int,
    call: Callable[..., object],
    baselines: dict[str, Callable[[], object]] | None = None,
) -> KernelCase:
    """A case whose run is `call(function)`; `numbers` are those of the model's dtype that move."""
    runs: dict[str, Callable[[], object]] = {}
    ours, plain = kernel(name, shape.backend), kernel(name, "reference")
    runs[OURS] = lambda: call(ours)
    if shape.backend != "reference":
        runs[_REFERENCE] = lambda: call(plain)
    return KernelCase(
        name=name, size=size, bytes=numbers * shape.item, flop=0, runs=runs | (baselines or {}), left_out={}
    )


def norm_cases(shape: MicroShape) -> list[KernelCase]:
    """RMS norm, residual sum with norm, gated activation."""
    rows, hidden, inner = shape.rows, shape.model.hidden_size, shape.model.intermediate_size
    x, update = shape.normal(rows, hidden), shape.normal(rows, hidden)
    residual, weight = shape.normal(rows, hidden), shape.normal(hidden)
    gate_up = shape.normal(rows, 2 * inner)

    def torch_silu() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return [
        _case(
            shape,
            "rms_norm",
            f"{rows} x {hidden}",
            2 * rows * hidden,
            lambda do: do(x, weight, _EPS),
            {"torch rms_norm": lambda: functional.rms_norm(x, (hidden,), weight, _EPS)},
        ),
        _case(
            shape,
            "add_rms_norm",
            f"{rows} x {hidden}",
            4 * rows * hidden,
            lambda do: do(update, residual, weight, _EPS),
        ),
        _case(
            shape,
            "silu_mul",
            f"{rows} x 2 x {inner}",
            3 * rows * inner,
            lambda do: do(gate_up),
            {"torch silu, product": torch_silu},
        ),
    ]


def rope_store_case(shape: MicroShape) -> KernelCase:
    """Rotation of queries and keys, and the store of keys and values."""
    model, rows = shape.model, shape.rows
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    qkv = shape.normal(rows, heads + 2 * kv_heads, dim)
    pool = [shape.normal(kv_heads, shape.num_slots, dim, seed=seed) for seed in (1, 2)]
    rope = RotaryEmbedding(model.rope, max_positions=shape.context, device=shape.device)
    every = torch.arange(shape.context, device=shape.device)
    cos, sin = rope.cos_sin(every, shape.context)
    places = torch.arange(shape.context - shape.nodes, shape.context, device=shape.device)
    positions = places.repeat(shape.batch).to(torch.int32)
    slots = shape.slots()[:, places].flatten()
    return _case(
        shape,
        "rope_store",
        f"{rows} rows of {heads} + 2 x {kv_heads} heads of {dim}",
        2 * qkv.numel(),
        lambda do: do(qkv, cos, sin, positions, *pool, slots, num_heads=heads),
    )


def commit_case(shape: MicroShape) -> KernelCase:
    """Accepted rows to the front, all layers; a short context, since only the moved rows matter."""
    model = shape.model
    small = MicroShape(
        model=model,
        device=shape.device,
        dtype=shape.dtype,
        batch=shape.batch,
        context=max(64, 2 * shape.nodes),
        nodes=shape.nodes,
    )
    data = small.normal(model.num_layers, 2, model.num_kv_heads, small.num_slots, model.head_dim)
    depth = min(_COMMITTED, shape.nodes - 1)
    # the last nodes of the tree, which all have to move
    nodes = torch.arange(shape.nodes - depth, shape.nodes, dtype=torch.int32, device=shape.device)
    accepted = nodes.repeat(shape.batch, 1)
    context = torch.full((shape.batch,), small.context - shape.nodes, dtype=torch.int32, device=shape.device)
    tables = small.block_tables()
    moved = 2 * model.num_layers * model.num_kv_heads * model.head_dim * shape.batch * depth
    return _case(
        shape,
        "commit_path",
        f"{shape.batch} x {depth} rows, {model.num_layers} layers",
        2 * moved,
        lambda do: do(data, accepted, context, tables, block_size=small.block_size),
    )


def tree_rows(shape: MicroShape, parents: list[int], max_depth: int) -> TreeRows:
    """One tree shape for every sequence, with tokens that no choice will follow for long."""
    rows = torch.tensor(parents * shape.batch, dtype=torch.int32, device=shape.device)
    starts = torch.arange(shape.batch + 1, device=shape.device, dtype=torch.int32) * shape.nodes
    tokens = torch.arange(shape.rows, device=shape.device) % shape.model.vocab_size
    return TreeRows(
        node_start=starts, parents=rows, token_ids=tokens, max_nodes=shape.nodes, max_depth=max_depth
    )


def row_cases(shape: MicroShape) -> list[KernelCase]:
    """Choices and laws of rows of logits, and the walks; logits are fp32, as the target gives them."""
    rows, vocab, device = shape.rows, shape.model.vocab_size, shape.device
    logits = 4 * shape.normal(rows, vocab, dtype=torch.float32)
    params = _row_params(rows, device)
    tree = tree_rows(shape, tree_parents(shape.nodes), shape.nodes)
    chain = tree_rows(shape, list(range(-1, shape.nodes - 1)), shape.nodes)
    seeds = torch.arange(shape.batch, device=device)
    positions = torch.full((rows,), shape.context, device=device)
    laws = kernel("row_laws", shape.backend)(logits, params)
    choices, bad = kernel("greedy_choices", shape.backend)(logits)
    draft = torch.softmax(logits.flip(0), dim=-1)
    once = rows * vocab * torch.float32.itemsize // shape.item
    size, trees = f"{rows} x {vocab}, T 0.7, top-p 0.95", f"{shape.batch} trees of {shape.nodes}"
    plain: dict[str, Callable[[], object]] = {"torch argmax": lambda: logits.argmax(-1)}
    softmax: dict[str, Callable[[], object]] = {"torch softmax": lambda: torch.softmax(logits, dim=-1)}
    calls: list[tuple[str, str, int, Callable[[Any], object], dict[str, Callable[[], object]]]] = [
        ("greedy_choices", f"{rows} x {vocab}", once, lambda do: do(logits), plain),
        ("row_laws", size, once, lambda do: do(logits, params), {}),
        # laws are doubles: they take twice the bytes of the logits
        ("row_probs", size, 3 * once, lambda do: do(logits, laws), softmax),
        ("race_winners", size, once, lambda do: do(logits, laws, tree, seeds, positions), {}),
        (
            "walk_choices",
            f"{shape.batch} trees of {shape.nodes}",
            rows,
            lambda do: do(tree, choices, bad),
            {},
        ),
        (
            "walk_target_only",
            f"{trees} x {vocab}",
            shape.batch * vocab,
            lambda do: do(tree, logits, laws, seeds, positions),
            {},
        ),
        (
            "walk_block",
            f"{shape.batch} chains of {shape.nodes} x {vocab}",
            2 * once,
            lambda do: do(chain, logits, laws, draft, seeds, positions),
            {},
        ),
    ]
    return [_case(shape, *call) for call in calls]


def _row_params(rows: int, device: str) -> RowParams:
    def filled(value: float) -> Tensor:
        return torch.full((rows,), value, dtype=torch.float64, device=device)

    return RowParams(
        temperature=filled(0.7),
        top_k=torch.zeros(rows, dtype=torch.int32, device=device),
        top_p=filled(0.95),
        min_p=filled(0.0),
    )


def growth_cases(shape: MicroShape) -> list[KernelCase]:
    """One level of tree growth from a full frontier, the choice of the best nodes, and their masks."""
    batch, device, depth = shape.batch, shape.device, 5
    vocab = min(_DRAFT_VOCAB, shape.model.vocab_size)
    root = shape.normal(batch, 1, vocab, dtype=torch.float32)
    logits = shape.normal(batch, _GROWTH_WIDTH, vocab, dtype=torch.float32)
    ids = torch.arange(vocab, device=device)

    def filled(value: int) -> Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=device)

    limits = GrowthLimits(top_k=filled(_GROWTH_WIDTH), max_depth=filled(depth), max_nodes=filled(60))
    capacity = growth_capacity(_GROWTH_WIDTH, depth)
    empty = start_trees(
        torch.zeros(batch, dtype=torch.int64, device=device), capacity=capacity, width=_GROWTH_WIDTH
    )
    grow = kernel("grow_level", shape.backend)
    trees, _ = grow(empty, root, limits, depth=0, vocab_ids=ids, vocab=shape.model.vocab_size)
    kept = kernel("prune_trees", shape.backend)(trees, limits, rows=61)
    read = logits.numel() * torch.float32.itemsize // shape.item
    nodes = batch * capacity * 3
    return [
        _case(
            shape,
            "grow_level",
            f"{batch} x {_GROWTH_WIDTH} nodes x {vocab}",
            read,
            lambda do: do(trees, logits, limits, depth=1, vocab_ids=ids, vocab=shape.model.vocab_size),
        ),
        _case(
            shape,
            "prune_trees",
            f"{batch} x {capacity} places to 61",
            nodes,
            lambda do: do(trees, limits, rows=61),
        ),
        _case(
            shape,
            "tree_masks",
            f"{batch} trees of 61",
            2 * batch * 61,
            lambda do: do(kept.parents, max_depth=depth),
        ),
    ]


def draft_loss_case(shape: MicroShape) -> KernelCase:
    """The training loss with its gradient, over a draft vocabulary."""
    slots = _LOSS_SLOTS[torch.device(shape.device).type]
    vocab = min(_DRAFT_VOCAB, shape.model.vocab_size)
    student, teacher = shape.normal(slots, vocab, seed=1), shape.normal(slots, vocab, seed=2)
    rows = torch.arange(slots, device=shape.device)
    log_norm = torch.logsumexp(teacher.float(), dim=-1) + 0.1
    scale = torch.full((slots,), 1.0 / slots, device=shape.device)
    return _case(
        shape,
        "draft_loss",
        f"kl, {slots} x {vocab}, gradient included",
        3 * slots * vocab,
        lambda do: do("kl", student, teacher, rows, log_norm, scale, measure=False),
    )
