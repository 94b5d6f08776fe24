"""The batch as device tensors says what the host's description says, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import SpecdecError
from specdec.kernels.device_batch import pack_bits, unpack_bits
from specdec.kernels.kv_quant import LARGEST_CODE, dequantise_rows, quantise_rows
from specdec.kernels.reference_tree_attention import sequence_slots, visible_keys


@given(rows=st.integers(0, 5), columns=st.integers(1, 200), seed=st.integers(0, 99))
def test_bits_survive_packing(rows: int, columns: int, seed: int) -> None:
    """The sign bit too: bit 63 of a word is column 63."""
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = pack_bits(mask, -(-columns // 64))
    assert words.dtype == torch.int64
    assert torch.equal(unpack_bits(words, columns), mask)


def test_the_batch_is_the_hosts_description(make_case: Callable[..., Any]) -> None:
    tree = (-1, 0, 0, 1, 1, 2, 5)
    case = make_case([(3, 20), (17, 1), (31, tree)], padding_rows=4)
    batch = case.batch
    assert batch.query_start.tolist() == [0, 20, 21, 28]
    assert batch.context_len.tolist() == [3, 17, 31]
    assert batch.chain.tolist() == [True, True, False]
    assert (batch.new_len, batch.new_positions, batch.max_queries) == (None, None, 20)
    assert batch.mask_words.shape == (32, 1)
    # node 6 hangs on 5, 2 and the root
    assert batch.mask_words[27, 0].item() == 1 + (1 << 2) + (1 << 5) + (1 << 6)
    assert batch.slots[-4:].tolist() == [-1] * 4
    for index, seq in enumerate(case.host):
        length = seq.context_len + seq.num_new
        slots = torch.arange(case.keys.shape[1])[seq.slots]
        assert torch.equal(sequence_slots(batch, index, length), slots)
        start = seq.query_start
        assert torch.equal(batch.slots[start : start + seq.num_queries], slots[seq.context_len :])
        assert batch.positions[start : start + seq.num_queries].tolist() == seq.query_positions
        expected = torch.ones(seq.num_queries, length, dtype=torch.bool)
        if seq.mask is not None:
            expected[:, seq.context_len :] = seq.mask
        assert torch.equal(visible_keys(batch, index, None), expected)


def test_queries_at_the_end_of_more_new_rows(make_case: Callable[..., Any]) -> None:
    """A chain stays one when only its last rows ask."""
    case = make_case([(9, (-1, 0, 0, 1)), (16, 6)], queries=[2, 3])
    assert case.batch.new_len.tolist() == [4, 6]
    assert case.batch.chain.tolist() == [False, True]
    assert case.batch.new_positions[0, :4].tolist() == [9, 10, 10, 11]


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.5), ("fp8", 16.0)])
def test_a_quantised_row_errs_by_half_a_step(kind: str, bound: float) -> None:
    """Half a step of int8; half the widest gap of e4m3, which is 32 codes, from 256 to 448."""
    rows = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0))
    rows[0, 0] = 0
    rows[1, 1] *= 1e-6
    codes, scales = quantise_rows(rows, kind)
    assert codes.element_size() == 1
    assert scales.shape == (3, 5)
    assert codes.float().abs().max() == LARGEST_CODE[kind]
    error = (dequantise_rows(codes, scales) - rows).abs()
    assert (error <= (bound + 1e-3) * scales[..., None]).all()
    assert not dequantise_rows(codes, scales)[0, 0].any()


def test_an_unknown_kind_of_codes_is_refused() -> None:
    with pytest.raises(SpecdecError, match=r"int4.*int8, fp8"):
        quantise_rows(torch.zeros(1, 8), "int4")
