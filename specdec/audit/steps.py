"""Level C4: teacher-forced, every committed position of the tree passes equals a plain pass over the text.

Catches a wrong position, mask, cache row or commit even where the argmax agrees, since whole rows of logits
are compared. Rows are grouped by depth in the tree: depth 0 is the root, which plain decoding computes too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.audit.levels import Figure, LevelResult, level_result
from specdec.audit.recording import VerifiedStep
from specdec.audit.reference import ROW_SAFETY, Noise, PlainReference, row_difference
from specdec.sequence import Sequence

MAX_FINDINGS = 8


@dataclass
class _Depth:
    """Rows of one depth."""

    rows: int = 0
    above: int = 0
    largest: float = 0.0
    total: float = 0.0
    not_chosen: int = 0


@dataclass
class StepInvariant:
    """Compares recorded steps with plain passes.

    Attributes:
        used: the target in the dtype of the engine.
        noise: what harmless changes make of it.
        greedy: whether every token must be the largest logit of its row.
        name_of: name of a sequence's prompt, for the findings.
    """

    used: PlainReference
    noise: Noise
    greedy: bool
    name_of: Callable[[Sequence], str]
    depths: dict[int, _Depth] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    # prompt -> number of its first token that was chosen from a row unlike the plain pass's
    spoiled: dict[str, int] = field(default_factory=dict)

    def take(self, steps: list[VerifiedStep]) -> None:
        """Compare the steps of finished sequences and empty the list."""
        by_sequence: dict[int, list[VerifiedStep]] = {}
        for step in steps:
            by_sequence.setdefault(id(step.seq), []).append(step)
        for own in by_sequence.values():
            self._compare(own)
        steps.clear()

    def _compare(self, steps: list[VerifiedStep]) -> None:
        seq = steps[0].seq
        text, first = seq.token_ids, seq.prompt_len - 1
        # the last token has no successor in the text
        expected = self.used.logits(text[:-1], first)
        for step in steps:
            # what an end or a limit cut off is in no text
            nodes = step.nodes[: len(text) - 1 - step.root_position]
            if not nodes:
                continue
            start = step.root_position - first
            found = step.logits[: len(nodes)]
            differences = row_difference(found, expected[start : start + len(nodes)]).tolist()
            choices = found.argmax(dim=1).tolist()
            for depth, difference in enumerate(differences):
                position = step.root_position + depth
                chosen = choices[depth] == text[position + 1]
                self._count(seq, position, depth, difference, chosen)

    def _count(self, seq: Sequence, position: int, depth: int, difference: float, chosen: bool) -> None:
        counts = self.depths.setdefault(depth, _Depth())
        above = not difference <= self.noise.same_row
        counts.rows += 1
        counts.above += above
        counts.total += difference
        counts.largest = max(counts.largest, difference)
        counts.not_chosen += self.greedy and not chosen
        index, name = position + 1 - seq.prompt_len, self.name_of(seq)
        if above:
            self.spoiled[name] = min(index, self.spoiled.get(name, index))
        if (above or (self.greedy and not chosen)) and len(self.findings) < MAX_FINDINGS:
            self.findings.append(
                {
                    "prompt": name,
                    "index": index,
                    "depth": depth,
                    "relative_difference": difference,
                    "token_is_the_argmax_of_its_row": chosen,
                }
            )

    def result(self) -> LevelResult:
        """The level's outcome so far."""
        figures = [
            Figure(
                name=f"depth {depth}" + (" (root)" if depth == 0 else ""),
                values={
                    "rows": counts.rows,
                    "mean_difference": counts.total / counts.rows,
                    "largest_difference": counts.largest,
                    "above_tolerance": counts.above,
                    "not_the_argmax": counts.not_chosen if self.greedy else None,
                },
                passed=counts.above == 0 and counts.not_chosen == 0,
            )
            for depth, counts in sorted(self.depths.items())
        ]
        return level_result(
            "C4",
            figures,
            notes=(
                "root mean square difference of a row of logits from the plain pass in the same dtype, in "
                f"units of the row's own spread; tolerance {self.noise.same_row:.3g}: {_origin(self.noise)}",
            ),
            findings=self.findings,
        )


def _origin(noise: Noise) -> str:
    return (
        f"{ROW_SAFETY:g} times the largest one between plain passes of 1, 5 and 256 rows over the same "
        f"{noise.positions} positions"
    )
