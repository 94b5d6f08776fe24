"""Hugging Face targets: loading, boundary taps, chat rendering.

Owns every touch of `transformers` that may change with its version: how a target is loaded, where its decoder
layers, final norm and output head sit, how the residual stream is captured, and how a chat becomes token ids.
Layer selection and training use this module for any decoder-only causal LM; serving uses `specdec.models`.

Does not know: which boundaries are wanted or why, batching, the draft head.

Boundary index b in 0..N for a target of N decoder layers: 0 is the input of the first decoder layer (the
embedding output as that layer receives it), b is the output of decoder layer b-1, N is therefore before the
final norm. The last entry of HF's `output_hidden_states` is after the final norm, which is why taps are hooks
and not that tuple.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from specdec.errors import SpecdecError
from specdec.loading import require_loading
from specdec.random_target import is_random

# layer kinds with a recurrent or convolutional state instead of a KV cache: a draft cannot be rolled back.
RECURRENT_LAYER_TYPES = frozenset(
    {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent", "rwkv"}
)
# architectures that are recurrent or hybrid without saying so in `layer_types`, and what their layers are.
RECURRENT_MODEL_TYPES = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), "mamba"),
    **dict.fromkeys(("mamba2", "bamba", "falcon_h1", "nemotron_h", "plamo2", "zamba2"), "mamba2"),
    **{"granitemoehybrid": "mamba2", "lfm2": "conv", "lfm2_moe": "conv", "minimax": "linear_attention"},
    **{"recurrent_gemma": "recurrent", "rwkv": "rwkv", "xlstm": "xlstm"},
}
# names of the module applied after the last decoder layer, as transformers spells them.
FINAL_NORM_NAMES = (
    "norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm", "ln_final", "layer_norm",
)  # fmt: skip
# names of decoder layer lists, used only to break a tie between lists of equal length at equal depth.
LAYER_LIST_NAMES = frozenset({"layers", "h", "blocks", "block", "decoder_layers"})
MASKED_LM_SUFFIXES = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForPreTraining")


def _target_folder(folder: str | Path) -> Path:
    """Return `folder` as a path after checking that it looks like a Hugging Face model folder."""
    path = Path(folder)
    if not path.is_dir():
        raise SpecdecError(
            f"target folder ({path}) does not exist; pass a Hugging Face model folder or run specdec pull"
        )
    if not (path / "config.json").is_file():
        raise SpecdecError(
            f"target folder ({path}) has no config.json; it is not a Hugging Face model folder"
        )
    return path


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a target folder without touching the network."""
    path = _target_folder(folder)
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SpecdecError(
            f"target folder ({path}) has no readable tokenizer: {_first_line(error)}"
        ) from error


def tokenizer_json(tokenizer: Any) -> str:
    """Everything a fast tokenizer does, in the JSON of the `tokenizers` library.

    Raises:
        SpecdecError: a tokenizer written in Python, which has no such form.
    """
    if not tokenizer.is_fast:
        raise SpecdecError(
            f"tokenizer ({type(tokenizer).__name__}) must be a fast one (tokenizer.json) for grammars"
        )
    text: str = tokenizer.backend_tokenizer.to_str()
    return text


def load_hf_model(folder: str | Path, *, dtype: str = "float32", device_map: Any = None) -> Any:
    """Load a decoder-only causal LM from a folder, in eval mode and without gradients.

    Args:
        folder: Hugging Face model folder; nothing is fetched.
        dtype: "float32", "float16" or "bfloat16".
        device_map: for targets larger than one card: auto, balanced, balanced_low_0 or sequential, or a
            mapping of module names to devices; None loads to the processor.
    """
    path = _target_folder(folder)
    if is_random(path):
        raise SpecdecError(
            "a random target's weights exist in the runtime only: bench, generate and serve take it, "
            "commands that read the target through transformers need a real folder"
        )
    require_loading(dtype, device_map)
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise SpecdecError(
            f"target folder ({path}) has no readable config.json: {_first_line(error)}"
        ) from error
    check_supported(config)
    disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(path),
            config=config,
            dtype=getattr(torch, dtype),
            device_map=device_map,
            local_files_only=True,
            output_loading_info=True,
        )
    # safetensors, OS and shape errors share no base class narrower than this.
    except Exception as error:
        raise SpecdecError(
            f"target folder ({path}) could not be loaded as a causal LM: {_first_line(error)}"
        ) from error
    missing = sorted(loading["missing_keys"])
    # transformers would fill them with random numbers and only warn.
    if missing:
        raise SpecdecError(
            f"target folder ({path}) lacks {len(missing)} weights, first {missing[0]}; pull it again"
        )
    _refuse_convolutions(model)
    model.requires_grad_(False)
    return model.eval()


def _first_line(error: Exception) -> str:
    """The first line of an error's text, for one-line messages."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def check_supported(config: PretrainedConfig) -> None:
    """Refuse, by name, targets without one residual stream of rewindable decoder layers."""
    name = config.model_type or type(config).__name__
    if config.is_encoder_decoder:
        raise SpecdecError(f"target architecture ({name}) is encoder-decoder; use a decoder-only causal LM")
    architectures = config.architectures or []
    if architectures and all(arch.endswith(MASKED_LM_SUFFIXES) for arch in architectures):
        raise SpecdecError(
            f"target architecture ({architectures[0]}) is not a causal LM; use a decoder-only one"
        )
    text = config.get_text_config(decoder=True)
    fields = text.to_dict()
    kinds = set(fields.get("layer_types") or ()) | set(fields.get("layers_block_type") or ())
    recurrent = kinds & RECURRENT_LAYER_TYPES
    if not recurrent and text.model_type in RECURRENT_MODEL_TYPES:
        recurrent = {RECURRENT_MODEL_TYPES[text.model_type]}
    if recurrent:
        raise _recurrent_error(name, recurrent)


def _recurrent_error(name: str, kinds: Iterable[str]) -> SpecdecError:
    return SpecdecError(
        f"target architecture ({name}) has layers of kind {', '.join(sorted(kinds))}; hybrid and recurrent "
        "models are not supported, use one whose decoder layers are all attention"
    )


def _refuse_convolutions(model: nn.Module) -> None:
    """Refuse recurrent mixers of any name: Mamba, gated delta nets and short convolutions hold a Conv1d."""
    for layer in decoder_layers(model):
        modules = dict(layer.named_modules())
        mixers = {
            type(modules[name.rpartition(".")[0]]).__name__
            for name, module in modules.items()
            if isinstance(module, nn.Conv1d)
        }
        if mixers:
            raise _recurrent_error(type(model).__name__, mixers)


def _config_num_layers(model: nn.Module) -> int:
    config = model.config
    assert isinstance(config, PretrainedConfig), "a target must carry a PretrainedConfig"
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layer list: the shallowest ModuleList as long as the config's `num_hidden_layers`."""
    return _layer_list(model)[1]


def _layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    num_layers = _config_num_layers(model)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    # a list inside a layer (experts, per-layer parts) can have the same length but sits deeper.
    shallowest = min((name.count(".") for name, _ in found), default=0)
    found = [(name, module) for name, module in found if name.count(".") == shallowest]
    if len(found) > 1:
        found = [(name, module) for name, module in found if name.rpartition(".")[2] in LAYER_LIST_NAMES]
    if len(found) != 1:
        raise SpecdecError(
            f"target architecture ({type(model).__name__}) has {len(found)} candidate lists of {num_layers} "
            "decoder layers; exactly one is needed to place taps"
        )
    return found[0]


def num_decoder_layers(model: nn.Module) -> int:
    """Number N of decoder layers; boundaries run 0..N."""
    return len(decoder_layers(model))


def final_norm(model: nn.Module) -> nn.Module:
    """The norm applied to boundary N before the output head."""
    name, _ = _layer_list(model)
    parent = model.get_submodule(name.rpartition(".")[0])
    children = dict(parent.named_children())
    for candidate in FINAL_NORM_NAMES:
        if candidate in children:
            return children[candidate]
    raise SpecdecError(
        f"target architecture ({type(model).__name__}) has no final norm beside its decoder layers; "
        f"looked for {', '.join(FINAL_NORM_NAMES)}"
    )


def output_head(model: Any) -> nn.Module:
    """The module that turns normed states into logits over the target vocabulary."""
    head = model.get_output_embeddings()
    if head is None:
        raise SpecdecError(
            f"target architecture ({type(model).__name__}) has no output head; use a causal LM"
        )
    return head


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go: the device of the first weights that are not offloaded."""
    return next(parameter.device for parameter in model.parameters() if parameter.device.type != "meta")


def run_decoder(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
    """One forward over the decoder stack without the output head, for its taps only.

    Args:
        model: target from `load_hf_model`.
        input_ids: `[batch, tokens]`.
        attention_mask: `[batch, tokens]`, 0 at padding.
    """
    with torch.no_grad():
        model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)


class BoundaryTap:
    """Captures the residual stream at chosen boundaries while the context is open.

    `states` maps boundary to a copy `[batch, tokens, hidden]`; a new dict begins at each forward, so states
    taken from an earlier forward stay as they were. Copies, because architectures may add to the stream in
    place.
    """

    def __init__(self, model: nn.Module, boundaries: Iterable[int]) -> None:
        self.boundaries = tuple(boundaries)
        self.states: dict[int, Tensor] = {}
        self._layers = decoder_layers(model)
        check_boundaries(self.boundaries, len(self._layers))
        self._handles: list[Any] = []

    def __enter__(self) -> BoundaryTap:
        assert not self._handles, "a tap is opened once at a time"
        # the first layer's hook also starts the new dict, whichever of model and base model is called.
        first = self._layers[0]
        self._handles.append(first.register_forward_pre_hook(self._enter_first_layer, with_kwargs=True))
        for boundary in self.boundaries:
            if boundary > 0:
                layer = self._layers[boundary - 1]
                self._handles.append(layer.register_forward_hook(self._after_layer(boundary)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_first_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.states = {}
        if 0 in self.boundaries:
            self.states[0] = stream_entering(args, kwargs)

    def _after_layer(self, boundary: int) -> Any:
        def capture(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.states[boundary] = _stream(output if isinstance(output, (tuple, list)) else (output,))

        return capture


def stream_entering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """A copy of the residual stream `[batch, tokens, hidden]` that a layer or norm is called with."""
    if args:
        return _stream(args)
    return _stream((kwargs["hidden_states"], kwargs.get("residual")))


def _stream(parts: Sequence[Any]) -> Tensor:
    """A copy of the whole stream from a layer's values: the first, plus a residual that is kept apart.

    Layers that fuse the addition into the next norm give (what they add, residual); the stream is their sum.
    Nothing else that layers return or take second (weights, caches, masks, positions) has the stream's shape.
    """
    hidden = parts[0]
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        shape = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise SpecdecError(
            f"a decoder layer's state ({shape}) must be one tensor [batch, tokens, hidden]; architectures "
            "with several residual streams are not supported"
        )
    if len(parts) > 1 and isinstance(parts[1], Tensor) and parts[1].shape == hidden.shape:
        return (hidden + parts[1]).detach()
    return hidden.detach().clone()


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> None:
    """Refuse boundaries outside 0..N, duplicates and descending order (fusion is order-sensitive)."""
    if not boundaries:
        raise SpecdecError(f"boundaries must name at least one of 0..{num_layers}")
    for boundary in boundaries:
        if not 0 <= boundary <= num_layers:
            raise SpecdecError(
                f"boundary ({boundary}) must be in 0..{num_layers}: 0 is the embedding output, "
                f"{num_layers} the output of the last decoder layer"
            )
    if any(left >= right for left, right in pairwise(boundaries)):
        raise SpecdecError(f"boundaries ({', '.join(map(str, boundaries))}) must be distinct and ascending")


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt with the tokenizer's own special tokens, the BOS at most once."""
    ids = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    bos = tokenizer.bos_token_id
    # a text that already starts with the BOS string would otherwise get two.
    if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        return ids[1:]
    return ids


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat: the one place where chats become ids. `variables` are the template's own.

    The template writes its own special tokens, so the text is encoded without adding any: one BOS, not two.
    """
    if tokenizer.chat_template is None:
        raise SpecdecError("the target's tokenizer has no chat template; pass plain prompts instead of chats")
    for index, message in enumerate(messages):
        # jinja renders a missing field as nothing: the turn would vanish silently.
        if not all(isinstance(message.get(field), str) for field in ("role", "content")):
            raise SpecdecError(f"chat message {index} ({dict(message)}) must have a string role and content")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(variables or {}),
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise SpecdecError(f"the chat template refused these messages: {_first_line(error)}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template, or "none" for a tokenizer without one."""
    template = tokenizer.chat_template
    if template is None:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
