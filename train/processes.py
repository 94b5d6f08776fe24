"""The processes of a training run: one, or several started by `torchrun`, or on cards by `accelerate launch`.

Owns who is who, what is summed over processes, and how the trained module is wrapped: data parallel by
accelerate, or weights, gradients and optimiser state in shards (FSDP, torch's `fully_shard`, which runs on
processors over gloo too, where accelerate's own wrapper does not). Knows nothing of heads, data or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from specdec.errors import SpecdecError


class Processes:
    """Every process of a run has one; all call its methods in the same order.

    Args:
        shard: keep weights, gradients and optimiser state in shards, one a process.
    """

    def __init__(self, *, shard: bool = False) -> None:
        # the objective does its own casting: accelerate fixes one precision for the life of a process.
        self.accelerator = Accelerator(
            mixed_precision="no",
            cpu=not torch.accelerator.is_available(),
            # buffers are the target's, equal everywhere and never written
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        self.sharded = shard or self.accelerator.distributed_type == DistributedType.FSDP
        if self.sharded and self.world == 1:
            raise SpecdecError(
                "shard_weights (true) needs several processes; start with accelerate launch or torchrun"
            )
        self._module: nn.Module | None = None

    @property
    def world(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.accelerator.process_index)

    @property
    def main(self) -> bool:
        """Whether this process writes and speaks."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    def wait(self) -> None:
        """Go on when every process is here."""
        self.accelerator.wait_for_everyone()

    def total(self, values: Tensor) -> Tensor:
        """Sum of fp64 `values` over processes."""
        if self.world == 1:
            return values
        moved = values.to(self.device, torch.float64)
        dist.all_reduce(moved)
        return moved.cpu()

    def from_main(self, value: Any) -> Any:
        """What the main process has."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def start_alike(self, module: nn.Module) -> None:
        """Give `module` the main process's weights."""
        if self.world == 1:
            return
        with torch.no_grad():
            for tensor in module.state_dict().values():
                shared = tensor.to(self.device)
                dist.broadcast(shared, src=0)
                tensor.copy_(shared)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose forward is to be called; its gradients are means over processes."""
        if self.sharded:
            wrapped = module.to(self.device)
            fully_shard(wrapped)
        else:
            wrapped = self.accelerator.prepare(module)
        self._module = wrapped
        return wrapped

    @contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; gradients are exchanged in the last one."""
        module = self._module
        assert module is not None, "a module must be wrapped before it is trained"
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
            yield
        elif last:
            yield
        else:
            with self.accelerator.no_sync(module):
                yield


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be in shards; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's state dict with every tensor whole, on the CPU: the same whatever the processes."""
    entries = {
        key: {
            name: whole(value).cpu() if isinstance(value, Tensor) else value for name, value in entry.items()
        }
        for key, entry in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole weights into a module that may be in shards."""
    own = module.state_dict()
    module.load_state_dict({name: sharded_like(tensor, own[name]) for name, tensor in weights.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole optimiser state where parameters may be in shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        key: {
            name: sharded_like(value, parameters[key])
            if isinstance(value, Tensor) and value.shape == parameters[key].shape
            else value
            for name, value in entry.items()
        }
        for key, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": state["param_groups"]})


def sharded_like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` in the shards of `model`, if it is in any, and on its device."""
    if not isinstance(model, DTensor):
        return tensor.to(model.device)
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)
