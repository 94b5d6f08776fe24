"""What an engine is put together from: the target's weights, a runner over its KV pool, and a drafter.

Owns how each is made from the settings. Knows nothing of requests and steps; the order belongs to the engine,
which looks at the clock between them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from specdec.config import EngineConfig, ModelConfig
from specdec.device.runner import DeviceRunner
from specdec.drafter import Drafter, TargetView
from specdec.kernels.kv_quant import KV_CODE_DTYPES
from specdec.kernels.operations import Operations
from specdec.models.decoder import Decoder
from specdec.paged_kv import PagedKVCache
from specdec.provenance import folder_fingerprint
from specdec.requests import PromptEncoder
from specdec.runner import ModelRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(
    config: EngineConfig, model_config: ModelConfig, folder: Path, max_model_len: int
) -> Decoder:
    """The target's weights, held as the settings say.

    Raises:
        SpecdecError: a damaged target, or one that cannot be held so.
    """
    return Decoder(
        model_config,
        folder,
        max_model_len=max_model_len,
        dtype=DTYPES[config.dtype],
        device=config.device,
        weights=config.weights,
        deterministic=config.deterministic,
    )


def make_runner(
    config: EngineConfig,
    decoder: Decoder,
    drafter: Drafter | None,
    operations: Operations | None,
    *,
    num_blocks: int,
    max_model_len: int,
) -> ModelRunner:
    """What runs a step's rows through the target, over a KV pool of its own.

    Args:
        config: settings of the engine.
        decoder: the target's weights.
        drafter: says which boundaries are tapped.
        operations: the kernels to run with; None for the processor's own path.
        num_blocks: size of the pool.
        max_model_len: longest text.
    """
    model = decoder.config
    cache = PagedKVCache(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=decoder.dtype,
        device=config.device,
        codes=KV_CODE_DTYPES.get(config.kv_cache_dtype),
    )
    boundaries = drafter.boundaries if drafter else ()
    if operations:
        return DeviceRunner(decoder, cache, boundaries, operations, max_model_len)
    return ModelRunner(decoder, cache, boundaries)


def make_drafter(
    draft: str | Path | Callable[[TargetView], Drafter] | None,
    config: EngineConfig,
    decoder: Decoder,
    encoder: PromptEncoder,
    operations: Operations | None,
    *,
    folder: Path,
    num_blocks: int,
    max_model_len: int,
) -> Drafter | None:
    """The drafter of a spelling, or what the caller builds from its view of the target.

    Args:
        draft: None, a spelling, or the caller's own.
        config: settings of the engine.
        decoder: the target's weights.
        encoder: the target's tokenizer and template.
        operations: the kernels to run with; None for the processor's own path.
        folder: of the target.
        num_blocks: size of the pool whose block tables the drafter shares.
        max_model_len: longest text.

    Raises:
        SpecdecError: a draft that does not belong to the target.
    """
    if draft is None:
        return None
    view = TargetView(
        config=decoder.config,
        embed_tokens=decoder.embed_tokens,
        head_weight=decoder.head_weight,
        fingerprint=folder_fingerprint(folder),
        template_hash=encoder.template_hash,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        dtype=decoder.dtype,
        device=config.device,
        draft_weights=config.resolved_draft_weights,
        operations=operations,
    )
    if callable(draft):
        return draft(view)
    # the one place where the runtime reaches up: a drafter named by the user is built by name,
    # so that `Engine(target, draft="...")` works without wiring
    drafter: Drafter = import_module("specdec.drafts").load_drafter(str(draft), view)
    return drafter
