"""What `tree_attention` compiles to: the cases that the harness in `compiled` bounds without a GPU.

Owns the list of dtypes, head widths and tile heights of models in use. Knows nothing of a launch's data.
"""

from __future__ import annotations

from typing import Any

from specdec.kernels.compiled import CompileCase
from specdec.kernels.tree_attention_kernel import FP8_BYTES, INT8, attention_kernel, combine_kernel
from specdec.kernels.tree_attention_tiles import COMBINE_PLACES, one_loop, padded_dim, tiling

# an A100 has 163 KiB for a program; the rest is left to the driver
MAX_SHARED_BYTES = 160 << 10


def compile_cases() -> list[CompileCase]:
    """What every run of the tests compiles: a decoding and a tree tile, codes, and the reduction."""
    return [
        _attention_case("decode/bf16/64", "bf16", 64, 16, chain=True),
        _attention_case("tree/bf16/128", "bf16", 128, 128, chain=True, split=True),
        _attention_case("tree/bf16/128/int8", "bf16", 128, 64, kind=INT8.value, code="i8"),
        _combine_case("combine/bf16/128", "bf16", 128),
    ]


def more_compile_cases() -> list[CompileCase]:
    """The other dtypes, head widths and tile heights of models in use; minutes of compiling."""
    return [
        _attention_case("tree/bf16/128/hopper", "bf16", 128, 128, chain=True, hopper=True),
        _attention_case("decode/fp16/128", "fp16", 128, 16, split=True),
        _attention_case("decode/bf16/256", "bf16", 256, 16, chain=True, split=True),
        _attention_case("tree/bf16/64", "bf16", 64, 128, new_len=True),
        _attention_case("tree/bf16/64/hopper", "bf16", 64, 128, chain=True, hopper=True),
        _attention_case("fixed/bf16/128", "bf16", 128, 64, chain=True, split=True),
        _attention_case("fixed/fp16/64", "fp16", 64, 64, chain=True, split=True),
        _attention_case("tree/fp16/80", "fp16", 80, 32, chain=True),
        _attention_case("tree/bf16/80", "bf16", 80, 128, chain=True),
        _attention_case("tree/bf16/96/words", "bf16", 96, 64, one_word=False),
        _attention_case("tree/bf16/24", "bf16", 24, 64, chain=True),
        _attention_case("tree/bf16/256", "bf16", 256, 64, chain=True, window=True),
        _attention_case("tree/bf16/128/window", "bf16", 128, 64, chain=True, window=True, split=True),
        _attention_case("tree/bf16/128/window/hopper", "bf16", 128, 128, window=True, hopper=True),
        _attention_case("tree/bf16/256/int8", "bf16", 256, 64, chain=True, kind=INT8.value, code="i8"),
        _attention_case("tree/fp16/128/fp8", "fp16", 128, 64, split=True, kind=FP8_BYTES.value, code="u8"),
        _attention_case("decode/bf16/128/fp8", "bf16", 128, 16, split=True, kind=FP8_BYTES.value, code="u8"),
        _attention_case("tree/fp32/24", "fp32", 24, 16, chain=True),
        _attention_case("tree/fp32/128", "fp32", 128, 32, chain=True, split=True),
        _attention_case("tree/fp32/256", "fp32", 256, 32, chain=True),
    ]


def _attention_case(
    name: str,
    dtype: str,
    dim: int,
    height: int,
    *,
    kind: int = 0,
    code: str | None = None,
    chain: bool = False,
    new_len: bool = False,
    window: bool = False,
    split: bool = False,
    one_word: bool = True,
    hopper: bool = False,
) -> CompileCase:
    tile = tiling(height, dim, 4 if dtype == "fp32" else 2, coded=code is not None, hopper=hopper)
    constants: dict[str, Any] = {
        "HEADS": 32,
        "GROUP": 4,
        "HEAD_DIM": dim,
        "BLOCK_D": padded_dim(dim),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_SEQS": 16,
        "BLOCK_SIZE": 16,
        "KIND": kind,
        "HAS_NEW_LEN": new_len,
        "HAS_CHAIN": chain,
        "HAS_NEW_POSITIONS": False,
        "WINDOWED": window,
        "SPLIT": split,
        "ONE_WORD": one_word,
        "ONE_LOOP": one_loop(tile, windowed=window, coded=code is not None),
        "STAGES": tile.stages,
    }
    stored = f"*{code or dtype}"
    pointers = {
        "query_ptr": f"*{dtype}",
        "key_ptr": stored,
        "value_ptr": stored,
        "key_scale_ptr": "*fp32" if kind else None,
        "value_scale_ptr": "*fp32" if kind else None,
        "output_ptr": f"*{dtype}",
        "part_ptr": "*fp32" if split else None,
        "part_max_ptr": "*fp32" if split else None,
        "part_sum_ptr": "*fp32" if split else None,
        "query_start_ptr": "*i32",
        "context_ptr": "*i32",
        "new_len_ptr": "*i32" if new_len else None,
        "chain_ptr": "*u8" if chain else None,
        "table_ptr": "*i32",
        "words_ptr": "*i64",
        "positions_ptr": "*i32",
        "new_positions_ptr": None,
    }
    strides = dict.fromkeys(
        (
            "query_row_stride",
            "query_head_stride",
            "key_head_stride",
            "key_slot_stride",
            "value_head_stride",
            "value_slot_stride",
        ),
        "i32",
    )
    sizes = (
        "num_rows",
        "num_seqs",
        "table_width",
        "num_words",
        "new_positions_stride",
        "num_splits",
        "split_tiles",
        "window",
        "scale_head_stride",
    )
    signature = {arg: kind_ for arg, kind_ in pointers.items() if kind_ is not None}
    return CompileCase(
        name=f"tree_attention/{name}/{tile.rows}",
        kernel=attention_kernel,
        signature={**signature, **strides, **dict.fromkeys(sizes, "i32"), "log2_scale": "fp32"},
        constants=constants | {arg: None for arg, kind_ in pointers.items() if kind_ is None},
        # fresh tensors start at multiples of 16, and so do rows of head_dim elements where that holds
        aligned=(*signature, *(strides if dim % 16 == 0 else ())),
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_shared_bytes=MAX_SHARED_BYTES,
    )


def _combine_case(name: str, dtype: str, dim: int) -> CompileCase:
    return CompileCase(
        name=f"tree_attention/{name}",
        kernel=combine_kernel,
        signature={
            "part_ptr": "*fp32",
            "part_max_ptr": "*fp32",
            "part_sum_ptr": "*fp32",
            "output_ptr": f"*{dtype}",
            "num_places": "i32",
            "num_splits": "i32",
        },
        constants={
            "HEAD_DIM": dim,
            "BLOCK_D": padded_dim(dim),
            "BLOCK_PLACES": COMBINE_PLACES,
        },
        aligned=("part_ptr", "part_max_ptr", "part_sum_ptr", "output_ptr"),
        num_warps=4,
    )
