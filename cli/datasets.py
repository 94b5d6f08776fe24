"""Prompt sets by name: the ones in the repository, or any file of the same form.

Owns the names of the shipped data and the reading of prompt files. Knows nothing of chat templates or token
ids (at most how many there are): a prompt is the user's turns as text. Sources and licences:
``cli/data/README.md`` and ``train/data/README.md``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, UsageError
from specdec.train.records import turns_of
from specdec.train.streamed_sets import SPELLING, is_streamed, local_copy

_BENCH = Path(__file__).parent / "data"
_TRAIN = Path(__file__).parent.parent / "train" / "data"

PROMPT_SETS: dict[str, Path] = {
    "mt_bench": _BENCH / "bench_mt_bench.jsonl",
    "gsm8k": _BENCH / "bench_gsm8k.jsonl",
    "humaneval": _BENCH / "bench_humaneval.jsonl",
    "mbpp": _BENCH / "bench_mbpp.jsonl",
    "instruct": _BENCH / "bench_instruct.jsonl",
    "arena_hard": _BENCH / "bench_arena_hard.jsonl",
    "dolly": _BENCH / "bench_dolly.jsonl",
    "six_tasks": _BENCH / "bench_six_tasks.jsonl",
    "dev": _BENCH / "dev_prompts.jsonl",
    "train": _TRAIN / "train_prompts.jsonl",
    "train_synthetic": _TRAIN / "train_prompts_synthetic.jsonl",
}
# how an option's help spells what may be given
SETS_HELP = f"a prompt set ({', '.join(PROMPT_SETS)}), or a .jsonl / .txt file"
# answers of SmolLM2-135M (code, maths, chat) and book passages (prose), about 16,000 tokens each
CALIBRATION: dict[str, Path] = {
    domain: _BENCH / f"calibration_{domain}.jsonl" for domain in ("prose", "code", "maths", "chat")
}
CORPORA: dict[str, Path] = {
    "pride_and_prejudice": _TRAIN / "corpus_pride_and_prejudice.txt",
    "voyage_of_the_beagle": _TRAIN / "corpus_voyage_of_the_beagle_part.txt",
    "tiny_shakespeare": _TRAIN / "corpus_tiny_shakespeare_part.txt",
    "die_verwandlung": _TRAIN / "corpus_die_verwandlung_part_de.txt",
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation to be answered: the user's turns, in order."""

    id: str
    category: str
    turns: tuple[str, ...]


def prompt_file(name_or_path: str, option: str = "--data") -> Path:
    """Find the prompt file for what a user typed: a shipped set's name, a .jsonl or .txt, or a streamed set.

    Args:
        name_or_path: what was typed.
        option: where, for the message.

    Raises:
        SpecdecError: none of them, or a set (`hf:NAME`) that cannot be had.
    """
    if is_streamed(name_or_path):
        return local_copy(name_or_path)
    return _find(option, name_or_path, PROMPT_SETS)


def require_training_data(data: Path) -> None:
    """Refuse what is neither a file nor the spelling of a streamed set, before anything is loaded.

    Raises:
        UsageError: naming both.
    """
    if not is_streamed(str(data)) and not data.is_file():
        raise UsageError(
            f"--data ({data}) is not a file; write one with specdec regenerate, or name a set as {SPELLING}"
        )


def text_file(name_or_path: str) -> Path:
    """Find a file of texts or prompts for calibration: a shipped corpus or set, or a file."""
    return _find("--data", name_or_path, {**CORPORA, **PROMPT_SETS})


def calibration_files(spelling: str) -> dict[str, Path]:
    """Find the calibration texts for what a user typed, by domain; "" is a domain nobody named.

    Args:
        spelling: ``calibration`` for the shipped texts of four domains, a name or file as in `text_file`, or
            several of these with a domain each: ``prose=book.txt,code=answers.jsonl``.
    """
    if spelling == "calibration":
        return dict(CALIBRATION)
    if "=" not in spelling:
        return {"": text_file(spelling)}
    found: dict[str, Path] = {}
    for part in spelling.split(","):
        domain, equals, name = (word.strip() for word in part.partition("="))
        if not equals or not domain or not name:
            raise SpecdecError(f"--data ({spelling}): ({part}) must be DOMAIN=FILE, as in prose=book.txt")
        if domain in found:
            raise SpecdecError(f"--data ({spelling}) names the domain ({domain}) twice")
        found[domain] = CALIBRATION[name] if name in CALIBRATION else text_file(name)
    return found


def _find(option: str, name_or_path: str, named: dict[str, Path]) -> Path:
    if name_or_path in named:
        return named[name_or_path]
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix in (".jsonl", ".txt"):
        return path
    if path.exists():
        raise SpecdecError(
            f"{option} ({name_or_path}) must be a .jsonl or .txt file, or one of {', '.join(named)}"
        )
    raise SpecdecError(f"{option} ({name_or_path}) is no file and no known name; known: {', '.join(named)}")


def load_prompts(name_or_path: str, option: str = "--data") -> list[Prompt]:
    """Read prompts in file order.

    Args:
        name_or_path: A name in PROMPT_SETS; a .jsonl with ``prompt`` (one turn) or ``turns`` in each row, ids
            and categories optional (Spec-Bench's ``question_id`` is understood); or a .txt with one prompt a
            line.
        option: where it was typed, for the message.

    Raises:
        SpecdecError: Unknown name, unreadable file, or a row that holds no prompt, with its line number.
    """
    path = prompt_file(name_or_path, option)
    try:
        # not splitlines: prompts may hold U+2028 and its like, which do not end a line of a .jsonl
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise SpecdecError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix == ".txt":
        prompts = [
            Prompt(id=str(number), category="text", turns=(line.strip(),)) for number, line in numbered
        ]
    else:
        prompts = [_parse_row(path, number, line) for number, line in numbered]
    if not prompts:
        raise SpecdecError(f"{path} holds no prompt")
    seen: set[str] = set()
    for prompt, (number, _) in zip(prompts, numbered, strict=True):
        if prompt.id in seen:
            raise SpecdecError(f"{path} line {number}: id ({prompt.id}) occurs twice; ids must be unique")
        seen.add(prompt.id)
    return prompts


def choose_prompts(prompts: Sequence[Prompt], limit: int | None, *, spread: bool) -> list[Prompt]:
    """The first prompts, or as many at even distances, so that a sorted set gives some of every category."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    if not spread:
        return list(prompts[:limit])
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def require_unicode(where: str, text: str) -> None:
    """Refuse half of a character (a lone surrogate), which no tokenizer can read and no file can hold.

    Raises:
        SpecdecError: beginning with `where`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SpecdecError(
            f"{where}: not valid Unicode (lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start + 1})"
        ) from error


def require_shorter(option: str, given: str, lengths: Mapping[str, int], context: int) -> None:
    """Refuse prompts that leave no room in the target's context, before the first is decoded.

    Args:
        option: where the prompts come from.
        given: its value.
        lengths: tokens of each prompt, by id.
        context: positions of the target.

    Raises:
        SpecdecError: naming the longest prompt.
    """
    longest = max(lengths, key=lambda name: lengths[name])
    if lengths[longest] >= context:
        raise SpecdecError(
            f"{option} ({given}): prompt {longest} ({lengths[longest]} tokens) must be shorter than the "
            f"target's context ({context} tokens)"
        )


def _parse_row(path: Path, number: int, line: str) -> Prompt:
    where = f"{path} line {number}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise SpecdecError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise SpecdecError(f"{where} must be a JSON object with 'prompt' or 'turns'")
    turns = [row["prompt"]] if "prompt" in row else row.get("turns")
    if turns is None and isinstance(talk := turns_of(row), list):
        # a chat is asked again: its answers are somebody else's
        turns = [
            turn.get("content") for turn in talk if isinstance(turn, dict) and turn.get("role") == "user"
        ]
    if not isinstance(turns, list) or not turns:
        raise SpecdecError(
            f"{where} must have 'prompt' (a string), 'turns' (a list of strings) or 'messages'"
        )
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise SpecdecError(f"{where}: every turn must be a string that is not empty")
    prompt = Prompt(
        id=str(row.get("id", row.get("question_id", number))),
        category=str(row.get("category", "none")),
        turns=tuple(turns),
    )
    for text in (prompt.id, prompt.category, *prompt.turns):
        require_unicode(where, text)
    return prompt
