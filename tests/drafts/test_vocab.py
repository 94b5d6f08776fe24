"""The draft vocabulary and its two maps."""

from __future__ import annotations

import pytest
import torch

from specdec.drafts.vocab import DraftVocab, build_draft_vocab, token_counts
from specdec.errors import SpecdecError


def test_d2t_holds_offsets_and_t2d_membership() -> None:
    """Catches d2t written as absolute ids (ids map to 2i, some past the vocabulary): verl-SpeCo #67."""
    vocab = DraftVocab(torch.tensor([0, 3, 4, 9]), 10)
    assert vocab.d2t.tolist() == [0, 2, 2, 6]
    assert torch.nonzero(vocab.t2d).flatten().tolist() == [0, 3, 4, 9]
    assert (torch.arange(4) + vocab.d2t).tolist() == [0, 3, 4, 9]


def test_full_vocabulary_has_zero_offsets() -> None:
    vocab = DraftVocab.full(10)
    assert not vocab.d2t.any()
    assert vocab.t2d.all()


@pytest.mark.parametrize(
    ("d2t", "words"),
    [([0, 2, 2, 7], "outside 0..9"), ([0, 2, 1, 6], "strictly increasing"), ([-1, 2, 2, 6], "outside 0..9")],
)
def test_a_map_that_is_none_is_refused(d2t: list[int], words: str) -> None:
    offsets = torch.tensor(d2t)
    with pytest.raises(SpecdecError, match=words):
        DraftVocab.from_d2t(offsets, torch.ones(10, dtype=torch.bool), 10)


def test_maps_that_disagree_are_refused() -> None:
    mask = torch.zeros(10, dtype=torch.bool)
    mask[[0, 3, 4, 8]] = True
    with pytest.raises(SpecdecError, match="t2d"):
        DraftVocab.from_d2t(torch.tensor([0, 2, 2, 6]), mask, 10)


def test_fewer_distinct_tokens_than_asked_are_padded_with_the_lowest_unused_ids() -> None:
    """Catches a kept set smaller than asked, or repeated ids: SpecForge #76, Automodel #2260."""
    seen = list(range(60, 100))
    counts = token_counts([seen, seen], 128)
    vocab = build_draft_vocab(counts, size=64, vocab_size=128, keep=(1, 2, 127))
    assert len(set(vocab.ids.tolist())) == 64
    assert {1, 2, 127} <= set(vocab.ids.tolist())
    unused = sorted(set(vocab.ids.tolist()) - set(seen) - {1, 2, 127})
    assert unused == [0, *range(3, 23)]


def test_ties_go_to_the_lower_id_whatever_the_order_of_the_data() -> None:
    forward = token_counts([[5, 6, 7], [8, 8]], 16)
    backward = token_counts([[8, 7], [8, 6, 5]], 16)
    for counts in (forward, backward):
        assert build_draft_vocab(counts, size=3, vocab_size=16).ids.tolist() == [5, 6, 8]


@pytest.mark.parametrize("size", [0, -1, 4.0, 129, True])
def test_a_size_outside_the_vocabulary_is_refused_by_name(size: object) -> None:
    with pytest.raises(SpecdecError, match="draft_vocab_size"):
        build_draft_vocab({1: 1}, size=size, vocab_size=128)  # type: ignore[arg-type]


def test_the_whole_vocabulary_needs_no_map() -> None:
    assert build_draft_vocab({1: 1}, size=128, vocab_size=128).ids.tolist() == list(range(128))


def test_coverage_counts_occurrences_over_the_whole_vocabulary() -> None:
    """Catches an accuracy measured inside the reduced vocabulary only: verl-SpeCo #66."""
    vocab = DraftVocab(torch.tensor([0, 3, 4, 8]), 10)
    assert vocab.coverage(token_counts([[9, 9, 9]], 10)) == 0.0
    assert vocab.coverage(token_counts([[9, 3, 3, 3]], 10)) == 0.75


def test_an_id_outside_the_target_vocabulary_is_refused() -> None:
    with pytest.raises(SpecdecError, match="token id \\(10\\)"):
        token_counts([[10]], 10)
