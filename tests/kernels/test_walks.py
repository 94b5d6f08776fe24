"""Walks of whole batches commit what the host's rules commit with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.acceptance import verify_step
from specdec.kernels import (
    reference_sampling_rows,
    reference_walks,
    row_choices,
    sampling_rows,
    walk_block,
    walks,
)
from specdec.kernels.tree_records import NO_PARENT, RowParams, TreeRows, WalkResult, seed_bits
from specdec.random_streams import RandomStream
from specdec.sampling_params import SamplingParams
from specdec.tree import DraftTree
from specdec.verification.registry import RULES
from specdec.verification.rules import bind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# where the functions live: laws, races, walks, chains
Modules = tuple[ModuleType, ModuleType, ModuleType, ModuleType]
PLAIN: Modules = (reference_sampling_rows, reference_sampling_rows, reference_walks, reference_walks)
# the interpreter is slow, and laws and races have tests of their own
TRITON: Modules = (*PLAIN[:2], walks, walk_block)
COMPILED: Modules = (sampling_rows, row_choices, walks, walk_block)
BOTH = pytest.mark.parametrize("modules", [TRITON, PLAIN], ids=["triton", "plain"])
RULES_ON_TREES = ("greedy", "coupled", "target-only")


@dataclass
class Case:
    """A ragged batch: trees, their logits and the numbers of their requests."""

    trees: list[DraftTree]
    logits: list[Tensor]
    params: list[SamplingParams]
    seeds: list[int]
    roots: list[int]
    padding: list[int]

    def host(self, rule: str, index: int) -> tuple[list[int], int, bool, bool]:
        """Accepted nodes, next token, bonus or not, failed or not: what the engine's own path commits."""
        tree, logits = self.trees[index], self.logits[index]
        seq: Any = SimpleNamespace(
            params=self.params[index],
            processor=None,
            simulated=None,
            rule=bind(RULES[rule], {}),
            stream=RandomStream(self.seeds[index]),
            token_ids=[0] * (self.roots[index] + 1),
        )
        errors: list[str] = []
        seq.finish = lambda reason, error: errors.append(error)
        plan: Any = [SimpleNamespace(seq=seq)]
        output: Any = SimpleNamespace(logits=logits, logits_start=[0])
        (result,) = verify_step(plan, [tree], output)
        if result is None:
            assert errors, "only a bad root ends a step without a result"
            return [], -1, False, True
        return result.accepted_nodes, result.next_token_id, result.next_kind == "bonus", False

    def device(self, rule: str, modules: Modules) -> WalkResult:
        """The same on the device, trees one after the other, padding behind each, an empty one last."""
        parents, tokens, logits, draft, positions, of_row, starts = [], [], [], [], [], [], [0]
        vocab = self.logits[0].shape[1]
        for index, tree in enumerate(self.trees):
            gap = self.padding[index]
            parents += tree.parents + [NO_PARENT] * gap
            tokens += tree.token_ids + [0] * gap
            positions += [self.roots[index] + depth for depth in tree.depths] + [0] * gap
            logits += [self.logits[index], torch.full((gap, vocab), torch.nan, dtype=self.logits[0].dtype)]
            if tree.draft_probs is not None:
                draft += [tree.draft_probs, torch.zeros(gap, vocab, dtype=tree.draft_probs.dtype)]
            of_row += [index] * (tree.num_nodes + gap)
            starts.append(len(parents))
        starts.append(len(parents))
        rows = TreeRows(
            node_start=integers(starts, torch.int32),
            parents=integers(parents, torch.int32),
            token_ids=integers(tokens),
            max_nodes=max(end - start for start, end in pairwise(starts)),
            max_depth=max(tree.max_depth for tree in self.trees) + 1,
        )
        on_device = torch.cat(logits).to(DEVICE)
        seeds = integers([seed_bits(seed) for seed in [*self.seeds, 0]])
        place = integers(positions, torch.int32)
        laws_in, races, walking, chains = modules
        if rule == "greedy":
            return walking.walk_choices(rows, *laws_in.greedy_choices(on_device))
        laws = laws_in.row_laws(on_device, row_params(self.params).at(integers(of_row)))
        if rule == "coupled":
            winners = races.race_winners(on_device, laws, rows, seeds, place)
            return walking.walk_choices(rows, winners, laws.bad)
        if rule == "target-only":
            return walking.walk_target_only(rows, on_device, laws, seeds, place)
        return chains.walk_block(rows, on_device, laws, torch.cat(draft).to(DEVICE), seeds, place)


def integers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def row_params(params: Sequence[SamplingParams]) -> RowParams:
    def doubles(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=DEVICE)

    return RowParams(
        temperature=doubles([one.temperature for one in params]),
        top_k=integers([one.top_k for one in params], torch.int32),
        top_p=doubles([one.top_p for one in params]),
        min_p=doubles([one.min_p for one in params]),
    )


def random_case(
    seed: int, *, chains: bool, max_nodes: int, dtype: torch.dtype, faults: float, batch: int = 3
) -> Case:
    """Trees whose tokens are often the target's best ones, so that paths get long."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([2, 7, 33]))
    case = Case([], [], [], [], [], [])
    for _ in range(batch):
        count = int(rng.integers(1, max_nodes + 1))
        logits = torch.from_numpy(rng.normal(size=(count, vocab)) * rng.choice([0.5, 2.0, 6.0])).to(dtype)
        parents, tokens, laws = [-1], [0], np.zeros((count, vocab))
        for node in range(1, count):
            parent = node - 1 if chains or rng.random() < 0.3 else int(rng.integers(0, node))
            best = int(logits[parent].argmax())
            parents.append(parent)
            tokens.append(best if rng.random() < 0.5 else int(rng.integers(0, vocab)))
            if chains and rng.random() < 0.8:
                # not normalised, some ids without mass, the drafted one with it
                laws[parent] = rng.random(vocab) * (rng.random(vocab) < 0.7)
                laws[parent, tokens[-1]] += 0.1
        for node in range(count):
            if rng.random() < faults:
                logits[node] = rng.choice([np.nan, -np.inf])
        draft_probs = torch.from_numpy(laws).to(dtype if dtype != torch.float16 else torch.float32)
        case.trees.append(
            DraftTree(token_ids=tokens, parents=parents, draft_probs=draft_probs if chains else None)
        )
        case.logits.append(logits)
        top_k = int(rng.choice([0, 3]))
        case.params.append(
            SamplingParams(
                temperature=float(rng.choice([0.6, 1.0])), top_k=top_k, top_p=float(rng.choice([0.9, 1.0]))
            )
        )
        case.seeds.append(int(rng.integers(0, 2**63)) * 2 + 1)
        case.roots.append(int(rng.integers(0, 5000)))
        case.padding.append(int(rng.integers(0, 3)))
    return case


def check(case: Case, rule: str, modules: Modules) -> set[int]:
    """Compare a batch with the host, sequence by sequence; returns the accepted lengths met."""
    found = case.device(rule, modules)
    batch = len(case.trees)
    lengths = set()
    for index in range(batch):
        accepted, token, is_bonus, failed = case.host(rule, index)
        path = found.accepted_nodes[index].tolist()
        assert path == accepted + [-1] * (len(path) - len(accepted))
        assert found.num_accepted[index].item() == len(accepted)
        assert found.next_token_ids[index].item() == token
        assert found.is_bonus[index].item() == is_bonus
        assert found.failed[index].item() == failed
        lengths.add(len(accepted))
    # the sequence without rows
    assert found.num_accepted[batch].item() == 0
    assert found.next_token_ids[batch].item() == -1
    assert not found.failed[batch]
    assert not found.is_bonus[batch]
    return lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("rule", [*RULES_ON_TREES, "block"])
@BOTH
def test_walks_commit_what_the_host_commits(modules: Modules, rule: str, dtype: torch.dtype) -> None:
    """Ragged trees with padding and an empty one, equal siblings, filters, rows that break off a path."""
    lengths = set()
    few = 6 if rule == "block" else 2
    for seed in range(few if modules is TRITON else 25):
        case = random_case(seed, chains=rule == "block", max_nodes=9, dtype=dtype, faults=0.08)
        lengths |= check(case, rule, modules)
    assert {0, 1} < lengths, "the batches must exercise rejections and long paths"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(RULES_ON_TREES))
def test_any_tree_of_64_nodes_is_walked_as_on_the_host(seed: int, rule: str) -> None:
    check(random_case(seed, chains=False, max_nodes=64, dtype=torch.float32, faults=0.02), rule, PLAIN)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(("greedy", "target-only")))
def test_any_tree_of_64_nodes_is_walked_in_triton_as_on_the_host(seed: int, rule: str) -> None:
    case = random_case(seed, chains=False, max_nodes=64, dtype=torch.float32, faults=0.02, batch=1)
    check(case, rule, TRITON)


@BOTH
def test_siblings_that_hold_all_of_p_leave_no_other_token(modules: Modules) -> None:
    """The running sum ends at 1, or all but: the draw after it must not leave the support."""
    logits = torch.tensor([[0.3, 0.2, -torch.inf, 0.1], [0.0, 0.0, 0.0, 0.0]])[[0, 1, 1, 1]]
    tree = DraftTree(token_ids=[0, 0, 1, 3], parents=[-1, 0, 0, 0])
    for seed in range(4):
        case = Case([tree], [logits], [SamplingParams(temperature=1.0)], [seed], [3], [0])
        check(case, "target-only", modules)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [*RULES_ON_TREES, "block"])
def test_walks_commit_what_the_host_commits_in_bf16(rule: str) -> None:
    for seed in range(25):
        case = random_case(seed, chains=rule == "block", max_nodes=64, dtype=torch.bfloat16, faults=0.05)
        check(case, rule, COMPILED)
