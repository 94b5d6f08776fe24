"""Every shape of the attention kernel becomes machine code for both cards without spilling; minutes of work.

A few shapes are compiled in every run, by `tests/kernels/test_compile.py`.
"""

from __future__ import annotations

import json

import pytest

from specdec.kernels.compiled import ARCHITECTURES, CompiledInfo, as_table, run_uninterpreted

SCRIPT = """
import dataclasses, json, sys
from specdec.kernels.compiled import compile_for
from specdec.kernels.tree_attention_cases import more_compile_cases
infos = [compile_for(case, int(arch)) for case in more_compile_cases() for arch in sys.argv[1:]]
print(json.dumps([dataclasses.asdict(info) for info in infos]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_shape_fits_both_cards() -> None:
    """Registers, stack and shared memory of all tilings, printed and bounded."""
    told = run_uninterpreted(["-c", SCRIPT, *(str(arch) for arch in ARCHITECTURES)])
    infos = [CompiledInfo(**entry) for entry in json.loads(told.splitlines()[-1])]
    print("\n" + as_table(infos))
    over = [
        info
        for info in infos
        if info.spill_bytes > info.max_spill_bytes or info.shared_bytes > info.max_shared_bytes
    ]
    assert not over, "\n" + as_table(over)
