"""Many predictions at once: a table of machines in, the same table with predicted minutes out."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.published.cost_model import ROUND, TimedRun
from cluster.published.prediction import Prediction, predict, usual_run
from cluster.published.results import described_machine, whole_number
from console.files import read_bounded, write_atomically

COLUMNS = (
    "accelerator",
    "nodes",
    "accelerators_per_node",
    "accelerator_interconnect",
    "host_networking",
    "global_batch_size",
)
"""Columns that a table has to have; the batch may be empty. A column `round`, where there is one, tells the software."""

ADDED = ("predicted_minutes", "low_minutes", "high_minutes")

MOST_BYTES = 16 << 20
MOST_ROWS = 20_000


@dataclass(frozen=True)
class PredictedRow:
    """A row of a table, and what is predicted for it.

    Attributes:
        number: of its line's record, from 1.
        cells: text by column.
        prediction: None where there is none.
        reason: why not.
    """

    number: int
    cells: dict[str, str]
    prediction: Prediction | None
    reason: str = ""


def predict_table(source: Path, out: Path) -> list[PredictedRow]:
    """Predict every row of the CSV file `source` and write the table with `ADDED` to `out`; return the rows.

    A row that cannot be predicted keeps its cells and gets empty ones.

    Raises:
        ValueError: the file is no such table, or nothing in it can be predicted.
    """
    # A list first: a broken line at the end of the file is found before anything is predicted.
    rows = [_predicted(number, cells) for number, cells in list(_read(source))]
    if all(row.prediction is None for row in rows):
        first = f", row {rows[0].number} because {rows[0].reason}" if rows else ""
        raise ValueError(f"{source}: no row can be predicted{first or ': it has none'}")
    text = io.StringIO()
    # Columns of an earlier run are replaced, not doubled.
    columns = [name for name in rows[0].cells if name not in ADDED]
    writer = csv.DictWriter(text, [*columns, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row.cells | dict(zip(ADDED, _cells(row.prediction), strict=True)))
    write_atomically(out, text.getvalue().encode())
    return rows


def _read(source: Path) -> Iterator[tuple[int, dict[str, str]]]:
    content = read_bounded(source, MOST_BYTES, "give --table a CSV file with the columns of published_results.csv")
    try:
        text = content.decode("utf-8-sig")  # spreadsheets put a byte order mark in front
    except UnicodeDecodeError:
        raise ValueError(f"{source}: no text in UTF-8, expected a CSV file") from None
    # newline="" as the csv module asks for; strict refuses quotes that never end.
    reader = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True)
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{source}: column {missing[0]} is missing, expected {', '.join(COLUMNS)}")
        for number, row in enumerate(reader, 1):
            if number > MOST_ROWS:
                raise ValueError(f"{source}: more than {MOST_ROWS:,} rows; split the table")
            # DictReader puts what is beyond the header under None.
            if None in row:
                raise ValueError(f"{source}: row {number} has more cells than the header has columns")
            yield number, row
    except csv.Error as error:
        raise ValueError(f"{source}: line {reader.line_num}: {error}; expected a CSV file") from None


def _predicted(number: int, cells: dict[str, str]) -> PredictedRow:
    try:
        machine = described_machine(cells)
        # A round that has no name of one counts as none, the newest: other tables have other columns of that name.
        round = cells.get("round", "").strip()
        round = round if ROUND.fullmatch(round) else None
        if cells["global_batch_size"].strip():
            run = TimedRun(machine, whole_number(cells, "global_batch_size"), round)
        else:
            run = usual_run(machine, round)
    except ValueError as error:
        return PredictedRow(number, cells, None, str(error))
    return PredictedRow(number, cells, predict(run))


def _cells(prediction: Prediction | None) -> tuple[str, str, str]:
    if prediction is None:
        return "", "", ""
    return f"{prediction.minutes:.6g}", f"{prediction.low:.6g}", f"{prediction.high:.6g}"
