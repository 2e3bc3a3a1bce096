"""Make text from outside safe to print: names of files, settings, what logs and other programs say.

A name may hold anything but a slash and a zero byte: line feeds that forge a verdict, escape sequences that clear the
screen, marks that turn the order of the letters round, bytes that are no UTF-8. What `str.isprintable` calls printable
passes; everything else, and what has no width, becomes the escape that `ascii` writes. So one text stays one line, in a
terminal, in the log of a build server, in Markdown. Documents escape for their own format on top.

Escaping twice changes nothing: backslashes stay as they are, and an escape may therefore also be what a name spells out.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping

_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks without a shape (Unicode's Default_Ignorable_Code_Point) that `str.isprintable` lets pass."""

_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\w*\[)|:(?=::MLLOG *\{)")
"""Text by which a build server takes a line for a command (GitHub, Azure), and a reader of logs takes one for a record."""


def visible(text: object, limit: int | None = None) -> str:
    r"""Return the text on one line, with what steers a reader or cannot be seen as escapes: \x1b, \n, \u202e, \udcff.

    Args:
        limit: most characters; what is longer ends in "...".
    """
    shown = str(text)
    if limit is not None:
        shown = shown[: limit + 1]  # escapes are longer than what they stand for
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else _escape(letter) for letter in shown)
    # All of these are beyond ASCII, of which most text is.
    if not shown.isascii():
        shown = _INVISIBLE.sub(lambda match: _escape(match[0]), shown)
    shown = _COMMAND.sub(lambda match: f"{match[1] or ''}\\x{ord(match[0][-1]):02x}", shown)
    return shown if limit is None or len(shown) <= limit else f"{shown[: max(0, limit - 3)]}..."


def annotation(level: str, message: object, properties: Mapping[str, object]) -> str:
    """A command to GitHub's runner that shows `message` beside a line; no part of it can end early or begin another.

    Specification: GitHub Docs, "Workflow commands for GitHub Actions", and the runner's ActionCommand, which undoes these
    escapes and no others. What steers a terminal is escaped as by `visible`, and stays so.

    Args:
        level: error, warning or notice.
        properties: file, line, title.
    """
    given = ",".join(f"{name}={visible(_in_command(value, _IN_PROPERTY))}" for name, value in properties.items())
    return f"::{level}{' ' if given else ''}{given}::{visible(_in_command(message, _IN_MESSAGE))}"


_IN_MESSAGE = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_PROPERTY = _IN_MESSAGE | {":": "%3A", ",": "%2C"}


def _in_command(text: object, codes: Mapping[str, str]) -> str:
    return str(text).translate(str.maketrans(dict(codes)))


def json_document(document: object) -> str:
    """A document as JSON in ASCII that every parser takes: half a surrogate pair, which is no text, as a visible escape.

    Raises:
        ValueError: it holds a number that is not finite.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"[^\n\x20-\x7e]", _in_json, text)  # outside of strings JSON has only ASCII


def _escape(letter: str) -> str:
    return ascii(letter)[1:-1]


def _in_json(match: re.Match[str]) -> str:
    is_surrogate = "\ud800" <= match[0] <= "\udfff"
    return f"\\{_escape(match[0])}" if is_surrogate else json.dumps(match[0])[1:-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest a known name that resembles ``name`` or ends with it, as the end of a message; empty if none does."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1) or [each for each in known if each.endswith(f".{name}")][:1]
    return f"; did you mean {close[0]}?" if close else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
