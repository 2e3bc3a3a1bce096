"""Query this machine through files of /proc and /sys and through commands, each with a time limit.

A missing file or command raises no exception. Tests imitate a machine by another root folder and other commands.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from console import processes
from console.processes import Output
from console.version import REPOSITORY

COMMAND_TIMEOUT_S = 20.0


def run_root() -> Path:
    """Return the folder in which runs start: the checkout, or the current folder if the package is installed."""
    return REPOSITORY if (REPOSITORY / "run_and_time.sh").is_file() else Path.cwd()


@dataclass(frozen=True)
class ExaminedHost:
    """A machine: the root of its file system, and the environment variables of this process."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def path(self, name: str) -> Path:
        """Return the path below `root` that stands for the absolute path `name`."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Return a small file's text without surrounding white space; "" if it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, ValueError):
            return ""

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        return sorted(entry.name for entry in self.path(folder).glob("*"))

    def run(
        self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S, environment: Mapping[str, str] | None = None
    ) -> Output:
        """Run a command in `run_root`. It runs in the C locale, because the parsers expect English output."""
        variables = {**self.environment, "LC_ALL": "C", **(environment or {})}
        return processes.run(command, timeout_s=timeout_s, folder=run_root(), environment=variables)

    def python(self, *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None) -> Output:
        return self.run(sys.executable, *arguments, timeout_s=timeout_s, environment=environment)
