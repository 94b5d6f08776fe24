"""Trains what a file of plans says, in a process of its own; run by tests that need several, or kill one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from specdec.train.config import TrainConfig
from specdec.train.run import train_draft


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    base = TrainConfig(**plan["base"])
    for run in plan["runs"]:
        lines: list[str] = []
        result = train_draft(
            plan["target"],
            boundaries=tuple(plan["boundaries"]),
            data=plan["data"],
            out=run["out"],
            config=replace(base, **run["change"]),
            states_cache=run.get("states_cache", "online"),
            report=lines.append,
        )
        assert bool(lines) == result.main, "the main process alone speaks"
        assert result.summary["processes"] == plan["processes"], "the run must have seen every process"


if __name__ == "__main__":
    main()
