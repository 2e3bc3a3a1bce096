"""Hostile file names, and a check that a program's output does not contain them unescaped."""

import re

FORGED = "PASS forged"
NAME = (
    f"x\n{FORGED}\r\n::error::forged\x1b[2J\x1b]8;;http:e\x07\x9b1m\x7f\u202e\u2066\u200b\u2028\x85"
    "##[error]forged[bold red]|`*_<b>\udcff\udc80"
)
"""File name with newlines, CI commands, escape sequences, bidirectional controls, markup and invalid UTF-8."""
LONG = NAME + "y" * (255 - len(NAME.encode("utf-8", "surrogateescape")))
"""``NAME`` extended to the maximum length of a file name."""


def assert_harmless(text: str) -> None:
    """Check that the text has no control characters, no forged lines and no commands for CI servers."""
    odd = {letter for letter in text if not letter.isprintable()} - {"\n"}
    assert not odd, (odd, text)
    for line in text.split("\n"):
        assert not line.strip().startswith((FORGED, "::")), text
        assert not re.search(r"##\w*\[", line), text
