"""Ask this machine about itself: files of /proc and /sys, and the output of commands, each within a time limit.

Nothing here raises for what a machine lacks: a missing file is empty, and a command that is missing, fails or hangs says so
in its `Output`. Tests stand in for a machine by giving another root folder and other commands.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from console.version import REPOSITORY

COMMAND_TIMEOUT_S = 20.0
MAX_OUTPUT_CHARACTERS = 2**20


@dataclass(frozen=True)
class Output:
    """Output of a command.

    Attributes:
        text: standard output; also that of a command that failed.
        trouble: why there is no answer, in words; "" when the command ended with status 0.
        missing: whether there is no such command here.
        errors: standard error.
    """

    text: str = ""
    trouble: str = ""
    missing: bool = False
    errors: str = ""

    @property
    def answer(self) -> str:
        """The text of a command that succeeded, else ""."""
        return "" if self.trouble else self.text


def run_root() -> Path:
    """The folder in which runs start: the checkout, or the current folder if the package was installed from a wheel."""
    return REPOSITORY if (REPOSITORY / "run_and_time.sh").is_file() else Path.cwd()


@dataclass(frozen=True)
class ExaminedHost:
    """A machine: where its file system begins, and the variables of this process."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def path(self, name: str) -> Path:
        """The file that the machine knows as `name`, an absolute path."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The text of a small file without the white space around it, "" when it cannot be read."""
        try:
            with self.path(name).open(encoding="utf-8", errors="replace") as file:
                # Bounded, as "small" is only expected of it.
                return file.read(MAX_OUTPUT_CHARACTERS).strip()
        except (OSError, ValueError):
            return ""

    def names(self, folder: str) -> list[str]:
        """The sorted names in a folder, none when it cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []

    def run(
        self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S, environment: Mapping[str, str] | None = None
    ) -> Output:
        """Run a command in `run_root`, in the C locale; a command that hangs is killed with its children."""
        try:
            process = subprocess.Popen(
                command,
                # No command may wait for somebody to type.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # The parsers know the words of this locale.
                env={**self.environment, "LC_ALL": "C", **(environment or {})},
                cwd=run_root(),
                start_new_session=True,  # a group of its own, to be killed as one
            )
        except FileNotFoundError:
            return Output(trouble=f"no command {command[0]} here", missing=True)
        except OSError as error:
            return Output(trouble=f"{command[0]} cannot be started: {error.strerror}")
        try:
            text, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_session(process)
            return Output(trouble=f"{command[0]} gave no answer within {timeout_s:g} s")
        except BaseException:  # Ctrl-C does not reach another session
            _kill_session(process)
            raise
        trouble = "" if process.returncode == 0 else f"{command[0]} failed with status {process.returncode}"
        return Output(text[:MAX_OUTPUT_CHARACTERS], trouble, errors=errors[:MAX_OUTPUT_CHARACTERS])

    def python(self, *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None) -> Output:
        """Run this interpreter, as `run`."""
        return self.run(sys.executable, *arguments, timeout_s=timeout_s, environment=environment)


def _kill_session(process: subprocess.Popen[str]) -> None:
    """End a command and what it started; one that the kernel holds (a dead network disk) is left behind."""
    try:
        os.killpg(process.pid, 9)
        process.communicate(timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        # What the kernel holds is waited for no longer, and nobody will read what it writes.
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
