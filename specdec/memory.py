"""What an engine's memory goes to: weights, KV pool, draft, and the workspace of its largest step.

Owns the sizes and the words for them. Weights and pools are counted tensor by tensor, each storage once; the
workspace is stated from the shapes of a step at its token budget. Knows nothing of free memory.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from specdec.config import EngineConfig, ModelConfig
from specdec.drafter import Drafter
from specdec.models.layers import Linear, Storage
from specdec.paged_kv import PagedKVCache
from specdec.runner import ModelRunner

# rows of one sequence's law and what filters make of it, in float64
LAW_COPIES = 6
# the processor's path keeps scores and softmax; the reference of the kernel also the scores before the mask
SCORE_COPIES = {"auto": 2, "reference": 3, "triton": 0}
# the processor's path hands a chunk's taps on; through kernels those of the step before may still be there
TAP_COPIES = {"auto": 1, "reference": 2, "triton": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes by purpose.

    Attributes:
        weights: the target's.
        kv_pool: the target's keys and values.
        draft_weights: the drafter's own; what it shares with the target is not counted again.
        draft_kv: the drafter's keys and values.
        workspace: what the largest step needs for a while.
    """

    weights: int
    kv_pool: int
    draft_weights: int
    draft_kv: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_pool + self.draft_weights + self.draft_kv + self.workspace

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


# what a module of TorchScript holds of `Matrices`; its other attributes cannot be listed and are small
SCRIPTED_LISTS = ("packed", "weights", "biases")


class TensorAudit:
    """Counts the tensors that objects hold, each storage once over all calls; KV caches are listed apart.

    Modules of TorchScript are counted only where `scripted` says so: packed matrices do not tell whether they
    are those of a linear layer that was counted already.
    """

    def __init__(self) -> None:
        self.scripted = False
        self._storages: set[int] = set()
        self._objects: dict[int, object] = {}
        self.caches: list[PagedKVCache] = []

    def bytes_of(self, held: object) -> int:
        """Bytes of the tensors under `held` that no call before has counted."""
        return sum(self._sizes(held))

    def _sizes(self, held: object) -> Iterator[int]:
        if isinstance(held, Tensor):
            if held.is_mkldnn:  # no storage to ask for; counted by its linear layer where that is seen
                if self.scripted and id(held) not in self._objects:
                    self._objects[id(held)] = held
                    yield held.numel() * held.element_size()
                return
            storage = held.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages.add(storage.data_ptr())
                yield storage.nbytes()
            return
        if held is None or isinstance(held, (str, bytes, int, float)):
            return
        if isinstance(held, (type, types.FunctionType, types.ModuleType)):
            return
        if id(held) in self._objects:
            return
        self._objects[id(held)] = held
        if isinstance(held, PagedKVCache):
            self.caches.append(held)
            return
        if isinstance(held, Linear) and held.storage is not Storage.PLAIN:
            self._objects[id(held.packed)] = held.packed
            yield held.out_features * held.in_features * (1 if held.storage is Storage.INT8 else 2)
        if isinstance(held, torch.ScriptObject):
            weight = torch.ops.quantized.linear_unpack(held)[0]
            yield weight.numel() * (1 if weight.is_quantized else 2)
        parts: object = ()
        if isinstance(held, torch.jit.ScriptModule):
            names = SCRIPTED_LISTS if self.scripted else ()
            parts = [getattr(held, name) for name in names if held._c.hasattr(name)]
        elif isinstance(held, Mapping):
            parts = list(held.values())
        elif isinstance(held, (list, tuple, set, frozenset)):
            parts = held
        elif isinstance(held, nn.Module) or type(held).__module__.startswith("specdec"):
            parts = list(vars(held).values())
        for part in parts:  # type: ignore[attr-defined]  # a sequence in every case
            yield from self._sizes(part)


def wanted_rows(config: EngineConfig, boundaries: tuple[int, ...]) -> int:
    """Rows of logits of the largest step: a root and a tree of every sequence, inside the token budget."""
    tree = config.spec.max_nodes if boundaries else 0
    return min(config.max_batch_tokens, config.max_num_seqs * (1 + tree))


def workspace_bytes(
    config: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int,
    pool_tokens: int,
    item_bytes: int,
    boundaries: tuple[int, ...],
    score_copies: int,
    tap_copies: int,
) -> int:
    """Bytes that a step at the token budget needs beside weights and pools.

    Args:
        config: of the engine.
        model: the target's.
        max_model_len: longest text.
        pool_tokens: rows of the KV pool.
        item_bytes: of the compute dtype.
        boundaries: what a drafter reads.
        score_copies: how often attention writes its scores out: not at all in kernels, see `SCORE_COPIES`.
        tap_copies: how many steps' taps are held at once, see `TAP_COPIES`.
    """
    rows, hidden, inner = config.max_batch_tokens, model.hidden_size, model.intermediate_size
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attended = model.num_heads * model.head_dim
    stream = 2 * hidden  # the residual stream and its norm
    # of one sequence at a time
    scores = score_copies * model.num_heads * min(rows, max_model_len) * max_model_len * item_bytes
    attention = rows * (stream + 2 * qkv + attended) * item_bytes + scores
    mlp = rows * (stream + 3 * inner + hidden) * item_bytes
    # one row of each block is kept
    taps = tap_copies * rows * len(boundaries) * hidden * item_bytes
    taps += pool_tokens // config.block_size * len(boundaries) * hidden * item_bytes
    wanted = wanted_rows(config, boundaries)
    copies = 4 if item_bytes == 4 else 4 + item_bytes
    head = wanted * (hidden * item_bytes + model.vocab_size * copies) + rows * hidden * item_bytes
    laws = LAW_COPIES * model.vocab_size * 8
    return max(attention, mlp, head + laws) + taps


def memory_report(
    runner: ModelRunner,
    drafter: Drafter | None,
    config: EngineConfig,
    max_model_len: int,
    measured_workspace: int | None,
) -> MemoryReport:
    """What an engine of these parts holds.

    Args:
        runner: with the target's weights and pool.
        drafter: of the engine.
        config: of the engine.
        max_model_len: longest text.
        measured_workspace: bytes, where a largest step has been run.
    """
    audit = TensorAudit()
    weights = audit.bytes_of(runner)
    pools = sum(cache.size_bytes for cache in audit.caches)
    audit.scripted = True
    draft_weights = audit.bytes_of(drafter)
    workspace = measured_workspace or workspace_bytes(
        config,
        runner.decoder.config,
        max_model_len=max_model_len,
        pool_tokens=runner.cache.num_blocks * runner.cache.block_size,
        item_bytes=runner.decoder.dtype.itemsize,
        boundaries=runner.boundaries,
        score_copies=0 if config.device != "cpu" else SCORE_COPIES[config.kernels],
        tap_copies=2 if config.device != "cpu" else TAP_COPIES[config.kernels],
    )
    return MemoryReport(
        weights=weights,
        kv_pool=pools,
        draft_weights=draft_weights,
        draft_kv=sum(cache.size_bytes for cache in audit.caches) - pools,
        workspace=workspace,
    )
