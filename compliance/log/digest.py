"""Digest chain of a log: digest lines that show whether the lines above them are unchanged.

A log with a chain begins with `OPENING`. A line "# digest: <hex>" follows every `LINES_A_DIGEST` lines and the end of the
run, and `# digest at the end: <hex>` is the last line of the file. A digest is the SHA-256 of all lines above it,
including earlier digests, each with one line feed at its end. If a line is changed, removed, added or moved, the first
digest below it does not match. The chain detects damaged and hand-edited logs. It is not a signature, because anybody who
can write the file can write a new chain.
"""

import hashlib
import re

OPENING = "# chain: each digest line holds the SHA-256 over all lines above it"
# Lines between two digests. The first digest that does not match shows in which of these blocks the log was changed.
LINES_A_DIGEST = 32

_DIGEST = re.compile(rb"# digest( at the end)?: ([0-9a-f]{64})")


class Chain:
    """Digest of all lines of a log so far, updated line by line."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.lines = 0
        self.pending = 0  # lines since the last digest

    def add(self, line: bytes) -> None:
        """Add a line, given without its line end."""
        self._hash.update(line)
        # Always hash this line end, so that a log with converted line ends still matches.
        self._hash.update(b"\n")
        self.lines += 1
        self.pending += 1

    def close_stretch(self, at_end: bool = False) -> bytes:
        """Return the digest line for all lines so far, and add this line to the digest."""
        line = f"# digest{' at the end' if at_end else ''}: {self._hash.hexdigest()}".encode()
        self.add(line)
        self.pending = 0
        return line

    def matches(self, hexadecimal: bytes) -> bool:
        return self._hash.hexdigest().encode() == hexadecimal


class ChainCheck:
    """Check of the digest chain while a log is read line by line.

    Attributes:
        opened: whether the first line announces a chain.
        digests: number of digest lines so far.
        broken: first line and digest line of the first block of lines whose digest does not match.
        covered: last line that a digest covers.
        ended: whether the digest at the end was read.
        after_end: first line after the digest at the end.
    """

    def __init__(self) -> None:
        self.opened = False
        self.digests = 0
        self.broken: tuple[int, int] | None = None
        self.covered = 0
        self.ended = False
        self.after_end: int | None = None
        self._chain = Chain()

    def take(self, number: int, line: bytes) -> bool:
        """Process one line; `number` counts from 1. Return whether it is the opening line or a digest line."""
        if number == 1:
            self.opened = line == OPENING.encode()
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
        # Stop hashing after the first mismatch, because no later digest can match.
        if self.broken is None:
            self._chain.add(line)
        return match is not None or number == 1
