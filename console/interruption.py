"""Ctrl-C, from the first import on: one line, and the end that a shell knows as 130."""

import sys
from types import TracebackType


def show_in_one_line() -> None:
    """Let a program that Ctrl-C ends say so, without a traceback. Does nothing where a package is imported by others.

    Python itself then ends the process by the signal, as shells expect; what was begun has been undone on the way.
    """
    if sys.argv[:1] == ["-m"]:  # Python has not yet found the file of `python -m PACKAGE`
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)
