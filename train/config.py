"""Options of draft-head training.

Owns every default of training. Knows nothing of tensors, files or the command line, which reads its defaults
from here. Values come from `EAGLE-3` (arXiv:2503.01840) where that paper gives them; others say why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.errors import SpecdecError

LossKind = Literal["kl", "lk", "lk-mix"]
LOSS_KINDS: tuple[LossKind, ...] = ("kl", "lk", "lk-mix")
Init = Literal["ridge", "random", "last-layer"]
INITS: tuple[Init, ...] = ("ridge", "random", "last-layer")
AUTO = "auto"
COMPUTE_DTYPES = (AUTO, "float32", "bfloat16")
STORAGE_DTYPES = ("float16", "bfloat16")
Schedule = Literal["cosine", "wsd"]
SCHEDULES: tuple[Schedule, ...] = ("cosine", "wsd")

# options younger than checkpoints that people have: a run without them is one with their defaults
LATER_OPTIONS = (
    "distill_top_k",
    "schedule",
    "decay_ratio",
    "ema",
    "embed",
    "hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "attention_bias",
    "qk_norm",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a head is built and trained.

    A *row* is a position of a sequence that starts a drafted chain; a *slot* is one unroll step of a row.
    `batch_rows` counts rows of one optimiser step; small batches learn faster per token at this scale.
    """

    # the head
    draft_vocab_size: int = 16384
    intermediate_size: int | None = None
    num_kv_heads: int | None = None
    lm_head: Literal["own", "target_rows"] = "target_rows"
    embed: Literal["own", "target"] = "target"
    # None: the target's width
    hidden_size: int | None = None
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    init: Init = "ridge"
    self_attending: bool = True
    # the objective; 0.8 is EAGLE-3's weight per step, 4 steps serve chains of about that length
    unroll: int = 4
    step_weight: float = 0.8
    loss: LossKind = "kl"
    # of the target's law, the most probable sayable tokens that count; None: all
    distill_top_k: int | None = None
    prompt_rows: bool = True
    prompt_row_weight: float = 1.0
    depth_sampling: bool = False
    # the loop
    epochs: float = 4.0
    steps: int | None = None
    max_hours: float | None = None
    batch_rows: int = 1024
    micro_batch_rows: int = 4096
    # a ridge start is near a good solution: 1e-3 shattered it in ten steps, 2e-4 improved it at once
    learning_rate: float = 3e-4
    min_lr_ratio: float = 0.02
    warmup_ratio: float = 0.05
    schedule: Schedule = "cosine"
    # share of all steps in which "wsd" falls
    decay_ratio: float = 0.2
    # share of the old average that a step keeps; None: the weights themselves are measured and saved
    ema: float | None = None
    weight_decay: float = 0.01
    adam_betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    seed: int = 0
    # auto: see `precision`
    compute_dtype: str = AUTO
    # weights, gradients and optimiser state in shards, one a process (FSDP)
    shard_weights: bool = False
    save_dtype: str = "float16"
    # the data
    max_length: int = 2048
    eval_fraction: float = 0.02
    eval_sequences: int = 48
    eval_depth: int = 4
    target_dtype: str = "float32"
    # spread a target too large for one card over several
    device_map: str | None = None
    # rows of the [rows, draft vocabulary] blocks of the loss: 256 x 16,384 floats stay in a 32 MB cache
    loss_chunk_rows: int = 256
    # upkeep
    log_every: int = 10
    save_every: int = 200
    eval_every: int = 500
    keep_checkpoints: int = 2
    # decoding in the engine: steps between measurements, prompts, tokens of each; 0 steps: never
    accept_every: int = 0
    accept_prompts: int = 4
    accept_tokens: int = 48

    def __post_init__(self) -> None:
        for name in (
            "unroll",
            "batch_rows",
            "micro_batch_rows",
            "max_length",
            "loss_chunk_rows",
            "log_every",
        ):
            self._whole(name, 1)
        for name in ("save_every", "eval_every", "keep_checkpoints", "eval_depth", "draft_vocab_size"):
            self._whole(name, 1)
        for name in ("steps", "intermediate_size", "num_kv_heads", "distill_top_k", "hidden_size"):
            if getattr(self, name) is not None:
                self._whole(name, 1)
        self._whole("eval_sequences", 0)
        self._whole("accept_every", 0)
        self._whole("accept_prompts", 1)
        self._whole("accept_tokens", 2)
        self._between("learning_rate", 0.0, 1.0)
        self._between("step_weight", 0.0, 1.0)
        self._between("warmup_ratio", -1e-9, 0.9)
        self._between("decay_ratio", 0.0, 1.0)
        self._between("eval_fraction", -1e-9, 0.5)
        self._between("prompt_row_weight", 0.0, 10.0)
        self._between("epochs", 0.0, 1e4)
        self._between("clip_norm", 0.0, 1e9)
        self._between("min_lr_ratio", -1e-9, 1.0)
        if self.max_hours is not None:
            self._between("max_hours", 0.0, 1e4)
        if self.ema is not None:
            self._between("ema", 0.0, 0.999999)
        self._one_of("loss", LOSS_KINDS)
        self._one_of("init", INITS)
        self._one_of("schedule", SCHEDULES)
        self._one_of("compute_dtype", COMPUTE_DTYPES)
        self._one_of("save_dtype", STORAGE_DTYPES)
        self._one_of("target_dtype", ("float32", "bfloat16", "float16"))
        self._one_of("lm_head", ("own", "target_rows"))
        self._one_of("embed", ("own", "target"))
        if self.fc_norm and self.norm_before_fc:
            raise SpecdecError(
                "fc_norm (true) and norm_before_fc (true) exclude each other; use --no-fc-norm"
            )
        if self.init == "ridge" and not (self.fc_norm and self.self_attending):
            raise SpecdecError(
                "init (ridge) needs fc_norm and self_attending; use --init random without them"
            )
        if self.init == "ridge" and self.norm_before_residual:
            raise SpecdecError("init (ridge) has no norm_before_residual; use --init random with it")
        if self.init != "random" and self.hidden_size is not None:
            raise SpecdecError(
                f"init ({self.init}) fits heads of the target's width; use --init random with hidden_size "
                f"({self.hidden_size})"
            )
        if self.unroll > 16:
            raise SpecdecError(
                f"unroll ({self.unroll}) must be at most 16; chains longer than that are not drafted"
            )

    def _whole(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < low:
            raise SpecdecError(f"{name} ({value}) must be a whole number of at least {low}")

    def _between(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or not low < value <= high:
            raise SpecdecError(f"{name} ({value}) must be above {max(low, 0.0)} and at most {high}")

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise SpecdecError(f"{name} ({getattr(self, name)!r}) must be one of {', '.join(allowed)}")


# what an option that a checkpoint does not name stands for
ABSENT_OPTIONS = {name: getattr(TrainConfig(), name) for name in LATER_OPTIONS}
