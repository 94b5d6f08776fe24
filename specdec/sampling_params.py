"""What a request asks of sampling: which token is chosen, what may be chosen, and when to stop.

Owns the fields, their defaults, ranges and size limits; the meaning of each is that of the module that
applies it (`sampling`, `constraints`, `penalties`, `grammar`, `logprobs`). Checks that need a vocabulary or
a tokenizer are admission's. Host data only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec.config import SpecConfig
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from torch import Tensor

GREEDY_TEMPERATURE = 1e-5  # at and below this, sampling is greedy on every path
# bounds of what a small request can make the engine do
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_LISTED_IDS = 1 << 18  # no vocabulary is larger
MAX_LOGPROBS = 20  # OpenAI's limit, and vLLM's default one
MAX_GRAMMAR_CHARACTERS = 200_000
BIAS_LIMIT = 100.0  # OpenAI's range

LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]
"""A user's own processor: all token ids before the choice (prompt included), logits `[vocab]` -> logits.

It is called for each place of the text that a step looks at, drafted places included, so it may see texts
that are never written, and one place twice: it must be a function of its arguments alone. It may write to
the logits it is given.
"""


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """The language an answer must belong to; give exactly one of the three.

    Attributes:
        json_schema: a JSON schema, as text or as the object itself.
        regex: a regular expression the whole answer matches (Rust's syntax).
        ebnf: a grammar in llama.cpp's GBNF (`root ::= ...`) or in Lark's notation (`start: ...`).
        any_whitespace: JSON only. Off: `", "` and `": "` between values and nothing else, as Python's `json`
            writes; on: any white space where JSON allows it, without limit.

    Raises:
        SpecdecError: none or several of them, or one that is too long or not JSON.
    """

    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    any_whitespace: bool = False

    def __post_init__(self) -> None:
        kinds = {"json_schema": self.json_schema, "regex": self.regex, "ebnf": self.ebnf}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise SpecdecError(f"grammar ({', '.join(given) or 'empty'}) must be one of {', '.join(kinds)}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        text = self.text
        if not isinstance(text, str) or not 0 < len(text) <= MAX_GRAMMAR_CHARACTERS:
            raise SpecdecError(
                f"grammar ({self.kind}) must be a text of 1..{MAX_GRAMMAR_CHARACTERS} characters"
            )

    @property
    def kind(self) -> str:
        """Which of the three was given."""
        return (
            "json_schema" if self.json_schema is not None else "regex" if self.regex is not None else "ebnf"
        )

    @property
    def text(self) -> str:
        """The schema (as JSON text), expression or grammar."""
        value = self.json_schema if self.kind == "json_schema" else self.regex or self.ebnf
        return value  # type: ignore[return-value]  # a schema became text when the spec was made


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature 0 (up to 1e-5) is greedy; top_k 0 or -1 means off. `max_tokens` None runs to the
    context's end. `seed` None draws a fresh one, recorded in the result.
    `spec` overrides the engine's speculation settings for this request; `speculate` False turns
    speculation off for it.

    What may come next, applied in this order (vLLM's): `grammar`; `allowed_token_ids` (no other id);
    `bad_words` (texts or token sequences that the output must not contain); `min_tokens` (no end token and no
    stop string before); `logit_bias`; `logits_processors`; `repetition_penalty` (over prompt and output),
    `frequency_penalty` and `presence_penalty` (over the output alone). Then temperature, top_k, top_p, min_p,
    typical_p. All of it holds at every drafted place with that place's own text as history.

    `rule` names how drafts are verified, with `rule_knobs` (see `specdec.verification`); None takes the exact
    rule that accepts most where the request is. A lossy rule also needs the engine's `allow_lossy`.

    `logprobs` n adds to each output token its log-probability and the n best ones, from the target's logits
    before any of the above; `prompt_logprobs` does so for the prompt's tokens, the first of which has none.
    Such a request computes its whole prompt, and leaves no part of it to later ones.

    Raises:
        SpecdecError: a value out of range, NaN included; the message names field, value and range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: GrammarSpec | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    speculate: bool = True
    spec: SpecConfig | None = None
    rule: str | None = None
    rule_knobs: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("typical_p", self.typical_p, 0.0, 1.0, exclude_low=True)
        _check_int("top_k", self.top_k, -1, 1 << 30)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, exclude_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 1 << 30)
        _check_int("min_tokens", self.min_tokens, 0, 1 << 30)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SpecdecError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        for name, wanted in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if wanted is not None:
                _check_int(name, wanted, 0, MAX_LOGPROBS)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in self.stop):
            raise SpecdecError(
                f"stop ({len(self.stop)} entries) must be at most {MAX_STOP_STRINGS} non-empty strings"
            )
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            _check_ids("allowed_token_ids", self.allowed_token_ids, empty=False)
        object.__setattr__(self, "rule_knobs", dict(self.rule_knobs))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _check_ids("logit_bias", self.logit_bias)
        for bias in self.logit_bias.values():
            _check_float("logit_bias", bias, -BIAS_LIMIT, BIAS_LIMIT)
        self._check_bad_words()
        if not all(callable(processor) for processor in self.logits_processors):
            raise SpecdecError("logits_processors must be callables (token_ids, logits) -> logits")
        if self.grammar is not None:
            if not isinstance(self.grammar, GrammarSpec):
                raise SpecdecError(f"grammar ({type(self.grammar).__name__}) must be a GrammarSpec")
            if self.ignore_eos:
                raise SpecdecError("ignore_eos must be off with a grammar: the end token ends the answer")

    def _check_bad_words(self) -> None:
        if isinstance(self.bad_words, str):
            object.__setattr__(self, "bad_words", (self.bad_words,))
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise SpecdecError(f"bad_words ({len(self.bad_words)} entries) must be at most {MAX_BAD_WORDS}")
        words = tuple(word if isinstance(word, str) else tuple(word) for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        for word in words:
            if not word or (not isinstance(word, str) and len(word) > MAX_BAD_WORD_TOKENS):
                raise SpecdecError(
                    f"bad_words ({word!r:.80}) must hold texts, or sequences of 1..{MAX_BAD_WORD_TOKENS} ids"
                )
            if not isinstance(word, str):
                _check_ids("bad_words", word)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters stands between the target's logits and the law."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(
            penalties != (1.0, 0.0, 0.0)
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.logits_processors
            or self.grammar is not None
        )


def _schema_text(schema: str | dict[str, Any] | bool) -> str:
    """One spelling of a schema, so that equal ones are compiled once."""
    try:
        return json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecdecError(f"json_schema must be JSON: {error}") from error


def _check_float(name: str, value: Any, low: float, high: float, exclude_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (exclude_low and value == low):
        bracket = "(" if exclude_low else "["
        raise SpecdecError(f"{name} ({value!r}) must be a number in {bracket}{low}, {high}]")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecdecError(f"{name} ({value!r}) must be an integer in {low}..{high}")


def _check_ids(name: str, ids: Iterable[Any], empty: bool = True) -> None:
    listed = list(ids)
    if len(listed) > MAX_LISTED_IDS or (not listed and not empty):
        low = 0 if empty else 1
        raise SpecdecError(f"{name} ({len(listed)} entries) must be {low}..{MAX_LISTED_IDS} token ids")
    for token_id in listed:
        _check_int(name, token_id, 0, (1 << 31) - 1)


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for `count` prompts, given once or one each.

    Raises:
        SpecdecError: another number of them.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise SpecdecError(f"{count} prompts but {len(params)} sampling parameters; give one, or one each")
    return list(params)
