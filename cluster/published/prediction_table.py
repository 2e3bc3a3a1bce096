"""Predictions for a CSV table of machines. The output is the same table with predicted minutes."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
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
"""Columns that a table must have; the batch may be empty. An optional column ``round`` selects the software."""

ADDED = ("predicted_minutes", "low_minutes", "high_minutes")

MOST_BYTES = 16 << 20


def predict_table(source: Path, out: Path) -> dict[int, str]:
    """Predict every row of the CSV file ``source`` and write the table with the columns `ADDED` to ``out``.

    Returns the reason for each row that cannot be predicted, by row number from 1. In such a row the columns `ADDED` are
    empty.

    Raises:
        ValueError: the file is not a table with the required columns.
    """
    content = read_bounded(source, MOST_BYTES, "give --table a CSV file with the columns of published_results.csv")
    reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig", "replace"), newline=""), restval="", strict=True)
    try:
        rows, columns = list(reader), list(reader.fieldnames or ())
    except csv.Error as error:
        raise ValueError(f"{source}: line {reader.line_num}: {error}; expected a CSV file") from None
    if missing := [name for name in COLUMNS if name not in columns]:
        raise ValueError(f"{source}: column {missing[0]} is missing, expected {', '.join(COLUMNS)}")
    text, refused = io.StringIO(), {}
    columns = [name for name in columns if name not in ADDED]
    # csv collects cells beyond the header under the key None, which `extrasaction` drops.
    writer = csv.DictWriter(text, [*columns, *ADDED], restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for number, row in enumerate(rows, 1):
        kept = {name: row[name] for name in columns}
        try:
            found = _predicted(row)
        except ValueError as error:
            refused[number] = str(error)
        else:
            minutes = (found.minutes, found.low, found.high)
            kept |= {name: f"{value:.6g}" for name, value in zip(ADDED, minutes, strict=True)}
        writer.writerow(kept)
    if len(refused) == len(rows):
        raise ValueError(f"{source}: no row can be predicted; row 1: {refused.get(1, 'missing')}")
    write_atomically(out, text.getvalue().encode())
    return refused


def _predicted(row: Mapping[str, str]) -> Prediction:
    machine, round = described_machine(row), row.get("round", "").strip()
    # Other tables may use the column for something else. Then assume the newest software.
    round = round if ROUND.fullmatch(round) else None
    if not row["global_batch_size"].strip():
        return predict(usual_run(machine, round))
    return predict(TimedRun(machine, whole_number(row, "global_batch_size"), round))
