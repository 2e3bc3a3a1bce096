"""The report of all parts as Markdown. The most important results come first; a table of all important rows may be last."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_parts.report import Figure, PartReport, number, percent

OURS = {"bf16": "this repository, unpadded, bf16", "FP8": "this repository, unpadded, FP8"}
"""Names of this repository's rows in the part ``peers``. The page compares the rates in the other rows with them."""

_MOST_ROWS = 10
_WIDEST = 90
"""Maximum number of characters in a cell. Longer cells are cut, so that tables stay legible in a terminal."""


def page(folder: Path, parts: Collection[str], *, every_row: bool = False) -> str:
    """Return the report of the parts that have a file in the folder, optionally with all important rows at the end."""
    paths = {part: folder / f"{part}.json" for part in parts}
    reports = {part: _report(path) for part, path in paths.items() if path.exists()}
    rows = {part: report.rows for part, report in reports.items()}
    timed = [row for row in rows.get("kernels", ()) if row.page and row.milliseconds]

    def longest(precision: str) -> list[Figure]:
        return _largest(row for row in rows.get("step", ()) if row.name.startswith(f"split, {precision}: "))

    ceilings = (row for row in rows.get("peers", ()) if row.name.startswith("ceiling") and row.figure)
    failures = [(part, row.name, row.note) for part, report in reports.items() for row in report.failures]
    important = (row for part in rows for row in rows[part] if row.page and every_row)
    sections = {
        "Wrong or failed": _table(("part", "what", "why"), failures),
        "Training on one device, in one run": _rates(rows.get("peers", ())),
        "Ceilings of that run": _figures(ceilings),
        "The slowest ops": _figures(_largest(timed)),
        "Where a step's time goes": _figures(longest("bf16") + longest("fp8")),
        "Parts": _parts(reports),
        "All important rows": _figures(important),
    }
    devices = dict.fromkeys(str(each.about["device"]) for each in reports.values() if "device" in each.about)
    title = " and ".join(devices) or "Nothing was measured"
    return "\n\n".join([f"# {title}", *(f"## {name}\n\n{table}" for name, table in sections.items() if table)])


def _report(path: Path) -> PartReport:
    """Load a report, or return an empty one with the reason why the file cannot be read."""
    try:
        return PartReport.load(path)
    except ValueError as error:
        return PartReport(path, {}, error=str(error))


def _largest(rows: Iterable[Figure]) -> list[Figure]:
    return sorted(rows, key=lambda row: -(row.milliseconds or 0))[:_MOST_ROWS]


def _figures(rows: Iterable[Figure]) -> str:
    """Return a table with a line for each row."""
    lines = [
        (
            row.name,
            number(row.milliseconds),
            number(row.figure),
            row.unit,
            percent(row.share),
            number(row.peer),
            row.note,
        )
        for row in rows
    ]
    return _table(("what", "ms", "figure", "", "share", "x peer", "note"), lines)


def _parts(reports: Mapping[str, PartReport]) -> str:
    header = "part", "outcome", "seconds", "commit", "date", "PyTorch", "Triton", "without"
    lines = []
    for part, report in reports.items():
        about = report.about
        failed = f", {len(report.failures)} FAILED" if report.failures else ""
        state = "complete" if report.complete else "NOT COMPLETE"
        without = ", ".join(f"{op} (instead {name})" for op, name in about.get("without", {}).items())
        packages = (str(about.get("versions", {}).get(name, "")) for name in ("torch", "triton"))
        # The parts `correctness` and `end-to-end` summarise their rows in one row.
        verdicts = [f", {row.note}" for row in report.rows if row.name in ("largest error", "log") and not row.failed]
        why = "" if report.complete else f", {report.error}"
        outcome = f"{state}: {len(report.rows)} rows{failed}{''.join(verdicts)}{why}"
        commit, date = str(about.get("commit", ""))[:10], str(about.get("date", ""))
        lines.append((part, outcome, f"{report.took:.0f}", commit, date, *packages, without))
    return _table(header, lines)


def _rates(rows: Iterable[Figure]) -> str:
    """Return a table of the training rates, and of the ratios of our rates to them."""
    rates = {row.name: row for row in rows if row.unit == "sequences/s" and row.figure}
    ours = {precision: rates[name].figure for precision, name in OURS.items() if name in rates}
    header = "", "sequences/s", "of the bf16 ceiling", *(f"ours in {precision} is" for precision in ours), ""
    lines = []
    for row in rates.values():
        ratios = (f"{rate / row.figure:.2f} x" for rate in ours.values() if rate and row.figure)
        lines.append((row.name, number(row.figure), percent(row.share), *ratios, row.note))
    return _table(header, lines)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns of equal width, or nothing if there are no lines."""
    if not lines:
        return ""
    shown = [[_cell(text) for text in line] for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    shown.insert(1, ["-" * max(1, width) for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in shown)


def _cell(text: str) -> str:
    text = text.replace("|", "/")  # a vertical bar would end the cell
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
