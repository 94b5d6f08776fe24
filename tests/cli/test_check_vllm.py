"""The comparison of drafts with vLLM's: following proposals through a text, and what is equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.cli.check_vllm import compare, holds, our_answers, walk

TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
# places 1 (two agree), 4 (none), 5 (all three)
PROPOSED = [[11, 12, 99], [99, 15, 16], [15, 16, 17]]


def test_proposals_are_followed_by_what_came_true() -> None:
    found = walk(TEXT, PROPOSED, 7, 3)
    assert list(found.proposed) == [1, 4, 5]
    assert (found.accepted, found.steps) == (5, 3)


def _theirs(proposed: list[list[int]], accepted: int = 5) -> dict[str, Any]:
    counters = {"num_drafts": 3, "num_draft_tokens": 9, "num_accepted_tokens": accepted}
    return {
        "versions": {},
        "counters": counters,
        "answers": [{"token_ids": TEXT[:8], "proposed": proposed}],
    }


def test_equal_drafts_hold_and_one_other_token_does_not() -> None:
    ours = [(TEXT, PROPOSED)]
    same = compare(ours, _theirs(PROPOSED), 8, 3)
    assert (same["proposed_equal"], same["proposed"], same["texts_equal"]) == (6, 6, 1)
    assert same["acceptance_length"]["specdec"] == 2.0
    # the counters go over the whole answer: 1 + 5 / 3
    assert not holds(same)
    assert holds(compare(ours, _theirs(PROPOSED, accepted=3), 8, 3))

    other = compare(ours, _theirs([[11, 12, 98], *PROPOSED[1:]], accepted=3), 8, 3)
    assert other["first_difference"] == {
        "prompt": 0,
        "place": 1,
        "specdec": [11, 12, 99],
        "vllm": [11, 12, 98],
    }
    assert not holds(other)


def test_our_drafts_are_recorded_step_by_step(
    tiny_llama: Path, tmp_path: Path, random_draft: Callable[..., Path]
) -> None:
    """Followed through our own text they account for every token: steps plus accepted drafts."""
    draft = random_draft(tiny_llama, tmp_path / "head")
    [(text, proposed)] = our_answers(tiny_llama, draft, [[7, 3, 9, 20, 5]], 24, 3)
    assert len(text) == 28
    found = walk(text, proposed, 21, 3)
    last = max(found.proposed)
    assert 21 <= 1 + found.accepted + found.steps <= last + 4
