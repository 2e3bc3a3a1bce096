"""Open and write the files of a results folder."""

from io import BufferedReader
from pathlib import Path

from console import files

MAX_FILE_BYTES = 50 * 2**20
"""Maximum size of a file in a submission, by the submission rules."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises ``ValueError`` if the file is missing or not regular.

    A pipe is not a regular file. It is refused at once, without waiting for data.
    """
    try:
        return files.open_regular(path)
    except (OSError, ValueError) as error:  # ValueError: the name contains a zero byte
        found = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: {found}; expected a text file such as results/<system>/bert/result_0.txt") from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, creating parent folders if needed, and flush the file to disk.

    Raises ``ValueError`` if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A file name that is not UTF-8 contains lone surrogates in Python. UTF-8 cannot encode them, so escape them.
        files.write_atomically(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another folder") from error
