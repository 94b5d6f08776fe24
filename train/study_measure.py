"""How an arm of a study is measured: counts a conversation offline, and the same prompts in the engine.

Owns both records. Knows nothing of training or of how arms are compared.

Offline: along the target's own text, with no noise from where verify steps fall, the overlap sum min(p, q)
and the divergence at every position, which separate arms that acceptance length cannot. In the engine:
speculation always on, a chain, greedy, against the plain engine's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.sequence import SamplingParams
from specdec.train.evaluate import ChainCounts
from specdec.train.sequences import TrainSequence

BATCH = 8


def conversation_record(sequence: TrainSequence, counts: ChainCounts) -> dict[str, Any]:
    """One held-out conversation: counts of simulated greedy chains, and sums by depth."""
    return {
        "id": sequence.id,
        "category": sequence.category,
        "verify_steps": counts.steps,
        "committed": counts.committed,
        "rows": counts.rows,
        "overlap": [round(value, 4) for value in counts.overlap],
        "divergence": [round(value, 4) for value in counts.divergence],
    }


def prompt_of(sequence: TrainSequence) -> list[int]:
    """The ids before a conversation's first answer token.

    Raises:
        SpecdecError: the conversation has no prompt.
    """
    first = sequence.assistant_mask.index(True) if True in sequence.assistant_mask else 0
    if first == 0:
        raise SpecdecError(f"conversation {sequence.id} has no prompt before its answer and cannot be served")
    return list(sequence.token_ids[:first])


class ServedPrompts:
    """Prompts of held-out conversations and the plain engine's answers to them.

    Args:
        target: Hugging Face folder.
        sequences: conversations whose prompts are answered.
        max_tokens: tokens of an answer.
        drafting: how the engine drafts.
    """

    def __init__(
        self, target: Path, sequences: Sequence[TrainSequence], max_tokens: int, drafting: SpecConfig
    ) -> None:
        self.sequences = sequences
        self.prompts = [prompt_of(sequence) for sequence in sequences]
        longest = max(len(prompt) for prompt in self.prompts) + max_tokens
        self.config = EngineConfig(
            max_num_seqs=BATCH,
            kv_tokens=BATCH * (longest + 64),
            spec=drafting,
            prefix_cache=False,
        )
        self.params = SamplingParams(max_tokens=max_tokens)
        self.plain = Engine(target, config=self.config)
        self.texts = [result.token_ids for result in self.plain.generate(self.prompts, self.params)]

    def measure(self, draft: Path) -> list[dict[str, Any]]:
        """Counts of each prompt with a draft folder, and whether the text is the plain one."""
        results = Engine(self.plain, draft=draft, config=self.config).generate(self.prompts, self.params)
        return [
            {
                "id": sequence.id,
                "category": sequence.category,
                "verify_steps": result.stats.verify_steps,
                "committed": result.stats.committed,
                "identical": result.token_ids == text,
            }
            for sequence, result, text in zip(self.sequences, results, self.texts, strict=True)
        ]
