"""The HTML that the sections of the report are made of. Everything from the files is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

from compliance.report.summary import MAX_SENTENCE, MAX_TEXT
from console.text import visible

MAX_FACTS = 400


def escaped(value: object, limit: int = MAX_TEXT) -> str:
    """Turn what may come from a file into text of the page."""
    return escape(visible(value, limit))


def section(title: str, *content: str) -> str:
    """A section with a heading; empty where all of its content is."""
    text = "\n".join(part for part in content if part)
    # Headings and heads of tables are words of this program, and the content has been escaped by whoever made it.
    return f"<section><h2>{title}</h2>\n{text}</section>" if text else ""


def pair(*figures: str) -> str:
    """Figures side by side, without those that are empty."""
    shown = [figure for figure in figures if figure]
    return f'<div class="pair">{"".join(shown)}</div>' if shown else ""


def figure(title: str, chart: str, note: str = "") -> str:
    """A chart with its title above and a note below."""
    caption = f'<p class="aside">{escaped(note, MAX_SENTENCE)}</p>' if note else ""
    head = f"<h3>{escaped(title)}</h3>" if title else ""
    return f"<figure>{head}{chart}{caption}</figure>"


def scrolling_table(name: str, head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table that scrolls in itself when it is too wide, with the keyboard too."""
    names = "".join(f'<th scope="col">{title}</th>' for title in head)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(name)}">'
        f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def fact_list(facts: dict[str, str]) -> str:
    """Names and values, at most `MAX_FACTS` of them."""
    shown = islice(facts.items(), MAX_FACTS)
    items = [f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in shown]
    if len(facts) > MAX_FACTS:
        items.append(f"<div><dt>and more</dt><dd>{len(facts) - MAX_FACTS} lines not shown</dd></div>")
    return f'<dl class="facts">{"".join(items)}</dl>' if items else ""
