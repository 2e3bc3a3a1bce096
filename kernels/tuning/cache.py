"""Measurements and pins, kept between runs: ``kernels.tuning.autotune`` reads and writes them.

A folder with one file for each kind of call on each device, and one with the pins. Files are written aside and put in place
at once, so that any number of processes may write at any time: each of them leaves a whole file. What cannot be read is
ignored with a warning.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imports PyTorch, for which `cluster.tuning.choice` cannot wait
    from kernels.registry import Implementation

FOLDER_VARIABLE = "MLPERF_BERT_CACHE"
_FORMAT = 1
_MOST_BYTES = 1 << 20

_LOG = logging.getLogger(__name__)


def default_folder() -> Path:
    """``$MLPERF_BERT_CACHE``, or this machine's and this checkout's own in ``$XDG_CACHE_HOME``, by default ``~/.cache``.

    What was pinned or is fastest on one machine need not even run on another that shares its home.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    checkout = _digest(os.fsencode(Path(__file__).resolve().parents[1]))[:8]
    return _user_folder() / "mlperf-bert" / f"{platform.node()}-{checkout}"


def _user_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG base directory specification has others ignored
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user without a name
        return Path(tempfile.gettempdir())


class Cache:
    """The files of one room of a folder, by default of the kernels in ``default_folder()``.

    The other room is ``runs``: there a recipe's name stands in place of an op's (``cluster.tuning.choice``).
    """

    def __init__(self, folder: Path | None = None, room: str = "kernels") -> None:
        self.folder = (default_folder() if folder is None else folder) / room

    def load(self, op: str, key: Mapping[str, object]) -> object:
        """Return what was stored for an op under exactly this key, or None."""
        path = self._path(op, key)
        found = _read(path)
        if found is None:
            return None
        # The name has only part of the digest: the key inside is what counts.
        if found.get("key") != dict(key):
            _LOG.warning("%s is of another origin and is ignored", path)
            return None
        return found.get("value")

    def store(self, op: str, key: Mapping[str, object], value: object) -> None:
        """Keep a value of JSON's types under a key; where the folder cannot be written, warn and go on."""
        try:
            _write(self._path(op, key), {"key": dict(key), "value": value})
        except OSError as error:
            _LOG.warning("what was measured is not kept: %s", error)

    def entries(self) -> list[tuple[dict[str, object], object]]:
        """Keys and values of all that is stored, of whatever device and version, in the order of the ops' names."""
        found = (_read(path) for path in self._paths())
        return [(each["key"], each.get("value")) for each in found if each and isinstance(each.get("key"), dict)]

    def clear(self, op: str | None = None) -> int:
        """Delete what is stored and pinned, of one op or of all; return the number of files and pins."""
        paths = self._paths(op)
        for path in paths:
            path.unlink(missing_ok=True)
        pins = self.pins()
        kept = {} if op is None else {name: each for name, each in pins.items() if name != op}
        if kept != pins:
            _write(self._pins_path, kept)
        return len(paths) + len(pins) - len(kept)

    def pins(self) -> dict[str, str]:
        """Implementation by op."""
        found = _read(self._pins_path)
        if found is None:
            return {}
        found.pop("format")
        # An entry that is not text was written by something else.
        return {op: name for op, name in found.items() if isinstance(name, str)}

    def pin(self, op: str, name: str) -> None:
        """Keep a pin; OSError where the folder cannot be written."""
        _write(self._pins_path, self.pins() | {op: name})

    @property
    def _pins_path(self) -> Path:
        return self.folder / "pins.json"

    def _path(self, op: str, key: Mapping[str, object]) -> Path:
        # sort_keys: equal keys must give equal names whatever their order.
        return self.folder / f"{op}-{_digest(json.dumps(key, sort_keys=True).encode())}.json"

    def _paths(self, op: str | None = None) -> list[Path]:
        return sorted(self.folder.glob("*-*.json" if op is None else f"{op}-*.json"))  # pins.json has no hyphen


def fingerprint(implementation: Implementation) -> str:
    """Hash that changes when the implementation's source does, or the version of the package that it calls."""
    spec = importlib.util.find_spec(implementation.module)
    # The source of the implementation's own module: a change there is what makes times stale.
    source = "" if spec is None or spec.origin is None else _digest(Path(spec.origin).read_bytes())
    if implementation.requires is None:
        return source
    return f"{source} {implementation.requires} {package_version(implementation.requires.partition('.')[0])}"


def package_version(package: str) -> str | None:
    """The version of an installed package; of one without metadata, size and time of its file; None of one that is not."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    with suppress(OSError):  # "built-in" and the like are no files
        state = Path(spec.origin).stat()
        return f"{state.st_size} bytes of {state.st_mtime_ns}"
    return "unknown"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a file that ``_write`` wrote; None without one, with a warning where there is something else."""
    try:
        if path.exists() and not path.is_file():
            # Opening a FIFO would block until somebody writes to it.
            raise ValueError("a pipe or the like, which may never answer")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        # One byte more than allowed is enough to tell.
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        found = json.loads(content)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError("not of the format that is written now")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _LOG.warning("%s is ignored: %s", path, str(error).partition("\n")[0][:200])
        return None
    return found


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Put a file in place at once; nothing is left of an attempt that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".")  # the same file system, where replacing is atomic
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT} | dict(content), file, indent=1)
            file.flush()
            # fsync before the name: after a crash the file is the old one or the new one, never an empty one.
            os.fsync(file.fileno())
        Path(aside).replace(path)
    # BaseException: nothing is left behind by Ctrl-C either.
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
