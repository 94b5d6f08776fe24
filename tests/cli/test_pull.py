"""`specdec pull`: what ends up in the cache is whole, converted once, and said by name when it is wrong.

From local folders and files; the wheel and the hub are in test_pull_remote.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec.cli.main as program
from specdec import convert, hub
from specdec.errors import SpecdecError, UsageError
from specdec.hub import describe, models_dir, pull, resolve_target
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
    assert tokenizer.eos_token == "<|eot|>"
    assert tokenizer.decode(tokenizer.encode("a , b .  c")) == "a , b .  c"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    assert resolve_target("tiny") == folder


@pytest.mark.parametrize(("rule", "pieces"), [("smollm", ["\u0120", "1", "2"]), ("gpt-2", ["\u012012"])])
def test_a_gguf_keeps_its_rule_for_cutting_text(
    gguf_of_rule: Callable[[str | None], Path], rule: str, pieces: list[str]
) -> None:
    """Catches digits cut by GPT-2's pattern in a model trained on single digits: other ids for a list."""
    from transformers import AutoTokenizer

    core = AutoTokenizer.from_pretrained(pull(str(gguf_of_rule(rule)))).backend_tokenizer
    assert [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(" 12")] == pieces


def test_an_unknown_rule_for_cutting_text_is_said(gguf_of_rule: Callable[[str | None], Path]) -> None:
    said: list[str] = []
    pull(str(gguf_of_rule("new-rule")), progress=said.append)
    assert sum("'new-rule', which is not known" in line for line in said) == 1


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
