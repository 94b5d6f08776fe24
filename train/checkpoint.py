"""Training checkpoints: everything a run needs to go on as if it had never stopped.

Owns their layout, their atomic writing, their retention and which of them a resumed run takes. A checkpoint
is one file written under another name and renamed, so a kill at any moment leaves the last complete one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from specdec.errors import OtherRunError, SpecdecError, writing

FOLDER = "checkpoints"
PATTERN = re.compile(r"step-(\d{8})\.pt")


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """State of a run after `step` optimiser steps.

    `contract` names what the run was started with (options, data, taps, target); resuming under another one
    is refused. The data position is (epoch, batch) of the next batch; random numbers are functions of (seed,
    step), the generator state is kept beside them for whatever a library draws. `average` are the averaged
    weights, where the run keeps some.
    """

    step: int
    epoch: int
    batch: int
    total_steps: int
    slots_seen: int
    seconds: float
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    rng: Tensor
    contract: Mapping[str, Any]
    average: Mapping[str, Tensor] | None = None


class _Sink:
    """A file to write to that remembers why a write failed: torch's own error does not say."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_state(folder: Path, state: TrainState, *, keep: int) -> Path:
    """Write a checkpoint atomically and delete all but the last `keep`."""
    place = folder / FOLDER
    path = place / f"step-{state.step:08d}.pt"
    scratch = place / f".{path.name}.partial"
    with writing(f"checkpoint ({path})"):
        place.mkdir(parents=True, exist_ok=True)
        try:
            _write_synced(scratch, state)
            os.replace(scratch, path)
        except BaseException:
            # half a checkpoint must not keep a full disk full
            scratch.unlink(missing_ok=True)
            raise
        for old in [*_paths(folder)[:-keep], *place.glob(".step-*.partial")]:
            old.unlink()
    return path


def _write_synced(path: Path, state: TrainState) -> None:
    with open(path, "wb") as file:
        sink = _Sink(file)
        try:
            torch.save(vars(state), cast(IO[bytes], sink))
        except RuntimeError as error:
            if sink.failure is None:
                raise
            raise sink.failure from error
        file.flush()
        os.fsync(file.fileno())


def latest_state(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, None when there is none."""
    paths = _paths(folder)
    return paths[-1] if paths else None


def load_state(
    path: Path,
    contract: Mapping[str, Any],
    absent: Mapping[str, Any] = MappingProxyType({}),
    *,
    whole: bool = True,
) -> TrainState:
    """Read a checkpoint and refuse one of a differently configured run, naming the first difference.

    Args:
        path: the checkpoint.
        contract: of the run that resumes.
        absent: what an entry stands for that a contract lacks: options younger than the checkpoint.
        whole: `contract` has every entry; else only those it has are compared.
    """
    try:
        raw = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise SpecdecError(
            f"checkpoint ({path}) cannot be read: {error}; delete it to resume from the one before"
        ) from error
    state = TrainState(**raw)
    for key in sorted(set(state.contract) | set(contract) if whole else contract):
        old, new = (side.get(key, absent.get(key)) for side in (state.contract, contract))
        if old != new:
            raise OtherRunError(
                f"{key} ({new}) differs from the run being resumed ({old}); use the same value, another "
                "--out, or --no-resume"
            )
    return state


def _paths(folder: Path) -> list[Path]:
    place = folder / FOLDER
    if not place.is_dir():
        return []
    return sorted(path for path in place.iterdir() if PATTERN.fullmatch(path.name))
