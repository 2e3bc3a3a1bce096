"""Signals: Ctrl-C prints one line, even during imports, and SIGTERM and SIGHUP let the program remove unfinished files."""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import NoReturn


def show_in_one_line() -> None:
    """Show one line instead of a traceback when Ctrl-C ends this program. Do nothing if another program imports the package.

    After this line, Python still ends the process by the signal, as shells expect.
    """
    if sys.argv[:1] == ["-m"]:  # argv[0] is "-m" only while `python -m PACKAGE` looks for its file
        sys.excepthook = in_one_line


def in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line for Ctrl-C, and the traceback for any other error. This function is a `sys.excepthook`."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


def abandon_stdout() -> int:
    """Discard further output after its reader, such as ``head``, has ended. Return the program's exit status."""
    # Python flushes standard output when it ends. Without this, it would complain about the missing reader again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def end_in_order() -> None:
    """From now on, let SIGTERM and SIGHUP raise ``SystemExit``, so that unfinished files are removed.

    The exit status is 128 + n after signal n, as in shells.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup makes a program ignore SIGHUP, so leave that
            signal.signal(number, _end)


def ignore_signals() -> None:
    """From now on, ignore the signals that end programs, because this program is about to end.

    Python restores the default actions of signals while it ends. Without this, a late signal would change the exit status.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise SystemExit(128 + number)
