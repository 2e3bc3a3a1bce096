"""One attempt: a reader reads a damaged file within limits of time and memory, or refuses it by a short message.

The message names the file.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NoReturn

from hypothesis import given, settings

from console.text import visible
from tests.conftest import patient
from tests.fuzz.damage import damaged

_SECONDS = 2.0  # processor time, which does not depend on other load
_PATIENCE_S = 60.0  # clock time, because a reader that waits takes no processor time
_MEMORY_BYTES, _MEMORY_PER_BYTE = 500 << 20, 2000  # the limit per byte is in addition to 64 MiB
_LONGEST_MESSAGE = 500
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
_OF_OFFICIAL_TOOLS = f"{gettempdir()}/compliance-"
"""Beginning of the paths of folders in which the official tools get copies of a submission."""


@dataclass(frozen=True)
class Target:
    """A reader of untrusted files.

    Attributes:
        read: function that reads ``file`` in a folder of its own, and asserts what must hold for any file. It may raise
            ``allowed``, and write to that folder.
        seeds: function that returns valid contents.
        inputs: number of inputs that take about a second.
        seal: function that corrects checksums, so that a reader does not refuse all damage because of them.
    """

    name: str
    read: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]
    file: str
    inputs: int = 150
    seal: Callable[[bytes], bytes] = bytes
    allowed: tuple[type[Exception], ...] = (ValueError,)


@cache
def made(make: Callable[[Path], object], name: str = "") -> bytes:
    """Return the bytes that ``make`` writes to the path that it is given, or to the file ``name`` in this folder."""
    with TemporaryDirectory() as folder:
        make(Path(folder, "made"))
        return Path(folder, "made", name).read_bytes()


def rewritten(read: Callable[[Path], Any], write: Callable[[Any, Path], object]) -> Callable[[Path], None]:
    """Return a function that reads a file, writes its content again, and checks that it reads equal content from that."""

    def reread(path: Path) -> None:
        found = read(path)
        write(found, path.with_name("out"))
        assert read(path.with_name("out")) == found

    return reread


def trial(target: Target, folder: Path | str, **changed: Any) -> Any:
    """Return a Hypothesis test that lets a target read damaged files in ``folder``. ``changed`` overrides its settings."""
    seeds, path = target.seeds(), Path(folder, target.file)
    path.write_bytes(seeds[0])
    path.with_name("out").unlink(missing_ok=True)
    target.read(path)  # first without limits, because it imports modules and fills caches

    @settings(patient, **changed)
    @given(damaged(seeds))
    def test(content: bytes) -> None:
        attempt(target, content, Path(folder))

    return test


class TooSlow(BaseException):
    """Raised in a reader that takes too much processor time, or that waits."""


tried = 0
"""Number of attempts in this process."""


def attempt(target: Target, content: bytes, folder: Path) -> None:
    """Let a target read ``content``. Raises ``AssertionError``, or the error that the target should not have raised."""
    global tried
    tried += 1
    path, content = folder / target.file, target.seal(content)
    path.write_bytes(content)
    path.with_name("out").unlink(missing_ok=True)
    most, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with _limits(folder):
        try:
            target.read(path)
        except target.allowed as error:
            said = visible(error).replace(str(folder), "FOLDER")
            assert len(said) < _LONGEST_MESSAGE, f"{len(said)} characters: {said}"
            # A target with the file name "said" reads from a socket, so its message need not name a file.
            assert target.file in said or "FOLDER" in said or target.file == "said", f"names no file: {said}"
        except SystemExit as end:
            raise AssertionError(f"ends the process with {end.code}") from end
    assert time.process_time() - start < _SECONDS, f"{time.process_time() - start:.1f} s for {len(content):,} bytes"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most << 10
    allowed = min(_MEMORY_BYTES, (64 << 20) + _MEMORY_PER_BYTE * len(content))
    assert grown < allowed, f"{grown >> 20:,} MiB of memory for {len(content):,} bytes"


_watched, _written = "", list[str]()


@contextmanager
def _limits(folder: Path) -> Iterator[None]:
    """Stop the block if it takes too long, and raise ``AssertionError`` if it has written outside of ``folder``."""
    global _watched

    def stop(*_: object) -> NoReturn:
        raise TooSlow

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, 2 * _SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, _PATIENCE_S)}
    handlers = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    _watched = str(folder)
    _written.clear()
    try:
        yield
    finally:
        _watched = ""
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])
    assert not _written, f"wrote outside of its folder: {_written}"


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or not (event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))):
        return
    made = arguments[event == "os.symlink"]  # the first argument of os.symlink is the target
    path = os.fsdecode(made) if isinstance(made, str | bytes) else ""
    # rmtree passes paths relative to an open folder. A temporary file without a name is opened by its folder's path.
    is_ours = (
        path.startswith((_watched, "/dev/null", _OF_OFFICIAL_TOOLS)) or "__pycache__" in path or Path(path).is_dir()
    )
    if path.startswith("/") and not is_ours:
        _written.append(f"{event} {path}")


sys.addaudithook(_notice)
