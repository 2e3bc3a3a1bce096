"""Predictions for a CSV table of machines, which may come from a spreadsheet. The output adds columns to the table."""

import csv
import io
import re
from pathlib import Path

from cluster.published.cost_model import LAST_ROUND, TimedRun
from cluster.published.measured import read_minutes
from cluster.published.prediction import predict, usual_run
from cluster.published.results import machine_of_row
from console.files import read_bounded, shown
from console.text import did_you_mean

REQUIRED = ("accelerator", "nodes", "accelerators_per_node")
OPTIONAL = ("accelerator_interconnect", "host_networking", "global_batch_size", "round", "minutes")
ADDED = ("predicted_minutes", "low_minutes", "high_minutes", "ratio", "reason")

_REMEDY = "expected a CSV file in UTF-8 with the columns of cluster/published/published_results.csv"


def predict_table(source: Path) -> tuple[str, int, int]:
    """Return the table with the columns `ADDED`, its number of rows, and the number of rows without a prediction.

    Raises ``ValueError`` if the file is no table of machines.
    """
    content = read_bounded(source, 16 << 20, _REMEDY)
    try:
        if b"\0" in content:
            raise ValueError("binary data, or text in UTF-16")
        text = content.decode("utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True) if any(row)]
        names = [name.strip() for name in rows[0]] if rows else []
        if missing := [name for name in REQUIRED if name not in names]:
            raise ValueError(f"no column {missing[0]}{did_you_mean(missing[0], names)}")
        if twice := [name for name in (*REQUIRED, *OPTIONAL, *ADDED) if [*names, *ADDED].count(name) > 1]:
            raise ValueError(f"the output would have two columns named {twice[0]}")
        if not rows[1:]:
            raise ValueError("no rows below the header")
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{source}: {shown(error)}; {_REMEDY}") from None
    out, refused = io.StringIO(newline=""), 0
    # Keep "\r" in the line terminator, because otherwise the writer does not quote cells that contain it.
    writer = csv.writer(out, delimiter=separator, lineterminator="\r\n" if "\r" in text else "\n")
    writer.writerow([*rows[0], *ADDED])
    for row in rows[1:]:
        cells = [*row, *[""] * (len(names) - len(row))]
        named = dict.fromkeys((*REQUIRED, *OPTIONAL), "") | dict(zip(names, map(str.strip, cells), strict=False))
        try:
            if len(row) > len(names):
                raise ValueError(f"the row has {len(row)} cells, expected {len(names)}")
            added = [*_predicted(named, decimal="," if separator == ";" else "."), ""]
        except ValueError as error:
            added, refused = ["", "", "", "", str(error)], refused + 1
        writer.writerow([*cells[: len(names)], *added, *cells[len(names) :]])
    return out.getvalue(), len(rows) - 1, refused


def _predicted(cells: dict[str, str], decimal: str) -> list[str]:
    """Return the cells of `ADDED` except the reason. If there is no prediction, raises ``ValueError`` with the reason."""
    whole = {}
    for name in ("nodes", "accelerators_per_node", "global_batch_size"):
        # Accept 8.0, because some spreadsheets write 8 as 8.0 if another cell of the column is empty.
        if not re.fullmatch(r"\d{1,9}(\.0+)?", cells[name], re.ASCII) and (cells[name] or name in REQUIRED):
            raise ValueError(f"{name} is {cells[name][:40]!r}, expected a whole number")
        whole[name] = cells[name].partition(".")[0]
    machine, batch, round = machine_of_row(cells | whole), whole["global_batch_size"], cells["round"] or LAST_ROUND
    found = predict(TimedRun(machine, int(batch), round) if batch else usual_run(machine, round))
    measured = cells["minutes"] and read_minutes(cells["minutes"].replace(decimal, "."), "minutes") / found.minutes
    return [f"{number:.6g}" if number else "" for number in (found.minutes, found.low, found.high, measured)]
