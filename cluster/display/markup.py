"""HTML that the pages of a cluster share. Text from files is escaped by `text`; everything else takes markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from console.page import TEMPLATES
from console.text import visible

STYLE_SHEETS = (TEMPLATES / "style.css", Path(__file__).with_name("page.css"))


def document(title: str, body: str, footer: str) -> str:
    """Return a page that needs nothing but itself; a policy forbids it to run or load anything."""
    # Style sheets go into the page itself, which may lie anywhere.
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in STYLE_SHEETS)
    return (
        # A name from a probe's file that got past the escaping could still not run or fetch anything.
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>\n{body}<footer>{footer}</footer>\n</body></html>\n"
    )


def text(value: object, limit: int = 400) -> str:
    """Escape a text from outside, of which at most ``limit`` characters are shown."""
    # `visible` first: control characters and directions of text would survive escaping.
    return escape(visible(value, limit))


def section(title: str, content: str) -> str:
    """Return a section with its title; nothing where there is no content."""
    return f"<section><h2>{title}</h2>\n{content}</section>" if content else ""


def figure_list(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return large figures side by side, each with a name above and a note below."""
    items = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(note)}</small></dd></div>"
        for name, value, note in figures
    )
    return f'<dl class="figures">{items}</dl>'


def table(name: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of figures; cells are markup, and the first one heads its row."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
        for first, *others in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table class="numbers"><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )
