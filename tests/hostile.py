"""Hostile file names, and a check that no program prints them unescaped."""

import re

FORGED = "PASS forged"
NAME = (
    f"x\n{FORGED}\r\n::error::forged\x1b[2J\x1b]8;;http:e\x07\x9b1m\x7f\u202e\u2066\u200b\u2028\x85"
    "##[error]forged[bold red]|`*_<b>\udcff\udc80"
)
"""Has newlines, build server commands, escape sequences, bidirectional and zero-width characters, markup, no UTF-8."""
LONG = NAME + "y" * (255 - len(NAME.encode("utf-8", "surrogateescape")))
"""The same name, extended to the maximum length of a file name."""


def assert_harmless(text: str) -> None:
    """Check that the text has no control characters, no forged lines and no build server commands."""
    odd = {letter for letter in text if not letter.isprintable()} - {"\n"}
    assert not odd, (odd, text)
    for line in text.split("\n"):
        assert not line.strip().startswith((FORGED, "::")), text
        assert not re.search(r"##\w*\[", line), text
