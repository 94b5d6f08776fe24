"""How fast a run was, beside what the machine can do, and what its memory is made of.

Owns the counts: operations of the products of a training step, bytes of weights, gradients, optimiser state,
frozen rows, activations and states. Attention is left out of the operations (its keys are few), and so is
everything that is no product. Knows nothing of how a step is run.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specdec.drafts.config import Eagle3Config
from specdec.train.config import TrainConfig

RATE_SECONDS = 0.3
RATE_SIDES = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What was computed: chains (`rows`), slots over all unroll steps, and positions read (`flat_rows`)."""

    rows: int
    slots: int
    flat_rows: int


def head_flop(head: Eagle3Config, work: Work) -> float:
    """Operations of forward and backward of a head and its loss over `work`; the target's forward not."""
    width, taps = head.hidden_size, head.num_taps * head.target_hidden_size
    fuse = taps * width
    keys = 2 * width * 2 * head.num_kv_heads * head.head_dim
    rest = 3 * width * head.num_heads * head.head_dim + 3 * width * head.intermediate_size
    layer = work.flat_rows * (fuse + keys) + work.slots * rest + max(0, work.slots - work.rows) * keys
    output = head.draft_vocab_size * width
    # logits and the gradient of the state; of the rows too where they are trained
    student = work.slots * output * (3 if head.lm_head == "own" else 2)
    teacher = work.rows * head.draft_vocab_size * head.target_hidden_size
    return 2.0 * (3 * layer + student + teacher)


def target_flop(target_parameters: int, flat_rows: int) -> float:
    """Operations of the target's forward over positions, its output head included."""
    return 2.0 * target_parameters * flat_rows


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square product in `dtype`, the best of a few tenths of a second."""
    side = RATE_SIDES.get(device.type, RATE_SIDES["cuda"])
    left = torch.ones(side, side, dtype=dtype, device=device)
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < RATE_SECONDS or best == float("inf"):
        started = time.perf_counter()
        product = left @ left
        # reading a number waits for a card
        float(product[0, 0])
        best = min(best, time.perf_counter() - started)
    return 2.0 * side**3 / best


def memory_parts(
    head: Eagle3Config,
    parameters: int,
    config: TrainConfig,
    *,
    target_bytes: int,
    batch_rows: int,
    world: int,
) -> dict[str, int]:
    """Bytes of one process by what they are for.

    Args:
        head: shape of the head.
        parameters: trained numbers.
        config: training options.
        target_bytes: weights of the target on this device; 0 where states come from a store.
        batch_rows: positions of the largest batch of a process.
        world: number of processes.
    """
    shards = world if config.shard_weights else 1
    products = 2 if config.compute_dtype == "bfloat16" else 4
    width, vocab = head.hidden_size, head.draft_vocab_size
    rows = min(batch_rows, config.micro_batch_rows)
    slots = rows * config.unroll
    # kept for the backward of a slot: normed inputs, projections, feed-forward parts, residuals in fp32
    slot = products * (4 * width + 3 * head.num_heads * head.head_dim + 4 * head.intermediate_size)
    slot += 4 * 6 * width
    blocks = config.loss_chunk_rows * vocab * (products + 4)
    return {
        "weights": 4 * parameters // shards,
        "gradients": 4 * parameters // shards,
        "optimiser": 8 * parameters // shards,
        "average": (4 * parameters // shards) if config.ema is not None else 0,
        "served copy": 4 * parameters,
        "frozen rows": vocab * head.target_hidden_size * (4 + 4 + 4 + products),
        "target": target_bytes,
        "states": batch_rows * (head.target_hidden_size * (2 * head.num_taps + 4) + 8),
        "activations": slots * slot + blocks,
    }


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has had: on its card where it computes on one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_bytes(parts: Mapping[str, int]) -> int:
    """Sum of the parts."""
    return sum(parts.values())
