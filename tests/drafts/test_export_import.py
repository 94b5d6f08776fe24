"""Drafts from elsewhere: damaged, disordered or of another kind; each is put right, or refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafts.checkpoint import StoredDraft
from specdec.drafts.export import make_export, write_export
from specdec.drafts.foreign import ForeignDraft, read_foreign
from specdec.drafts.formats import FORMATS
from specdec.drafts.target_facts import TargetFacts
from specdec.errors import SpecdecError

EXPECTED_IDS = [0, 3, 4, 9, 12, 39]
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


class Folder:
    """An export that tests damage and read again."""

    def __init__(self, path: Path, name: str, draft: StoredDraft, facts: TargetFacts) -> None:
        self.path, self.form, self.facts = path, FORMATS[name], facts
        write_export(path, make_export(draft, self.form, facts), draft, self.form, facts, {})

    def change(self, change: Change) -> None:
        config = json.loads((self.path / "config.json").read_text())
        tensors = load_file(self.path / "model.safetensors")
        change(config, tensors)
        (self.path / "config.json").write_text(json.dumps(config))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, self.path / "model.safetensors"
        )

    def read(self) -> ForeignDraft:
        return read_foreign(self.path, self.form, self.facts, "t" * 64)


@pytest.fixture
def exported(make_stored: Any, facts: TargetFacts, tmp_path: Path) -> Callable[..., Folder]:
    """Call with a format and overrides of the head."""

    def make(name: str, **overrides: Any) -> Folder:
        return Folder(tmp_path / "foreign", name, make_stored(**overrides), facts)

    return make


def test_the_prefix_of_nemo_is_taken_off(exported: Any, make_stored: Any) -> None:
    folder = exported("sglang")

    def prefix(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["architectures"] = ["LlamaEagle3DraftModel"]
        for name in [name for name in tensors if name not in ("d2t", "t2d")]:
            tensors[f"model.{name.replace('midlayer', 'layers.0')}"] = tensors.pop(name)

    folder.change(prefix)
    found = folder.read()
    assert found.draft.tensors.keys() == make_stored().tensors.keys()
    assert "prefix model." in found.remarks[0]


def test_a_map_in_order_of_frequency_is_sorted_with_its_output_rows(exported: Any, make_stored: Any) -> None:
    """Catches the slicing of target logits by a mask that has another order (Model-Optimizer's exports)."""
    order = torch.tensor([3, 0, 5, 1, 4, 2])

    def shuffle(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        ids = torch.tensor(EXPECTED_IDS)[order]
        tensors["d2t"] = ids - torch.arange(6)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        del tensors["t2d"]

    folder = exported("vllm", lm_head="own")
    folder.change(shuffle)
    found = folder.read()
    original = make_stored(lm_head="own")
    assert found.draft.config == original.config
    for name in ("d2t", "t2d", "lm_head.weight"):
        assert torch.equal(found.draft.tensors[name], original.tensors[name])
    assert len(found.remarks) == 2


def test_a_missing_mask_is_made_from_the_map(exported: Any, make_stored: Any) -> None:
    folder = exported("vllm")
    folder.change(lambda config, tensors: tensors.pop("t2d"))
    found = folder.read()
    assert torch.equal(found.draft.tensors["t2d"], make_stored().tensors["t2d"])
    assert found.remarks == ("t2d is missing: made from d2t",)


@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc"])
def test_unsorted_layers_are_sorted_with_the_columns_that_read_them(
    flag: str, exported: Any, make_stored: Any
) -> None:
    """Catches the silent corruption of engines that capture in ascending depth, whatever a config lists."""
    order = [2, 0, 1]

    def disorder(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        ids = config["eagle_aux_hidden_state_layer_ids"]
        config["eagle_aux_hidden_state_layer_ids"] = [ids[tap] for tap in order]
        for name in ("fc.weight", "input_norm.weight"):
            if name in tensors:
                blocks = tensors[name].chunk(3, dim=-1)
                tensors[name] = torch.cat([blocks[tap] for tap in order], -1)
        norms = {
            f"fc_norm.{place}.weight": tensors.get(f"fc_norm.{tap}.weight") for place, tap in enumerate(order)
        }
        tensors.update({name: norm for name, norm in norms.items() if norm is not None})

    folder = exported("vllm", **{flag: True})
    folder.change(disorder)
    found, original = folder.read(), make_stored(**{flag: True})
    assert found.draft.config == original.config
    for name, tensor in original.tensors.items():
        assert torch.equal(found.draft.tensors[name], tensor), name
    assert "not ascending" in found.remarks[0]


def test_a_pickled_file_is_read_as_tensors_alone(exported: Any, make_stored: Any, tmp_path: Path) -> None:
    folder = exported("eagle")
    path = folder.path / "model.safetensors"
    torch.save(load_file(path), folder.path / "pytorch_model.bin")
    with pytest.raises(SpecdecError, match=r"model\.safetensors and pytorch_model\.bin"):
        folder.read()
    path.unlink()
    assert folder.read().draft.tensors.keys() == make_stored().tensors.keys()

    class Program:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (folder.path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Program()}, protocol=2))
    with pytest.raises(SpecdecError, match="nothing else in it is run"):
        folder.read()
    assert not (tmp_path / "ran").exists()


def test_shards_are_read_together(exported: Any, make_stored: Any) -> None:
    folder = exported("vllm")
    tensors = load_file(folder.path / "model.safetensors")
    (folder.path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder.path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert folder.read().draft.tensors.keys() == make_stored().tensors.keys()


def test_sglang_spells_norms_by_depth_and_shares_a_head_of_all_tokens(exported: Any) -> None:
    def respell(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["draft_vocab_size"] = None
        config["use_aux_norm"] = config.pop("fc_norm")
        del tensors["lm_head.weight"]
        for tap, name in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{tap}.weight")

    folder = exported("sglang", fc_norm=True, draft_vocab_size=40)
    folder.change(respell)
    config = folder.read().draft.config
    assert (config.fc_norm, config.lm_head, config.draft_vocab_size) == (True, "target_rows", 40)


def test_absent_layer_ids_are_those_the_engines_assume_and_that_is_said(exported: Any) -> None:
    folder = exported("vllm")
    folder.change(lambda config, tensors: config.pop("eagle_aux_hidden_state_layer_ids"))
    found = folder.read()
    assert found.draft.config.boundaries == (2, 4, 5)
    assert found.remarks == ("no layer ids stored: boundaries [2, 4, 5], which the engines assume",)


def test_a_portable_folder_with_both_lists_is_read_alike_by_both(exported: Any) -> None:
    def both(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}

    folder = exported("vllm")
    folder.change(both)
    assert folder.read().draft.config.boundaries == (2, 4, 5)
    folder.form = FORMATS["sglang"]
    assert folder.read().draft.config.boundaries == (2, 4, 5)


def _set(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def _drop(name: str) -> Change:
    return lambda config, tensors: (config if name in config else tensors).pop(name)


def _add(name: str, *shape: int) -> Change:
    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(shape, dtype=torch.float16)

    return add


def _rename(old: str, new: str) -> Change:
    def rename(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return rename


def _map(*offsets: int) -> Change:
    def set_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.tensor(offsets)

    return set_map


def _float_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"].half()


def _nested(*ids: int) -> Change:
    return lambda config, tensors: config.update(
        eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids)}, eagle_aux_hidden_state_layer_ids=None
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vllm", _drop("d2t"), "d2t is missing and the head says 6 of 40"),
        ("vllm", _drop("lm_head.weight"), "lm_head.weight is missing"),
        ("vllm", _drop("norm.weight"), "tensor norm.weight is missing"),
        (
            "vllm",
            _rename("norm.weight", "final.weight"),
            "norm.weight is missing; it has final.weight instead",
        ),
        ("vllm", _add("surplus.weight", 2), "surplus.weight is not part of this head"),
        ("vllm", _map(0, 2, 2, 6, 8, 35), "target id 40, outside 0..39"),
        ("vllm", _map(0, -1, 2, 6, 8, 34), "strictly increasing"),
        ("vllm", _map(0, 3, 4, 9, 12, 39), "target id 44|t2d must be true"),
        ("vllm", _float_map, "d2t .torch.float16"),
        (
            "vllm",
            _add("midlayer.self_attn.q_norm.weight", 6),
            "q_norm.weight is not part of this head",
        ),
        ("vllm", _add("layers.1.mlp.up_proj.weight", 6), "head with several decoder layers"),
        ("vllm", _add("fc.bias", 16), "a bias on the fusion"),
        ("vllm", _add("mask_hidden", 1, 1, 48), "P-EAGLE"),
        ("vllm", _add("model.fc.weight", 16, 48), "two tensors are fc.weight"),
        ("sglang", _add("embed_tokens.weight", 40, 16), "which SGLang uses in their place"),
        ("eagle", _add("embed_tokens.weight", 40, 16), "which SafeAILab's EAGLE repository uses in"),
        ("vllm", _add("embed_tokens.weight", 40, 17), "embed_tokens.weight has shape"),
        ("vllm", _set(hidden_size=32), r"hidden_size \(32\) is not the target's 16"),
        ("sglang", _set(hidden_size=32), "SGLang has no heads of another width"),
        ("speculators", _set(hidden_size=32, target_hidden_size=16), "has no heads of another width"),
        ("vllm", _set(hidden_size=32, target_hidden_size=None), r"target_hidden_size \(32\) must be 16"),
        ("vllm", _set(target_hidden_size=32), "another target"),
        ("vllm", _set(vocab_size=41), "another target"),
        ("vllm", _set(num_hidden_layers=2), r"num_hidden_layers \(2\) must be 1"),
        ("vllm", _set(model_type="qwen3"), "must agree on norms on queries and keys"),
        ("vllm", _set(model_type="gemma3"), r"model_type \(gemma3\) must be llama"),
        ("sglang", _set(model_type="qwen3"), r"model_type \(qwen3\) must be llama"),
        ("vllm", _set(architectures=["Eagle3Qwen3ForCausalLM"]), "Eagle3Qwen3ForCausalLM"),
        (
            "vllm",
            _set(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3"),
            "k_norm.weight is missing",
        ),
        ("vllm", _set(architectures=["LlamaEagle3DraftModel"]), "LlamaEagle3DraftModel"),
        ("vllm", _set(hidden_act="gelu"), "hidden_act"),
        ("vllm", _set(mlp_bias=True), "mlp_bias"),
        ("vllm", _set(quantization_config={"bits": 4}), "unquantised"),
        ("vllm", _set(tie_word_embeddings=True), "tie_word_embeddings"),
        ("vllm", _set(num_aux_hidden_states=4), r"num_aux_hidden_states \(4\) must be 3"),
        ("vllm", _set(eagle_aux_hidden_state_layer_ids=[2, 4, 4]), "must be distinct"),
        ("vllm", _set(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), r"must lie in 0\.\.8"),
        ("vllm", _set(eagle_aux_hidden_state_layer_ids="2"), "list of whole numbers"),
        (
            "vllm",
            _set(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}),
            "remove the list that is wrong",
        ),
        ("vllm", _nested(2, 4, 5), "--from sglang"),
        ("vllm", _set(rope_theta=10.0), "must agree"),
        ("vllm", _set(rope_scaling={"rope_type": "mrope"}, rope_parameters=None), "mrope"),
        ("vllm", _set(speculators_model_type="eagle3"), "--from speculators"),
        ("vllm", _drop("rms_norm_eps"), "rms_norm_eps is missing"),
        ("sglang", _set(eagle_config={}, eagle_aux_hidden_state_layer_ids=[2, 4, 5]), "SGLang ignores"),
        ("sglang", _set(norm_before_residual=True), "norm_before_residual .true. is ignored by SGLang"),
        ("sglang", _set(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        ("speculators", _drop("norm_before_residual"), "readers disagree"),
        ("speculators", _set(speculators_model_type="peagle"), "peagle"),
        ("speculators", _drop("transformer_layer_config"), "transformer_layer_config is missing"),
        ("eagle", _set(norm_output=True), "norm_output .true. is ignored by SafeAILab"),
        ("eagle", _set(rope_scaling={"type": "linear", "factor": 2.0}), "is ignored by SafeAILab"),
        (
            "eagle",
            _set(rope_theta=1e4, rope_parameters=None, rope_scaling={"type": "yarn", "factor": 2.0}),
            "yarn",
        ),
    ],
)
def test_what_cannot_be_read_as_it_was_trained_is_refused_by_name(
    name: str, change: Change, message: str, exported: Any
) -> None:
    folder = exported(name)
    folder.change(change)
    with pytest.raises(SpecdecError, match=message):
        folder.read()


def test_weights_in_a_format_of_eight_bits_are_refused(exported: Any) -> None:
    def quantise(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)

    folder = exported("vllm")
    folder.change(quantise)
    with pytest.raises(SpecdecError, match=r"fc\.weight \(torch\.float8_e4m3fn\)"):
        folder.read()


def test_tied_embeddings_are_the_output_head_only_on_a_tied_target(exported: Any, facts: TargetFacts) -> None:
    def tie(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]

    folder = exported("vllm", draft_vocab_size=40)
    folder.change(tie)
    with pytest.raises(SpecdecError, match="not on this target"):
        folder.read()
    folder.facts = replace(facts, lm_head=facts.embed)
    assert folder.read().draft.config.lm_head == "target_rows"


def test_embeddings_beside_a_head_are_dropped_where_they_are_the_targets(
    exported: Any, make_stored: Any
) -> None:
    found = exported("speculators").read().draft
    assert found.tensors.keys() == make_stored().tensors.keys()


def test_the_repository_assumes_a_theta_where_none_is_stated(exported: Any) -> None:
    """Catches the target's theta filled in where the head was trained with the default."""
    folder = exported("eagle")
    folder.change(_set(rope_theta=None, rope_parameters=None))
    found = folder.read()
    assert found.draft.config.rope.theta == 10000.0
    assert "rope_theta is not stated: 10000" in found.remarks[0]
