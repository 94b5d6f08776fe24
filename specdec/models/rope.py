"""Rotary position embedding, every scaling type the supported configurations allow.

Frequencies follow the definitions of the Hugging Face configurations: linear (position
interpolation), dynamic NTK, YaRN (arXiv:2309.00071), Llama-3 and LongRoPE (arXiv:2402.13753).
The runtime never exceeds `max_position_embeddings`, inside which dynamic NTK equals the default.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.config import RopeConfig
from specdec.errors import SpecdecError


class RotaryEmbedding:
    """Tables of cosines and sines by absolute position.

    Args:
        config: rotary parameters.
        max_positions: longest context in use; LongRoPE takes its long factors when this exceeds the
            original context, for every position alike, so that a cached row never changes its meaning.
    """

    def __init__(self, config: RopeConfig, *, max_positions: int | None = None, device: str = "cpu") -> None:
        self.config = config
        self.max_positions = max_positions or config.max_position_embeddings
        inv_freq, self.attention_scaling = rope_frequencies(config, self.max_positions)
        self.inv_freq = inv_freq.to(device)
        self._cos, self._sin = self._tables(min(self.max_positions, 1024))
        self._turned: tuple[Tensor, Tensor] | None = None

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, dtype=torch.float32, device=self.inv_freq.device)
        angles = torch.outer(positions, self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    def cos_sin(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, head_dim] at `positions` [tokens], all of them below `longest`."""
        self._reach(longest)
        return self._cos[positions], self._sin[positions]

    def turned(self, longest: int) -> tuple[Tensor, Tensor]:
        """Tables of all positions below `longest` and more, for halves that are swapped and not negated.

        Returns:
            Cosines and sines [positions, 1, head_dim]; the sines of the first half have their sign turned.
        """
        self._reach(longest)
        if self._turned is None:
            sin = self._sin.clone()
            sin[:, : sin.shape[1] // 2].neg_()
            self._turned = self._cos.unsqueeze(1), sin.unsqueeze(1)
        return self._turned

    def _reach(self, longest: int) -> None:
        if longest > self._cos.shape[0]:
            self._cos, self._sin = self._tables(max(longest, 2 * self._cos.shape[0]))
            self._turned = None


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of each head: x [tokens, heads, head_dim], cos and sin [tokens, head_dim]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)


def rope_frequencies(config: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cosines and sines.

    Raises:
        SpecdecError: a parameter the rope type needs is missing.
    """
    dim, theta, params = config.head_dim, config.theta, config.params
    base = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if config.rope_type in ("default", "dynamic"):
        return base, 1.0
    if config.rope_type == "linear":
        return base / _param(config, "factor"), 1.0
    if config.rope_type == "llama3":
        return _llama3(config, base), 1.0
    if config.rope_type == "yarn":
        return _yarn(config, base)
    assert config.rope_type == "longrope", f"unknown rope type {config.rope_type}"
    original = int(params.get("original_max_position_embeddings") or config.max_position_embeddings)
    factors = params.get("long_factor" if max_positions > original else "short_factor")
    if factors is None:
        raise SpecdecError("longrope needs short_factor and long_factor in the target's rope parameters")
    factor = params.get("factor") or config.max_position_embeddings / original
    scaling = params.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return base / torch.tensor(factors, dtype=torch.float32), float(scaling)


def _param(config: RopeConfig, name: str) -> float:
    value = config.params.get(name)
    if value is None:
        raise SpecdecError(f"rope_type {config.rope_type!r} needs {name!r} in the target's rope parameters")
    return float(value)


def _llama3(config: RopeConfig, base: Tensor) -> Tensor:
    factor, original = _param(config, "factor"), _param(config, "original_max_position_embeddings")
    low, high = _param(config, "low_freq_factor"), _param(config, "high_freq_factor")
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = torch.where(wavelength > original / low, base / factor, base)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, blended, scaled)


def _yarn(config: RopeConfig, base: Tensor) -> tuple[Tensor, float]:
    dim, params = config.head_dim, config.params
    original = float(params.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = params.get("factor")
    factor = float(factor) if factor else config.max_position_embeddings / original
    mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
    scaling = params.get("attention_factor")
    if scaling is None:
        if mscale and mscale_all:
            scaling = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        else:
            scaling = _yarn_mscale(factor, 1.0)
    fast, slow = float(params.get("beta_fast") or 32), float(params.get("beta_slow") or 1)

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = correction(fast), correction(slow)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return base / factor * (1 - extrapolated) + base * extrapolated, float(scaling)


def _yarn_mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
