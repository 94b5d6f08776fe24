"""Recipes: changes of training options that a study compares with the study's own training.

Owns which options a recipe may change and how one is spelled. A recipe must not change what makes arms
comparable: the conversations, how often they are seen, the vocabulary, the states, the seeds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from specdec.errors import SpecdecError
from specdec.train.config import TrainConfig

BASE = "base"
RECIPE_FIELDS = (
    *("intermediate_size", "num_kv_heads", "lm_head", "embed", "hidden_size", "fc_norm", "norm_output"),
    *("norm_before_residual", "norm_before_fc", "attention_bias", "qk_norm", "init", "self_attending"),
    *("unroll", "step_weight", "loss", "distill_top_k", "prompt_rows", "prompt_row_weight"),
    *("depth_sampling", "batch_rows", "learning_rate", "min_lr_ratio", "warmup_ratio", "schedule"),
    *("decay_ratio", "ema", "weight_decay", "clip_norm"),
)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A name and the options of `TrainConfig` it changes."""

    name: str
    changes: tuple[tuple[str, Any], ...]

    def applied(self, training: TrainConfig) -> TrainConfig:
        """The training with the changes.

        Raises:
            SpecdecError: values that training does not take, or not together.
        """
        try:
            return replace(training, **dict(self.changes))
        except SpecdecError as error:
            raise SpecdecError(f"--recipe {self.name}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"name": self.name, "changes": dict(self.changes)}


def parse_recipe(text: str) -> Recipe:
    """A recipe of `NAME:option=value,option=value`.

    Raises:
        SpecdecError: another spelling, an option that a recipe may not change, a value of another kind.
    """
    name, _, rest = text.partition(":")
    parts = [part.partition("=") for part in rest.split(",")]
    if not re.fullmatch(r"[\w+-]+", name) or not all(sign and value for _, sign, value in parts):
        raise SpecdecError(f"--recipe ({text}) must be NAME:option=value,... such as kl:loss=kl")
    if name == BASE:
        raise SpecdecError(f"--recipe ({text}): the study's own training is called {BASE}; choose a name")
    changes: dict[str, Any] = {}
    for option, _, value in parts:
        key = option.strip()
        if key not in RECIPE_FIELDS or key in changes:
            allowed = ", ".join(RECIPE_FIELDS)
            raise SpecdecError(f"--recipe {name}: {key!r} must be one of {allowed}, and once")
        changes[key] = _value(name, key, value.strip())
    return Recipe(name=name, changes=tuple(changes.items()))


def _value(name: str, option: str, text: str) -> Any:
    kind = next(str(field.type) for field in fields(TrainConfig) if field.name == option)
    value: Any = _WORDS.get(text, text)
    for convert in (int, float):
        if isinstance(value, str):
            try:
                value = convert(text)
            except ValueError:
                continue
    if (kind == "bool") != isinstance(value, bool) or (value is None and "None" not in kind):
        wanted = "true or false" if kind == "bool" else f"of kind {kind}"
        raise SpecdecError(f"--recipe {name}: {option} ({text}) must be {wanted}")
    return value


def check_recipes(recipes: list[Recipe], training: TrainConfig) -> None:
    """Refuse recipes that cannot be trained, and names given twice.

    Raises:
        SpecdecError: naming the recipe.
    """
    names = [recipe.name for recipe in recipes]
    for recipe in recipes:
        if names.count(recipe.name) > 1:
            raise SpecdecError(f"--recipe {recipe.name} is given twice; every recipe needs its own name")
        if recipe.applied(training) == training:
            raise SpecdecError(f"--recipe {recipe.name} changes nothing: it is the study's own training")
