"""Run another program to its end and read its output."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Output:
    """What a program printed, and how it ended.

    Attributes:
        text: standard output. Bytes that are not UTF-8 become surrogates, so that printed file names can still be opened.
        errors: standard error.
        trouble: sentence that says how the program failed; empty if it ended with status 0.
    """

    text: str = ""
    errors: str = ""
    trouble: str = ""

    @property
    def answer(self) -> str:
        """Standard output of a program that succeeded, otherwise an empty text."""
        return "" if self.trouble else self.text

    @property
    def complaint(self) -> str:
        """What to show if the program failed: the last line on standard error, or else ``trouble``."""
        lines = self.errors.strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else self.trouble


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Output:
    """Run a program without standard input. A program that is missing, fails or hangs raises no exception.

    The program runs in a new session, and is killed with its children after `timeout_s` seconds or on Ctrl-C.
    `environment` replaces all environment variables; by default the program gets the variables of this process.
    """
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    except FileNotFoundError:
        return Output(trouble=f"no command {name} here")
    except OSError as error:
        return Output(trouble=f"{name} cannot be started: {error.strerror}")
    try:
        text, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_session(process)
        return Output(trouble=f"{name} gave no answer within {timeout_s:g} s")
    except BaseException:  # Ctrl-C does not reach the program's session, so kill it
        _kill_session(process)
        raise
    return Output(text, errors, f"{name} failed with status {process.returncode}" if process.returncode else "")


def _kill_session(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits for a dead network disk cannot be killed, so stop waiting for it after 2 seconds.
    with suppress(OSError, subprocess.TimeoutExpired):
        process.communicate(timeout=2)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
