"""Rates of speculation, to the last digit."""

from __future__ import annotations

import json
import random

import pytest

from specdec.stats import DEFINITIONS, SpecStats
from specdec.tree import DraftTree, chain_tree, tree_from_paths


def record(stats: SpecStats, tree: DraftTree, accepted: int, committed: int | None = None) -> None:
    stats.record_step(
        tree.drafted_per_depth, tree.num_drafted, accepted, accepted + 1 if committed is None else committed
    )


def chain(length: int) -> DraftTree:
    return chain_tree(0, list(range(1, length + 1)))


def test_rates_of_a_chain_are_the_textbook_ones() -> None:
    """B65: accept lengths [0, 1, 3, 3, 2] at k = 3."""
    stats = SpecStats()
    for accepted in (0, 1, 3, 3, 2):
        record(stats, chain(3), accepted)
    report = stats.to_dict()
    assert (report["verify_steps"], report["drafted"], report["accepted"], report["committed"]) == (
        5,
        15,
        9,
        14,
    )
    assert report["acceptance_rate"] == 9 / 15
    assert report["acceptance_rate_per_node"] == 9 / 15
    assert report["acceptance_length"] == 2.8
    assert report["acceptance_per_depth"] == [4 / 5, 3 / 5, 2 / 5]
    assert report["acceptance_per_depth_conditional"] == [4 / 5, 3 / 4, 2 / 3]


def test_depths_a_step_did_not_draft_are_not_held_against_it() -> None:
    """B66: denominators are observed; a chain cut short by max_tokens drafted less than configured."""
    stats = SpecStats()
    record(stats, chain(4), 4)
    record(stats, chain(1), 1)
    record(stats, chain(0), 0)
    report = stats.to_dict()
    assert report["drafted"] == 5
    assert report["acceptance_rate"] == 1.0
    assert report["acceptance_per_depth"] == [1.0, 1.0, 1.0, 1.0]
    assert report["acceptance_per_depth_conditional"] == [1.0, 1.0, 1.0, 1.0]
    assert report["steps_per_depth"] == [2, 1, 1, 1]
    assert report["acceptance_length"] == 8 / 3


def test_a_tree_has_a_rate_per_depth_and_a_rate_per_node() -> None:
    """B66: 16 proposed nodes of depth 4, 2 accepted: 2/4 and 2/16, and the root is not a draft."""
    paths = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [4, 4, 4, 4]]
    stats = SpecStats()
    record(stats, tree_from_paths(0, paths), 2)
    report = stats.to_dict()
    assert report["drafted"] == 16
    assert report["acceptance_rate"] == 2 / 4
    assert report["acceptance_rate_per_node"] == 2 / 16
    assert report["acceptance_per_depth"] == [1.0, 1.0, 0.0, 0.0]
    assert report["acceptance_per_depth_conditional"] == [1.0, 1.0, 0.0, None]
    assert report["nodes_per_depth"] == [4, 4, 4, 4]


@pytest.mark.parametrize("steps", [0, 3])
def test_rates_without_a_denominator_are_null(steps: int) -> None:
    """B66: no drafts at all gives null and valid JSON, and a length of 1.0 (or null without steps)."""
    stats = SpecStats()
    for _ in range(steps):
        record(stats, chain(0), 0)
    report = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert report["acceptance_rate"] is None
    assert report["acceptance_rate_per_node"] is None
    assert report["acceptance_per_depth"] == []
    assert report["acceptance_length"] == (1.0 if steps else None)


def test_end_token_inside_the_accepted_run_counts_what_was_emitted() -> None:
    """B64: [d1, d2, EOS, d4, d5] + bonus, all matching: 5 accepted by the verifier, 3 committed."""
    stats = SpecStats()
    record(stats, chain(5), 5, committed=3)
    report = stats.to_dict()
    assert (report["accepted"], report["committed"], report["acceptance_length"]) == (5, 3, 3.0)
    assert "committed" in DEFINITIONS["acceptance_length"]


def test_added_stats_equal_the_stats_of_all_steps() -> None:
    """Rates are ratios of sums, whatever the grouping; committed sums to what the runs emitted."""
    rng = random.Random(0)
    together, parts = SpecStats(), SpecStats()
    emitted = 0
    for _ in range(100):
        part = SpecStats()
        for _ in range(rng.randrange(4)):
            length = rng.randrange(5)
            accepted = rng.randint(0, length)
            committed = rng.randint(1, accepted + 1)
            emitted += committed
            for stats in (together, part):
                record(stats, chain(length), accepted, committed)
        parts.add(part)
    assert parts == together
    assert parts.committed == emitted
    assert parts.to_dict() == together.to_dict()


def test_every_rate_has_its_definition() -> None:
    assert set(DEFINITIONS) == set(SpecStats().to_dict()) - {
        "nodes_per_depth",
        "steps_per_depth",
        "accepted_per_depth",
    }


@pytest.mark.parametrize(("accepted", "committed"), [(4, 4), (-1, 0), (2, 4)])
def test_impossible_counts_are_bugs(accepted: int, committed: int) -> None:
    with pytest.raises(AssertionError):
        record(SpecStats(), chain(3), accepted, committed)
