"""How many KV blocks a card has room for: what is free once weights are loaded and the largest step has run.

Owns the measuring pass and the arithmetic. Pools are made small, and grow to what is found.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from specdec.admission import pool_blocks
from specdec.attention import SequenceAttention
from specdec.config import EngineConfig, ModelConfig
from specdec.device.runner import DeviceRunner
from specdec.drafter import Drafter, TapDrafter
from specdec.errors import SpecdecError
from specdec.kernels.device_batch import device_batch
from specdec.memory import wanted_rows
from specdec.runner import ModelRunner

logger = logging.getLogger(__name__)

# blocks of the pools while the largest step is measured; its rows are stored nowhere
MEASURING_BLOCKS = 2
GB = 1e9


def is_measured(config: EngineConfig) -> bool:
    """Whether the size of the pool is found by measuring."""
    return config.device != "cpu" and config.kv_tokens is None


def first_blocks(config: EngineConfig, model: ModelConfig, max_model_len: int, item_bytes: int) -> int:
    """Blocks that pools are made with: as `pool_blocks` says, or few where the size is measured later.

    Raises:
        SpecdecError: a pool that is too small, or too large for the memory.
    """
    if is_measured(config):
        return MEASURING_BLOCKS
    return pool_blocks(config, model, max_model_len, item_bytes)


def fit_pool(
    runner: ModelRunner, drafter: Drafter | None, config: EngineConfig, max_model_len: int
) -> tuple[int, int | None]:
    """Grow pools of `MEASURING_BLOCKS` blocks to what the card has room for; others stay as they are.

    Args:
        runner: of the engine, its weights loaded.
        drafter: of the engine, if it has one; its pools grow too.
        config: of the engine.
        max_model_len: longest text.

    Returns:
        Blocks of every pool, and the bytes of the largest step's workspace where it was measured.

    Raises:
        SpecdecError: no room for two blocks.
    """
    if not is_measured(config):
        return runner.cache.num_blocks, None
    assert isinstance(runner, DeviceRunner), "what is not on the processor runs through the kernels"
    device = torch.device(config.device)
    caches = [runner.cache, *(drafter.caches if isinstance(drafter, TapDrafter) else ())]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_step(runner, config.max_batch_tokens, wanted_rows(config, runner.boundaries))
    torch.cuda.synchronize(device)
    workspace = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    block_bytes = sum(cache.size_bytes // cache.num_blocks for cache in caches)
    blocks = num_blocks(
        free=free,
        total=total,
        workspace=workspace,
        block_bytes=block_bytes,
        utilization=config.gpu_memory_utilization,
    )
    if blocks * config.block_size < max_model_len:
        logger.warning(
            "the KV pool holds %d tokens, fewer than the context (%d): longer requests are refused",
            blocks * config.block_size,
            max_model_len,
        )
    for cache in caches:
        cache.resize(blocks)
    return blocks, workspace


def num_blocks(*, free: int, total: int, workspace: int, block_bytes: int, utilization: float) -> int:
    """Blocks that fit beside what is used and the workspace, with `1 - utilization` of the card left alone.

    Args:
        free: bytes that nothing uses.
        total: bytes of the card.
        workspace: bytes of the largest step.
        block_bytes: of one block in all pools.
        utilization: share of the card that may be used.

    Raises:
        SpecdecError: fewer than two.
    """
    room = int(total * utilization) - (total - free) - workspace
    blocks = room // block_bytes
    if blocks < 2:
        raise SpecdecError(
            f"the card ({total / GB:.1f} GB, {(total - free) / GB:.1f} GB of it in use) has no room for a KV "
            f"pool beside a workspace of {workspace / GB:.2f} GB: raise gpu_memory_utilization "
            f"({utilization:g}), lower max_batch_tokens or max_num_seqs, or take a smaller target or dtype"
        )
    return blocks


@torch.inference_mode()
def largest_step(runner: DeviceRunner, rows: int, wanted: int) -> Tensor:
    """Run one prompt chunk of `rows` rows, with logits of `wanted` of them; nothing is stored."""
    device, size = runner.decoder.device, runner.cache.block_size
    positions = list(range(rows))
    chunk = SequenceAttention(
        query_start=0,
        num_queries=rows,
        context_len=0,
        num_new=rows,
        slots=torch.zeros(rows, dtype=torch.int64),
        mask=torch.ones(rows, rows, dtype=torch.bool).tril_(),
        query_positions=positions,
        new_positions=positions,
    )
    batch = device_batch([chunk], block_size=size, device=device)
    batch.slots.fill_(-1)
    normed, _ = runner.target(torch.zeros(rows, dtype=torch.int64, device=device), batch)
    return runner.target.logits(normed[:wanted]).argmax(-1)
