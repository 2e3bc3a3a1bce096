"""Read and write the files of a results folder: never without bound, never by halves."""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

from console import files

MAX_FILE_BYTES = 50 * 2**20
"""Largest file that a submission may hold (submission rules)."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; what is none does not make the program wait.

    Raises:
        ValueError: saying what stands in the way.
    """
    try:
        return files.open_regular(path)
    except FileNotFoundError:
        found = "no such file"
    except IsADirectoryError:
        found = "a folder"
    except files.NotAFileError:
        found = "not a regular file"
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    raise ValueError(f"{path}: {found}, expected a text file such as results/<system>/bert/result_0.txt")


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, and put it in place when it is on the disk. What is no text is escaped.

    Raises:
        ValueError: saying why it could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_path(path) as aside:
            # Names that are no UTF-8 reach Python as lone surrogates, on which a strict encoder raises.
            aside.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another folder") from error
