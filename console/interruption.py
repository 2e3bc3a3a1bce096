"""Signals that end a program: Ctrl-C in one line from the first import on, and what is told to end in order."""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import NoReturn


def show_in_one_line() -> None:
    """Let a program that Ctrl-C ends say so, without a traceback. Does nothing where a package is imported by others.

    Python itself then ends the process by the signal, as shells expect; what was begun has been undone on the way.
    """
    if sys.argv[:1] == ["-m"]:  # Python has not yet found the file of `python -m PACKAGE`
        sys.excepthook = in_one_line


def in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error that ends the program, Ctrl-C in one line: a `sys.excepthook`."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


def reader_has_gone() -> int:
    """Give up standard output, whose reader has seen enough, as ``head`` does; return the exit status."""
    # Python writes out what is left as it ends, and would complain about the reader once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def end_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process from here on as an error does, so that what is unfinished is removed.

    The exit status is 128 + n after signal n, as shells have it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one would leave things as they are
    raise SystemExit(128 + number)
