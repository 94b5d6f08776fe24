"""Random numbers depend on where they are used and on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specdec.exact_law import exact_law
from specdec.random_streams import Purpose, RandomStream


def test_numbers_do_not_depend_on_what_was_drawn_before() -> None:
    """Catches state carried between calls: batch composition would change the text."""
    stream = RandomStream(7)
    first = stream.uniform(5, Purpose.ACCEPT, count=3)
    for position in range(20):
        stream.uniform(position, Purpose.DRAFT, count=position + 1, node=position)
    assert stream.uniform(5, Purpose.ACCEPT, count=3) == first
    assert RandomStream(7).uniform(5, Purpose.ACCEPT, count=3) == first


def test_a_longer_answer_begins_like_a_shorter_one() -> None:
    """A larger tree must not change the numbers of the nodes a smaller one had."""
    stream = RandomStream(7)
    longest = stream.uniform(3, Purpose.ACCEPT, count=70)
    for count in (0, 1, 2, 3, 4, 5, 8, 63, 64, 65):
        assert stream.uniform(3, Purpose.ACCEPT, count=count) == longest[:count]


def test_places_never_share_numbers() -> None:
    """Catches a counter layout where position, purpose, node or seed overlap."""
    places = itertools.product((0, 1, 2, 2**40), Purpose, (0, 1, 63), (0, 1, 2**32, 2**64 - 1))
    numbers = [
        number
        for position, purpose, node, seed in places
        for number in RandomStream(seed).uniform(position, purpose, count=9, node=node)
    ]
    assert len(numbers) == 4 * len(Purpose) * 3 * 4 * 9
    assert len(set(numbers)) == len(numbers)


def test_numbers_are_uniform_below_one() -> None:
    stream = RandomStream(0)
    numbers = np.array([stream.uniform(position, Purpose.BONUS)[0] for position in range(20_000)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    # 19 degrees of freedom: 43.8 is the 0.999 quantile; the seed is fixed
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_the_stream_is_philox_and_stays_so() -> None:
    """Golden values (numpy.random.Philox, key 42, counter [0, 2, 1, 9]): texts of old seeds stay the same."""
    bits = np.random.Philox(key=42, counter=(9 << 192) | (1 << 128) | (2 << 64))
    wanted = [(int(raw) >> 11) * 2.0**-53 for raw in bits.random_raw(5)]
    assert RandomStream(42).uniform(9, Purpose.ACCEPT, count=5, node=2) == wanted
    assert wanted[0] == 0.447966725240858


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(AssertionError, match="64"):
        RandomStream(seed)


def test_forking_numbers_give_exact_laws_and_keep_reused_numbers_equal() -> None:
    """The enumeration behind every law test: an independent fork per comparison would miss a reused coin."""
    law = exact_law(
        lambda source: (
            source.uniform(0, Purpose.ACCEPT)[0] < 0.25,
            source.uniform(0, Purpose.ACCEPT)[0] < 0.75,
            source.uniform(0, Purpose.BONUS)[0] < 0.5,
        )
    )
    assert law == {
        (True, True, True): 0.125,
        (True, True, False): 0.125,
        (False, True, True): 0.25,
        (False, True, False): 0.25,
        (False, False, True): 0.125,
        (False, False, False): 0.125,
    }
