"""Logits of a step's rows, multiplied out when a walk asks for them.

The output head is a fifth of a small target's weights, and a walk down a tree reads a row per level: most
rows of a tree are never asked for. Owns which rows exist, the greedy choice of each, and the order in which
greedy walks of all trees ask for theirs (in waves, so that a wave is one product). A row's bits do not depend
on the rows beside it, so the order changes no text. Does not know how rows are made, or any rule but the
greedy one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from specdec.sampling import greedy_tokens
from specdec.tree import DraftTree

# so many rows cost little more than one: reading the head's weights takes that long
FREE_ROWS = 5


class StepLogits:
    """Rows `[rows, vocab]` that are made on demand and kept.

    Args:
        head: makes the logits of the rows it is given, fp32 `[len, vocab]`.
        num_rows: how many rows there are.
        vocab_size: of each.
        row_multiple: `head` pads its products to a multiple of so many rows.
    """

    def __init__(
        self, head: Callable[[list[int]], Tensor], num_rows: int, vocab_size: int, row_multiple: int = 1
    ) -> None:
        self._head = head
        self.shape = (num_rows, vocab_size)
        self.free_rows = max(1, FREE_ROWS // row_multiple * row_multiple)
        # the product that made each row, and its place there
        self._rows: dict[int, tuple[Tensor, int]] = {}
        self._choices: dict[int, int] = {}
        self._bad: dict[int, bool] = {}

    @classmethod
    def of(cls, logits: StepLogits | Tensor) -> StepLogits:
        """The same rows as `StepLogits`; a tensor's exist already."""
        if isinstance(logits, StepLogits):
            return logits
        made = cls(lambda rows: logits[rows], logits.shape[0], logits.shape[1])
        made.compute(list(range(logits.shape[0])))
        return made

    def __len__(self) -> int:
        return self.shape[0]

    def compute(self, rows: Sequence[int]) -> None:
        """Make those of the rows that do not exist yet, in one product."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._rows]
        if missing:
            self._keep(missing, self._head(missing))

    def _keep(self, rows: list[int], logits: Tensor) -> None:
        tokens, bad = greedy_tokens(logits)
        self._rows.update((row, (logits, place)) for place, row in enumerate(rows))
        self._choices.update(zip(rows, tokens, strict=True))
        self._bad.update(zip(rows, bad, strict=True))

    @overload
    def __getitem__(self, rows: int, /) -> Tensor: ...

    @overload
    def __getitem__(self, rows: slice | list[int], /) -> Tensor: ...

    def __getitem__(self, rows: int | slice | list[int], /) -> Tensor:
        """One row `[vocab]`, or several `[len, vocab]`."""
        if isinstance(rows, int):
            self.compute([rows])
            logits, place = self._rows[rows]
            return logits[place]
        asked = list(range(*rows.indices(self.shape[0]))) if isinstance(rows, slice) else rows
        self.compute(asked)
        return torch.stack([self[row] for row in asked])

    def __setitem__(self, rows: int | slice, logits: Tensor | float) -> None:
        """Put others in the place of some rows."""
        asked = list(range(*rows.indices(self.shape[0]))) if isinstance(rows, slice) else [rows]
        self._keep(asked, torch.as_tensor(logits).expand(len(asked), self.shape[1]).clone())

    def choice(self, row: int) -> int:
        """The greedy token of a row; means nothing if the row is bad."""
        self.compute([row])
        return self._choices[row]

    def is_bad(self, row: int) -> bool:
        """Whether no token can be chosen from a row (`specdec.sampling.greedy_tokens`)."""
        self.compute([row])
        return self._bad[row]

    def walk_greedily(self, trees: list[tuple[int, DraftTree]]) -> None:
        """Make the rows that greedy walks down some trees visit.

        Args:
            trees: each with its first row.
        """
        standing = dict.fromkeys(range(len(trees)), 0)
        while standing:
            wave = [trees[index][0] + node for index, node in standing.items()]
            room = self.free_rows - len(wave)
            for index, node in standing.items():
                start, tree = trees[index]
                likely = likely_path(tree, node, room)
                wave += [start + later for later in likely]
                room -= len(likely)
            self.compute(wave)
            standing = {
                index: after
                for index, node in standing.items()
                if (after := self._descend(*trees[index], node)) is not None
            }

    def _descend(self, start: int, tree: DraftTree, node: int) -> int | None:
        """The first node on the greedy way down from `node` whose row is missing; None where the way ends."""
        while start + node in self._rows:
            wanted = self._choices[start + node]
            child = next((child for child in tree.children[node] if tree.token_ids[child] == wanted), None)
            if child is None:
                return None
            node = child
        return node


def likely_path(tree: DraftTree, node: int, count: int) -> list[int]:
    """At most `count` nodes below `node`: its first child, that one's first child, and so on."""
    path: list[int] = []
    while len(path) < count and tree.children[node]:
        node = tree.children[node][0]
        path.append(node)
    return path


class TreeLogits:
    """One tree's rows of a step, by node.

    Args:
        step: the step's rows.
        start: the row of the tree's root.
        tree: the tree.
    """

    def __init__(self, step: StepLogits, start: int, tree: DraftTree) -> None:
        self._step, self._start, self._tree = step, start, tree

    def __getitem__(self, node: int, /) -> Tensor:
        """Logits after `node` `[vocab]`."""
        likely = likely_path(self._tree, node, self._step.free_rows - 1)
        self._step.compute([self._start + each for each in (node, *likely)])
        return self._step[self._start + node]

    def is_bad(self, node: int) -> bool:
        """Whether no token can follow `node`."""
        return self._step.is_bad(self._start + node)

    @property
    def choices(self) -> TreeChoices:
        """The greedy tokens of the same nodes."""
        return TreeChoices(self._step, self._start)


class TreeChoices:
    """Greedy tokens by node, of the tree whose root has the row `start`."""

    def __init__(self, step: StepLogits, start: int) -> None:
        self._step, self._start = step, start

    def __getitem__(self, node: int, /) -> int:
        return self._step.choice(self._start + node)
