"""Print output and errors of command line programs, and parse their options. `console.text` escapes all text."""

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
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from console.text import did_you_mean, json_document, visible
from console.version import version_line

_MOST_SAID = 400
"""Maximum number of characters of tyro's complaint that are shown. The complaint repeats values, which may be long."""

# Characters that GitHub's workflow commands require to be escaped, in messages and in properties.
_IN_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_IN_PROPERTY = _IN_MESSAGE | str.maketrans({":": "%3A", ",": "%2C"})

Result = TypeVar("Result")


def say(text: object = "") -> None:
    """Print one line and flush. Line feeds in the text are escaped."""
    _print_line(visible(text), sys.stdout)


def _print_line(text: str, stream: TextIO) -> None:
    # By itself, ``print`` writes a line and its end separately. Without buffering, another rank could print between them.
    print(f"{text}\n", end="", file=stream, flush=True)


def say_document(text: str) -> None:
    """Print a text of several lines, each as `say` does."""
    for one in text.removesuffix("\n").split("\n"):
        say(one)


def say_json(document: object) -> None:
    """Print a document as JSON. Text that a build server would take for a command is escaped."""
    print(json_document(document).replace("##", "#\\u0023"), flush=True)  # "##" begins a command in Azure Pipelines


def say_annotation(level: str, message: object, properties: Mapping[str, object]) -> None:
    """Print the command that lets GitHub's runner show `message` beside a line. No text can add another command.

    `level` is error, warning or notice, and `properties` may have file, line and title. The command is
    specified in GitHub Docs, "Workflow commands for GitHub Actions". The escapes made here are those that the runner's
    class ActionCommand undoes. The function `visible` also escapes control characters.
    """
    given = ",".join(f"{name}={visible(str(value).translate(_IN_PROPERTY))}" for name, value in properties.items())
    print(f"::{level}{' ' if given else ''}{given}::{visible(str(message).translate(_IN_MESSAGE))}", flush=True)


def complain(error: object, kind: str = "error") -> None:
    _print_line(visible(f"{kind}: {reason(error)}"), sys.stderr)


def reason(error: object) -> str:
    """Return an error's message. For a failed system call, return the file and the reason without the error number."""
    if isinstance(error, OSError) and error.filename is not None:  # the name may be bytes
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def accept_any_text() -> None:
    """Let the standard streams escape characters that their encoding lacks, and escape warnings and log messages.

    Output to a standard stream that the caller has closed is dropped.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115, open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Programs here configure no logging, so Python's handler of last resort prints log messages. Let it escape them.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    warnings.showwarning = _show_warning


def drop_lost_output(note: Callable[[str], None]) -> None:
    """From now on, drop output that standard output or standard error does not accept, for example after `tee` has ended.

    `note` is called with a sentence when a stream fails for the first time.
    """
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Expendable(stream.fileno(), title, note)
            same = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **same))


class _Expendable(io.FileIO):
    """Output stream whose writes never fail."""

    def __init__(self, descriptor: int, title: str, note: Callable[[str], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title = title
        self._note: Callable[[str], None] | None = note

    def write(self, data: Any, /) -> int:
        written: int | None = None  # stays None if the write fails or a non-blocking terminal is full
        try:
            written = super().write(data)
        except OSError as error:
            note, self._note = self._note, None
            if note:
                note(f"{self._title} failed ({error.strerror}): what it cannot take is dropped")
        return len(data) if written is None else written


class _Visible(logging.Formatter):
    """Formatter that escapes a log message into one line. A traceback below it keeps its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(visible, super().formatException(ei).split("\n")))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    complain(f"{filename}:{lineno}: {category.__name__}: {message}", "warning")


def answer_version(arguments: Sequence[str]) -> None:
    """Print the version and end the program if the first argument is ``--version``."""
    if arguments and arguments[0] == "--version":
        say(version_line())
        raise SystemExit(0)


class RaisingParser(argparse.ArgumentParser):
    """Parser that raises ``ValueError`` for wrong options, in one line, instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (-[^\s=]+)", message):
            message = f"there is no option {unknown[1]}{did_you_mean(unknown[1], self._option_string_actions)}"
        raise ValueError(message)


def unknown_option(function: Callable[..., Any], words: Sequence[str]) -> str:
    """Return a complaint about the first option that is not in the help of ``function``, or "" if the help has all of them.

    tyro would report a misspelt argument as missing, so call this to name the misspelling instead.
    """
    import tyro

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(function, args=["--help"])
    known = re.findall(r"--\w[\w-]*", shown.getvalue())
    for word in itertools.takewhile(lambda word: word != "--", words):
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in known:  # a word with one dash may be a value, such as -1
            return f"no option {option}{did_you_mean(option, known)}"
    return ""


def parsed(parse: Callable[[], Result]) -> Result:
    """Return the result of `parse`, which calls tyro on the command line.

    Raises ``ValueError`` if the options are wrong. Its message is one line instead of tyro's frame.
    """
    complaint = io.StringIO()
    try:
        # Capture the frame of several lines that tyro prints before it ends the program.
        with contextlib.redirect_stderr(complaint):
            return parse()
    except SystemExit as stop:
        if stop.code != 2:  # the program ends because of --help or a signal, and not a wrong option
            sys.stdout.flush()  # raises BrokenPipeError if the reader has ended, which the caller handles
            raise
        raise ValueError(visible(_unframed(complaint.getvalue()), _MOST_SAID)) from None


def _unframed(complaint: str) -> str:
    """Return the first paragraph of tyro's framed message on one line."""
    lines = [text.strip("│ ") for text in complaint.splitlines()[1:]]
    paragraphs = itertools.groupby(lines, key=lambda text: bool(text.strip("─-╰╯") or not text))
    said = next((" ".join(paragraph).strip() for is_text, paragraph in paragraphs if is_text), "") or complaint.strip()
    said = re.sub(r"^Error parsing \w+: ", "", said)
    said = re.sub(r"^Unrecognized (?:or misplaced )?options: ([^\s,=]+).*$", r"unexpected argument \1", said)
    wrong = re.match(r"Error parsing (\S+): .*(?:literal for (int)\(\)|string to (float)).*: ('.*')$", said)
    if wrong is None:
        return said
    kind = "a whole number" if wrong[2] else "a number"
    return f"{wrong[1]} is {wrong[4]}, expected {kind}{' or None' if '{None}' in said else ''}"


def bound(function: Callable[..., Result]) -> Callable[..., Callable[[], Result]]:
    """Return a function with the same parameters. It does not run ``function`` but returns a call of it, to be run later."""

    @wraps(function)
    def bind(*arguments: Any, **named: Any) -> Callable[[], Result]:
        return partial(function, *arguments, **named)

    return bind
