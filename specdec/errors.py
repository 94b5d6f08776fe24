"""Errors that are the user's to mend.

Owns the exception types whose message is written for people: the command line prints it in one line, without
a traceback; the message of `BadLogitsError` stands in the result of its request. Also the one wording of a
failed write. Knows nothing of how it is shown. A message says what was given, what is allowed and what to do
next. Mistakes of the project itself are assertions, not these.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class SpecdecError(ValueError):
    """What was asked for cannot be done; the message says which value is wrong and what to do (exit 1)."""


class UsageError(SpecdecError):
    """An option or argument is wrong before any work was started (exit 2)."""


class StoppedError(SpecdecError):
    """A signal ended the work early; what was done is saved (exit 143)."""


class OtherRunError(SpecdecError):
    """A run to be resumed was started with other options."""


class RuleMismatchError(SpecdecError):
    """A verification rule does not go with a drafter, or with the shape of its trees; each is fine alone."""


class BadLogitsError(ValueError):
    """A request's next token cannot be chosen; the text is that request's own error, others are unharmed."""


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A block that writes `what`, such as "checkpoint (PATH)": a full disk or a quota is the user's to mend.

    Raises:
        SpecdecError: in place of an OSError, naming what and why.
    """
    try:
        yield
    except OSError as error:
        raise SpecdecError(f"{what} cannot be written: {error.strerror or error}") from error
