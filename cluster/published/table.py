"""Predictions for a CSV table of machines, which may come from a spreadsheet: the same table with further columns."""

import csv
import io
import re
from pathlib import Path

from cluster.published.cost_model import LAST_ROUND, TimedRun
from cluster.published.measured import read_minutes
from cluster.published.prediction import predict, usual_run
from cluster.published.results import machine_of_row
from console.files import read_bounded, shown
from console.text import counted, did_you_mean

REQUIRED = ("accelerator", "nodes", "accelerators_per_node")
OPTIONAL = ("accelerator_interconnect", "host_networking", "global_batch_size", "round", "minutes")
ADDED = ("predicted_minutes", "low_minutes", "high_minutes", "ratio", "reason")

_REMEDY = "expected a CSV file in UTF-8 with the columns of cluster/published/published_results.csv"


def predict_table(source: Path) -> tuple[str, int, int]:
    """Return a table with the columns `ADDED`, its number of rows, and how many of them have a reason and no prediction.

    Raises ``ValueError`` if the file is no table of machines.
    """
    content = read_bounded(source, 16 << 20, _REMEDY)
    try:
        if b"\0" in content:
            raise ValueError("binary data, or text in UTF-16")
        text = content.decode("utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header, *rows = [row for row in reader if any(row)] or [[]]
        if not rows:
            raise ValueError("no rows below a header")
        names = [name.strip() for name in header]
        for name in (*REQUIRED, *OPTIONAL, *ADDED):
            found, most = names.count(name), int(name not in ADDED)
            if found > most or (not found and name in REQUIRED):
                hint = "" if found else did_you_mean(name, names)
                raise ValueError(f"{counted(found, 'column')} named {name}, expected {most}{hint}")
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{source}: {shown(error)}; {_REMEDY}") from None
    out, refused = io.StringIO(newline=""), 0
    # Cells with a carriage return are quoted only if the line ends have one, too.
    writer = csv.writer(out, delimiter=separator, lineterminator="\r\n" if "\r" in text else "\n")
    writer.writerow([*header, *ADDED])
    for row in rows:
        added = _predicted(names, row, decimal="," if separator == ";" else ".")
        refused += bool(added[-1])
        cells = [*row, *[""] * (len(names) - len(row))]
        writer.writerow([*cells[: len(names)], *added, *cells[len(names) :]])
    return out.getvalue(), len(rows), refused


def _predicted(names: list[str], row: list[str], decimal: str) -> list[str]:
    """Return the cells of the columns `ADDED`."""
    cells = dict.fromkeys((*REQUIRED, *OPTIONAL), "") | dict(zip(names, map(str.strip, row), strict=False))
    try:
        if len(row) > len(names):
            raise ValueError(f"{len(row)} cells, expected {len(names)}")
        for name in ("nodes", "accelerators_per_node", "global_batch_size"):
            # Spreadsheets write whole numbers as 8.0 if another cell of the column is empty.
            if not re.fullmatch(r"\d{1,9}(\.0+)?", cells[name], re.ASCII) and (cells[name] or name in REQUIRED):
                raise ValueError(f"{name} is {cells[name][:40]!r}, expected a whole number")
            cells[name] = cells[name].partition(".")[0]
        machine, batch, round = machine_of_row(cells), cells["global_batch_size"], cells["round"] or LAST_ROUND
        found = predict(TimedRun(machine, int(batch), round) if batch else usual_run(machine, round))
        measured = cells["minutes"] and read_minutes(cells["minutes"].replace(decimal, "."), "minutes") / found.minutes
    except ValueError as error:
        return ["", "", "", "", str(error)]
    numbers = (found.minutes, found.low, found.high, measured)
    return [*(f"{number:.6g}" if number else "" for number in numbers), ""]
