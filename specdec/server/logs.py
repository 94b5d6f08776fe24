"""Log lines as JSON, one object a line, on stderr.

Owns the shape of a line. What stands in it is the caller's; the server's own lines hold no text of prompts.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")


class JsonLines(logging.Formatter):
    """One compact object a record: time, level, event, and the `fields` the caller added."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_json(level: str) -> None:
    """Send the records of specdec and uvicorn to stderr as JSON."""
    # a full disk behind stderr must not fill it further with complaints about itself
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, least in (("specdec", level.upper()), ("uvicorn", "WARNING"), ("opentelemetry", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False
