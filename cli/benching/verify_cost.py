"""What a target pass over several rows of one sequence costs, in units of plain decoding.

The figures behind `specdec.speculation.FIXED_COSTS`: one sequence, chains of a token that is hardly
ever right, so that every step verifies the same number of rows. Beside each time stands the least that its
products can take: their operations at the rate of a large matrix product, measured in the same run. Where
that alone exceeds what is wished for, no arrangement of these products reaches it on this processor.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch

from specdec.cli.console import print_table, progress
from specdec.cli.micro.timing import Clock, measure_limits
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.models.decoder import Decoder
from specdec.models.layers import Storage
from specdec.sequence import SamplingParams
from specdec.step_logits import FREE_ROWS
from specdec.tree import DraftTree, chain_tree

ROWS = (1, 4, 8, 12, 16, 24, 32)
PROMPT_TOKENS = 128
STEPS = 24
REPEATS = 7
LIMIT_ROUNDS = 5


class FixedDrafter:
    """Proposes a chain of `length` copies of one token, whatever the text."""

    name = "fixed"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, length: int, vocab_size: int) -> None:
        self.length, self.vocab_size = length, vocab_size

    def makes_chains(self, spec: SpecConfig) -> bool:
        return True

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        """Nothing is kept."""

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        trees = []
        for request in requests:
            root = request.seq.token_ids[-1]
            # not the root again: models do repeat themselves
            trees.append(chain_tree(root, [(root + 7) % self.vocab_size] * self.length))
        return trees


def measure_verify_cost(target: str, *, dtype: str, weights: str) -> dict[str, Any]:
    """Median seconds of a target pass by rows, interleaved; prints the table.

    Args:
        target: name or folder.
        dtype: of `EngineConfig`, as the next.
        weights: .
    """
    config = EngineConfig(max_num_seqs=1, kv_tokens=2048, prefix_cache=False, dtype=dtype, weights=weights)
    plain = Engine(target, config=config)
    engines: dict[int, Engine] = {1: plain}
    for rows in ROWS[1:]:
        engines[rows] = _engine(plain, rows)
    clock = Clock("cpu", rounds=LIMIT_ROUNDS)
    rounded = plain.decoder.num_packed and plain.decoder.storage is Storage.BF16
    products = torch.bfloat16 if rounded else plain.decoder.dtype
    rate = measure_limits(clock, products).matrix_flop_per_s
    prompt = [100 + index % 400 for index in range(PROMPT_TOKENS)]
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    with progress("repeats", REPEATS) as bar:
        for repeat in range(REPEATS + 1):
            for rows, engine in engines.items():
                stream = engine.stream([prompt], params)
                next(stream)  # the prompt's own pass
                # rows of logits are made when the walk asks for them, which counts as verification
                before, steps = engine.times.target + engine.times.verify, engine.times.steps
                for _ in stream:
                    pass
                if repeat:  # the first round warms up
                    spent = engine.times.target + engine.times.verify - before
                    seconds[rows].append(spent / (engine.times.steps - steps))
            bar.update(repeat)
    rate = max(rate, measure_limits(clock, products).matrix_flop_per_s)
    base = median(seconds[1])
    least = {rows: operations_of(plain.decoder, rows) / rate for rows in ROWS}
    figures = [
        {"rows": rows, "ms": 1e3 * median(values), "relative": median(values) / base,
         "relative_low": min(values) / base, "relative_high": max(values) / base,
         "least_ms": 1e3 * least[rows], "least_relative": least[rows] / base}
        for rows, values in seconds.items()
    ]  # fmt: skip
    print_table(
        f"target pass, {target}, {dtype}, weights {weights}, one sequence at {PROMPT_TOKENS} tokens, "
        f"median of {REPEATS} interleaved repeats of {STEPS} tokens; least: its products at "
        f"{rate / 1e9:.0f} GFLOP/s, as a large one",
        ["rows", "ms", "relative to 1 row", "lowest", "highest", "least ms", "least relative"],
        [list(figure.values()) for figure in figures],
    )
    return {
        "schema": "specdec.verify-cost/1",
        "target": target,
        "dtype": dtype,
        "weights": weights,
        "matrix_gflop_per_s": rate / 1e9,
        "threads": torch.get_num_threads(),
        "passes": figures,
    }


def operations_of(decoder: Decoder, rows: int) -> int:
    """Operations of a pass's matrix products; the output head multiplies only rows that a walk may visit."""
    matrices = [
        matrix for layer in decoder.layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    in_layers = sum(matrix.out_features * matrix.in_features for matrix in matrices)
    in_head = decoder.head.out_features * decoder.head.in_features
    return 2 * (rows * in_layers + min(rows, FREE_ROWS) * in_head)


def _engine(plain: Engine, rows: int) -> Engine:
    spec = SpecConfig(max_depth=min(rows - 1, 32), max_nodes=rows - 1, adaptive=False)
    return Engine(
        plain,
        draft=lambda view: FixedDrafter(rows - 1, view.config.vocab_size),
        config=replace(plain.config, spec=spec),
    )
