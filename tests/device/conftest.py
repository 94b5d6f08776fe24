"""An engine on the device path whose draft is right now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig
from specdec.drafter import Drafter, DraftRequest, TargetView
from specdec.drafts import load_drafter
from specdec.drafts.eagle3_device import DeviceEagle3Drafter
from specdec.engine import Engine
from specdec.kernels.step_records import StepClass, StepInputs
from specdec.kernels.tree_records import GrownTrees
from specdec.tree import DraftTree

MAX_LENGTH = 128


class Knowing:
    """Stands in for the growth of trees: makes the head's rows, and puts known texts on their first paths.

    Acceptance is then long, short and none by turns. Texts are found by seed, and given by `learn`. The
    host's proposals get the same tokens, so that it does not matter who made a tree. Requests whose text
    depends on their drafts keep theirs.
    """

    def __init__(self, drafter: DeviceEagle3Drafter) -> None:
        self.inner: Callable[[StepClass, StepInputs], GrownTrees] = drafter._growth
        self.inner_propose = drafter.propose
        self.seeds = torch.zeros(0, dtype=torch.int64)
        self.texts = torch.zeros(0, MAX_LENGTH + 8, dtype=torch.int64)

    def learn(self, seed: int, token_ids: list[int]) -> None:
        text = torch.full((1, MAX_LENGTH + 8), 5)
        text[0, : len(token_ids)] = torch.tensor(token_ids)
        self.seeds = torch.cat((self.seeds, torch.tensor([seed])))
        self.texts = torch.cat((self.texts, text))

    def __call__(self, size: StepClass, inputs: StepInputs) -> GrownTrees:
        trees = self.inner(size, inputs)
        if not len(self.seeds):
            return trees
        text = self.texts[(inputs.seeds.unsqueeze(1) == self.seeds).int().argmax(1)]
        node = torch.zeros_like(inputs.context_len)
        for depth in range(1, size.depth + 1):
            is_child = trees.parents == node.unsqueeze(1)
            child = is_child.int().argmax(1)
            place = inputs.context_len + depth
            known = text.gather(1, place.unsqueeze(1).long()).squeeze(1)
            # wrong now and then, by place alone
            known = torch.where((place * 7 + inputs.context_len) % 5 == 0, known ^ 1, known)
            valid = is_child.any(1) & (node >= 0) & ~(inputs.is_block | inputs.is_target_only)
            row = torch.arange(len(child))
            trees.token_ids[row, child] = torch.where(valid, known, trees.token_ids[row, child])
            node = torch.where(valid, child, -3)
        return trees

    def propose(self, asked: list[DraftRequest]) -> list[DraftTree]:
        return [self._with_text(*pair) for pair in zip(asked, self.inner_propose(asked), strict=True)]

    def _with_text(self, request: DraftRequest, tree: DraftTree) -> DraftTree:
        rows = (self.seeds == request.seq.stream.seed).nonzero()
        if request.seq.needs_whole_trees or not len(rows):
            return tree
        text, context = self.texts[int(rows[0])].tolist(), len(request.seq.token_ids) - 1
        tokens, node = list(tree.token_ids), 0
        while tree.children[node]:
            node = tree.children[node][0]
            place = context + tree.depths[node]
            tokens[node] = text[place] ^ 1 if (place * 7 + context) % 5 == 0 else text[place]
        return DraftTree(token_ids=tokens, parents=tree.parents)


@pytest.fixture(scope="package")
def draft(
    tiny_llama: Path, random_draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return random_draft(tiny_llama, tmp_path_factory.mktemp("device-draft"))


@pytest.fixture(scope="package")
def knowing_engine(tiny_llama: Path, draft: Path) -> Callable[..., Engine]:
    """Make an engine from texts by the seeds of their requests, and from settings."""

    def make(
        texts: dict[int, list[int]], clock: Callable[[], float] = time.monotonic, **settings: Any
    ) -> Engine:
        def build(view: TargetView) -> Drafter:
            drafter = load_drafter(str(draft), view)
            assert isinstance(drafter, DeviceEagle3Drafter)
            growth = Knowing(drafter)
            drafter._growth = growth  # type: ignore[assignment]
            drafter.propose = growth.propose  # type: ignore[method-assign]
            for seed, token_ids in texts.items():
                growth.learn(seed, token_ids)
            return drafter

        return Engine(tiny_llama, draft=build, config=EngineConfig(**settings), clock=clock)

    return make
