"""How a peer program talks to `specdec compare`: JSON lines on stdin and stdout.

First line in: the setup (`model`, `dtype`, `device`, `threads`, `max_model_len`, `batch_size`, `options`).
First line out: `ready`, with the engine's name, versions and what it was told. Then one line in a batch
(`ids`, `prompts`, `max_tokens`) and one line out (`ids`, `token_ids`, `seconds`); `seconds` is the engine's
own call, nothing of the pipe. A failure is one line with `error`. Imports the standard library only, since
it runs in any environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[[list[list[int]], int], list[list[int]]]
Load = Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]


def serve(load: Load) -> None:
    """Load an engine by the setup and answer prompts until stdin ends.

    Args:
        load: makes from the setup the facts about the engine and the function that answers: (ids of each
            prompt, number of new tokens) -> new ids of each, greedy, without an end before that number.
    """
    # engines print to stdout, their children too: the lines get a descriptor of their own
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(record: dict[str, Any]) -> None:
        lines.write(json.dumps(record) + "\n")
        lines.flush()

    try:
        facts, answer = load(json.loads(sys.stdin.readline()))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        raise
    send({"ready": facts})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            started = time.perf_counter()
            token_ids = answer(request["prompts"], request["max_tokens"])
            seconds = time.perf_counter() - started
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
            raise
        send({"ids": request["ids"], "token_ids": token_ids, "seconds": seconds})
