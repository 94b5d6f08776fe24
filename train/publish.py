"""The draft of a run as others get it: cast, measured, written.

Owns the copy of the head that is served, so that the trained fp32 weights are never touched, and which
measurements are made of it: simulated chains on held-out text at every call, decoding in the engine now and
then. Knows nothing of how the weights came about.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.config import EngineConfig, SpecConfig
from specdec.drafts.checkpoint import DraftContract, cast_head, save_draft
from specdec.drafts.eagle3 import Eagle3Head
from specdec.engine import Engine
from specdec.sequence import SamplingParams
from specdec.train.config import TrainConfig
from specdec.train.evaluate import OfflineAcceptance, offline_acceptance
from specdec.train.sequences import TrainSequence
from specdec.train.states import StateSource
from specdec.train.study_measure import prompt_of


class Publisher:
    """Called with a step and whole weights: measures them as served and writes the draft folder.

    Args:
        folder: the draft folder.
        target: the target's folder.
        head: the trained head, for its shape; its weights are not read.
        source: target states of the held-out conversations.
        held_out: conversations to measure on; without any nothing is measured.
        config: training options.
        contract: what the draft was made for; the numbers of a step are added.
        trained_on: counts that the contract tells of the training data.
        report: called with one line of progress.
    """

    def __init__(
        self,
        folder: Path,
        target: str | Path,
        head: Eagle3Head,
        source: StateSource,
        held_out: Sequence[TrainSequence],
        config: TrainConfig,
        *,
        target_fingerprint: str,
        template_hash: str,
        trained_on: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.folder, self.target, self.source, self.held_out = folder, target, source, held_out
        self.config, self.report, self.trained_on = config, report, dict(trained_on)
        self.target_fingerprint, self.template_hash = target_fingerprint, template_hash
        # the target's rows and embeddings are shared, not copied
        self.served = copy.deepcopy(head, {id(buffer): buffer for buffer in head.buffers()}).cpu()
        self.acceptance: OfflineAcceptance | None = None
        self.served_length: float | None = None
        self._decoded_at = 0

    def __call__(self, step: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Measure and write; the numbers for the log."""
        self.served.load_state_dict(weights)
        cast_head(self.served, self.config.save_dtype)
        found = None
        if self.held_out:
            found = offline_acceptance(self.served, self.source, self.held_out, self.config.eval_depth)
            self.report(
                f"step {step}: offline acceptance length {found.acceptance_length or 0:.3f}, "
                f"conditional {[round(x, 3) if x is not None else None for x in found.conditional]}"
            )
        self.acceptance = found
        training = {
            "step": step,
            **self.trained_on,
            "offline_acceptance": found.to_dict() if found else None,
        }
        contract = DraftContract(
            target_fingerprint=self.target_fingerprint, template_hash=self.template_hash, training=training
        )
        save_draft(self.folder, self.served, contract, dtype=self.config.save_dtype)
        return training | self._decode(step)

    def _decode(self, step: int) -> dict[str, Any]:
        """Acceptance in the engine, when `accept_every` steps have passed since the last time."""
        every = self.config.accept_every
        prompts = [
            prompt_of(s) for s in self.held_out[: self.config.accept_prompts] if not s.assistant_mask[0]
        ]
        if not every or step // every == self._decoded_at // every or not prompts:
            return {}
        self._decoded_at = step
        tokens, depth = self.config.accept_tokens, self.config.eval_depth
        room = len(prompts) * (max(map(len, prompts)) + tokens + 64)
        engine = Engine(
            self.target,
            draft=self.folder,
            config=EngineConfig(
                kv_tokens=room,
                max_num_seqs=len(prompts),
                spec=SpecConfig(adaptive=False, max_depth=depth, top_k=1, max_nodes=depth),
            ),
        )
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        results = engine.generate(prompts, params)
        committed = sum(result.stats.committed for result in results)
        steps = sum(result.stats.verify_steps for result in results)
        del engine
        gc.collect()
        self.served_length = committed / steps if steps else None
        if self.served_length is not None:
            self.report(
                f"step {step}: acceptance length in the engine {self.served_length:.3f}, greedy chain of "
                f"{depth}, {len(prompts)} held-out prompts, {committed} tokens"
            )
        return {
            "engine": {
                "acceptance_length": self.served_length,
                "prompts": len(prompts),
                "tokens": committed,
                "verify_steps": steps,
            }
        }
