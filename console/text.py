"""Make untrusted text safe to print. Such text is in file names, settings, logs, and the output of other programs.

A file name may hold line feeds that forge a verdict, escape sequences that clear the screen, marks that reverse the order
of letters, and bytes that are not UTF-8. Printable characters (`str.isprintable`) are kept. All other characters, and
printable characters without a width, become the escapes that `ascii` writes, so that a text stays on one line. Text in HTML
and Markdown is also escaped for these formats.

Backslashes are not escaped, so escaping a text twice changes nothing.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable

_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Invisible characters (Unicode's Default_Ignorable_Code_Point) that `str.isprintable` accepts."""

_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\w*\[)|:(?=::MLLOG *\{)")
"""Text that build servers (GitHub, Azure) execute as a command, or that log readers parse as a record."""


def visible(text: object, limit: int | None = None) -> str:
    r"""Return the text on one line, with control and invisible characters as escapes: \x1b, \n, \u202e, \udcff.

    If the result is longer than `limit` characters, it is shortened to `limit` and ends in "...".
    """
    shown = str(text)
    if limit is not None:
        shown = shown[: limit + 1]  # escaping never shortens a text, so the rest would be cut anyway
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else _escape(letter) for letter in shown)
    # The search is slow. Most text is ASCII, which has none of these characters, so skip the search there.
    if not shown.isascii():
        shown = _INVISIBLE.sub(lambda match: _escape(match[0]), shown)
    shown = _COMMAND.sub(lambda match: f"{match[1] or ''}\\x{ord(match[0][-1]):02x}", shown)
    return shown if limit is None or len(shown) <= limit else f"{shown[: max(0, limit - 3)]}..."


def json_document(document: object) -> str:
    """Return a document as JSON in ASCII. Raises ``ValueError`` if it holds a number that is not finite.

    No parser accepts half of a surrogate pair, so it becomes a visible escape.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"[^\n\x20-\x7e]", _in_json, text)  # outside of strings, JSON is ASCII


def _escape(letter: str) -> str:
    return ascii(letter)[1:-1]


def _in_json(match: re.Match[str]) -> str:
    is_surrogate = "\ud800" <= match[0] <= "\udfff"
    return f"\\{_escape(match[0])}" if is_surrogate else json.dumps(match[0])[1:-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with a known name that is similar to ``name``, or an empty text if there is none."""
    known = [each for each in known if each != name]
    ending = f".{name.removeprefix('--')}"
    close = difflib.get_close_matches(name, known) or [each for each in known if each.endswith(ending)]
    return f"; did you mean {close[0]}?" if close else ""


def counted(number: int, noun: str) -> str:
    ends_in_ies = noun.endswith("y") and not noun.endswith(("ay", "ey", "oy"))
    plural = f"{noun[:-1]}ies" if ends_in_ies else f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number:,} {noun if number == 1 else plural}"


def clock(seconds: float) -> str:
    """Format a time as minutes and seconds, with hours if there are any: 1:05, 1:01:01."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float | None) -> str:
    """Format a measured time. Below a second it has three digits, else one or two decimals: 12.3 us, 5.3 s, 5.45 min."""
    if seconds is None:
        return "-"
    if seconds >= 120:
        return f"{seconds / 60:.2f} min"
    rounded = float(f"{seconds:.3g}")  # round first, so that 0.9996 s becomes 1.0 s and not 1000 ms
    if rounded >= 1 or rounded <= 0:
        return f"{seconds:.1f} s"
    unit, size = next((each for each in (("ms", 1e-3), ("us", 1e-6)) if rounded >= each[1]), ("ns", 1e-9))
    return f"{rounded / size:.3g} {unit}"
