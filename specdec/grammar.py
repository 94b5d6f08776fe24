"""Masks that keep an answer inside a grammar: JSON schema, regular expression or EBNF.

Owns the walk of one matcher over the committed text and any drafted path behind it. The grammar engine is
llguidance (Microsoft, MIT licence; an optional extra): it runs on the processor, needs no compiler and no
torch, takes tokens back, and refuses the parts of JSON schema it does not know instead of ignoring them.
"""

from __future__ import annotations

from collections import OrderedDict
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.hf import tokenizer_json
from specdec.sampling_params import GrammarSpec

COMPILED_GRAMMARS = 64  # kept; a compiled schema is some hundred kilobytes
# how Python's `json` writes, which is what most models have read
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarState:
    """Where one answer stands in its grammar.

    Args:
        matcher: llguidance's matcher at the beginning of the answer; owned.
        prompt_len: tokens of the text that come before the answer.
        vocab_size: length of the masks.
    """

    def __init__(self, matcher: Any, prompt_len: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        # the matcher has read token_ids[prompt_len : _committed], then _ahead
        self._committed = prompt_len
        self._ahead: list[int] = []

    def allowed(self, token_ids: list[int], path: list[int]) -> Tensor | None:
        """Ids that may follow a drafted path, the end tokens exactly where the grammar accepts.

        Args:
            token_ids: committed tokens, prompt first; a continuation of those of the call before, without an
                end token.
            path: drafted tokens behind them, without an end token.

        Returns:
            bool `[vocab]`, or None when the path itself leaves the grammar.
        """
        if not self._move_to(token_ids, path):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._raise_on_error()
        return torch.from_numpy(
            np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        )

    def _move_to(self, token_ids: list[int], path: list[int]) -> bool:
        """Let the matcher stand behind text and path; False when the path is not in the grammar."""
        fresh = token_ids[self._committed :]
        wanted = fresh + path
        common = 0
        for ours, theirs in zip(self._ahead, wanted, strict=False):
            if ours != theirs:
                break
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
        read = self._matcher.try_consume_tokens(wanted[common:]) if common < len(wanted) else 0
        self._raise_on_error()
        assert common + read >= len(fresh), "a token outside the grammar was committed"
        self._ahead = wanted[len(fresh) : common + read]
        self._committed = len(token_ids)
        return common + read == len(wanted)

    def _raise_on_error(self) -> None:
        if self._matcher.is_error():
            raise GrammarLimitError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")


class GrammarLimitError(ValueError):
    """The grammar engine gave up on a text (a limit on the work of one step)."""


class GrammarCompiler:
    """Makes the state of new answers; compiles each grammar once.

    Args:
        tokenizer: the target's, None when it has none.
        vocab_size: rows of the target's head.
        end_ids: the target's own end tokens.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._engine_tokenizer: Any | None = None
        self._compiled: OrderedDict[GrammarSpec, Any] = OrderedDict()

    def start(self, spec: GrammarSpec, prompt_len: int) -> GrammarState:
        """State at the beginning of an answer.

        Raises:
            SpecdecError: llguidance is missing, a target without tokenizer or end token, or a grammar that
                does not compile.
        """
        if spec not in self._compiled:
            self._compiled[spec] = self._compile(spec)
            if len(self._compiled) > COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(spec)
        return GrammarState(self._compiled[spec].deep_copy(), prompt_len, self._vocab_size)

    def _compile(self, spec: GrammarSpec) -> Any:
        try:
            engine: Any = import_module("llguidance")
        except ImportError as error:
            raise SpecdecError(
                'grammar needs the package llguidance; install it with pip install "specdec[grammar]"'
            ) from error
        if self._engine_tokenizer is None:
            self._engine_tokenizer = self._load_tokenizer(engine)
        try:
            if spec.kind == "json_schema":
                overrides = None if spec.any_whitespace else COMPACT
                source = engine.LLMatcher.grammar_from_json_schema(spec.text, overrides=overrides)
            else:
                source = engine.grammar_from(spec.kind, spec.text)
        except ValueError as error:
            raise SpecdecError(f"grammar ({spec.kind}) cannot be used: {_one_line(str(error))}") from error
        # warnings, which go to stderr, are errors or silence: nothing in between
        matcher = engine.LLMatcher(self._engine_tokenizer, source, log_level=0)
        if matcher.is_error():
            raise SpecdecError(f"grammar ({spec.kind}) cannot be used: {_one_line(matcher.get_error())}")
        return matcher

    def _load_tokenizer(self, engine: Any) -> Any:
        if self._tokenizer is None:
            raise SpecdecError("grammar needs a tokenizer, which the target lacks")
        if not self._end_ids:
            raise SpecdecError("grammar needs an end token, which the target's config does not name")
        try:
            return engine.LLTokenizer(
                tokenizer_json(self._tokenizer), n_vocab=self._vocab_size, eos_token=list(self._end_ids)
            )
        except ValueError as error:
            raise SpecdecError(
                f"grammar cannot be used with the target's tokenizer: {_one_line(str(error))}"
            ) from error


def _one_line(text: str) -> str:
    """The first line of the engine's report, with its reason where that stands further down."""
    lines = [line.strip() for line in text.strip().splitlines()] or ["no reason given"]
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    return f"{lines[0]} {reason.removeprefix('error:').strip()}".strip()
