"""Watches an engine's target passes: what each verify step saw at the positions it committed.

Owns a runner that passes everything on unchanged. Rows are kept for the accepted path alone; whoever asked
for them takes them away batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from specdec.engine import Engine
from specdec.runner import ModelRunner, StepOutput
from specdec.scheduler import ScheduledSequence
from specdec.sequence import Sequence
from specdec.tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class VerifiedStep:
    """One sequence's verify step.

    Attributes:
        seq: the sequence; its token ids go on growing.
        root_position: absolute position of the tree's root.
        tree: what was drafted.
        nodes: the root and the accepted path.
        logits: the target's rows at those nodes `[nodes, vocab]`.
    """

    seq: Sequence
    root_position: int
    tree: DraftTree
    nodes: list[int]
    logits: Tensor


class RecordingRunner(ModelRunner):
    """Passes every call on to another runner and keeps the rows of the accepted paths."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner.decoder, inner.cache, inner.boundaries)
        self.inner = inner
        self.steps: list[VerifiedStep] = []
        self._open: tuple[list[DraftTree], StepOutput, list[int]] | None = None

    def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
        """Run the pass and remember it until its commit."""
        roots = [share.seq.num_computed + share.num_rows - 1 for share in plan]
        output = self.inner.run(plan, trees)
        self._open = (trees, output, roots)
        return output

    def commit(self, plan: list[ScheduledSequence], accepted: list[list[int]]) -> None:
        """Keep the rows of what is committed."""
        assert self._open is not None, "a commit follows its pass"
        trees, output, roots = self._open
        for index, share in enumerate(plan):
            start = output.logits_start[index]
            if start >= 0:
                nodes = [0, *accepted[index]]
                self.steps.append(
                    VerifiedStep(
                        seq=share.seq,
                        root_position=roots[index],
                        tree=trees[index],
                        nodes=nodes,
                        logits=output.logits[[start + node for node in nodes]].clone(),
                    )
                )
        self._open = None
        self.inner.commit(plan, accepted)


@contextmanager
def recording(engine: Engine) -> Iterator[list[VerifiedStep]]:
    """Record the verify steps of an engine while the block runs; the list may be emptied on the way."""
    inner = engine.runner
    recorder = RecordingRunner(inner)
    engine.runner = recorder
    try:
        yield recorder.steps
    finally:
        engine.runner = inner
