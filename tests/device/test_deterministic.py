"""`deterministic`: a row's numbers do not depend on what else its pass carries, in any dtype."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.attention import SequenceAttention
from specdec.audit.recording import recording
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.kernels import paged_attention
from specdec.kernels.invariant import invariant_attention
from specdec.models.fixed_rows import FIXED_ROWS, FixedRowLinear
from specdec.sampling_params import SamplingParams
from specdec.tree import DraftTree, ancestor_mask, path_to, tree_from_paths

PROMPTS = [[random.Random(seed).randrange(3, 250) for _ in range(2 + 31 * seed)] for seed in range(6)]
TOKENS = 16


class HalfRight:
    """Fake drafter: chains and trees whose right path is as long as chance has it."""

    name = "half-right"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, known: dict[tuple[int, ...], list[int]], *, chains: bool) -> None:
        self.known, self.chains = known, chains
        self.chance = random.Random(3)

    def makes_chains(self, spec: SpecConfig) -> bool:
        return self.chains

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        return None

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> DraftTree:
        seq = request.seq
        known = self.known[tuple(seq.token_ids[: seq.prompt_len])]
        ahead = known[seq.num_output : seq.num_output + min(5, request.max_depth)]
        right = self.chance.randrange(6)
        path = [token if depth < right else token ^ 1 for depth, token in enumerate(ahead)]
        wrong = [[path[0] ^ (2 << branch), 5] for branch in range(3)] if path else []
        paths = [*wrong, path] if self.chance.random() < 0.7 and not self.chains else [path]
        return tree_from_paths(seq.token_ids[-1], paths)


def texts_and_logits(
    folder: Path,
    params: SamplingParams,
    drafts: list[list[int]] | None,
    *,
    chains: bool = False,
    prompts: list[list[int]] = PROMPTS,
    **settings: object,
) -> tuple[list[list[int]], dict[tuple[int, int], torch.Tensor]]:
    """Texts, and the logits of every committed position by (request, position)."""
    config = EngineConfig(
        kv_tokens=2048,
        max_num_seqs=1 if drafts is None else 5,
        spec=SpecConfig(max_depth=8, max_nodes=16, adaptive=False),
        **settings,  # type: ignore[arg-type]
    )
    draft: Callable[..., HalfRight] | None = None
    if drafts is not None:
        known = {tuple(p): text + [0] * 64 for p, text in zip(prompts, drafts, strict=True)}
        draft = lambda view: HalfRight(known, chains=chains)
    engine = Engine(folder, draft=draft, config=config)
    with recording(engine) as steps:
        results = engine.generate(prompts, params)
    rows = {
        (step.seq.seq_id, step.root_position + depth): row
        for step in steps
        for depth, row in enumerate(step.logits)
    }
    return [result.token_ids for result in results], rows


def differing_rows(folder: Path, params: SamplingParams, **settings: Any) -> tuple[int, bool]:
    """Positions whose logits differ between plain and speculative decoding, and whether a text does."""
    plain, plain_rows = texts_and_logits(folder, params, None, **settings)
    speculative, rows = texts_and_logits(folder, params, plain, **settings)
    shared = plain_rows.keys() & rows.keys()
    wanted = len(settings.get("prompts", PROMPTS)) * ((params.max_tokens or 0) - 1)
    assert len(shared) >= wanted, "the two runs must have positions in common"
    return sum(not torch.equal(plain_rows[key], rows[key]) for key in shared), plain != speculative


GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=5)


@pytest.mark.parametrize(
    ("params", "dtype"),
    [(GREEDY, "bfloat16"), (GREEDY, "float16"), (GREEDY, "float32"), (SAMPLED, "bfloat16")],
    ids=["greedy-bf16", "greedy-fp16", "greedy-fp32", "sampled-bf16"],
)
def test_speculative_text_is_plain_text_bit_for_bit(
    tiny_llama: Path, params: SamplingParams, dtype: str
) -> None:
    assert differing_rows(tiny_llama, params, dtype=dtype, deterministic=True) == (0, False)


def test_a_sliding_window_is_deterministic_too(tiny_model_factory: Callable[..., Path]) -> None:
    folder = tiny_model_factory("mistral")
    assert differing_rows(folder, GREEDY, dtype="bfloat16", deterministic=True) == (0, False)


def test_chains_through_interpreted_kernels_are_deterministic(
    tiny_model_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    folder = tiny_model_factory("llama", seed=4, hidden_size=32, intermediate_size=48)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    settings: dict[str, Any] = {"chains": True, "prompts": PROMPTS[:1], "kernels": "triton"}
    assert differing_rows(folder, params, dtype="float16", deterministic=True, **settings) == (0, False)


@pytest.mark.gpu
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_chains_on_a_card_are_deterministic_in_bfloat16(tiny_llama: Path, params: SamplingParams) -> None:
    settings: dict[str, Any] = {"chains": True, "device": "cuda", "dtype": "bfloat16"}
    assert differing_rows(tiny_llama, params, deterministic=True, **settings) == (0, False)


def test_trees_through_kernels_are_refused_when_deterministic(tiny_llama: Path) -> None:
    from specdec.device.selection import check_deterministic_trees

    config = EngineConfig(device="cuda", deterministic=True)
    check_deterministic_trees(config, makes_chains=True)
    with pytest.raises(SpecdecError, match="chains only"):
        check_deterministic_trees(config, makes_chains=False)
    with pytest.raises(SpecdecError, match="no fixed order"):
        Engine(tiny_llama, config=EngineConfig(kernels="reference", deterministic=True, kv_tokens=64))


def test_without_the_setting_the_numbers_do_differ(tiny_llama: Path) -> None:
    """The tests above can fail: low bits differ between plain decoding and verification."""
    differing, _ = differing_rows(tiny_llama, GREEDY, dtype="float32")
    assert differing > 0


@pytest.mark.parametrize("attention", [paged_attention, invariant_attention])
def test_a_query_alone_and_in_a_tree_gives_the_same_bits(attention: Callable[..., torch.Tensor]) -> None:
    """The committed rows of the one are tree rows of the other; only the invariant attention holds."""
    generator = torch.Generator().manual_seed(7)
    heads, dim, context, parents = 8, 64, 400, [-1, 0, 0, 2, 3, 0, 4, 6]
    keys, values = torch.randn(2, 2, 512, dim, generator=generator)
    query = torch.randn(len(parents), heads, dim, generator=generator)
    tree = _share(len(parents), context, list(range(context + len(parents))), ancestor_mask(parents))
    together = attention(query, keys, values, [tree])
    same = []
    for node in range(len(parents)):
        path = path_to(parents, node)
        rows = [*range(context), *(context + ancestor for ancestor in path)]
        alone = _share(1, len(rows) - 1, rows, None)
        same.append(torch.equal(attention(query[node : node + 1], keys, values, [alone])[0], together[node]))
    assert all(same) == (attention is invariant_attention)


def _share(queries: int, context: int, rows: list[int], mask: torch.Tensor | None) -> SequenceAttention:
    return SequenceAttention(
        query_start=0,
        num_queries=queries,
        context_len=context,
        num_new=queries,
        slots=torch.tensor(rows),
        mask=mask,
        query_positions=[context] * queries,
        new_positions=[context] * queries,
    )


@pytest.mark.parametrize("rows", [1, 3, FIXED_ROWS, FIXED_ROWS + 5])
def test_fixed_rows_compute_every_row_as_alone(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    linear = FixedRowLinear(torch.randn(24, 40, generator=generator), None)
    x = torch.randn(rows, 40, generator=generator)
    together = linear(x)
    assert together.shape == (rows, 24)
    assert torch.equal(together, torch.cat([linear(row[None]) for row in x]))
    torch.testing.assert_close(together, x @ linear.weight.T)
