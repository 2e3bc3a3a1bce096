"""Supervision of programs: their process groups, the signals that end them, and the processes that they leave behind."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

from console.interruption import abandon_stdout
from console.program import say

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2), from linux/prctl.h."""
_PATIENCE_S = 60.0
"""Time in seconds to wait for processes that end by themselves after their launcher was killed."""

Stop = Callable[[int, int, int], None]
"""Function that ends a program. Its arguments are the process id, the signal number and the number of earlier signals."""


class Stopped(BaseException):
    """A signal that arrived while no program was running.

    This is not a ``KeyboardInterrupt``: if that is raised in code that ``exec`` runs, such as the methods that dataclasses
    generate, Python later ends the process by SIGINT, even if the exception was caught.
    """


class Supervisor:
    """Runs programs one after another, each in its own process group, which the terminal's Ctrl-C does not reach.

    A signal to this process calls the running program's `Stop`, and `run` returns after the program has ended. Without a
    running program, the signal raises `Stopped`. Either way, this process says at once what happens.
    """

    def __init__(self) -> None:
        self.status = 0
        """Exit status: 128 + n after signal n to this process, otherwise 0."""
        self.signals = 0
        """Number of signals since the last program was started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Stop = end
        self._is_unwinding = False
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
                signal.signal(number, self._handle)

    def receive_signals(self) -> None:
        """Unblock the signals that run_and_time.sh has blocked while Python started."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        stop: Stop | None = None,
        quiet: bool = False,
    ) -> int:
        """Run a program and return its exit status, or 128 + n if signal n ended the program or arrived at this process.

        A signal to this process calls ``stop``, which is `end` by default. ``quiet`` drops the program's standard output.
        If this process is killed, the program gets SIGTERM.
        """
        self._stop, self.signals, self._is_unwinding = stop or end, 0, False
        output = subprocess.DEVNULL if quiet else None
        # If the program is killed, its processes become children of this process, which can then wait for them.
        _prctl(_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the signal handler needs `_process`, which is not set yet
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, process_group=0, preexec_fn=_in_child
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        status = self._process.wait()
        self._process = None
        if self.signals:
            return self.status
        return status if status >= 0 else 128 - status

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.status = 128 + number
        if self._process is None:
            if not self._is_unwinding:
                self._is_unwinding = True
                say_at_once("interrupted")
                raise Stopped
            return
        self.signals += 1
        self._stop(self._process.pid, number, self.signals - 1)


def end(process: int, _number: int, earlier: int) -> None:
    """End a program by SIGTERM, so that it can remove unfinished files. At the second signal, end it by SIGKILL."""
    if not earlier:
        say_at_once("interrupted")
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL if earlier else signal.SIGTERM)


def await_orphans() -> None:
    """Wait up to a minute for the processes that a killed program has left behind, and warn if some do not end."""
    deadline = time.monotonic() + _PATIENCE_S
    with suppress(ChildProcessError):  # raised if no process is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
        say_at_once("warning: processes of this run are still there after a minute: end them before the next run")


def say_at_once(line: str) -> None:
    """Print a line on standard error. Unlike ``print``, it works in a signal handler that has interrupted a ``print``."""
    with suppress(OSError):  # the terminal may be gone, for example after SIGHUP
        os.write(2, f"{line}\n".encode())


def announce(text: str) -> None:
    """Print a line about progress. If nobody reads the output, drop all further output, also that of later programs."""
    try:
        say(f"==> {text}")
    except OSError:
        abandon_stdout()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _in_child() -> None:
    """Prepare a child process between fork and exec: it unblocks signals, and gets SIGTERM when its parent is killed."""
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
