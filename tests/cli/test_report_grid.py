"""A report of a grid speaks of what was pooled over its sets, never of the luckiest cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.cli.main import main

Make = Callable[..., Path]
SETS = ("easy", "hard")


def as_grid(body: dict[str, Any]) -> None:
    """Two sets, one of them with a lucky cell; together the setting gains a tenth."""
    plain, drafted = body["settings"]
    cells = {"easy": (1.9, 3.0), "hard": (1.1, 0.7)}
    body["data"] = ",".join(SETS)
    body["settings"] = []
    for name, (length, speed) in cells.items():
        acceptance = drafted["acceptance"] | {"acceptance_length": length}
        body["settings"] += [
            plain | {"data": name},
            drafted | {"data": name, "acceptance": acceptance, "speedup": speed},
        ]
    together = {"batch_size": 1, "temperature": 0.0, "lossless": True, "rule": "greedy", "data": list(SETS)}
    counted = {"prompts": 8, "answers": 8, "tokens": 160, "acceptance_rate": 0.25}
    body["pooled"] = [
        {
            "setting": "plain",
            "draft": None,
            "tokens_per_second": 20.0,
            "acceptance_length": 1.0,
            "acceptance_length_interval": [1.0, 1.0],
            **together,
            **counted,
        },
        {
            "setting": "draft chain:2",
            "draft": "draft",
            "tokens_per_second": 22.0,
            "acceptance_length": 1.4,
            "acceptance_length_interval": [1.2, 1.6],
            "speedup": 1.1,
            "speedup_interval": [0.9, 1.3],
            "identical": 8,
            **together,
            **counted,
        },
    ]
    body["per_prompt"] = {}


def written(bench_record: Make, tmp_path: Path) -> str:
    out = tmp_path / "report.md"
    assert main(["report", str(bench_record(as_grid)), "--out", str(out)]) == 0
    return out.read_text()


def test_the_gain_is_that_of_all_sets_together(bench_record: Make, tmp_path: Path) -> None:
    text = written(bench_record, tmp_path)
    assert "draft chain:2 writes 1.10 (0.90..1.30) times the tokens per second of tiny" in text
    assert "n = 8 prompts of 2 sets" in text
    assert "- speedup: **1.10x** 95 % interval 0.90..1.30" in text
    assert "writes 3.00" not in text


def test_every_cell_stands_in_a_table_by_set(bench_record: Make, tmp_path: Path) -> None:
    lines = written(bench_record, tmp_path).splitlines()
    heads = [at for at, line in enumerate(lines) if line == "| setting | batch | temperature | easy | hard |"]
    assert len(heads) == 2
    lengths, speeds = (lines[at + 2] for at in heads)
    assert lengths == "| draft chain:2 | 1 | 0 | 1.90 (1.35..1.65) | 1.10 (1.35..1.65) |"
    assert speeds == "| draft chain:2 | 1 | 0 | 3.00 (1.90..2.10) | 0.70 (1.90..2.10) |"


def test_a_chart_has_a_mark_for_each_setting_not_for_each_cell(bench_record: Make, tmp_path: Path) -> None:
    text = written(bench_record, tmp_path)
    assert text.count("Chart: Speed-up over no speculation. draft chain:2 1.10 (0.90..1.30).") == 1
    assert "Chart: Acceptance by depth" not in text
