"""Rows, and the file of a part: written anew with every row, so that a part that is cut off leaves what it has measured.

Nothing here imports PyTorch: the process that starts the parts and ends them writes the same files.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

CUT_OFF = "cut off"
"""What the file says until the part has ended."""

_OWN_PACKAGES = ("benchmarks", "bert", "dataloading", "kernels")


class NotUsableError(Exception):
    """Error for something that is not installed, or cannot be used on this device."""


class DeviceLostError(Exception):
    """Error for a device that no longer answers this process, as after an access out of bounds; a new process may use it."""


@dataclass(frozen=True)
class Figure:
    """A row of the report: one figure."""

    name: str
    milliseconds: float | None = None
    """Median time."""
    figure: float | None = None
    unit: str = ""
    share: float | None = None
    """Fraction of the ceiling or floor that ``note`` names, measured in the same run."""
    peer: float | None = None
    """Speed relative to the fastest peer in the same run."""
    note: str = ""
    page: bool = False
    """Whether the row is on the one page that is printed last; all others are in the file."""
    seconds: list[float] = field(default_factory=list)
    """Every single time, in order."""
    losses: list[float] = field(default_factory=list)
    """Loss of every step, in parts that compare losses."""

    @property
    def failed(self) -> bool:
        """Tell whether the row is wrong or could not be measured; a row that is not usable here has not failed."""
        return self.note.startswith(("failed", "WRONG"))


@dataclass
class PartReport:
    """The rows of a part and how it ended."""

    path: Path
    about: Mapping[str, object]
    """What the figures depend on: part, device, commit, versions."""
    # The default does nothing: reports are also made without a device.
    settle: Callable[[], None] = lambda: None
    """Called after each measurement to clean up the device; may raise ``DeviceLostError``."""
    rows: list[Figure] = field(default_factory=list)
    measuring: str | None = None
    """The row that is being measured."""
    error: str | None = CUT_OFF
    """Why the part is not complete."""
    took: float = 0.0
    """Seconds, in all processes of the part."""
    _since: float = field(default_factory=time.monotonic)

    @classmethod
    def load(cls, path: Path) -> "PartReport":
        """Load the report of a file; an empty one where there is none."""
        if not path.exists():
            return cls(path, {"part": path.stem})
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [Figure(**row) for row in found.pop("rows")]
        # Derived from `error`, and written for people who read the file.
        del found["complete"]
        state = {name: found.pop(name) for name in ("measuring", "error", "took")}
        return cls(path, found, rows=rows, **state)

    @property
    def complete(self) -> bool:
        """Tell whether the part ran to its end, failed rows or not."""
        return self.error is None

    @property
    def failures(self) -> list[Figure]:
        """The rows that are wrong or could not be measured."""
        return [row for row in self.rows if row.failed]

    def row(self, name: str) -> Figure | None:
        """The row of that name."""
        return next((row for row in self.rows if row.name == name), None)

    def add(self, *rows: Figure, quiet: bool = False) -> None:
        """Add rows in place of earlier rows of the same names, and print them."""
        names = {row.name for row in rows}
        # Rows replace earlier ones of their name: a run that goes on reports the same rows anew.
        self.rows = [*(row for row in self.rows if row.name not in names), *rows]
        self.write()
        for row in rows if not quiet else ():
            print(f"{self.path.stem}: {text(row)}", flush=True)

    def attempt(self, name: str, measure: Callable[[], Figure | None]) -> Figure | None:
        """Add the row that ``measure`` gives, or one that says why there is none: others can still be measured.

        What an earlier process of this part has tried is not tried again. Returns the row.
        """
        if found := self.row(name):
            return found
        # Written before the measurement: should the process die in it, the file says where.
        self.measuring = name
        self.write()
        try:
            row = measure()
        except Exception as error:  # whatever one library raises must not take the others' figures along
            row = Figure(name, note=f"{_kind(error)}: {first_line(error)}")
        # After every measurement, failed or not: asynchronous errors show here and not in the next row.
        try:
            self.settle()
        except DeviceLostError as error:
            self.measuring = None
            # The row that lost the device is named as failed before the process ends.
            self.add(row if row and row.failed else Figure(name, note=f"failed: {first_line(error)}"))
            raise
        self.measuring = None
        if row is not None:
            self.add(row)
        return row

    def end(self, error: str | None) -> None:
        """Say that the part has ended: as it should, or why not."""
        self.error = error
        self.write()

    def write(self) -> None:
        """Write the file anew; a reader finds the old one or the new one, whenever this process ends."""
        now = time.monotonic()
        # Seconds since the last writing are added, so that several processes of a part add up.
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
        # Aside and renamed: a reader never finds half a file.
        aside = self.path.with_name(f".{self.path.name}.partial")
        aside.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        aside.replace(self.path)


def first_line(error: BaseException) -> str:
    """Type and start of an error's message."""
    message = str(error).strip().partition("\n")[0][:200]
    return message if isinstance(error, NotUsableError) else f"{type(error).__name__}: {message}"


def text(row: Figure) -> str:
    """A row in one line."""
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
    """Format with four digits."""
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share."""
    return "" if value is None else f"{100 * value:.1f} %"


def _kind(error: Exception) -> str:
    """An import that fails says that a library is not there, unless it is of this repository."""
    of_this_repository = (getattr(error, "name", None) or "").startswith(_OWN_PACKAGES)
    absent = isinstance(error, NotUsableError) or (isinstance(error, ImportError) and not of_this_repository)
    return "not usable here" if absent else "failed"


def _json_value(value: object) -> object:
    # JSON has no NaN and no infinity.
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
