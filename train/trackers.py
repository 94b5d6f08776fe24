"""Trackers of experiments (TensorBoard, trackio, ...) through accelerate.

Owns which are refused, and how numbers get there. Knows nothing of what is tracked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers
from accelerate.utils import ProjectConfiguration

from specdec.errors import SpecdecError

PROJECT = "specdec"


def check_tracker(name: str | None) -> None:
    """Refuse a tracker that accelerate does not know, or whose package is missing."""
    known = sorted(str(kind) for kind in LOGGER_TYPE_TO_CLASS)
    if name is None:
        return
    if name not in known:
        raise SpecdecError(f"tracker ({name}) must be one of {', '.join(known)}")
    if name not in [str(kind) for kind in get_available_trackers()]:
        raise SpecdecError(f"tracker ({name}) needs a package that is not installed; pip install {name}")


class Tracking:
    """One run in a tracker; without a name nothing is tracked.

    Args:
        accelerator: the run's; its main process writes.
        name: a tracker's.
        folder: where trackers that write files put them.
        config: options to note with the run.
    """

    def __init__(
        self, accelerator: Accelerator, name: str | None, folder: Path, config: Mapping[str, Any]
    ) -> None:
        self.accelerator, self.on = accelerator, name is not None
        if name is None:
            return
        check_tracker(name)
        accelerator.project_configuration = ProjectConfiguration(
            project_dir=str(folder), logging_dir=str(folder)
        )
        accelerator.log_with = filter_trackers(name, str(folder))
        plain = {
            key: value if isinstance(value, int | float | str | bool) else str(value)
            for key, value in config.items()
        }
        accelerator.init_trackers(PROJECT, config=plain)

    @property
    def track(self) -> Callable[[Mapping[str, float], int], None]:
        """What takes numbers and their step."""

        def track(values: Mapping[str, float], step: int) -> None:
            if self.on:
                self.accelerator.log(dict(values), step=step)

        return track

    def close(self) -> None:
        """Write out what is left."""
        if self.on:
            for tracker in self.accelerator.trackers:
                tracker.finish()
