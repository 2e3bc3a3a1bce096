"""Damaged files: valid files with a few edits of their words, lines, bytes, numbers and parts, drawn by Hypothesis."""

import re
from collections.abc import Callable, Sequence
from functools import partial

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

_LARGEST = 1 << 16
"""Size in bytes to which repetition makes a file grow."""
_WORD = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|[A-Za-z_]+')
_WORDS = (
    *(b"null", b"true", b"false", b"0", b"1", b"-1", b"1.5", b"1e999", b"-1e999", b"NaN", b"Infinity", b"1e400000"),
    *(b"65535", b"65536", b"2147483648", b"9007199254740993", b"18446744073709551616", b"1" + b"0" * 400, b"7" * 5000),
    *(b'""', b"[]", b"{}", b"[[]]", b'{"a": 1}', b"[" * 3000, b'{"a":' * 3000, b'"' + b"x" * 3000 + b'"', b'"\\ud800"'),
    *(b'"x\\u0000\\u001b[2Jy\\n::error::z"', '"\u202e\u2066\x9b1m\u2028"'.encode(), b'"\xff\xfe"', b"'", b'"'),
    *(b'"../../etc/passwd"', b'"/etc/passwd"', b'"C:\\\\x"', b'"a/b"', b'"."', b"0x10", b"1_000", b"1979-05-27"),
    *('"\u0663"'.encode(), '"\u00b2"'.encode(), b'" 1 "', b'"1e3"', b'"[bold red]"', b'"success"', b'"nan"'),
)
"""Texts that replace a word: a number, a name or a quoted text."""
_BYTES = (
    *(b"\0", b"\n", b"\r", b"\r\n", b"\n\n", b"\t", b" ", b"\x1b[2J", b"\x85", b"\xa0", b"\xff", b"\xef\xbb\xbf"),
    *("\u2028\u0085".encode(), b",", b":", b"}", b"]", b"#", b"# ", b":::MLLOG ", b"<doc>", b"</doc>", b"\x1f\x8b"),
)
_INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    32767,
    65535,
    *((1 << bits) + least for bits in (31, 32, 63, 64) for least in (-1, 0)),
)


Pick = Callable[[int], int]
"""Function ``pick(end)`` that returns a number from 0 to ``end - 1``."""


@st.composite
def damaged(draw: DrawFn, seeds: Sequence[bytes]) -> bytes:
    """Draw one of ``seeds`` with up to eight edits. One drawn number determines a whole edit, because draws are slow."""
    content = draw(st.sampled_from(seeds))
    for number in draw(st.lists(st.integers(0, (1 << 96) - 1), max_size=8)):
        pick = partial(_below, [number])
        content = _EDITS[pick(len(_EDITS))](pick, content, seeds[pick(len(seeds))])
    return content


def _below(left: list[int], end: int) -> int:
    left[0], picked = divmod(left[0], end)
    return picked


def _word(pick: Pick, content: bytes, _: bytes) -> bytes:
    """Replace, remove or repeat a word, or remove everything from it to another word."""
    words = [match.span() for match in _WORD.finditer(content, 0, _LARGEST)] or [(0, len(content))]
    (start, end), (first, last) = (words[pick(len(words))] for _ in range(2))
    new = (content[first:last], b"", *[_WORDS[pick(len(_WORDS))]] * 5)[pick(7)]
    return (
        content[:start] + new + content[end:] if pick(8) else content[: min(start, first)] + content[max(end, last) :]
    )


def _line(pick: Pick, content: bytes, other: bytes) -> bytes:
    """Remove, repeat or replace a line."""
    lines, others = content.split(b"\n"), other.split(b"\n")
    place, taken = pick(len(lines)), others[pick(len(others))]
    lines[place : place + 1] = ([], [lines[place]] * 2, [taken], [lines[place], taken])[pick(4)]
    return b"\n".join(lines)


def _bytes(pick: Pick, content: bytes, _: bytes) -> bytes:
    place, number, size = pick(len(content) + 1), _INTEGERS[pick(len(_INTEGERS))], 1 << pick(4)
    new = (number % (1 << 8 * size)).to_bytes(size, ("little", "big")[pick(2)])
    new = (new, _BYTES[pick(len(_BYTES))], pick(1 << 24).to_bytes(3, "big")[: pick(4)])[pick(3)]
    return content[:place] + new + content[place + (len(new), 0, 1, 8)[pick(4)] :]


def _part(pick: Pick, content: bytes, other: bytes) -> bytes:
    """Cut the end off, remove a part, copy it elsewhere, repeat it many times, or take the end of another file."""
    start, end = sorted((pick(len(content) + 1), pick(len(content) + 1)))
    place, times = pick(len(content) + 1), (2, 3, 20, 1 << 14)[pick(4)]
    times = min(times, max(0, _LARGEST - len(content)) // max(1, end - start))
    copied = content[start:place] + content[start:end] + content[place:]
    return (
        content[:start]
        + (b"", content[end:], content[start:end] * times + content[end:], other[place:], copied)[pick(5)]
    )


_EDITS = (_word, _word, _word, _line, _bytes, _bytes, _part)
