"""Parser with which tests examine the HTML pages that programs write."""

import re
from html.parser import HTMLParser

ALLOWED = set(
    re.findall(
        r"\w+",
        """html head meta title style body header footer section h1 h2 h3 p small strong b i code div span ul li dl dt dd
        figure svg g path rect polygon table thead tbody tr th td details summary""",
    )
)


class Page(HTMLParser):
    """Tags and text of a page. Fails if tags are unbalanced, or if the page could load a resource or run a script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(str(text))
        self.close()
        assert not self.stack
        assert {tag for tag, _ in self.tags} <= ALLOWED
        names = {name for _, attrs in self.tags for name in attrs}
        assert not [name for name in names if name in ("src", "href", "srcset", "action") or name.startswith("on")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag and kind in (None, *str(attrs.get("class")).split())]

    @property
    def charts(self) -> list[str]:
        return [str(attrs["aria-label"]) for attrs in self.of("div", "chart")]
