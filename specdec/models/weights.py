"""Reading a target's safetensors into named tensors, with errors that name file and tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.random_target import RandomWeights, is_random


class WeightSource(Protocol):
    """Where a target's tensors come from."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, which must have `shape`."""
        ...


def open_weights(folder: str | Path, device: str) -> WeightSource:
    """The tensors of a target's folder; those of a random target are made on `device`."""
    return RandomWeights(folder, device) if is_random(folder) else WeightReader(folder)


class WeightReader:
    """Tensors of a Hugging Face folder by name, read on demand from one file or an indexed set.

    Raises:
        SpecdecError: no safetensors in the folder, a truncated file, or a missing tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [self.folder / name for name in names]
        elif single.exists():
            files = [single]
        else:
            raise SpecdecError(
                f"target folder ({folder}) has no model.safetensors; run `specdec pull` on the model"
            )
        self._where: dict[str, Path] = {}
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118  # not a dict
                self._where[name] = file

    def _open(self, file: Path):  # type: ignore[no-untyped-def]  # safetensors ships no types
        try:
            return safe_open(file, framework="pt")
        except FileNotFoundError as error:
            raise SpecdecError(f"{file} is named by the index but missing") from error
        except (SafetensorError, OSError) as error:
            raise SpecdecError(f"{file} is not a readable safetensors file: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, which must have `shape`."""
        if name not in self._where:
            raise SpecdecError(f"target folder ({self.folder}) lacks the tensor {name!r}")
        tensor: Tensor = self._open(self._where[name]).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise SpecdecError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the config says {shape} ({self.folder})"
            )
        return tensor


def stacked(reader: WeightSource, names: list[str], rows: list[int], columns: int) -> Tensor:
    """The weights `names` one above the other: [sum(rows), columns]."""
    return torch.cat([reader.get(name, (count, columns)) for name, count in zip(names, rows, strict=True)])


def stacked_bias(reader: WeightSource, names: list[str], rows: list[int]) -> Tensor:
    """The biases `names` one after the other: [sum(rows)]."""
    return torch.cat([reader.get(name, (count,)) for name, count in zip(names, rows, strict=True)])
