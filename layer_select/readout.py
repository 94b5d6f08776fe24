"""From states to logits the way the target does it, and a check that its taps hold the whole stream.

Owns what is asked of a target beyond its states. Does not know estimators or how rows are chosen.

What lies between the last boundary and the logits differs (a final norm, soft-capping, scaling, an offloaded
head), so none of it is repeated here: the target runs on one dummy token while its final norm is handed the
states in question. That costs one decoder step a call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import SpecdecError
from specdec.hf import BoundaryTap, decoder_layers, final_norm, input_device, output_head, stream_entering

# logits held at once: 64 MiB in fp32.
BLOCK_ELEMENTS = 1 << 24
# enough positions for attention to matter, few enough to cost nothing.
PROBE_TOKENS = 8
# a residual kept apart is added in another order here than in the target: a few roundings.
STREAM_ULPS = 16.0


class Readout:
    """The target's own way from states to logits, in blocks of rows so that memory stays bounded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        head: Any = output_head(model)
        self._norm = final_norm(model)
        self._dtype = model.get_input_embeddings().weight.dtype
        self.device = input_device(model)
        self.hidden_size = int(model.get_input_embeddings().weight.shape[1])
        self.vocab_size = int(head.weight.shape[0])

    @torch.no_grad()
    def over_logits(self, states: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """What `reduce` makes of the logits `[block, vocabulary]`, fp32, of states before the final norm.

        Args:
            states: `[rows, hidden]`.
            reduce: a function of a block's logits with one result a row; results are put together.
        """
        return torch.cat([reduce(self._step(block, before=True)) for block in self._blocks(states)])

    @torch.no_grad()
    def logits_of_features(self, features: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]`, fp32, of features `[rows, hidden]` after the final norm."""
        return torch.cat([self._step(block, before=False) for block in self._blocks(features)])

    @torch.no_grad()
    def features(self, states: Tensor) -> Tensor:
        """Normed states `[rows, hidden]`, fp32: what the output head is given."""
        device = _device_of(self._norm, self.device)
        return self._norm(states.to(device, self._dtype)).float().to(states.device)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]`, fp32, of token ids `[rows]`."""
        return self._model.get_input_embeddings()(ids.to(self.device)).float()

    def _blocks(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(max(1, BLOCK_ELEMENTS // self.vocab_size))

    def _step(self, rows: Tensor, *, before: bool) -> Tensor:
        given = rows.unsqueeze(0).to(self._dtype)
        device = _device_of(self._norm, self.device)

        def replace_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
            return (given.to(device),)

        def replace_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return given.to(device)

        hook = (
            self._norm.register_forward_pre_hook(replace_input)
            if before
            else self._norm.register_forward_hook(replace_output)
        )
        try:
            dummy = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            return self._model(input_ids=dummy, use_cache=False).logits[0].float().to(rows.device)
        finally:
            hook.remove()


def _device_of(module: nn.Module, fallback: torch.device) -> torch.device:
    """Where a module's weights are; `fallback` where it has none or they are offloaded."""
    parameter = next(module.parameters(), None)
    return fallback if parameter is None or parameter.device.type == "meta" else parameter.device


def check_stream(model: Any) -> None:
    """Refuse a target whose taps miss part of the stream: each must equal what the next layer is given.

    One forward of a few tokens. Catches architectures that change the stream between layers or before the
    final norm, which would otherwise be measured, and later served, with the wrong states.
    """
    layers = decoder_layers(model)
    followers: list[nn.Module] = [*layers[1:], final_norm(model)]
    entering: dict[int, Tensor] = {}

    def seen(boundary: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering[boundary] = stream_entering(args, kwargs)

        return hook

    ids = torch.arange(PROBE_TOKENS, device=input_device(model)).unsqueeze(0)
    with ExitStack() as stack, BoundaryTap(model, range(len(layers) + 1)) as tap:
        for boundary, module in enumerate(followers, start=1):
            handle = module.register_forward_pre_hook(seen(boundary), with_kwargs=True)
            stack.callback(handle.remove)
        with torch.no_grad():
            model.base_model(input_ids=ids, use_cache=False)
    for boundary, module in enumerate(followers, start=1):
        tapped, given = tap.states[boundary], entering.get(boundary)
        tolerance = STREAM_ULPS * torch.finfo(tapped.dtype).eps * float(tapped.abs().max())
        if given is None or given.shape != tapped.shape:
            raise _stream_error(model, boundary, module)
        if float((given.to(tapped.device) - tapped).abs().max()) > tolerance:
            raise _stream_error(model, boundary, module)


def _stream_error(model: Any, boundary: int, module: nn.Module) -> SpecdecError:
    return SpecdecError(
        f"target architecture ({type(model).__name__}) hands {type(module).__name__} at boundary {boundary} "
        "something else than the layer before it puts out; its taps would miss part of the residual stream, "
        "so layers cannot be selected for it"
    )
