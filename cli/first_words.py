"""A word to who waits for a command's first sign of life.

Owns the one line that is said when a command has been silent for some seconds after its start: libraries and
a large target take long on a busy machine, which looks like a program that hangs. Imports nothing slow.
"""

import sys
import threading

# on an idle machine a small target is there before
PATIENCE_S = 5.0


class FirstWords:
    """Whether anything was said; says that the command is starting where nothing was in time."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._said = threading.Event()

    def said(self) -> None:
        """From now on the command speaks for itself."""
        self._said.set()

    def watch(self, command: str) -> threading.Thread:
        """Say in the background, once, that `command` is starting, unless it speaks before."""
        thread = threading.Thread(target=self._wait, args=(command,), name="first-words", daemon=True)
        thread.start()
        return thread

    def _wait(self, command: str) -> None:
        if not self._said.wait(self._patience_s):
            print(f"{command} is starting: what it needs is being read", file=sys.stderr, flush=True)


first_words = FirstWords()
