"""What is audited, what cannot be, and what comes out.

Owns the plan and its refusals. The claim that comes out is (criterion, precision, batch regime): dtype and
batch size stand in every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.audit.baselines import Baseline
from specdec.audit.levels import LevelResult
from specdec.audit.parity import Task
from specdec.audit.reference import Noise
from specdec.config import SpecConfig
from specdec.errors import UsageError
from specdec.exactness import ROUNDING_SETTINGS
from specdec.verification.rules import BoundRule

EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """What is audited.

    Attributes:
        target: folder, or a name that pull knows.
        draft: drafter spelling.
        spec: shape of the trees.
        dtype: of target and cache.
        weights: how the target's matrices are held (`EngineConfig.weights`).
        batch_size: requests decoded at once.
        levels: in order.
        rule: the rule requests name; None: exact verification as served by default.
        prompts: names and token ids, for C1 to C4.
        tasks: for C5 and the baselines of a lossy rule.
        max_tokens: of the answers of C2 to C4.
        task_tokens: of the answers to tasks.
        draws: of every test on tensors (C1).
        engine_draws: answers a prompt through the engine (C1).
        temperature: of a lossy rule's baselines.
        seed: of sampled text.
    """

    target: str
    draft: str
    spec: SpecConfig
    dtype: str
    batch_size: int
    levels: tuple[str, ...]
    rule: BoundRule | None
    prompts: Sequence[tuple[str, list[int]]]
    tasks: Sequence[Task]
    max_tokens: int
    task_tokens: int
    draws: int
    engine_draws: int
    temperature: float
    seed: int
    weights: str = "auto"

    @property
    def lossy(self) -> bool:
        """Whether the rule changes the law of the text."""
        return self.rule is not None and not self.rule.rule.is_lossless

    @property
    def full_precision(self) -> bool:
        """Whether the audited target computes with the weights that were loaded, in float32."""
        return self.dtype == "float32" and self.weights not in ROUNDING_SETTINGS

    @property
    def label(self) -> str:
        """Rule and knobs."""
        return EXACT if self.rule is None else self.rule.label


def check_plan(*, rule: BoundRule | None, levels: Sequence[str], spec: SpecConfig) -> None:
    """Refuse what the levels cannot decide.

    Raises:
        UsageError: greedy and trajectory levels of a lossy rule, or a chain rule on trees.
    """
    if rule is None:
        return
    if not rule.rule.is_lossless:
        unfit = [level for level in levels if level in ("C2", "C3", "C5")]
        if unfit:
            raise UsageError(
                f"--levels ({','.join(unfit)}) ask for the plain text, which a lossy rule ({rule.rule.name}) "
                "does not keep; give C0, C1 and C4"
            )
        if spec.top_k > 1:
            raise UsageError(
                f"--shape: a lossy rule ({rule.rule.name}) declares the law of one draft; give chain:DEPTH"
            )
    if rule.rule.topology == "chain" and spec.top_k > 1:
        raise UsageError(f"--shape: rule {rule.rule.name} verifies chains; give chain:DEPTH")


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """What came out.

    Attributes:
        levels: results in order.
        baselines: of a lossy rule, else empty.
        noise: what harmless changes move, None where no level needed it.
    """

    levels: list[LevelResult]
    baselines: list[Baseline]
    noise: Noise | None

    @property
    def passed(self) -> bool:
        """Whether no level failed."""
        return all(level.passed is not False for level in self.levels)
