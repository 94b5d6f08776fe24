"""Run records are complete, files are written whole, and a fingerprint follows what a model computes."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec import provenance
from specdec.errors import SpecdecError
from specdec.provenance import RunRecord, folder_fingerprint, write_json_atomic, write_text_atomic


def test_a_record_says_what_is_needed_to_repeat_the_run(tmp_path: Path) -> None:
    record = RunRecord.collect(
        dtype="float32", seeds={"sampling": 3}, defaults={"max_tokens": 128}, extra={"boundaries": [2, 5]}
    )
    record.write(tmp_path / "run.json")
    loaded = json.loads((tmp_path / "run.json").read_text())
    assert loaded["schema"] == "specdec.run/1"
    assert loaded["versions"]["torch"]
    assert loaded["versions"]["specdec"]
    assert loaded["hardware"]["cores"] >= 1
    assert set(loaded["git"]) == {"revision", "dirty"}
    assert loaded["seeds"] == {"sampling": 3}
    assert loaded["defaults"] == {"max_tokens": 128}
    assert loaded["template_hash"] is None
    assert "/" not in loaded["command"][0]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an output opened for writing before it is known that it can be finished."""
    path = tmp_path / "metrics.json"
    write_json_atomic(path, {"tau": 1.5})

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provenance.os, "fsync", fail)
    with pytest.raises(SpecdecError, match=r"metrics\.json: No space left"):
        write_json_atomic(path, {"tau": 9.9})
    assert json.loads(path.read_text()) == {"tau": 1.5}
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.json"]


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecdecError, match="cannot write"):
        write_text_atomic(tmp_path / "file" / "run.json", "{}")


def test_nan_is_refused_in_files() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic("unused.json", {"rate": float("nan")})
    assert not Path("unused.json").exists()


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    return folder


def test_the_fingerprint_ignores_how_the_same_weights_are_stored(model: Path, tiny_llama: Path) -> None:
    """Catches a draft refused because another transformers version wrote its target's folder."""
    save_file(
        load_file(model / "model.safetensors"),
        model / "model.safetensors",
        metadata={"format": "pt", "a": "b"},
    )
    config = json.loads((model / "config.json").read_text())
    rope = config.pop("rope_parameters")
    older = {
        **config,
        "rope_theta": rope["rope_theta"],
        "transformers_version": "4.1",
        "torch_dtype": "float32",
    }
    (model / "config.json").write_text(json.dumps(older))
    assert folder_fingerprint(model) == folder_fingerprint(tiny_llama)


@pytest.mark.parametrize("change", ["weight", "eps", "theta"])
def test_the_fingerprint_changes_with_what_is_computed(model: Path, change: str) -> None:
    before = folder_fingerprint(model)
    config = json.loads((model / "config.json").read_text())
    if change == "weight":
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"][3] += 1e-3
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    elif change == "eps":
        config["rms_norm_eps"] *= 2
    else:
        config["rope_parameters"]["rope_theta"] = 5e5
    (model / "config.json").write_text(json.dumps(config))
    assert folder_fingerprint(model) != before


def test_a_tied_head_counts_once(tiny_model_factory: object, tmp_path: Path) -> None:
    """Catches a fingerprint that depends on whether the tied copy of the embedding was stored."""
    folder = tiny_model_factory("llama", tie_word_embeddings=True)  # type: ignore[operator]
    stored = tmp_path / "stored"
    shutil.copytree(folder, stored)
    tensors = load_file(stored / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    assert folder_fingerprint(stored) == folder_fingerprint(folder)


def test_the_fingerprint_is_computed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder_fingerprint(model)
    monkeypatch.setattr(provenance, "_fingerprint", lambda *_: pytest.fail("hashed again"))
    assert folder_fingerprint(model) == first


def test_a_home_that_cannot_be_written_costs_only_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folder_fingerprint(model)
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "blocked"))
    assert folder_fingerprint(model) == first
