"""Sampling, walks and growth never ask the host: nothing in a step depends on a value read back.

Two proofs for the plain versions: on the "meta" device there are no values to read, so any read raises; and a
dispatch mode refuses the operations that would wait for a card. The kernels' own Python is checked by the
same calls on a card, where the sync debug mode turns a wait into an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kernels import KernelBackend, kernel
from specdec.kernels.tree_records import (
    GrowthLimits,
    GrowthRaces,
    RowParams,
    TreeRows,
    growth_capacity,
    start_trees,
)
from specdec.random_streams import Purpose

ROWS, VOCAB, BATCH, WIDTH, DEPTH = 8, 40, 3, 2, 3
READS = {
    "_local_scalar_dense",
    "nonzero",
    "item",
    "masked_select",
    "unique_dim",
    "_unique2",
    "is_nonzero",
    "equal",
}
Step = Callable[[], Any]


class NoReads(TorchDispatchMode):
    """Refuses what makes the host wait: reads, shapes that depend on values, copies between devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (
            name == "index" and any(one is not None and one.dtype == torch.bool for one in args[1])
        ):
            raise AssertionError(f"{name} waits for the device")
        kwargs = kwargs or {}
        if name in ("_to_copy", "copy_"):
            target = kwargs.get("device", args[0].device)
            source = args[1] if name == "copy_" else args[0]
            assert target is None or torch.device(target) == source.device, f"{name} moves between devices"
        return func(*args, **kwargs)


def steps_on(device: str, backend: KernelBackend) -> dict[str, Step]:
    """Every operation on small tensors of a device."""
    meta = device == "meta"

    def made(values: list[Any], dtype: torch.dtype) -> Tensor:
        if meta:
            return torch.empty(torch.tensor(values).shape, dtype=dtype, device=device)
        return torch.tensor(values, dtype=dtype, device=device)

    logits = (
        torch.empty(ROWS, VOCAB, device=device)
        if meta
        else torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    )
    tree = TreeRows(
        node_start=made([0, 4, 6, 8], torch.int32),
        parents=made([-1, 0, 0, 1, -1, 0, -1, -2], torch.int32),
        token_ids=made([0, 3, 4, 5, 1, 2, 7, 0], torch.int64),
        max_nodes=4,
        max_depth=3,
    )
    chains = TreeRows(
        node_start=tree.node_start,
        parents=made([-1, 0, 1, 2, -1, 0, -1, -2], torch.int32),
        token_ids=tree.token_ids,
        max_nodes=4,
        max_depth=3,
    )
    seeds = made([1, 2, 3], torch.int64)
    positions = made([5, 6, 6, 7, 9, 10, 0, 0], torch.int32)
    params = RowParams(
        temperature=made([1.0, 0.0, 0.7], torch.float64),
        top_k=made([0, 3, 5], torch.int32),
        top_p=made([0.9, 1.0, 0.8], torch.float64),
        min_p=made([0.0, 0.1, 0.0], torch.float64),
    )

    def run(operation: str, *args: Any, **kwargs: Any) -> Any:
        return kernel(operation, backend)(*args, **kwargs)

    def laws() -> Any:
        return run("row_laws", logits, params.at(tree.sequence_of_row()))

    # made here, not in the step: a copy from the host waits
    limits = GrowthLimits(
        top_k=made([2, 1, 2], torch.int32),
        max_depth=made([3, 2, 1], torch.int32),
        max_nodes=made([5, 5, 2], torch.int32),
    )
    ids = made(list(range(VOCAB)), torch.int64)
    roots, is_coupled = made([5, 9, 0], torch.int32), made([True, False, True], torch.bool)
    sequences = {
        rows: made([[seq] * rows for seq in range(BATCH)], torch.int64).flatten() for rows in (1, WIDTH)
    }

    def grow() -> Any:
        trees = start_trees(seeds, capacity=growth_capacity(WIDTH, DEPTH), width=WIDTH)
        for depth in range(DEPTH):
            rows = 1 if depth == 0 else WIDTH
            level = logits[: BATCH * rows].view(BATCH, rows, VOCAB)
            races = GrowthRaces(
                laws=run("row_laws", level.flatten(0, 1), params.at(sequences[rows])),
                seeds=seeds,
                roots=roots,
                is_coupled=is_coupled,
            )
            trees, _ = run(
                "grow_level", trees, level, limits, depth=depth, vocab_ids=ids, vocab=VOCAB, races=races
            )
        grown = run("prune_trees", trees, limits, rows=6)
        return run("tree_masks", grown.parents, max_depth=DEPTH)

    return {
        "uniforms": lambda: run("uniforms", seeds, seeds, seeds, purpose=Purpose.ACCEPT, count=5),
        "exponentials": lambda: run("exponentials", seeds, seeds, count=5),
        "greedy": lambda: run("walk_choices", tree, *run("greedy_choices", logits)),
        "probs": lambda: run("row_probs", logits, laws()),
        "coupled": lambda: run(
            "walk_choices", tree, run("race_winners", logits, laws(), tree, seeds, positions), laws().bad
        ),
        "target-only": lambda: run("walk_target_only", tree, logits, laws(), seeds, positions),
        "block": lambda: run("walk_block", chains, logits, laws(), logits.abs(), seeds, positions),
        "growth": grow,
    }


STEPS = tuple(steps_on("cpu", "reference"))


@pytest.mark.parametrize("name", STEPS)
def test_plain_versions_run_where_there_are_no_values(name: str) -> None:
    """Catches `.item()`, `.tolist()`, a branch on a tensor, a boolean index: none of them works on meta."""
    steps_on("meta", "reference")[name]()


@pytest.mark.parametrize("name", STEPS)
def test_plain_versions_use_no_operation_that_waits(name: str) -> None:
    step = steps_on("cpu", "reference")[name]
    with NoReads():
        step()


def test_the_proofs_can_fail() -> None:
    values = torch.tensor([1.0, -1.0])
    for read in (
        lambda t: t[t > 0],
        lambda t: t.sum().item(),
        lambda t: t.nonzero(),
        lambda t: bool(t.any()),
    ):
        with pytest.raises(AssertionError), NoReads():
            read(values)
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(values.to("meta"))


@pytest.mark.parametrize("name", STEPS)
def test_the_python_of_the_kernels_uses_no_operation_that_waits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are left out: what stands between them must not read either."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    step = steps_on("meta", "triton")[name]
    with NoReads():
        step()


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_kernels_wait_for_nothing_on_a_card(name: str) -> None:
    step = steps_on("cuda", "triton")[name]
    # the first call compiles
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
