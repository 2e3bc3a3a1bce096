"""Count how much of a text is lost on its way to samples, and describe the losses."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Self

from msgspec import Meta

from console.text import counted

_NOTABLE = 0.03
"""A loss of more than this share of a text is worth a warning."""

_TOO_MUCH = 0.5
"""A loss of more than this share of a text makes the samples useless."""

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class TextCounts:
    """Numbers of characters, documents and tokens in a text, and how many of them are lost."""

    characters: _Count = 0
    dropped_characters: _Count = 0
    """Control characters, format characters, and U+FFFD, which stands for bytes that could not be decoded."""
    stripped_marks: _Count = 0
    """Accents and vowel signs, if accents are stripped."""
    documents: _Count = 0
    dropped_documents: _Count = 0
    """Documents without a word, and repeated documents."""
    tokens: _Count = 0
    unknown_tokens: _Count = 0
    """Words that the vocabulary cannot express, which become [UNK]."""
    unknown_characters: _Count = 0
    """Characters of the words that become [UNK]."""
    unused_tokens: _Count = 0
    """Tokens that are in no sample, because they were truncated whenever a sample was made from their sentence."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __bool__(self) -> bool:
        return self != type(self)()

    def __str__(self) -> str:
        lost = [description for share, description, _ in self._kinds() if share]
        sizes = {"character": self.characters, "document": self.documents, "token": self.tokens}
        counts = ", ".join(counted(size, noun) for noun, size in sizes.items())
        return f"{counts}; {'lost: ' + ', '.join(lost) if lost else 'nothing lost'}"

    def _kinds(self) -> Iterator[tuple[float, str, str]]:
        """Yield the lost share of the text, a description of the loss, and its cause with a remedy."""
        tokens, characters, documents = (max(1, count) for count in (self.tokens, self.characters, self.documents))
        share = self.unknown_tokens / tokens
        of_characters = self.unknown_characters / characters
        yield (
            max(share, of_characters),
            f"{_percent(share)} of the tokens, with {_percent(of_characters)} of the characters, are [UNK]",
            "the vocabulary lacks them, or words have more than 200 characters: use a vocabulary for the text's "
            "language, or a larger one",
        )
        share = self.unused_tokens / tokens
        yield (
            share,
            f"{_percent(share)} of the tokens are truncated in all samples",
            "put one sentence on a line, or make longer samples (--max-seq-length)",
        )
        share = self.stripped_marks / characters
        yield (
            share,
            f"{_percent(share)} of the characters are accents or vowel signs and are stripped",
            "set --strip-accents False, unless the vocabulary lacks them",
        )
        share = self.dropped_characters / characters
        yield (
            share,
            f"{_percent(share)} of the characters are dropped",
            "they are control characters, or U+FFFD from a wrong decoding: decode the text again from its source",
        )
        share = self.dropped_documents / documents
        yield (
            share,
            f"{_percent(share)} of the documents are dropped",
            "they have no words or repeat other documents: bring different documents",
        )

    def losses(self, remedy: str = "", above: float = _NOTABLE) -> Iterator[str]:
        """Yield a sentence with a remedy for each kind of loss that exceeds the share ``above`` of the text.

        ``remedy`` replaces the usual remedies, which name options of ``prepare`` and ``from-text``.
        """
        for share, description, usual in self._kinds():
            if share > above:
                yield f"{description}; {remedy or usual}"

    def require_enough(self, source: Path, remedy: str = "") -> None:
        """Raise ``ValueError`` if more than half of the text is lost."""
        if lost := list(self.losses(remedy, _TOO_MUCH)):
            way_out = "" if remedy else ", or set --accept-losses to go on"
            raise ValueError(f"{source}: {'; '.join(lost)}{way_out}")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 or not share else "less than 0.1 %"
