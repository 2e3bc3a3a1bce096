"""Files that are written whole or not at all, and read with a bound."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path``, safely on disk, when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        # Writing to an open file fails without its name.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """``content`` as the file ``path``, which appears complete and safely on disk, or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def read_bounded(path: Path, limit: int, remedy: str) -> bytes:
    """The bytes of a file of at most ``limit`` bytes.

    Raises:
        ValueError: it cannot be read, or is larger; ``remedy`` says what to do about either.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise ValueError(f"{path}: {size:,} bytes, expected at most {limit:,}; {remedy}")
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {remedy}") from None


def sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
