"""`bench --url` on the command line: what makes no sense is refused by flag, before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.cli.loading.drive import Load
from specdec.cli.loading.figures import figures_of
from specdec.cli.loading.picture import draw_load
from specdec.cli.main import main

# nobody listens on port 9 here; no test comes so far
URL = ["--url", "http://127.0.0.1:9/v1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "TARGET is missing"),
        (["some-target", *URL], "TARGET and --url exclude each other"),
        ([*URL, "--draft", "ngram"], "--draft and --url exclude each other"),
        # also where the value is the default: the server would not know of it
        ([*URL, "--device", "cpu"], "--device and --url exclude each other"),
        ([*URL, "--batch-size", "1"], "--batch-size and --url"),
        ([*URL, "--micro"], "--micro and --url"),
        ([*URL, "--no-adaptive"], "--adaptive and --url"),
        (["some-target", "--concurrency", "2"], "--concurrency needs --url"),
        (["some-target", "--cold"], "--cold needs --url"),
        (["--url", "localhost:8000"], "--url (localhost:8000) must be http"),
        ([*URL, "--concurrency", "1,x"], "--concurrency (1,x) must be counts"),
        ([*URL, "--concurrency", "0"], "--concurrency (0) must be counts"),
        ([*URL, "--concurrency", "2,2"], "the same count twice"),
        ([*URL, "--concurrency", "1,2", "--request-rate", "3"], "drop --request-rate"),
        ([*URL, "--request-rate", "0"], "--request-rate (0) must be above 0"),
        ([*URL, "--request-rate", "nan"], "--request-rate (nan)"),
        ([*URL, "--think-time", "1"], "--think-time needs --turns"),
        ([*URL, "--turns", "2", "--think-time", "inf"], "--think-time (inf)"),
        ([*URL, "--turns", "2", "--endpoint", "completions"], "--turns (2) needs --endpoint chat"),
        ([*URL, "--endpoint", "embeddings"], "--endpoint (embeddings) must be one of"),
        ([*URL, "--prefix-groups", "2"], "--prefix-groups needs --shared-prefix"),
        ([*URL, "--goodput", "itl:3"], "--goodput (itl:3) must be NAME:MS"),
        ([*URL, "--goodput", "ttft:0"], "--goodput (ttft:0)"),
        ([*URL, "--extra-body", "[1]"], "--extra-body ([1]) must be a JSON object"),
        ([*URL, "--extra-body", '{"stream": false}'], "--extra-body must not set stream"),
        ([*URL, "--request-timeout", "0"], "--request-timeout (0)"),
    ],
)
def test_senseless_options_are_refused_by_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_nobody_listening_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *URL, "--limit", "1"]) == 1
    assert "--url (http://127.0.0.1:9/v1) does not answer" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="names a Unix device")
def test_an_output_that_cannot_be_written_is_known_before_the_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", *URL, "--out", "/dev/null"]) == 2
    assert "--out (/dev/null)" in capsys.readouterr().err


def test_a_sweep_is_drawn_even_where_a_point_measured_nothing(tmp_path: Path) -> None:
    empty = figures_of(Load(records=[], duration_s=0.0), requests=4, goodput={})
    spread = {"median": 2.0, "p99": 3.0}
    points = [
        {"concurrency": 1, **empty},
        {"concurrency": 4, **empty, "output_throughput": 9.0, "ttft_ms": spread, "tpot_ms": spread},
    ]
    draw_load(points, tmp_path / "load.png", title="a sweep")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
