"""Render HTML pages that need no other file: Jinja2 with autoescape, one base template and one style sheet.

Each package keeps its templates beside its modules. Templates extend `base.html` and import the macros of `parts.html`:

    {% extends "base.html" %}
    {% from "parts.html" import section, table %}
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console.text import visible

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")

MAX_TEXT = 400
"""Maximum characters that the filter `brief` keeps, for names and values."""
MAX_SENTENCE = 2000
"""Maximum characters of any other text."""


def render_page(template: Path, **facts: Any) -> str:
    """Render a page or a chart. Every text is escaped for terminals and for HTML and cut to `MAX_SENTENCE` characters."""
    return _environment(template.parent).get_template(template.name).render(facts)


@lru_cache
def _environment(folder: Path) -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        # Escape control characters and direction marks here, because the later escaping for HTML leaves them unchanged.
        finalize=lambda value: value if hasattr(value, "__html__") else visible(value, MAX_SENTENCE),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["brief"] = lambda value: visible(value, MAX_TEXT)
    return environment
