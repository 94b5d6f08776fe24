"""The sampled output of the whole engine against the target's exact law, from transformers in float64.

Five-token vocabulary, so the joint law of a whole answer is a table: a wrong position, mask, cache row, seed
or acceptance rule anywhere between prompt and output shifts it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.audit.goodness import fit
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine, GenerationResult
from specdec.hf import load_hf_model
from specdec.random_streams import RandomStream
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree, tree_from_paths

VOCAB = 5
PROMPT = [1, 4, 2, 0, 3]
# the first token comes from the prompt's pass, then one step drafts two tokens and adds a third
NUM_TOKENS = 4
NUM_REQUESTS = 2500
# per test; the seeds are fixed, so a failure is a change of the law and not bad luck
ALPHA = 0.001
SAMPLED = {
    "plain": SamplingParams(temperature=1.0),
    "cut": SamplingParams(temperature=1.6, top_k=4, top_p=0.95),
    "min_p": SamplingParams(temperature=1.4, min_p=0.12),
    "all": SamplingParams(temperature=1.2, top_k=4, top_p=0.93, min_p=0.1),
}

Answer = tuple[int, ...]


class FixedDrafter:
    """Proposes the same paths below every root."""

    name = "fixed"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, paths: list[list[int]]) -> None:
        self._paths = paths

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [
            tree_from_paths(request.seq.token_ids[-1], [path[: request.max_depth] for path in self._paths])
            for request in requests
        ]

    def release(self, seq_id: int) -> None:
        return None


DRAFTS: dict[str, list[list[int]] | None] = {
    "no drafts": None,
    "chain": [[2, 0]],
    "tree": [[0, 1], [0, 4], [3, 3], [3, 2], [2, 0]],
    "every token": [[token, token] for token in range(VOCAB)],
}


@pytest.fixture(scope="module")
def folder(tiny_model_factory: Callable[..., Path]) -> Path:
    return tiny_model_factory("llama", vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=0)


@pytest.fixture(scope="module")
def exact_laws(folder: Path) -> dict[str, dict[Answer, float]]:
    """Probability of every answer under each setting, filtered by a few lines of its own."""
    model = load_hf_model(folder).double()
    answers = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
    ids = torch.tensor([[*PROMPT, *answer] for answer in answers])
    logits = model(input_ids=ids).logits[:, len(PROMPT) - 1 : -1].numpy()

    def filtered(row: np.ndarray, params: SamplingParams) -> np.ndarray:
        p = np.exp((row - row.max()) / params.temperature)
        order = np.argsort(-p)
        if params.top_k:
            p[order[params.top_k :]] = 0.0
        p /= p.sum()
        if params.top_p < 1.0:
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= params.top_p]] = 0.0
        p[p < params.min_p * p.max()] = 0.0
        return p / p.sum()

    return {
        name: {
            answer: float(np.prod([filtered(rows[i], params)[token] for i, token in enumerate(answer)]))
            for answer, rows in zip(answers, logits, strict=True)
        }
        for name, params in SAMPLED.items()
    }


def p_value(counts: Counter[Answer], law: dict[Answer, float]) -> float:
    found = fit(counts, law)
    assert found.freedom >= 20, "too few cells to see anything"
    return found.p_value


def generate(folder: Path, paths: list[list[int]] | None, setting: str) -> list[GenerationResult]:
    engine = Engine(
        folder,
        draft=None if paths is None else lambda view: FixedDrafter(paths),
        config=EngineConfig(kv_tokens=2048, spec=SpecConfig(max_depth=2, max_nodes=16, adaptive=False)),
    )
    base = replace(SAMPLED[setting], max_tokens=NUM_TOKENS, ignore_eos=True)
    return engine.generate(
        [PROMPT] * NUM_REQUESTS, [replace(base, seed=seed) for seed in range(NUM_REQUESTS)]
    )


def count_answers(results: list[GenerationResult]) -> Counter[Answer]:
    return Counter(tuple(result.token_ids) for result in results)


@pytest.mark.parametrize(
    ("drafts", "setting"),
    [
        ("no drafts", "plain"),
        ("chain", "plain"),
        ("tree", "plain"),
        ("tree", "cut"),
        ("every token", "cut"),
        ("tree", "min_p"),
        ("every token", "all"),
    ],
)
def test_sampled_answers_have_the_law_of_the_target(
    folder: Path, exact_laws: dict[str, dict[Answer, float]], drafts: str, setting: str
) -> None:
    results = generate(folder, DRAFTS[drafts], setting)
    counts, law = count_answers(results), exact_laws[setting]
    assert all(law[answer] > 0.0 for answer in counts), "a token the settings exclude came out"
    assert p_value(counts, law) > ALPHA
    accepted = sum(result.stats.accepted for result in results)
    assert (accepted > NUM_REQUESTS // 20) == (DRAFTS[drafts] is not None), "drafts must really be accepted"


def test_the_comparison_catches_a_number_used_twice(
    folder: Path, exact_laws: dict[str, dict[Answer, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: neighbouring positions share their random numbers."""
    right = RandomStream.race

    def shared(self: RandomStream, position: int, rates: np.ndarray, count: int = 1) -> list[int]:
        return right(self, position // 2, rates, count)

    monkeypatch.setattr(RandomStream, "race", shared)
    counts = count_answers(generate(folder, DRAFTS["tree"], "plain"))
    assert p_value(counts, exact_laws["plain"]) < ALPHA
