"""The processor's layer loop against the same layers one by one, on ragged batches of odd sizes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.attention import SequenceAttention, block_slots, causal_mask
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.models import layers
from specdec.models.decoder import Decoder, ForwardBatch
from specdec.models.layer_loop import LayerLoop
from specdec.models.layers import (
    ROW_MULTIPLE,
    ROW_MULTIPLES,
    Linear,
    Storage,
    packing_available,
    row_multiple,
)
from specdec.paged_kv import PagedKVCache
from specdec.tree import ancestor_mask

BLOCK = 4
# sums of fp32 in another order, in states of up to about ten; a wrong row differs by more than a tenth
ROUNDING = 1e-4
# (block table, committed rows, parents of the tree's nodes): gathered and consecutive, alone and in trees
SEQUENCES: list[tuple[list[int], int, list[int]]] = [
    ([2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 37, [-1]),
    ([20, 17, 30, 1], 9, [-1, 0, 0, 1, 1, 2, 5]),
    ([12, 13, 14, 15], 11, [-1, 0, 1]),
]


def ragged_batch(padding: int) -> ForwardBatch:
    """Trees of three sequences and a chain of a fourth without any context, then rows of padding."""
    entries: list[SequenceAttention] = []
    slots: list[int] = []
    positions: list[int] = []
    for table, context, parents in [*SEQUENCES, ([31, 29], 0, [-1, 0, 1, 2, 3])]:
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        here = [context + depth for depth in depths]
        chain = context == 0
        entries.append(
            SequenceAttention(
                query_start=len(slots),
                num_queries=len(parents),
                context_len=context,
                num_new=len(parents),
                slots=block_slots(table, BLOCK, context + len(parents)),
                mask=causal_mask(len(parents)) if chain else ancestor_mask(parents),
                query_positions=here,
                new_positions=here,
            )
        )
        positions += here
        slots += [table[row // BLOCK] * BLOCK + row % BLOCK for row in range(context, context + len(parents))]
    generator = torch.Generator().manual_seed(1)
    return ForwardBatch(
        token_ids=torch.randint(0, 200, (len(slots) + padding,), generator=generator),
        positions=torch.tensor(positions + [0] * padding),
        longest=max(positions) + 1,
        slots=torch.tensor(slots),
        attention=entries,
    )


def filled_cache(decoder: Decoder) -> PagedKVCache:
    config = decoder.config
    cache = PagedKVCache(
        num_layers=config.num_layers,
        num_blocks=33,
        block_size=BLOCK,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
    )
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(2)))
    return cache


def engine_of(folder: Path, **options: object) -> Engine:
    return Engine(folder, config=replace(EngineConfig(kv_tokens=64), **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def half_family(tiny_any_family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose weights are fp16 numbers, so that they can be packed."""
    folder = shutil.copytree(tiny_any_family, tmp_path_factory.mktemp("half") / "model")
    halve(folder, "")
    return folder


def halve(folder: Path, part: str) -> None:
    """Make fp16 numbers of the weights whose names hold `part`."""
    tensors = {
        name: tensor.half() if part in name else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("weights", ["auto", "plain"])
@torch.inference_mode()
def test_the_loop_equals_the_layers_one_by_one(half_family: Path, weights: str) -> None:
    decoder = engine_of(half_family, weights=weights).decoder
    assert packing_available() == (weights == "auto" and decoder.num_plain == 0) or weights == "plain"
    boundaries = tuple(range(0, decoder.config.num_layers + 1, 2))
    one, two = filled_cache(decoder), filled_cache(decoder)
    batch = ragged_batch(padding=2)
    hidden, taps = decoder.forward(batch, one, boundaries)
    expected, expected_taps = decoder.forward_by_layer(batch, two, boundaries)
    rows = len(batch.slots)
    assert taps is not None
    assert expected_taps is not None
    torch.testing.assert_close(hidden[:rows], expected[:rows], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(taps[:rows], expected_taps[:rows], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(one.data, two.data, rtol=ROUNDING, atol=ROUNDING)


@torch.inference_mode()
def test_half_precision_is_as_near_to_fp32_as_the_layers_one_by_one(tiny_llama: Path) -> None:
    decoder = engine_of(tiny_llama, dtype="bfloat16").decoder
    batch = ragged_batch(padding=0)
    exact, _ = engine_of(tiny_llama).decoder.forward(batch, filled_cache(engine_of(tiny_llama).decoder), ())
    hidden, _ = decoder.forward(batch, filled_cache(decoder), ())
    other, _ = decoder.forward_by_layer(batch, filled_cache(decoder), ())
    assert hidden.dtype == torch.bfloat16
    assert (hidden - exact).norm() < 1.5 * (other - exact).norm()


@torch.inference_mode()
def test_torchscript_changes_no_bit(half_family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python from 3.14 on runs the loop as it stands; the text must not depend on that."""
    decoder = engine_of(half_family).decoder
    batch = ragged_batch(padding=0)
    hidden = [decoder.forward(batch, filled_cache(decoder), ())[0] for _ in range(3)]
    monkeypatch.setattr("specdec.models.decoder.scripted", lambda loop: loop)
    plain = engine_of(half_family).decoder
    assert isinstance(plain._loop, LayerLoop)
    expected = plain.forward(batch, filled_cache(plain), ())[0]
    # the first runs are profiled, later ones optimised
    assert all(torch.equal(rows, expected) for rows in hidden)


def test_consecutive_slots_are_written_as_listed_ones_are(tiny_llama: Path) -> None:
    decoder = engine_of(tiny_llama).decoder
    batch = replace(ragged_batch(0), attention=ragged_batch(0).attention[:1])
    rows = replace(
        batch, token_ids=batch.token_ids[:1], positions=batch.positions[:1], slots=batch.slots[:1], longest=38
    )
    one, two = filled_cache(decoder), filled_cache(decoder)
    with torch.inference_mode():
        decoder.forward(rows, one, ())
        decoder.forward(replace(rows, first_slot=int(rows.slots[0])), two, ())
    assert torch.equal(one.data, two.data)


@torch.inference_mode()
@pytest.mark.usefixtures("several_threads")
def test_packed_products_keep_a_rows_bits_at_the_multiple_that_was_found() -> None:
    if not packing_available():
        pytest.skip("this torch build has no packed fp16 products")
    multiple = row_multiple()
    assert multiple in ROW_MULTIPLES
    generator = torch.Generator().manual_seed(4)
    for outputs, inputs in ((37, 100), (960, 576), (129, 1537)):
        matrix = Linear(torch.randn(outputs, inputs, generator=generator).half(), None, Storage.FP16)
        x = torch.randn(144, inputs, generator=generator)
        whole = matrix(x)
        for rows in range(multiple, 145, multiple):
            assert torch.equal(matrix(x[:rows]), whole[:rows]), f"{rows} rows of {outputs} x {inputs}"


@torch.inference_mode()
def test_plain_products_keep_a_rows_bits_at_their_multiple() -> None:
    generator = torch.Generator().manual_seed(4)
    for outputs, inputs in ((37, 100), (960, 576), (129, 1537)):
        matrix = Linear(torch.randn(outputs, inputs, generator=generator), None)
        x = torch.randn(144, inputs, generator=generator)
        whole = matrix(x)
        for rows in range(ROW_MULTIPLE, 145, ROW_MULTIPLE):
            assert torch.equal(matrix(x[:rows]), whole[:rows]), f"{rows} rows of {outputs} x {inputs}"


def test_rows_are_padded_where_products_depend_on_their_number(
    half_family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uneven(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + (len(x) % ROW_MULTIPLE)

    if not packing_available():
        pytest.skip("this torch build has no packed fp16 products")
    row_multiple.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(layers, "Linear", Uneven)
        assert row_multiple() % ROW_MULTIPLE == 0
    row_multiple.cache_clear()
    assert engine_of(half_family, weights="plain").decoder.row_multiple == ROW_MULTIPLE
    assert engine_of(half_family).decoder.row_multiple == row_multiple()


def test_a_target_of_packed_and_plain_matrices_is_padded_for_both(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packing_available():
        pytest.skip("this torch build has no packed fp16 products")
    monkeypatch.setattr("specdec.models.decoder.row_multiple", lambda: 6)
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    halve(folder, "down_proj")
    engine = engine_of(folder)
    assert engine.decoder.num_packed
    assert engine.decoder.num_plain
    assert engine.decoder.row_multiple == 12


@torch.inference_mode()
def test_int8_is_another_model_near_the_one_that_was_named(tiny_llama: Path) -> None:
    if not packing_available(Storage.INT8):
        pytest.skip("this torch build has no int8 products")
    exact, rounded = engine_of(tiny_llama).decoder, engine_of(tiny_llama, weights="int8").decoder
    batch = ragged_batch(padding=0)
    one, _ = exact.forward(batch, filled_cache(exact), ())
    two, _ = rounded.forward(batch, filled_cache(rounded), ())
    difference = (one - two).norm() / one.norm()
    assert 1e-4 < difference < 0.2
    by_layer, _ = rounded.forward_by_layer(batch, filled_cache(rounded), ())
    torch.testing.assert_close(two, by_layer, rtol=1e-2, atol=1e-2)


@torch.inference_mode()
@pytest.mark.usefixtures("several_threads")
def test_a_row_of_an_int8_product_does_not_depend_on_the_others() -> None:
    if not packing_available(Storage.INT8):
        pytest.skip("this torch build has no int8 products")
    generator = torch.Generator().manual_seed(5)
    matrix = Linear(torch.randn(77, 130, generator=generator), torch.randn(77), Storage.INT8)
    x = torch.randn(9, 130, generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    assert torch.equal(matrix(x), torch.cat([matrix(row[None]) for row in x]))
    assert torch.isfinite(matrix(torch.zeros(1, 130))).all()


@torch.inference_mode()
def test_bf16_products_are_another_model_near_the_one_that_was_named(half_family: Path) -> None:
    if not packing_available(Storage.BF16):
        pytest.skip("this processor does not multiply bf16 numbers")
    exact, rounded = engine_of(half_family).decoder, engine_of(half_family, weights="bf16-packed").decoder
    assert (rounded.num_plain, rounded.storage, rounded.dtype) == (0, Storage.BF16, torch.float32)
    batch = ragged_batch(padding=2)
    one, _ = exact.forward(batch, filled_cache(exact), ())
    two, _ = rounded.forward(batch, filled_cache(rounded), ())
    rows = len(batch.slots)
    assert 1e-4 < (one - two)[:rows].norm() / one[:rows].norm() < 0.03
    by_layer, _ = rounded.forward_by_layer(batch, filled_cache(rounded), ())
    torch.testing.assert_close(two[:rows], by_layer[:rows], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_bf16_product_rounds_both_sides_once_and_keeps_a_rows_bits(dtype: torch.dtype) -> None:
    if not packing_available(Storage.BF16):
        pytest.skip("this processor does not multiply bf16 numbers")
    generator = torch.Generator().manual_seed(6)
    for outputs, inputs in ((37, 100), (960, 576), (129, 1537)):
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs)
        matrix = Linear(weight, bias, Storage.BF16)
        x = torch.randn(60, inputs, generator=generator).to(dtype)
        whole = matrix(x)
        assert whole.dtype == dtype
        exact = x.bfloat16().double() @ weight.bfloat16().double().T
        # the product is rounded to bf16 once, and again with its bias where that is the dtype
        end = 2**-8 if dtype == torch.bfloat16 else 1e-6
        bound = exact.abs() * 2**-8 + (exact + bias).abs() * end + 1e-3
        assert ((whole.double() - exact - bias).abs() <= bound).all()
        for rows in range(ROW_MULTIPLE, 61, ROW_MULTIPLE):
            assert torch.equal(matrix(x[:rows]), whole[:rows]), f"{rows} rows of {outputs} x {inputs}"


@torch.inference_mode()
def test_a_bf16_model_is_packed_where_that_changes_no_number(tiny_llama: Path) -> None:
    if not packing_available(Storage.BF16):
        pytest.skip("this processor does not multiply bf16 numbers")
    packed = engine_of(tiny_llama, dtype="bfloat16").decoder
    plain = engine_of(tiny_llama, dtype="bfloat16", weights="plain").decoder
    assert (packed.num_plain, plain.num_packed) == (0, 0)
    batch = ragged_batch(padding=0)
    one, _ = packed.forward(batch, filled_cache(packed), ())
    two, _ = plain.forward(batch, filled_cache(plain), ())
    # sums may be ordered otherwise: a last bit here and there
    assert (one - two).float().norm() < 0.01 * two.float().norm()


def test_bf16_weights_are_counted_once(half_family: Path) -> None:
    if not packing_available(Storage.BF16):
        pytest.skip("this processor does not multiply bf16 numbers")
    halves, rounded = engine_of(half_family), engine_of(half_family, weights="bf16-packed")
    qkv = [layer.qkv for layer in rounded.decoder.layers]
    # FBGEMM keeps biases inside
    biases = sum(matrix.bias.nbytes for matrix in qkv if matrix.bias is not None)
    assert rounded.memory_report().weights == halves.memory_report().weights + biases


def test_bf16_products_are_refused_where_there_are_none(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "multiplies_bf16", lambda: False)
    with pytest.raises(SpecdecError, match=r"weights \('bf16-packed'\) are not available .* this processor"):
        engine_of(tiny_llama, weights="bf16-packed")
    assert engine_of(tiny_llama, dtype="bfloat16").decoder.num_packed == 0


def test_slow_products_of_bf16_numbers_are_named(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layers, "multiplies_bf16", lambda: False)
    engine_of(tiny_llama)
    assert layers.SLOW_BF16 not in caplog.text
    engine_of(tiny_llama, dtype="bfloat16")
    assert layers.SLOW_BF16 in caplog.text


def test_unknown_and_impossible_weights_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(SpecdecError, match=r"weights \('fp8'\) must be one of"):
        EngineConfig(weights="fp8")
    with pytest.raises(SpecdecError, match=r"weights \('int8'\) need device 'cpu' and dtype 'float32'"):
        EngineConfig(weights="int8", dtype="bfloat16")
