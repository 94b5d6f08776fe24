"""All kernels become machine code for both cards, without a GPU, and stay inside a card's means."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specdec.kernels
from specdec.kernels.compiled import (
    ARCHITECTURES,
    CompiledInfo,
    as_table,
    compile_in_subprocess,
    run_uninterpreted,
)

# a program of more than 64 K registers cannot be launched; the register file of both cards
REGISTERS_PER_BLOCK = 65536


@pytest.fixture(scope="module")
def compiled() -> list[CompiledInfo]:
    return compile_in_subprocess()


# half a minute of one quiet core with an empty Triton cache, and a machine may be busy
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_for_both_cards_within_its_bounds(compiled: list[CompiledInfo]) -> None:
    """Prints the table (`-s` shows it); a spill or too much shared memory is a slow or a failing launch."""
    print("\n" + as_table(compiled))
    assert compiled, "no module of specdec.kernels lists compile cases"
    cards: dict[str, set[int]] = {}
    for info in compiled:
        cards.setdefault(info.kernel, set()).add(info.arch)
    assert all(found == set(ARCHITECTURES) for found in cards.values()), cards
    over = [
        info
        for info in compiled
        if info.spill_bytes > info.max_spill_bytes
        or info.shared_bytes > info.max_shared_bytes
        or info.registers * info.num_warps * 32 > REGISTERS_PER_BLOCK
    ]
    assert not over, "\n" + as_table(over)
    assert all(info.cubin_bytes > 0 for info in compiled)


@pytest.mark.timeout(1200)
def test_no_kernel_is_left_out(compiled: list[CompiledInfo]) -> None:
    """A jitted function named `..._kernel` is one that is launched; the others are parts of those."""
    written = {
        node.name
        for path in Path(specdec.kernels.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    }
    assert written
    assert written == {info.kernel for info in compiled}


def test_the_harness_sees_spills() -> None:
    """Catches a harness that reads zero for everything: 128 values a thread in 24 registers must spill."""
    script = (
        "import dataclasses\n"
        "from specdec.kernels.compiled import compile_for\n"
        "from specdec.kernels.norms import compile_cases\n"
        "[case] = [case for case in compile_cases() if case.name == 'norms/rms_norm-8b-bf16']\n"
        "info = compile_for(dataclasses.replace(case, num_warps=1), 80, max_registers=24)\n"
        "print(info.spill_bytes, info.registers)\n"
    )
    spilled, registers = run_uninterpreted(["-c", script]).split()[-2:]
    assert int(spilled) > 0
    assert int(registers) <= 24
