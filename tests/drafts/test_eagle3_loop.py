"""An EAGLE-3 head's passes on the processor: chains in one call, and what int8 weights do to drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.drafts import eagle3_drafter
from specdec.drafts.eagle3_drafter import Eagle3Drafter
from specdec.engine import Engine
from specdec.models.layers import Storage, packing_available
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree

PROMPTS = [[7, 3, 9, 20, 5], [40, 41], [100, 3, 100, 3, 100, 3, 8, 9, 10, 11, 12], [5] * 19]
CHAIN = SpecConfig(max_depth=5, top_k=1, max_nodes=5, adaptive=False)
# different ends of text, so that chains of one call have different lengths
PARAMS = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (9, 12, 5, 17)]


def drafted(
    monkeypatch: pytest.MonkeyPatch, target: Path, draft: Path, config: EngineConfig
) -> tuple[list[list[int]], list[DraftTree]]:
    """The texts and every tree that was proposed, in order."""
    trees: list[DraftTree] = []
    propose = Eagle3Drafter.propose

    def spy(self: Eagle3Drafter, requests: list[DraftRequest]) -> list[DraftTree]:
        found = propose(self, requests)
        trees.extend(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Eagle3Drafter, "propose", spy)
        results = Engine(target, draft=draft, config=config).generate(PROMPTS, PARAMS)
    return [result.token_ids for result in results], trees


@pytest.mark.parametrize("block_size", [4, 16])
def test_chains_in_one_call_equal_chains_grown_level_by_level(
    tiny_llama: Path,
    tmp_path: Path,
    random_draft: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
) -> None:
    """Small blocks lie scattered in the pool, so rows are gathered; large ones are consecutive."""
    draft = random_draft(tiny_llama, tmp_path / "head")
    config = EngineConfig(kv_tokens=256, block_size=block_size, spec=CHAIN, draft_weights="plain")
    texts, fast = drafted(monkeypatch, tiny_llama, draft, config)
    monkeypatch.setattr(eagle3_drafter, "_is_plain_chain", lambda request: False)
    expected_texts, slow = drafted(monkeypatch, tiny_llama, draft, config)
    assert texts == expected_texts
    assert len({tree.num_drafted for tree in fast}) > 2
    assert [tree.token_ids for tree in fast] == [tree.token_ids for tree in slow]
    for one, two in zip(fast, slow, strict=True):
        assert one.parents == two.parents
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-3)


def test_int8_drafts_are_nearly_those_of_full_precision_and_the_text_is_the_same(
    tiny_llama: Path, tmp_path: Path, random_draft: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packing_available(Storage.INT8):
        pytest.skip("this torch build has no int8 products")
    draft = random_draft(tiny_llama, tmp_path / "head")
    plain = EngineConfig(kv_tokens=1024, spec=CHAIN, draft_weights="plain")
    texts, exact = drafted(monkeypatch, tiny_llama, draft, plain)
    rounded_texts, rounded = drafted(monkeypatch, tiny_llama, draft, replace(plain, draft_weights="auto"))
    assert texts == rounded_texts
    firsts = [
        (one.token_ids[:2] == two.token_ids[:2], one.log_probs != two.log_probs)
        for one, two in zip(exact, rounded, strict=False)
        if one.token_ids[0] == two.token_ids[0]
    ]
    assert sum(same for same, _ in firsts) > 0.8 * len(firsts)
    assert any(moved for _, moved in firsts)


def test_a_head_that_computes_nan_drafts_nothing(
    tiny_llama: Path, tmp_path: Path, random_draft: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = random_draft(tiny_llama, tmp_path / "head")
    config = EngineConfig(kv_tokens=1024, spec=CHAIN, draft_weights="plain")
    engine = Engine(tiny_llama, draft=draft, config=config)
    assert isinstance(engine.drafter, Eagle3Drafter)
    engine.drafter._loop.final_norm.fill_(torch.nan)
    results = engine.generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == [
        r.token_ids for r in Engine(tiny_llama, config=EngineConfig(kv_tokens=1024)).generate(PROMPTS, PARAMS)
    ]
    assert all(result.stats.drafted == 0 for result in results)


def test_rows_that_nobody_drafts_from_get_the_keys_and_values_of_a_full_pass(
    tiny_llama: Path, tmp_path: Path, random_draft: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that end, and all but the last of many late rows, are stored without the rest of the layer."""
    draft = random_draft(tiny_llama, tmp_path / "head")
    config = EngineConfig(kv_tokens=256, block_size=4, spec=CHAIN, draft_weights="plain")
    kept = []
    for full in (False, True):
        if full:
            monkeypatch.setattr(eagle3_drafter, "FEW_ROWS", 10_000)
            monkeypatch.setattr(Eagle3Drafter, "absorb", lambda self, sequences: None)
        engine = Engine(tiny_llama, draft=draft, config=config)
        seq = engine.add(PROMPTS[3], PARAMS[3])
        engine.step()
        engine.step()
        assert isinstance(engine.drafter, Eagle3Drafter)
        slots = [block * 4 + row for block in seq.block_table for row in range(4)][: seq.draft_computed]
        kept.append((seq.draft_computed, engine.drafter.caches[0].data[..., slots, :].clone()))
    assert kept[0][0] == kept[1][0] == 19
    torch.testing.assert_close(kept[0][1], kept[1][1], rtol=1e-5, atol=1e-6)
