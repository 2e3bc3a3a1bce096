"""A model's vocabulary, and the normalization of text that belongs to it.

A token's id is the number of its line in the vocabulary file, and its row in the word embedding table. Whether text is
lower-cased and loses its accents is stated by a tokenizer's files, if there are any, and can otherwise only be guessed.
"""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Self

from console.files import read_bounded, shown
from console.text import counted
from dataloading.options import Normalization, NormalizationOptions
from dataloading.text.documents import decode_text, stripped_lines
from dataloading.text.tokenizer_files import MAX_TOKENS, TOKENIZER, read_tokens, stated_normalization

_MAX_VOCABULARY_BYTES = 64 << 20
"""Limit on the size of a vocabulary file: a thousand bytes for each of 65,536 tokens."""

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_ENOUGH = 0.05
"""A normalization does not fit a vocabulary if it makes at least this share of the tokens useless. A lower share is normal:
vocabularies of lower-cased text have some tokens with capital letters that were added later, such as markers and names."""

_MOST_PADDING = 1024
"""Largest multiple to which the rows of a word embedding table may be padded, such as 128 rows on each of eight ranks."""


@dataclass(frozen=True)
class Vocabulary:
    """The word pieces of a model by id. Ids without a token have an empty token."""

    tokens: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a vocabulary file, or a tokenizer.json or its folder. Raises ``ValueError`` if there is no vocabulary."""
        if not path.is_dir():
            return (
                cls.from_file(path) if path.suffix != ".json" else cls.of_tokens(list(chain(*read_tokens(path))), path)
            )
        if (found := cls.from_folder(path)) is None:
            raise ValueError(f"{path} holds neither vocab.txt nor {TOKENIZER}; name the vocabulary of a BERT model")
        return found

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file with one token a line. Blank and repeated lines keep their ids, as in transformers and TensorFlow.

        The benchmark's script gives such lines no ids, but its vocabulary has no such lines. Blanks around a token are
        dropped, as by the script. Raises ``ValueError`` if the file cannot be read, is not UTF-8, lacks a special token, or
        has too many tokens for 16 bits.
        """
        remedy = (
            "name a BERT vocabulary, one token a line; `python -m dataloading wikipedia` puts the benchmark's in place"
        )
        text = decode_text(read_bounded(path, _MAX_VOCABULARY_BYTES, remedy), path)
        # A lone carriage return ends a line for Python and transformers, but not for TensorFlow, so ids would be ambiguous.
        if alone := re.search(r"\r(?!\n)", text):
            number = text.count("\n", 0, alone.start()) + 1
            raise ValueError(f"{path}: line {number:,} holds a carriage return; end each line with a line feed")
        return cls.of_tokens(stripped_lines(text), path)

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Read ``tokenizer.json`` or ``vocab.txt`` from a model's folder. Return None if the folder has neither.

        Raises the same ``ValueError`` as `from_file`, and also if the tokenizer is not WordPiece, or if both files exist
        and disagree.
        """
        text, described = folder / "vocab.txt", folder / TOKENIZER
        listed = cls.from_file(text) if text.is_file() else None
        if not described.is_file():
            return listed
        rows, added = read_tokens(described)
        if listed is not None and listed.ids != {token: index for index, token in enumerate(rows) if token}:
            raise ValueError(f"{text} and {TOKENIZER} beside it number tokens differently; delete the wrong one")
        return cls.of_tokens([*rows, *added], described)

    @classmethod
    def of_tokens(cls, tokens: Sequence[str], path: Path) -> Self:
        """Return the vocabulary with these tokens. ``path`` is for error messages."""
        if missing := [token for token in SPECIAL_TOKENS if token not in tokens]:
            raise ValueError(
                f"{path}: {counted(len(tokens), 'token')} without {', '.join(missing)}; "
                "a BERT vocabulary has one token a line, the special ones included"
            )
        if len(tokens) > MAX_TOKENS:
            raise ValueError(
                f"{path}: {len(tokens):,} tokens; ids are stored in 16 bits, so at most {MAX_TOKENS:,} fit"
            )
        if odd := next((token for token in tokens if "\n" in token), None):
            raise ValueError(f"{path}: the token '{shown(odd)}' holds a line feed; expected a BERT vocabulary")
        return cls(tuple(tokens))

    @property
    def content(self) -> bytes:
        """Content of the vocabulary file, one token a line."""
        return "".join(f"{token}\n" for token in self.tokens).encode()

    @cached_property
    def _identity(self) -> bytes:
        # Treat repeated lines as blank lines, because no token has the id of such a line.
        rows = [token if self.ids.get(token) == index else "" for index, token in enumerate(self.tokens)]
        return ("\n".join(rows).rstrip("\n") + "\n").encode()

    @cached_property
    def md5(self) -> str:
        """MD5 of the tokens, one a line. The published digest of the benchmark's vocabulary is an MD5."""
        return hashlib.md5(self._identity, usedforsecurity=False).hexdigest()

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the tokens, one a line. It does not depend on the file's line ends."""
        return hashlib.sha256(self._identity).hexdigest()

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each token. As in transformers and TensorFlow, a repeated token has the id of its last line."""
        return {token: index for index, token in enumerate(self.tokens) if token}

    @property
    def size(self) -> int:
        """Number of ids, which is the number of rows in the word embedding table."""
        return len(self.tokens)

    def fits(self, normalization: Normalization) -> bool:
        """Return whether text with this normalization can contain nearly all tokens that have letters."""
        pieces = [token.removeprefix("##") for token in self.ids if not (token[0] == "[" and token[-1] == "]")]
        words = [piece for piece in pieces if any(map(str.isalpha, piece))]
        useless = sum(_normalized(piece, normalization) != piece for piece in words)
        return useless / max(1, len(words)) < _ENOUGH

    def require_table(self, rows: int, path: Path) -> None:
        """Raise ``ValueError`` unless a word embedding table of ``rows`` rows can belong to this vocabulary.

        A table may be padded to a multiple of 8, 16, 32 and so on.
        """
        used = 1 + max(self.ids.values(), default=-1)  # blank lines at the end do not count
        multiple = min(rows & -rows, _MOST_PADDING)
        if used > rows or (rows > self.size and (multiple < 8 or rows - used >= multiple)):
            raise ValueError(
                f"{path} has {self.size:,} tokens, but the model's word embedding table has {rows:,} rows; use the "
                "vocabulary that the model was trained with"
            )

    def guess_normalization(self) -> Normalization:
        """Guess how text must be normalized so that it can contain nearly all tokens of this vocabulary."""
        lower = self.fits(Normalization(strip_accents=False))
        strip = lower and self.fits(Normalization())
        ideographs = [token for token in self.ids if any(map(is_ideograph, token))]
        long = sum(len(token.removeprefix("##")) > 1 for token in ideographs)
        return Normalization(lower, strip, not long or long / len(ideographs) < _ENOUGH)


def _normalized(text: str, normalization: Normalization) -> str:
    if normalization.do_lower_case:
        text = text.lower()
    if normalization.strip_accents:
        text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    return text


# The reference's ranges, which lack ideographs that Unicode has added since.
_IDEOGRAPHS = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF)),
    *((0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F)),
)


def is_ideograph(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _IDEOGRAPHS)


@dataclass(frozen=True)
class FoundNormalization:
    """A normalization, and where it comes from."""

    normalization: Normalization
    source: str
    is_stated: bool = False
    """Whether a file states whether text is lower-cased."""

    def __str__(self) -> str:
        return f"{self.normalization} ({self.source})"


def find_normalization(vocabulary: Vocabulary, path: Path, given: NormalizationOptions) -> FoundNormalization:
    """Return the normalization for a vocabulary that was read from ``path``, a file or a model's folder.

    The options ``given`` come first, then what a tokenizer's files beside the vocabulary state, then a guess. Raises
    ``ValueError`` if these files describe another kind of tokenizer.
    """
    folder = _folder(path)
    options = {name: value for name, value in asdict(given).items() if value is not None}
    stated, files = stated_normalization(folder, options)
    known = stated | options
    if stated:
        known = {"tokenize_chinese_chars": True} | known  # the default of transformers
    guess = vocabulary.guess_normalization()
    if "do_lower_case" in known:
        normalization = Normalization.of(**({"tokenize_chinese_chars": guess.tokenize_chinese_chars} | known))
    else:
        normalization = replace(guess, **known)
    sources = [f"set by {', '.join(options)}"] if options else []
    sources += [f"stated by {files} in {folder}"] if stated else []
    sources += [] if "do_lower_case" in known else ["guessed from the vocabulary"]
    return FoundNormalization(normalization, ", ".join(sources), "do_lower_case" in stated)


def read_stated(path: Path) -> Normalization | None:
    """Return the normalization that the tokenizer's files in a vocabulary's folder state, or None if they state none."""
    stated, _ = stated_normalization(_folder(path))
    return Normalization.of(**stated) if "do_lower_case" in stated else None


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent
