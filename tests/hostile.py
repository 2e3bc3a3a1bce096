"""Names that lie, and what no program may print because of one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

FORGED = "PASS forged"
NAME = (
    f"x\n{FORGED}\r\n::error::forged\x1b[2J\x1b]8;;http:e\x07\x9b1m\x7f\u202e\u2066\u200b\u2028\x85"
    "##[error]forged[bold red]|`*_<b>\udcff\udc80"
)
"""Line feeds, commands to build servers, escape sequences, marks of direction and without width, markup, no UTF-8."""
LONG = NAME + "y" * (255 - len(NAME.encode("utf-8", "surrogateescape")))
"""The same, as long as the name of a file may be."""


def run(module: str, arguments: Sequence[object], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit status and whole output of `python -m MODULE ARGUMENTS`."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout.decode()


def assert_harmless(text: str) -> None:
    """Nothing in the text steers a terminal, begins a line as the name wanted, or is a command to a build server."""
    odd = {letter for letter in text if not letter.isprintable()} - {"\n"}
    assert not odd, (odd, text)
    for line in text.split("\n"):
        assert not line.strip().startswith((FORGED, "::")), text
        assert not re.search(r"##\w*\[", line), text
