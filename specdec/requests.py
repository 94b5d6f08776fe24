"""What a caller gives and gets: prompts in three forms, results, pieces of a stream.

Owns how a prompt becomes token ids (the target's own tokenizer and chat template, `specdec.hf`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.exactness import TARGET
from specdec.hf import encode_text, load_tokenizer, render_chat, template_hash
from specdec.logprobs import TokenLogprobs
from specdec.sequence import Sequence
from specdec.stats import SpecStats
from specdec.verification.result import TokenKind

Prompt = str | SequenceOf[int] | SequenceOf[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One finished request. `finish_reason` is "stop", "length" or "error" (then `error` says why).

    `logprobs` has one entry per output token, `prompt_logprobs` one per prompt token from the second on, None
    when they were not asked for; `token_kinds` one, how it came (`specdec.verification.result`). `rule` is
    the rule that verified its drafts, with its knobs; `lossless` whether the text has the target's law.
    `exact_against` says whose law that is (`specdec.exactness`).
    `simulated`: accepted lengths were drawn, the text is meaningless.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_token_ids: list[int]
    seed: int
    stats: SpecStats
    rule: str
    lossless: bool
    exact_against: str = TARGET
    simulated: bool = False
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    token_kinds: list[TokenKind] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """New tokens and text of request `index`; `result` comes with the last piece.

    The tokens of a piece may be ahead of its text, which waits for whole characters and
    possible stop strings.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    token_kinds: list[TokenKind] = field(default_factory=list)
    result: GenerationResult | None = None


def whole_piece(index: int, result: GenerationResult) -> StreamPiece:
    """A result as the one piece of its stream."""
    return StreamPiece(
        index=index,
        token_ids=result.token_ids,
        text=result.text,
        logprobs=result.logprobs,
        token_kinds=result.token_kinds,
        result=result,
    )


class PromptEncoder:
    """The target's tokenizer, where it has one, and what needs it.

    Args:
        folder: the target's folder; without tokenizer files only token ids can be given.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        has_files = (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists()
        self.tokenizer: Any = load_tokenizer(folder) if has_files else None
        self.template_hash: str | None = template_hash(self.tokenizer) if has_files else None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a string, of a chat (rendered with the target's template), or as given.

        Raises:
            SpecdecError: text for a target without tokenizer, or something that is no prompt.
        """
        if isinstance(prompt, str):
            return encode_text(self._need(), prompt)
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], dict):
            return list(render_chat(self._need(), items, add_generation_prompt=True))
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise SpecdecError("prompt must be a string, a list of token ids, or a list of chat messages")
        return [int(item) for item in items]

    def encode_word(self, text: str) -> list[tuple[int, ...]]:
        """Token sequences that write a text: at the beginning of a line, and behind a space.

        Raises:
            SpecdecError: a target without tokenizer.
        """
        tokenizer = self._need()
        spellings = (text, " " + text.lstrip())
        sequences = [tuple(tokenizer.encode(each, add_special_tokens=False)) for each in spellings]
        return list(dict.fromkeys(sequence for sequence in sequences if sequence))

    def _need(self) -> Any:
        if self.tokenizer is None:
            raise SpecdecError(f"target ({self.folder}) has no tokenizer; pass token ids")
        return self.tokenizer


def result_of(seq: Sequence) -> GenerationResult:
    """The result of a finished sequence."""
    return GenerationResult(
        token_ids=seq.output_ids,
        text=seq.detokenizer.text,
        finish_reason=seq.finish_reason or "abort",
        prompt_token_ids=seq.token_ids[: seq.prompt_len],
        seed=seq.stream.seed,
        stats=seq.stats,
        logprobs=logprobs_of(seq, 0),
        prompt_logprobs=None if seq.params.prompt_logprobs is None else seq.prompt_logprobs,
        token_kinds=list(seq.token_kinds),
        rule=seq.simulated.label if seq.simulated else seq.rule.label,
        lossless=seq.rule.rule.is_lossless and seq.simulated is None,
        exact_against=seq.exact_against,
        simulated=seq.simulated is not None,
        error=seq.error,
    )


def verification_fields(results: Iterable[GenerationResult]) -> dict[str, str | None]:
    """Of a record: `exact`, or the lossy rules by name and knobs; and whose plain text exact ones leave."""
    known = list(results)
    lossy = sorted({result.rule for result in known if not result.lossless})
    against = sorted({result.exact_against for result in known})
    return {
        "verification": ", ".join(lossy) or "exact",
        "exact_against": None if lossy else ", ".join(against) or None,
    }


def logprobs_of(seq: Sequence, first: int) -> list[TokenLogprobs] | None:
    """Entries of the output tokens from number `first` on; None when they were not asked for."""
    return None if seq.params.logprobs is None else seq.logprobs[first:]
