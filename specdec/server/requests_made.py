"""From a request's fields to the runtime's: sampling parameters, speculation, options.

Owns OpenAI's defaults (temperature 1; a completion of 16 tokens), the server's caps, and which field a
refusal is about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from specdec.config import SpecConfig
from specdec.request_options import RequestOptions
from specdec.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from specdec.server.config import ServerConfig
from specdec.server.fields import (
    ChatFields,
    CompletionFields,
    GeneratingFields,
    SpeculativeFields,
)
from specdec.server.grammar_fields import grammar_of
from specdec.server.problems import about_fields, bad_field

COMPLETION_TOKENS = 16  # OpenAI's default for the older endpoint
MAX_STOP_CHARACTERS = 1024
# fields that go to SamplingParams under their own names; those left out keep the defaults below
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_OPENAI_DEFAULTS = {"temperature": 1.0}
_SEEDS = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server can do, as far as requests depend on it."""

    config: ServerConfig
    spec: SpecConfig
    has_draft: bool


def field_names(fields: GeneratingFields) -> dict[str, str]:
    """The request's fields by the names that the runtime's refusals begin with."""
    names = {name: name for name in SamplingParams.__dataclass_fields__}
    names["rule"] = "speculative.verification"
    names |= {
        name: f"speculative.{name}" for name in (fields.speculative or SpeculativeFields()).model_extra or ()
    }
    names["grammar"] = grammar_of(fields)[1] or "response_format"
    names["prompt"] = "prompt"
    if isinstance(fields, ChatFields):
        names |= {"logprobs": "top_logprobs", "prompt": "messages", "chat": "messages"}
        if fields.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    # "a prompt of 60 tokens with max_tokens (10) does not fit"
    names["a"] = names["max_tokens"]
    return names


def sampling_of(
    fields: GeneratingFields,
    settings: Settings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Sampling parameters of the request's first choice.

    Args:
        fields: the request's.
        settings: the server's.
        max_tokens: longest answer, None for the rest of the context.
        logprobs: best tokens to report beside each token, None for no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt.

    Raises:
        Problem: a 400 that names the field.
    """
    given = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    greedy = given.get("temperature", 1.0) <= GREEDY_TEMPERATURE
    spec, rule, knobs = _speculation(fields.speculative or SpeculativeFields(), settings, greedy=greedy)
    grammar, _ = grammar_of(fields)
    with about_fields(field_names(fields)):
        return SamplingParams(
            **{**_OPENAI_DEFAULTS, **given},
            logit_bias=_logit_bias(fields.logit_bias or {}),
            bad_words=tuple(fields.bad_words or ()),
            allowed_token_ids=None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids),
            stop=_stop(fields.stop),
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            seed=fields.seed,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            spec=spec,
            speculate=(fields.speculative or SpeculativeFields()).enabled is not False,
            rule=rule,
            rule_knobs=knobs,
        )


def completion_params(fields: CompletionFields, settings: Settings) -> SamplingParams:
    """Sampling parameters of a completion."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise bad_field(
            "best_of", f"best_of ({fields.best_of}) must equal n ({fields.n or 1}), or be left out"
        )
    # an echoed prompt has log-probabilities where the answer has them
    echoed = fields.logprobs if fields.echo else None
    wanted = [count for count in (echoed, _prompt_logprobs(fields)) if count is not None]
    return sampling_of(
        fields,
        settings,
        max_tokens=COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=max(wanted, default=None),
    )


def chat_params(fields: ChatFields, settings: Settings) -> SamplingParams:
    """Sampling parameters of a chat."""
    newer = fields.max_completion_tokens is not None
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_field("top_logprobs", f"top_logprobs ({fields.top_logprobs}) needs logprobs: true")
    return sampling_of(
        fields,
        settings,
        max_tokens=fields.max_completion_tokens if newer else fields.max_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=_prompt_logprobs(fields),
    )


def _prompt_logprobs(fields: GeneratingFields) -> int | None:
    if fields.stream and fields.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "prompt_logprobs come with a whole answer; leave stream out")
    return fields.prompt_logprobs


def of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of a choice: a seed counts up, so that each choice is the run of a seed of its own."""
    if params.seed is None or choice == 0:
        return params
    return replace(params, seed=(params.seed + choice) % _SEEDS)


def options_of(fields: GeneratingFields, config: ServerConfig) -> RequestOptions:
    """Scheduling and cache wishes.

    Raises:
        Problem: a 400 that names the field.
    """
    if fields.timeout is not None and fields.deadline_s is not None:
        raise bad_field("timeout", "timeout and deadline_s are the same; give one of them")
    field = "timeout" if fields.timeout is not None else "deadline_s"
    deadline = fields.timeout if fields.timeout is not None else fields.deadline_s
    cap = config.max_deadline_s
    if cap is not None and deadline is not None and deadline > cap:
        raise bad_field(field, f"{field} ({deadline:g}) must be at most {cap:g} seconds on this server")
    names = {name: name for name in RequestOptions.__dataclass_fields__} | {"deadline_s": field}
    with about_fields(names):
        return RequestOptions(
            priority=fields.priority or 0,
            deadline_s=cap if deadline is None else deadline,
            cache_salt=fields.cache_salt,
            kv_ttl_s=fields.kv_ttl_s or 0.0,
        )


def num_choices(fields: GeneratingFields, config: ServerConfig) -> int:
    """The request's `n`.

    Raises:
        Problem: out of range.
    """
    count = 1 if fields.n is None else fields.n
    if not 1 <= count <= config.max_choices:
        raise bad_field("n", f"n ({count}) must be in 1..{config.max_choices}")
    return count


def _speculation(
    fields: SpeculativeFields, settings: Settings, *, greedy: bool
) -> tuple[SpecConfig | None, str | None, dict[str, float | str]]:
    """Settings, rule and knobs of a request's `speculative` object."""
    wanted = {name: getattr(fields, name) for name in ("max_depth", "top_k", "max_nodes", "adaptive")}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if not settings.has_draft and (fields.enabled or wanted):
        name = "enabled" if fields.enabled else next(iter(wanted))
        raise bad_field(f"speculative.{name}", "this server has no draft; leave speculative out")
    caps = settings.config.caps.covering(settings.spec)
    for name in ("max_depth", "top_k", "max_nodes"):
        cap = getattr(caps, name)
        if name in wanted and wanted[name] > cap:
            raise bad_field(
                f"speculative.{name}", f"{name} ({wanted[name]}) must be at most {cap} on this server"
            )
    spec = None
    if wanted:
        with about_fields({name: f"speculative.{name}" for name in wanted}, "speculative"):
            spec = _shaped(settings.spec, wanted)
    knobs: dict[str, float | str] = {}
    for name, value in (fields.model_extra or {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise bad_field(f"speculative.{name}", f"speculative.{name} must be a number or a word")
        knobs[name] = value if isinstance(value, str) else _float(f"speculative.{name}", value)
    if fields.verification in (None, "exact"):
        if knobs:
            name = next(iter(knobs))
            raise bad_field(
                f"speculative.{name}",
                f"speculative.{name} is neither a field nor a knob: knobs need the rule they belong to in "
                "speculative.verification",
                "unknown_field",
            )
        # at temperature 0 a lossy rule has nothing to relax, and every exact one is the greedy one
        if fields.verification is None and settings.config.default_rule is not None and not greedy:
            return spec, settings.config.default_rule, dict(settings.config.default_knobs)
        return spec, None, {}
    return spec, fields.verification, knobs


def _shaped(base: SpecConfig, wanted: dict[str, Any]) -> SpecConfig:
    """The server's settings with the wanted ones; what was not given is made to fit what was."""
    depth = wanted.get("max_depth", base.max_depth)
    nodes = wanted.get("max_nodes", base.max_nodes)
    if "max_nodes" not in wanted:
        nodes = depth if wanted.get("top_k", base.top_k) == 1 else max(nodes, depth)
    elif "max_depth" not in wanted:
        depth = min(depth, nodes)
    return replace(base, **{**wanted, "max_depth": depth, "max_nodes": nodes})


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise bad_field(name, f"{name} is out of every range") from error


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    longest = max((len(text) for text in texts), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise bad_field("stop", f"stop ({longest} characters) must be at most {MAX_STOP_CHARACTERS} each")
    return texts


def _logit_bias(pairs: dict[str, float]) -> dict[int, float]:
    for key in pairs:
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise bad_field("logit_bias", f"logit_bias ({key!r:.40}) must have token ids for keys")
    return {int(key): value for key, value in pairs.items()}
