"""`specdec bench --micro`: all figures are there, counted by hand where they can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.cli.main import main
from specdec.cli.micro.attention import attention_case
from specdec.cli.micro.kernels import kernel_cases
from specdec.cli.micro.run import _against, _better
from specdec.cli.micro.shapes import OURS, MicroShape, tree_parents
from specdec.cli.micro.steps import StepPlan, verify_curve, weight_bytes
from specdec.cli.micro.timing import Clock, Limits, Timing, measure_limits
from specdec.config import EngineConfig, ModelConfig
from specdec.engine import Engine
from specdec.kernels import OPERATIONS
from specdec.random_target import SHAPES

TINY = ModelConfig.from_dict(SHAPES["tiny"])


def shape(batch: int, context: int, nodes: int) -> MicroShape:
    return MicroShape(
        model=TINY, device="cpu", dtype=torch.float32, batch=batch, context=context, nodes=nodes
    )


@pytest.mark.parametrize(
    ("sizes", "prefill"), [((2, 33, 1), False), ((3, 50, 7), False), ((1, 40, 19), True)]
)
def test_our_attention_and_its_baselines_do_the_same_work(sizes: tuple[int, int, int], prefill: bool) -> None:
    """A baseline that skips the mask or reads other rows would be beaten, or win, for nothing."""
    case = attention_case(shape(*sizes), prefill=prefill)
    ours = case.runs[OURS]()
    batch, _, nodes = sizes
    for name, run in case.runs.items():
        answer = run()
        if name != OURS:
            # [batch, heads, nodes, d]
            answer = answer.transpose(1, 2).reshape(batch * nodes, -1)
        torch.testing.assert_close(answer, ours, msg=name)
    assert set(case.runs) == {OURS, "SDPA", "gather, then SDPA"}
    assert "FlexAttention" in case.left_out


def test_bytes_and_operations_of_attention_are_counted_by_hand() -> None:
    case = attention_case(shape(2, 48, 4))
    # keys and values of 2 sequences x 48 rows x 2 heads x 16, queries and results of 8 rows x 4 heads x 16
    assert case.bytes == 4 * (2 * 2 * 48 * 2 * 16 + 2 * 8 * 4 * 16)
    # a product and a sum, of scores and of values, for 8 rows x 4 heads x 16 numbers x 48 keys
    assert case.flop == 2 * 2 * 8 * 4 * 16 * 48


def test_every_kernel_has_a_case_that_runs() -> None:
    """Catches a new operation that nobody measures."""
    cases = {case.name: case for case in kernel_cases(shape(2, 40, 5))}
    not_rows_of_a_step = {"tree_attention", "uniforms", "exponentials"}
    assert set(cases) == set(OPERATIONS) - not_rows_of_a_step
    for case in cases.values():
        assert case.bytes > 0
        for run in case.runs.values():
            run()


def test_trees_have_parents_before_children_and_four_each() -> None:
    assert tree_parents(7) == [-1, 0, 0, 0, 0, 1, 1]
    assert tree_parents(1) == [-1]


def test_calls_take_turns_in_an_order_that_turns() -> None:
    seen: list[str] = []
    clock = Clock("cpu", rounds=3)
    clock._warm_up = lambda run: 1  # type: ignore[method-assign]
    timings = clock.compare({name: (lambda name=name: seen.append(name)) for name in "ab"})
    assert seen == ["a", "b", "b", "a", "a", "b"]
    assert len(timings["a"].seconds) == 3


def test_shares_of_the_limits_by_hand() -> None:
    def limits(copy: float, matrix: float) -> Limits:
        timing = Timing(seconds=(1.0,))
        return Limits(
            copy_bytes_per_s=copy, matrix_flop_per_s=matrix, timings={"copy": timing, "matrix": timing}
        )

    best = _better(limits(4e9, 1e12), limits(3e9, 2e12))
    assert (best.copy_bytes_per_s, best.matrix_flop_per_s) == (4e9, 2e12)
    figure = _against({"ms": 2.0, "bytes": 4_000_000, "flop": 1_000_000_000}, best)
    assert figure["gb_per_s"] == pytest.approx(2.0)
    assert figure["bandwidth_share"] == pytest.approx(0.5)
    assert figure["tflop_per_s"] == pytest.approx(0.5)
    assert figure["matrix_share"] == pytest.approx(0.25)
    assert _against({"ms": 2.0, "bytes": 1, "flop": 0}, best)["tflop_per_s"] is None
    measured = measure_limits(Clock("cpu", rounds=1), torch.float32)
    assert measured.copy_bytes_per_s > 0
    assert Timing(seconds=(3.0, 1.0, 2.0)).to_dict() == {
        "ms": 2000.0,
        "ms_lowest": 1000.0,
        "ms_highest": 3000.0,
        "n": 3,
    }


@pytest.fixture
def engine(specdec_home: Path) -> Engine:
    return Engine("random:tiny", config=EngineConfig(kv_tokens=64))


def test_the_curve_measures_what_fits_and_names_the_rest(engine: Engine) -> None:
    plan = StepPlan(
        target="random:tiny",
        config=engine.config,
        rounds=2,
        rows=(1, 4, 9),
        batches=(1, 3, 10**7),
        contexts=(32, 4096),
    )
    figures, left_out = verify_curve(plan, engine)
    sizes = [(one["batch"], one["rows"]) for one in figures]
    assert sizes == [(1, 1), (1, 4), (1, 9), (3, 1), (3, 4), (3, 9)]
    assert all(one["context"] == 32 and one["n"] == 2 for one in figures)
    assert [one["relative"] for one in figures if one["rows"] == 1] == [1.0, 1.0]
    assert len(left_out) == 2
    assert "B=10000000 L=32" in left_out[0]
    assert "beyond the target's context of 2048" in left_out[1]


def test_weight_bytes_are_those_of_the_matrices(engine: Engine) -> None:
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 128)
    assert weight_bytes(engine) == 2 * (4 * layer + 512 * 64)


def test_the_command_measures_all_of_it(
    specdec_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    from specdec.cli.micro import run as micro
    from specdec.cli.micro import steps as micro_steps

    monkeypatch.setattr(micro_steps, "STEP_TOKENS", 8)
    small = micro.Sizes(attention=((1, 64, 4),), prefill=(1, 64, 16), kernels=(1, 64, 4))
    monkeypatch.setitem(micro.SIZES, "cpu", small)
    monkeypatch.setattr(
        micro, "StepPlan", lambda **given: StepPlan(**given, rows=(1, 4), batches=(1,), contexts=(64,))
    )
    monkeypatch.setattr("specdec.cli.bench.MICRO_ROUNDS", 2)
    out, trace = tmp_path / "micro.json", tmp_path / "trace.json"
    words = ["bench", "random:tiny", "--micro", "--out", str(out), "--trace", str(trace)]
    assert main(words) == 0
    text = capsys.readouterr().out
    summary = json.loads(text.strip().splitlines()[-1])
    assert summary["schema"] == "specdec.micro/1"
    assert summary["simulated"] is True
    assert summary["random_weights"] is True
    assert "SIMULATED" in text
    for one in summary["kernels"]:
        assert one["gb_per_s"] > 0
        assert one["ms_lowest"] <= one["ms"] <= one["ms_highest"]
    for one in summary["steps"]:
        assert sum(one["shares"].values()) == pytest.approx(1.0)
        assert all(share > -0.05 for share in one["shares"].values())
        assert 0 <= one["host_share"] <= 1
        assert one["weight_streaming_share"] > 0
    assert [one["rows"] for one in summary["verify_cost"]] == [1, 4]
    assert json.loads(trace.read_text())["traceEvents"]
    valid_record(json.loads(out.read_text()))
    assert set(json.loads(out.read_text())["definitions"]) >= {"gb_per_s", "host_share", "relative"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--micro", "--draft", "ngram"], "--draft and --micro"),
        (["--micro", "--verify-cost"], "--verify-cost and --micro"),
        (["--micro", "--max-tokens", "128"], "--max-tokens and --micro"),
        (["--trace", "t.json"], "--trace needs --micro"),
        (["--micro", "--device", "tpu"], "--device"),
        (["--micro", "--dtype", "float8"], "--dtype"),
    ],
)
def test_what_micro_cannot_do_is_wrong_usage(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "random:tiny", *words]) == 2
    assert error in capsys.readouterr().err


class _Interpreted(MicroShape):
    """Sizes whose cases run the Triton kernels, interpreted."""

    backend = "triton"  # type: ignore[assignment]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a card")
@pytest.mark.parametrize(("nodes", "prefill"), [(1, False), (5, False), (5, True)])
def test_the_attention_measured_on_a_card_is_the_triton_kernel(
    nodes: int, prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("specdec.cli.micro.attention._flex", lambda *inputs: lambda: None)
    sizes = _Interpreted(model=TINY, device="cpu", dtype=torch.float32, batch=2, context=24, nodes=nodes)
    case = attention_case(sizes, prefill=prefill)
    assert "FlexAttention" in case.runs
    baseline = case.runs["SDPA"]()
    assert isinstance(baseline, torch.Tensor)
    torch.testing.assert_close(case.runs[OURS](), baseline.transpose(1, 2).reshape(2 * nodes, -1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "prefill"), [((2, 512, 1), False), ((3, 512, 33), False), ((1, 512, 200), True)]
)
def test_on_a_card_our_kernel_and_its_baselines_do_the_same_work(
    sizes: tuple[int, int, int], prefill: bool
) -> None:
    batch, context, nodes = sizes
    on_card = MicroShape(
        model=TINY, device="cuda", dtype=torch.bfloat16, batch=batch, context=context, nodes=nodes
    )
    case = attention_case(on_card, prefill=prefill)
    assert set(case.runs) == {OURS, "SDPA", "gather, then SDPA", "FlexAttention"}
    ours = case.runs[OURS]()
    for name, run in case.runs.items():
        if name != OURS:
            answer = run().transpose(1, 2).reshape(batch * nodes, -1)
            torch.testing.assert_close(answer, ours, rtol=0.02, atol=0.02, msg=name)


@pytest.mark.gpu
def test_on_a_card_every_kernel_has_a_case_that_runs() -> None:
    on_card = MicroShape(model=TINY, device="cuda", dtype=torch.bfloat16, batch=2, context=64, nodes=9)
    timings = Clock("cuda", rounds=1)
    for case in kernel_cases(on_card):
        assert set(case.runs) >= {OURS, "reference in torch"}
        assert all(timing.median > 0 for timing in timings.compare(case.runs).values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_a_card_that_is_not_there_is_named(specdec_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "random:tiny", "--micro", "--device", "cuda"]) == 1
    assert "device (cuda) needs a CUDA card" in capsys.readouterr().err


def test_the_trace_and_the_record_are_two_files(
    specdec_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, same = tmp_path / "one.json", tmp_path / "." / "one.json"
    assert main(["bench", "random:tiny", "--micro", "--out", str(out), "--trace", str(same)]) == 2
    error = capsys.readouterr().err
    assert "--trace" in error
    assert "--out" in error
    assert not out.exists()
