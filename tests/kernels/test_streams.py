"""Random numbers on a device are those of `RandomStream`: the same bits, whoever asks and how much."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels import reference_streams, streams
from specdec.kernels.tree_records import seed_bits
from specdec.random_streams import Purpose, RandomStream

IMPLEMENTATIONS = [streams, reference_streams]
# two correctly rounded logarithms agree; libraries err by a unit in the last place or two
LOG_ULPS = 4
SEEDS = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]


def tensors(values: list[int], device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("module", IMPLEMENTATIONS, ids=["triton", "plain"])
@pytest.mark.parametrize("count", [1, 3, 4, 65])
def test_uniforms_are_numpys_bit_for_bit(module: ModuleType, count: int, device: str) -> None:
    """Catches a wrong high half of a product, counter order, lane order, or a lost bit of the seed."""
    positions = [0, 1, 7, 2**31 - 1, 5, 131071]
    nodes = [0, 3, 63, 1, 0, 7]
    for purpose in Purpose:
        found = module.uniforms(
            tensors([seed_bits(seed) for seed in SEEDS], device),
            tensors(positions, device, torch.int32),
            tensors(nodes, device, torch.int32),
            purpose=purpose,
            count=count,
        )
        wanted = [
            RandomStream(seed).uniform(position, purpose, count=count, node=node)
            for seed, position, node in zip(SEEDS, positions, nodes, strict=True)
        ]
        assert found.tolist() == wanted


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 4096))
def test_any_place_has_numpys_numbers(seed: int, position: int, node: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = RandomStream(seed).uniform(position, Purpose.ACCEPT, count=6, node=node)
    for module in IMPLEMENTATIONS:
        found = module.uniforms(
            tensors([seed_bits(seed)], device),
            tensors([position], device),
            tensors([node], device),
            purpose=Purpose.ACCEPT,
            count=6,
        )
        assert found[0].tolist() == wanted


@pytest.mark.parametrize("module", IMPLEMENTATIONS, ids=["triton", "plain"])
@pytest.mark.parametrize("count", [2, 1001])
def test_race_noise_is_numpys_up_to_the_logarithm(module: ModuleType, count: int, device: str) -> None:
    positions = [0, 17, 40000]
    found = module.exponentials(
        tensors([seed_bits(seed) for seed in SEEDS[:3]], device), tensors(positions, device), count=count
    )
    wanted = np.stack(
        [
            RandomStream(seed).exponentials(position, count)
            for seed, position in zip(SEEDS[:3], positions, strict=True)
        ]
    )
    assert found.dtype == torch.float64
    np.testing.assert_array_max_ulp(found.cpu().numpy(), wanted, maxulp=LOG_ULPS)


@pytest.mark.gpu
def test_a_card_draws_numpys_numbers() -> None:
    """The compiled high half of a product, and the card's own logarithm, over a real vocabulary."""
    seeds = tensors([seed_bits(seed) for seed in SEEDS], "cuda")
    places = tensors([0, 1, 7, 131071, 5, 9], "cuda", torch.int32)
    uniforms = streams.uniforms(seeds, places, places, purpose=Purpose.ACCEPT, count=65).tolist()
    noise = streams.exponentials(seeds, places, count=151_937).cpu().numpy()
    for row, (seed, place) in enumerate(zip(SEEDS, places.tolist(), strict=True)):
        assert uniforms[row] == RandomStream(seed).uniform(place, Purpose.ACCEPT, count=65, node=place)
        wanted = RandomStream(seed).exponentials(place, 151_937)
        np.testing.assert_array_max_ulp(noise[row], wanted, maxulp=LOG_ULPS)
