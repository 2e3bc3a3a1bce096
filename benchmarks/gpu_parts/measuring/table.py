"""The table that is printed last. It contains the important rows of every part that has a file in a folder."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_parts.measuring.report import Figure, PartReport, number, percent

_COLUMNS = ("part", "what", "ms", "figure", "", "of ceiling", "x peer", "note")
# Wide enough for the longest usual cell. Longer cells are cut, so that a row fits into a terminal.
_WIDEST = (13, 58, 9, 9, 18, 10, 6, 62)


def page(folder: Path, parts: Sequence[str]) -> str:
    """Return a Markdown table of the important rows and the failed rows, and a line with the outcome of each part."""
    lines = [_COLUMNS]
    for part in parts:
        path = folder / f"{part}.json"
        # A part that has not run has no file.
        if not path.exists():
            continue
        report = PartReport.load(path)
        lines += [_cells(part, row) for row in report.rows if row.page or row.failed]
        lines.append((part, _ending(report), "", "", "", "", "", _why_or_where(report)))
    widths = [min(most, max(len(line[at]) for line in lines)) for at, most in enumerate(_WIDEST)]
    rule = "|".join("-" * (width + 2) for width in widths)
    table = [_line(line, widths) for line in lines]
    return "\n".join([table[0], f"|{rule}|", *table[1:]])


def _cells(part: str, row: Figure) -> tuple[str, ...]:
    peer = "" if row.peer is None else f"{row.peer:.2f}"
    figures = number(row.milliseconds), number(row.figure), row.unit, percent(row.share), peer
    return part, row.name, *figures, row.note


def _ending(report: PartReport) -> str:
    failed = f", {len(report.failures)} FAILED" if report.failures else ""
    return f"{'complete' if report.complete else 'NOT COMPLETE'}: {len(report.rows)} rows{failed}, {report.took:.0f} s"


def _why_or_where(report: PartReport) -> str:
    if report.error:
        return report.error
    about = report.about
    return f"{about.get('device')}, {str(about.get('commit'))[:10]}, {about.get('date')}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # A vertical bar would end the cell.
    kept = [_shortened(cell.replace("|", "/"), width).ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(kept)} |"


def _shortened(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 3]}..."
