"""Compiling Triton kernels to machine code without a GPU, and what the result costs a card.

Owns `CompileCase` (one kernel with the types and constants of one use), its compilation for a named
architecture, and the reading of registers, stack and shared memory from the machine code with the
`cuobjdump` that Triton brings along. Every module of `specdec.kernels` with Triton kernels lists its cases
in a function `compile_cases()`, which `all_cases` gathers. Knows nothing of what a kernel computes.

Triton decides at import whether kernels are interpreted, and an interpreted kernel cannot be compiled, so
`compile_in_subprocess` runs `python -m specdec.kernels.compiled` with `TRITON_INTERPRET` unset.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# A100 and H100/H200, the two cards the kernels are written for
ARCHITECTURES = (80, 90)
# bytes a block may take on each: the CUDA programming guide's table of compute capabilities, 1 KB reserved
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One kernel as one call would compile it.

    Attributes:
        name: unique among all cases, `module/what`.
        kernel: the jitted function.
        signature: type of every argument that is not a constant: "*bf16", "*i64", "i32", "fp32".
        constants: value of every `tl.constexpr` argument, and of arguments specialised to None or 1.
        aligned: pointer and integer arguments that the launcher finds divisible by 16.
        num_warps: warps per program.
        num_stages: software pipeline depth.
        max_spill_bytes: stack bytes per thread that are let pass; the test of the harness bounds by this.
        max_shared_bytes: shared memory per program that is let pass; None for what the card has.
        archs: cards it is compiled for; variants beside a kernel's first case may name the one that matters.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    max_spill_bytes: int = 0
    max_shared_bytes: int | None = None
    archs: tuple[int, ...] = ARCHITECTURES


@dataclass(frozen=True, kw_only=True)
class CompiledInfo:
    """What one case costs on one architecture; `spill_bytes` is the stack frame of a thread."""

    name: str
    kernel: str
    arch: int
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx_bytes: int
    cubin_bytes: int
    max_spill_bytes: int
    max_shared_bytes: int


def compiled_stages(case: CompileCase, arch: int, *, max_registers: int | None = None) -> Any:
    """Triton's own result for a case: `asm` holds every stage ("ptx", "cubin"); no GPU is touched.

    Args:
        case: kernel and types.
        arch: compute capability, two digits.
        max_registers: cap on registers per thread, None for the compiler's own choice.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    unknown = (set(case.signature) | set(case.constants)) ^ set(names)
    assert not unknown, f"{case.name}: arguments missing from the case or unknown to the kernel: {unknown}"
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    options: dict[str, Any] = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    source = ASTSource(case.kernel, signature, dict(case.constants), attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_for(case: CompileCase, arch: int, *, max_registers: int | None = None) -> CompiledInfo:
    """What a case costs on a card of `arch`; arguments as for `compiled_stages`."""
    made = compiled_stages(case, arch, max_registers=max_registers)
    cubin = made.asm["cubin"]
    registers, stack = _registers_and_stack(cubin)
    return CompiledInfo(
        name=case.name,
        kernel=case.kernel.__name__,
        arch=arch,
        num_warps=case.num_warps,
        registers=registers,
        spill_bytes=stack,
        shared_bytes=int(made.metadata.shared),
        ptx_bytes=len(made.asm["ptx"]),
        cubin_bytes=len(cubin),
        max_spill_bytes=case.max_spill_bytes,
        max_shared_bytes=case.max_shared_bytes or SHARED_LIMIT[arch],
    )


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = _USAGE.search(told)
    assert found, f"cuobjdump names no registers: {told}"
    registers, stack, _, local = (int(number) for number in found.groups())
    return registers, stack + local


def all_cases() -> list[CompileCase]:
    """The cases of every module of `specdec.kernels` that has a `compile_cases` function, by name."""
    package = importlib.import_module("specdec.kernels")
    cases: list[CompileCase] = []
    for info in pkgutil.iter_modules(package.__path__):
        listed = getattr(importlib.import_module(f"specdec.kernels.{info.name}"), "compile_cases", None)
        if listed is not None:
            cases += listed()
    names = [case.name for case in cases]
    assert len(names) == len(set(names)), f"two compile cases share a name: {sorted(names)}"
    return sorted(cases, key=lambda case: case.name)


def run_uninterpreted(arguments: Sequence[str]) -> str:
    """Output of a Python process in which Triton compiles; `arguments` follow the interpreter's name."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"a kernel does not compile:\n{done.stderr[-4000:]}"
    return done.stdout


def compile_in_subprocess() -> list[CompiledInfo]:
    """Compile every case for its architectures in a process that does not interpret kernels."""
    told = run_uninterpreted(["-m", "specdec.kernels.compiled"])
    return [CompiledInfo(**entry) for entry in json.loads(told.splitlines()[-1])]


def as_table(infos: Iterable[CompiledInfo]) -> str:
    """One line a case and architecture, for people."""
    lines = [
        f"{'kernel':44} {'sm':>3} {'warps':>5} {'regs':>5} {'spill B':>8} {'shared B':>9} {'cubin B':>8}"
    ]
    lines += [
        f"{info.name:44} {info.arch:>3} {info.num_warps:>5} {info.registers:>5} {info.spill_bytes:>8} "
        f"{info.shared_bytes:>9} {info.cubin_bytes:>8}"
        for info in infos
    ]
    return "\n".join(lines)


def main() -> None:
    """Compile all cases for their architectures; the last line is JSON."""
    infos = [compile_for(case, arch) for case in all_cases() for arch in case.archs]
    print(as_table(infos))
    print(json.dumps([asdict(info) for info in infos]))


if __name__ == "__main__":
    main()
