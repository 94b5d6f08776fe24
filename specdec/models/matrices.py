"""Matrices by number, for loops in TorchScript: one place that knows how each storage multiplies.

Owns the choice of the product at run time and the int8 product whose rows do not depend on each other. Knows
nothing of what the matrices are for.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.models.layers import Linear, Storage, bf16_product, int8_overflows, spread_rows


class Matrices(nn.Module):
    """Some linear layers, held as lists.

    Args:
        linears: in the order of their numbers.
    """

    # branches not taken are not compiled
    __constants__: tuple[str, ...] = ("any_packed", "any_bf16")

    def __init__(self, linears: list[Linear]) -> None:
        super().__init__()
        packed = [linear.packed for linear in linears if linear.packed is not None]
        nothing = torch.empty(0)
        self.any_packed = bool(packed)
        self.any_bf16 = any(linear.storage is Storage.BF16 for linear in linears)
        self.seven_bits = any(linear.storage is Storage.INT8 for linear in linears) and int8_overflows()
        self.storage = [int(linear.storage) for linear in linears]
        if packed:
            # a plain matrix has a place in the list, and nobody reads it
            self.packed = [packed[0] if linear.packed is None else linear.packed for linear in linears]
        self.weights = [linear.weight for linear in linears]
        self.biases = [nothing if linear.bias is None else linear.bias for linear in linears]

    def product(self, matrix: int, x: Tensor) -> Tensor:
        """Product of x [T, in] and the matrix of that number."""
        if self.any_bf16 and self.storage[matrix] == 3:
            bias = self.biases[matrix]
            product = bf16_product(x, self.weights[matrix])
            return (product + bias).to(x.dtype) if bias.numel() > 0 else product
        if self.any_packed:
            if self.storage[matrix] == 1:
                return torch.ops.quantized.linear_dynamic_fp16(x, self.packed[matrix])
            elif self.storage[matrix] == 2:
                spread, scale = spread_rows(x)
                rounded = torch.ops.quantized.linear_dynamic(spread, self.packed[matrix], self.seven_bits)
                bias = self.biases[matrix]
                return rounded * scale + bias if bias.numel() > 0 else rounded * scale
            else:
                return self.plain(matrix, x)
        else:
            return self.plain(matrix, x)

    def plain(self, matrix: int, x: Tensor) -> Tensor:
        """Product of x [T, in] and a matrix that is not packed."""
        bias = self.biases[matrix]
        if bias.numel() > 0:
            return F.linear(x, self.weights[matrix], bias)
        return F.linear(x, self.weights[matrix])


def scripted(module: nn.Module) -> Any:
    """The module as TorchScript; as it is from Python 3.14 on, where torch does not support that."""
    if sys.version_info >= (3, 14):
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)
