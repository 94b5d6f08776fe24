"""The budget of a layer study: every default of it.

Owns no tensors, so that the command line can show the defaults at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.config import SpecConfig
from specdec.errors import SpecdecError
from specdec.train.config import TrainConfig

# a small head trained for a minute or two: per-tap norms and the closed-form start in every arm
STUDY_TRAINING = TrainConfig(
    draft_vocab_size=4096, epochs=2.0, batch_rows=512, step_weight=0.6, depth_sampling=True
)


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """The budget every arm gets.

    Attributes:
        train_tokens: answer tokens of the training conversations.
        held_out: conversations that measure acceptance offline.
        served: of these, the prompts answered in the engine.
        served_tokens: tokens of each such answer.
        chain: drafted tokens of a verify step.
        training: how a head is trained; its seed is the arm's.
        keep_heads: keep the draft folders of the arms.
    """

    train_tokens: int = 40_000
    held_out: int = 96
    served: int = 16
    served_tokens: int = 64
    chain: int = 4
    training: TrainConfig = field(default=STUDY_TRAINING)
    keep_heads: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("train_tokens", 1),
            ("held_out", 2),
            ("served", 0),
            ("served_tokens", 2),
            ("chain", 1),
        ):
            if getattr(self, name) < low:
                flag = "--" + name.replace("_", "-")
                raise SpecdecError(f"{flag} ({getattr(self, name)}) must be at least {low}")
        # a chain the engine does not draft is refused here, not after the first head has been trained.
        self.drafting()
        if self.served > self.held_out:
            raise SpecdecError(f"--served ({self.served}) must be at most --held-out ({self.held_out})")
        if not self.training.fc_norm:
            raise SpecdecError("fc_norm must be on: without it a study compares norms, not layers")

    def drafting(self) -> SpecConfig:
        """How the engine drafts for a served prompt: a greedy chain, never switched off."""
        return SpecConfig(max_depth=self.chain, max_nodes=self.chain, top_k=1, adaptive=False)
