"""The three streams of a command: what cannot be written is an error with an id, never a traceback.

Verbs print without a thought of this; the entry point of the command calls `prepare` once.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from samebits.errors import Refused


class ReaderLeft(Exception):
    """Whoever read our output has closed it, as `head` does."""


class _Output(io.TextIOWrapper):
    """Standard output; what cannot be written is dropped once it has been said."""

    def write(self, text: str) -> int:
        with self._refused():
            return super().write(text)

    def flush(self) -> None:
        with self._refused():
            super().flush()

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            drop(self.fileno())  # else the interpreter tries once more when it ends
            if isinstance(error, BrokenPipeError):
                raise ReaderLeft from None
            raise unwritable(str(error)) from None


def unwritable(problem: str) -> Refused:
    """SB1008: the output of a command is not, or not whole, where it was to go."""
    return Refused(
        "SB1008",
        seen=f"standard output: {problem}",
        required="an open file or terminal with room for all of the output",
        hint="df -h .",
    )


def drop(descriptor: int) -> None:
    """Send what is still to be written to `descriptor` nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    if nowhere != descriptor:
        os.close(nowhere)


def tell(text: str) -> None:
    """Print on stderr; where that cannot be written, the exit code has to do."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr.fileno())


def prepare() -> None:
    """Open what the caller closed, so that no other file gets its number, and watch the output."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    closed = sys.stdout is None
    if closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if closed:
        raise unwritable("closed")
    out = sys.stdout
    assert isinstance(out, io.TextIOWrapper)
    sys.stdout = _Output(
        out.buffer, out.encoding, out.errors, line_buffering=out.line_buffering, newline="\n"
    )
