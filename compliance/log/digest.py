"""The chain of digests in a log: lines that tell whether the lines above them are still as they were written.

A log with a chain opens with `OPENING`. A line "# digest: <hex>" follows every `LINES_A_DIGEST` lines and the end of the
run, and `# digest at the end: <hex>` is the last line of the file. Each holds the SHA-256 over all lines above it, other
digests included, every line with one line feed. A changed, removed, added or moved line breaks the first digest below it.
The chain is not a signature: anybody who can write the file can write a new chain. It detects damaged and hand-edited logs.
"""

from __future__ import annotations

import hashlib
import re

OPENING = "# chain: each digest line holds the SHA-256 over all lines above it"
# A broken digest points to at most this many lines.
LINES_A_DIGEST = 32

_DIGEST = re.compile(rb"# digest( at the end)?: ([0-9a-f]{64})")


class Chain:
    """The digest over the lines so far."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.lines = 0
        self.pending = 0  # lines since the last digest

    def add(self, line: bytes) -> None:
        """Take in a line, without its end."""
        self._hash.update(line)
        # Always this one byte, so that a log with converted line ends still matches.
        self._hash.update(b"\n")
        self.lines += 1
        self.pending += 1

    def close_stretch(self, at_end: bool = False) -> bytes:
        """Return the digest line over everything so far, and take it in."""
        line = f"# digest{' at the end' if at_end else ''}: {self._hash.hexdigest()}".encode()
        self.add(line)
        self.pending = 0
        return line

    def matches(self, hexadecimal: bytes) -> bool:
        """Tell whether `hexadecimal` is the digest over everything so far."""
        return self._hash.hexdigest().encode() == hexadecimal


class ChainCheck:
    """Follow the chain of a log that is read line by line.

    Attributes:
        opened: the first line says that the log carries the chain.
        digests: number of digest lines so far.
        broken: (first, last) line of the first stretch whose digest does not match its lines.
        covered: the last line above a digest.
        ended: the digest at the end has been seen.
        after_end: first line below the digest at the end.
    """

    def __init__(self) -> None:
        self.opened = False
        self.digests = 0
        self.broken: tuple[int, int] | None = None
        self.covered = 0
        self.ended = False
        self.after_end: int | None = None
        self._chain = Chain()

    def open(self, first_line: bytes) -> None:
        """Take in whether the first line opens a chain."""
        self.opened = first_line == OPENING.encode()

    def take(self, number: int, line: bytes) -> bool:
        """Take in line `number`, from 1. Return whether it belongs to the chain itself."""
        match = _DIGEST.fullmatch(line) if line.startswith(b"# digest") else None
        if not self.opened and match is None:
            return False
        if self.ended and self.after_end is None:
            self.after_end = number
        if match:
            self.digests += 1
            if self.broken is None and not self._chain.matches(match[2]):
                self.broken = (self.covered + 1, number)
            self.covered = number
            self.ended = match[1] is not None
        # Below the first break no digest can match.
        if self.broken is None:
            self._chain.add(line)
        return match is not None or number == 1
