"""Lines, errors and parsed options of a command line program, all by way of `console.text`."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar

from console.text import annotation, json_document, visible
from console.version import version_line

Result = TypeVar("Result")


def say(text: object = "") -> None:
    """Print one line, at once. A line feed in it is shown, not obeyed: a text of several lines is said line by line."""
    print(visible(text), flush=True)


def say_document(text: str) -> None:
    """Print a document of several lines, each as `say` does."""
    for one in text.removesuffix("\n").split("\n"):
        say(one)


def say_json(document: object) -> None:
    """Print a document as JSON; nothing in it is a command to a build server."""
    print(json_document(document).replace("##", "#\\u0023"), flush=True)  # Azure's commands begin so


def say_annotation(level: str, message: object, properties: Mapping[str, object]) -> None:
    """Print the one command to a build server that is meant as one: see `console.text.annotation`."""
    print(annotation(level, message, properties), flush=True)


def complain(error: object, kind: str = "error") -> None:
    """Print "error: ..." on standard error."""
    print(visible(f"{kind}: {reason(error)}"), file=sys.stderr, flush=True)


def reason(error: object) -> str:
    """Return what an error says; of a failed system call the file and the reason, without its number."""
    if isinstance(error, OSError) and error.filename is not None:  # the name is bytes where the call was given bytes
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def accept_any_text() -> None:
    """Make the standard streams escape what their encoding lacks, instead of ending the program, and warnings harmless."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # The handler that logging falls back on, as programs here set up none.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    warnings.showwarning = _show_warning


def drop_lost_output(note: Callable[[str], None]) -> None:
    """Go on without standard output or error when it fails from here on, as when `tee` has ended or a disk is full.

    What a stream cannot take is dropped; `note` gets a sentence when a stream fails for the first time.
    """
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Expendable(stream.fileno(), title, note)
            same = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **same))


class _Expendable(io.FileIO):
    """Descriptor of an output stream to which a write never fails."""

    def __init__(self, descriptor: int, title: str, note: Callable[[str], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title = title
        self._note: Callable[[str], None] | None = note

    def write(self, data: Any, /) -> int:
        """Write ``data``, or drop it."""
        written: int | None = None  # what stays None if a terminal that does not block has no room
        try:
            written = super().write(data)
        except OSError as error:
            note, self._note = self._note, None
            if note:
                note(f"{self._title} failed ({error.strerror}): what it cannot take is dropped")
        return len(data) if written is None else written


class _Visible(logging.Formatter):
    """Formatter of what a module logs into one harmless line; a traceback below it keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(visible, super().formatException(ei).split("\n")))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    complain(f"{filename}:{lineno}: {category.__name__}: {message}", "warning")


def answer_version(arguments: Sequence[str]) -> None:
    """End the program with its version where that is what the command line asks for first."""
    if arguments and arguments[0] == "--version":
        say(version_line())
        raise SystemExit(0)


class RaisingParser(argparse.ArgumentParser):
    """Parser that raises ``ValueError`` for wrong options, in one line, where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise the complaint."""
        raise ValueError(message)


def parsed(parse: Callable[[], Result]) -> Result:
    """Return what `parse`, a call of tyro, makes of the command line.

    Raises:
        ValueError: what is wrong with the options, in one line instead of tyro's frame.
    """
    complaint = io.StringIO()
    try:
        # tyro prints a frame of several lines and ends the program.
        with contextlib.redirect_stderr(complaint):
            return parse()
    except SystemExit as stop:
        if not stop.code:
            sys.stdout.flush()  # a reader that has gone is an error here, in time to be caught
            raise
        raise ValueError(_unframed(complaint.getvalue())) from None


def _unframed(complaint: str) -> str:
    """The first paragraph of tyro's framed message, on one line; where output is not UTF-8 it has rules alone."""
    lines = [text.strip("│ ") for text in complaint.splitlines()[1:]]
    paragraphs = itertools.groupby(lines, key=lambda text: bool(text.strip("─-╰╯") or not text))
    said = next((" ".join(paragraph).strip() for is_text, paragraph in paragraphs if is_text), "") or complaint.strip()
    said = re.sub(r"^Error parsing \w+: ", "", said)
    wrong = re.match(r"Error parsing (\S+): .*(?:literal for (int)\(\)|string to (float)).*: ('.*')$", said)
    if wrong is None:
        return said
    kind = "a whole number" if wrong[2] else "a number"
    return f"{wrong[1]} is {wrong[4]}, expected {kind}{' or None' if '{None}' in said else ''}"


def bound(function: Callable[..., Result]) -> Callable[..., Callable[[], Result]]:
    """Turn a function into one of the same signature that binds its arguments, for a call after parsing."""

    @wraps(function)
    def bind(*arguments: Any, **named: Any) -> Callable[[], Result]:
        return partial(function, *arguments, **named)

    return bind
