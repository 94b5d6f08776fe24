"""Laws, greedy choices and races of many rows: the host's law by law and id by id."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels import reference_sampling_rows, row_choices, sampling_rows
from specdec.kernels.tree_records import NO_PARENT, RowLaws, RowParams, TreeRows, seed_bits
from specdec.random_streams import RandomStream
from specdec.sampling import greedy_tokens, process_logits
from specdec.sampling_params import SamplingParams

# a law's entry is one exponential over one sum of them: some last bits of float64
LAW_TOLERANCE = 1e-13
# temperature, top_k, top_p, min_p
Setting = tuple[float, int, float, float]
SETTINGS: list[Setting] = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.8, 50, 0.95, 0.02),
    (1.0, 0, 1.0, 0.1),
    (2.0, 1, 0.5, 0.0),
    (0.6, 3, 0.3, 1.0),
    (0.0, 4, 0.5, 0.2),
    (1e-5, 0, 1.0, 0.0),
    (2e-5, -1, 0.8, 0.0),
    (100.0, 7, 0.999, 0.0),
    (1.0, 10**6, 0.9999, 0.0),
]
CHOICES = {"triton": (sampling_rows, row_choices), "plain": (reference_sampling_rows,) * 2}
BOTH = pytest.mark.parametrize("modules", CHOICES.values(), ids=CHOICES)
Modules = tuple[ModuleType, ModuleType]


def row_params(chosen: Sequence[Setting], device: str) -> RowParams:
    temperature, top_k, top_p, min_p = zip(*chosen, strict=True)
    return RowParams(
        temperature=torch.tensor(temperature, dtype=torch.float64, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
        min_p=torch.tensor(min_p, dtype=torch.float64, device=device),
    )


def host_law(row: Tensor, setting: Setting) -> Tensor:
    temperature, top_k, top_p, min_p = setting
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return process_logits(row[None].cpu(), params)[0]


def random_logits(rows: int, vocab: int, seed: int, *, ties: bool = False) -> Tensor:
    """Rows of different sharpness; with ties, many equal logits, zeros of both signs and -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.2, 6.0, rows).unsqueeze(1)
    if ties:
        logits = (logits * 2).round() / 2
        logits[torch.rand(rows, vocab, generator=generator) < 0.2] = -torch.inf
        logits[:, vocab // 2] = 1.5
    return logits


def check_laws(modules: Modules, logits: Tensor, chosen: Sequence[Setting], device: str) -> RowLaws:
    on_device = logits.to(device)
    laws: RowLaws = modules[0].row_laws(on_device, row_params(chosen, device))
    found = modules[1].row_probs(on_device, laws).cpu()
    assert not laws.bad.any()
    for row, setting in enumerate(chosen):
        wanted = host_law(logits[row], setting)
        assert torch.equal(found[row] > 0, wanted > 0), f"row {row} {setting} keeps other ids"
        torch.testing.assert_close(found[row], wanted, rtol=LAW_TOLERANCE, atol=1e-300)
    return laws


@BOTH
@pytest.mark.parametrize("vocab", [201])
@pytest.mark.parametrize(("ties", "of"), [(False, torch.float32), (True, torch.float16)], ids=["", "ties"])
def test_laws_are_the_hosts(modules: Modules, vocab: int, ties: bool, of: torch.dtype, device: str) -> None:
    """Every filter and their order, ties at the border to the lowest id, tiles without a kept id."""
    logits = random_logits(len(SETTINGS), vocab, vocab, ties=ties).to(of)
    check_laws(modules, logits, SETTINGS, device)


FILTERS = st.tuples(
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 80),
    st.floats(1e-3, 1.0),
    st.sampled_from([0.0, 0.05, 0.5]),
)


def check_any_filters(modules: Modules, seed: int, vocab: int, setting: Setting, ties: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_laws(modules, random_logits(1, vocab, seed, ties=ties), [setting], device)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), FILTERS, st.booleans())
def test_any_filters_keep_the_hosts_ids(seed: int, vocab: int, setting: Setting, ties: bool) -> None:
    check_any_filters(CHOICES["plain"], seed, vocab, setting, ties)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), FILTERS, st.booleans())
def test_any_filters_keep_the_hosts_ids_in_triton(
    seed: int, vocab: int, setting: Setting, ties: bool
) -> None:
    check_any_filters(CHOICES["triton"], seed, vocab, setting, ties)


@BOTH
def test_one_value_everywhere_keeps_the_lowest_ids(modules: Modules, device: str) -> None:
    """A border in the midst of equal logits, over several tiles; top-p inside what top-k left."""
    logits = torch.zeros(4, 100)
    logits[1, ::2] = -0.0
    laws = check_laws(
        modules,
        logits,
        [(1.0, 37, 1.0, 0.0), (1.0, 50, 0.5, 0.0), (1.0, 0, 0.25, 0.0), (3.0, 0, 1.0, 0.9)],
        device,
    )
    kept = (modules[1].row_probs(logits.to(device), laws) > 0).sum(-1)
    assert kept.tolist() == [37, 25, 25, 100]


@BOTH
def test_neighbouring_floats_are_told_apart(modules: Modules, device: str) -> None:
    """The last cuts of the search fall on keys that ids have: none is counted twice or lost."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    logits = (1.0 + order * 2.0**-23).repeat(4, 1)
    chosen = [(1.0, 9, 1.0, 0.0), (1.0, 26, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 31, 0.7, 0.0)]
    check_laws(modules, logits, chosen, device)


@BOTH
def test_bad_rows_are_flagged_and_give_a_stand_in(modules: Modules, device: str) -> None:
    """NaN, +inf, nothing but -inf; NaN beside +inf in another tile; the flag is the host's."""
    logits = random_logits(6, 90, 0)
    logits[1, 80] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 2], logits[4, 70] = torch.inf, torch.nan
    logits[5, 1:] = -torch.inf
    on_device = logits.to(device)
    laws = modules[0].row_laws(on_device, row_params([(1.0, 5, 0.9, 0.1)] * 6, device))
    wanted = greedy_tokens(logits)
    assert laws.bad.tolist() == wanted[1] == [False, True, True, True, True, False]
    tokens, bad = modules[0].greedy_choices(on_device)
    assert bad.tolist() == wanted[1]
    assert tokens.tolist()[0] == wanted[0][0]
    assert all(0 <= token < 90 for token in tokens.tolist())
    probs = modules[1].row_probs(on_device, laws)
    assert probs[1:5, 0].tolist() == [1.0] * 4
    assert probs.sum(-1).cpu().sub(1.0).abs().max() < LAW_TOLERANCE


@BOTH
@pytest.mark.parametrize("vocab", [1, 2, 67, 2048])
def test_greedy_choices_take_the_lowest_id(
    modules: Modules, vocab: int, dtype: torch.dtype, device: str
) -> None:
    logits = random_logits(7, vocab, 5, ties=vocab > 2).to(dtype)
    tokens, bad = modules[0].greedy_choices(logits.to(device))
    assert (tokens.tolist(), bad.tolist()) == greedy_tokens(logits)


@BOTH
@pytest.mark.parametrize(("vocab", "of"), [(2, torch.float16), (97, torch.float32)])
def test_races_have_the_hosts_winners(modules: Modules, vocab: int, of: torch.dtype, device: str) -> None:
    """Ragged trees with padding and an empty sequence; each node races at its own position."""
    parents = [-1, 0, 0, 1, 1, -1, -1, 0, 1, NO_PARENT, NO_PARENT]
    depths = [0, 1, 1, 2, 2, 0, 0, 1, 2, 0, 0]
    starts = [0, 5, 5, 6, 11]
    seeds = [7, 2**63 + 1, 2**64 - 1, 3]
    roots = [4, 0, 900, 31]
    sequence = [0] * 5 + [2] + [3] * 5
    positions = [roots[seq] + depth for seq, depth in zip(sequence, depths, strict=True)]
    logits = random_logits(len(parents), vocab, 9).to(of)
    logits[9:] = torch.nan
    chosen = SETTINGS[: len(parents)]
    tree = TreeRows(
        node_start=torch.tensor(starts, dtype=torch.int32, device=device),
        parents=torch.tensor(parents, dtype=torch.int32, device=device),
        token_ids=torch.zeros(len(parents), dtype=torch.int64, device=device),
        max_nodes=5,
        max_depth=2,
    )
    laws = modules[0].row_laws(logits.to(device), row_params(chosen, device))
    winners = modules[1].race_winners(
        logits.to(device),
        laws,
        tree,
        torch.tensor([seed_bits(seed) for seed in seeds], device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
    )
    for row in range(9):
        law = host_law(logits[row], chosen[row]).numpy()
        assert [winners[row].item()] == RandomStream(seeds[sequence[row]]).race(positions[row], law)
    assert winners[9:].tolist() == [0, 0]


def test_a_winner_differs_from_the_hosts_less_than_once_in_1e12_races(device: str) -> None:
    """Two fastest ids lie within a share x of each other about once in 1 / x races, and speeds err by 1e-13.

    The same count says why races are not run in float32: its noise errs by 1e-7, which would turn one race in
    some million, one token of a long conversation.
    """
    logits = torch.randn(40, 512, generator=torch.Generator().manual_seed(1)) * 2
    laws = sampling_rows.row_laws(logits.to(device), row_params([(1.0, 0, 1.0, 0.0)] * 40, device))
    found = row_choices.row_probs(logits.to(device), laws).cpu()
    wanted = process_logits(logits, SamplingParams(temperature=1.0))
    assert (found / wanted - 1.0).abs().max() < LAW_TOLERANCE
    stream, gaps = RandomStream(11), []
    for position in range(200):
        noise = torch.from_numpy(stream.exponentials(position, 512))
        fastest = (wanted / noise).topk(2, dim=-1).values
        gaps.append(1.0 - fastest[:, 1] / fastest[:, 0])
    for share in (0.01, 0.03, 0.1):
        assert (torch.cat(gaps) < share).double().mean() < 1.5 * share


@pytest.mark.gpu
def test_laws_of_a_real_vocabulary_are_the_hosts_in_bf16() -> None:
    """Many tiles, odd length, and the ties that bf16 makes of every row."""
    logits = random_logits(len(SETTINGS), 151_937, 3).bfloat16()
    laws = check_laws(CHOICES["triton"], logits, SETTINGS, "cuda")
    again = sampling_rows.row_laws(logits.cuda(), row_params(SETTINGS, "cuda"))
    assert torch.equal(laws.numbers, again.numbers), "the order of a sum is fixed"


@pytest.mark.gpu
def test_races_of_a_real_vocabulary_have_the_hosts_winners_in_bf16() -> None:
    logits = random_logits(64, 151_937, 4).bfloat16()
    tree = TreeRows(
        node_start=torch.tensor([0, 64], dtype=torch.int32, device="cuda"),
        parents=torch.arange(-1, 63, dtype=torch.int32, device="cuda"),
        token_ids=torch.zeros(64, dtype=torch.int64, device="cuda"),
        max_nodes=64,
        max_depth=63,
    )
    chosen = [SETTINGS[row % 6] for row in range(64)]
    laws = sampling_rows.row_laws(logits.cuda(), row_params(chosen, "cuda"))
    positions = torch.arange(1000, 1064, dtype=torch.int32, device="cuda")
    seeds = torch.tensor([9], device="cuda")
    winners = row_choices.race_winners(logits.cuda(), laws, tree, seeds, positions).tolist()
    stream = RandomStream(9)
    assert winners == [
        stream.race(1000 + row, host_law(logits[row], chosen[row]).numpy())[0] for row in range(64)
    ]
