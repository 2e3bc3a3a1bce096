"""Counts of what becomes of a text on its way to samples, and reports of the text that is lost."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Self

from msgspec import Meta

_NOTABLE = 0.03
"""Share of a text that is lost that calls for a warning."""

_TOO_MUCH = 0.5
"""Share of a text that is lost that makes the samples useless."""

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class TextCounts:
    """Numbers of characters, documents and tokens in a text, and how many of them are lost."""

    characters: _Count = 0
    dropped_characters: _Count = 0
    """Control characters, format characters, and U+FFFD, which stands for bytes that could not be decoded."""
    documents: _Count = 0
    dropped_documents: _Count = 0
    """Documents without a word, and repeated documents."""
    tokens: _Count = 0
    unknown_tokens: _Count = 0
    """Words that the vocabulary cannot express, which become [UNK]."""
    unused_tokens: _Count = 0
    """Tokens that are in no sample, because they were truncated whenever a sample was made from their sentence."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __bool__(self) -> bool:
        return self != type(self)()

    def __str__(self) -> str:
        lost = [f"{_percent(lost, total)} {name}" for lost, total, name, *_ in self._kinds() if lost]
        counts = f"{self.characters:,} characters, {self.documents:,} documents, {self.tokens:,} tokens"
        return f"{counts}; {'lost: ' + ', '.join(lost) if lost else 'nothing lost'}"

    def _kinds(self) -> Iterator[tuple[int, int, str, str, str]]:
        """Yield the lost and the total number of each kind, its name, its description, and a remedy."""
        yield (
            *(self.unknown_tokens, self.tokens, "of the tokens are [UNK]"),
            ", because the vocabulary does not fit the text",
            "use a vocabulary for the text's language, or a larger one",
        )
        yield (
            *(self.unused_tokens, self.tokens, "of the tokens are truncated in all samples"),
            "",
            "put one sentence on a line, or make longer samples (--max-seq-length)",
        )
        yield (
            *(self.dropped_characters, self.characters, "of the characters are dropped"),
            ", which are control characters, or U+FFFD from a wrong decoding",
            "decode the text again from its source",
        )
        yield (
            *(self.dropped_documents, self.documents, "of the documents are dropped"),
            ", because they have no words or repeat other documents",
            "bring different documents",
        )

    def losses(self, above: float = _NOTABLE) -> Iterator[str]:
        """Yield a sentence with a remedy for each kind of loss of more than a share ``above`` of the text."""
        for lost, total, name, description, remedy in self._kinds():
            if lost > above * total:
                yield f"{_percent(lost, total)} {name}{description}; {remedy}"

    def require_enough(self, source: Path) -> None:
        """Raise ``ValueError`` if more than half of the text is lost."""
        if lost := list(self.losses(_TOO_MUCH)):
            raise ValueError(f"{source}: {'; '.join(lost)}, or set --accept-losses to go on")


def _percent(part: int, total: int) -> str:
    percent = 100 * part / max(1, total)
    return f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"
