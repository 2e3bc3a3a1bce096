"""Rows that a part measures, and the file of a part.

The file is rewritten after every row, so that no row is lost if the part is cut off. This module does not import PyTorch,
because the process that starts and ends the parts also writes these files.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CUT_OFF = "cut off"
"""Value of the field ``error`` while a part runs. It remains in the file if the part is killed."""

_OWN_PACKAGES = ("benchmarks", "bert", "dataloading", "kernels")


class NotUsableError(Exception):
    """Error for a library or kernel that is not installed, or cannot be used on this device."""


class DeviceLostError(Exception):
    """Error for a device that no longer responds to this process, for example after an access out of bounds."""


@dataclass(frozen=True)
class Figure:
    """A row of the report, with one figure."""

    name: str
    milliseconds: float | None = None
    """Median time of the repeats."""
    figure: float | None = None
    unit: str = ""
    share: float | None = None
    """Fraction of the ceiling, floor or total that ``note`` names, measured in the same run."""
    peer: float | None = None
    """Speed relative to the fastest peer in the same run."""
    note: str = ""
    page: bool = False
    """Whether the row appears in the table that is printed last. The file contains all rows."""
    seconds: list[float] = field(default_factory=list)
    """The time of each repeat, in order."""
    losses: list[float] = field(default_factory=list)
    """The loss of each step, in parts that compare losses."""

    @property
    def failed(self) -> bool:
        """Whether the row is wrong or could not be measured. A row that is not usable on this device has not failed."""
        return self.note.startswith(("failed", "WRONG"))


@dataclass
class PartReport:
    path: Path
    about: Mapping[str, Any]
    """The conditions of the figures: part, device, commit, versions."""
    # The default does nothing, because reports are also made without a device.
    settle: Callable[[], None] = lambda: None
    """Function that cleans up the device after each measurement. It may raise ``DeviceLostError``."""
    rows: list[Figure] = field(default_factory=list)
    measuring: str | None = None
    """Name of the row that is being measured."""
    error: str | None = CUT_OFF
    """Reason why the part is incomplete, or None."""
    took: float = 0.0
    """Seconds spent in all processes of the part."""
    _since: float = field(default_factory=time.monotonic)

    @classmethod
    def load(cls, path: Path) -> "PartReport":
        """Load the report from a file, or return an empty report if the file does not exist.

        Raises ``ValueError`` if the file is not a report.
        """
        if not path.exists():
            return cls(path, {"part": path.stem})
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = [Figure(**row) for row in found.pop("rows")]
            # `complete` follows from `error`, and is in the file only for people who read it.
            del found["complete"]
            state = {name: found.pop(name) for name in ("measuring", "error", "took")}
            if not all(isinstance(found.get(name, {}), dict) for name in ("versions", "without")):
                raise ValueError("versions and without must be objects")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a report of this program; remove the file: {first_line(error)}") from error
        return cls(path, found, rows=rows, **state)

    @property
    def complete(self) -> bool:
        """Whether the part ran to its end, even if rows have failed."""
        return self.error is None

    @property
    def failures(self) -> list[Figure]:
        return [row for row in self.rows if row.failed]

    def row(self, name: str) -> Figure | None:
        return next((row for row in self.rows if row.name == name), None)

    def add(self, *rows: Figure, quiet: bool = False) -> None:
        """Add rows and print them. They replace earlier rows of the same names."""
        names = {row.name for row in rows}
        # A part that continues in another process reports some rows again.
        self.rows = [*(row for row in self.rows if row.name not in names), *rows]
        self.write()
        for row in rows if not quiet else ():
            print(f"{self.path.stem}: {text(row)}", flush=True)

    def attempt(self, name: str, measure: Callable[[], Figure | None]) -> Figure | None:
        """Add and return the row that ``measure`` returns. If ``measure`` raises an error, the row has the reason.

        A row that an earlier process of this part has tried is not measured again. Raises ``DeviceLostError`` if the device
        no longer responds.
        """
        if found := self.row(name):
            return found
        # Write before the measurement, so that the file names the row if the process dies.
        self.measuring = name
        self.write()
        try:
            row = measure()
        except Exception as error:  # an error of one library must not prevent the other rows
            row = Figure(name, note=f"{_kind(error)}: {first_line(error)}")
        # Clean up even after a failure, so that asynchronous errors appear here and not in the next row.
        try:
            self.settle()
        except DeviceLostError as error:
            self.measuring = None
            # This process ends now, so record that the row has failed.
            self.add(row if row and row.failed else Figure(name, note=f"failed: {first_line(error)}"))
            raise
        self.measuring = None
        if row is not None:
            self.add(row)
        return row

    def end(self, error: str | None) -> None:
        """Record that the part has ended, with the error if it is incomplete."""
        self.error = error
        self.write()

    def write(self) -> None:
        """Replace the file atomically: even if this process is killed, the file has either the old or the new content."""
        now = time.monotonic()
        # Add the seconds since the previous write, so that the times of several processes of a part add up.
        self.took, self._since = self.took + now - self._since, now
        figures = {
            **self.about,
            "complete": self.complete,
            "error": self.error,
            "measuring": self.measuring,
            "took": round(self.took, 1),
            "rows": [{name: _json_value(value) for name, value in asdict(row).items()} for row in self.rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.partial")
        aside.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        aside.replace(self.path)


def first_line(error: BaseException) -> str:
    """Return an error's type and the start of its message. A ``NotUsableError`` is described by its message alone."""
    message = str(error).strip().partition("\n")[0][:200]
    return message if isinstance(error, NotUsableError) else f"{type(error).__name__}: {message}"


def text(row: Figure) -> str:
    cells = [row.name]
    if row.milliseconds is not None:
        cells.append(f"{number(row.milliseconds)} ms")
    if row.figure is not None:
        cells.append(f"{number(row.figure)} {row.unit}".rstrip())
    if row.share is not None:
        cells.append(percent(row.share))
    if row.peer is not None:
        cells.append(f"{row.peer:.2f} x the fastest peer")
    return "  ".join([*cells, row.note]).rstrip()


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _kind(error: Exception) -> str:
    """Return "not usable here" if an external library is missing or cannot be used, and "failed" for any other error."""
    of_this_repository = (getattr(error, "name", None) or "").startswith(_OWN_PACKAGES)
    absent = isinstance(error, NotUsableError) or (isinstance(error, ImportError) and not of_this_repository)
    return "not usable here" if absent else "failed"


def _json_value(value: object) -> object:
    # Write None for NaN and infinity, which JSON does not have.
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
