"""Reading of documents, and WordPiece tokenization with the same ids as the reference BERT tokenizer for every text.

The reference (Devlin et al. 2018, arXiv 1810.04805) splits lines into words by Unicode categories from Python's
``unicodedata``. The normalizer of the ``tokenizers`` library uses Rust's tables, drops characters that the reference
keeps, and recognises special tokens inside text. So words are split here, and ``tokenizers`` only does the greedy
longest-match search. The ids of each distinct word are cached.
"""

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from console.files import read_bounded, read_json

NO_TEXT = "no text found; expected one sentence a line, an empty line between documents"

_MAX_TEXT_BYTES = 4 << 30
"""Largest size of a text. Processing needs 30 times as much memory. The benchmark's texts have 27 MB each."""

_MAX_LINE = 16 << 20
"""Longest line in characters. The limit detects text without line feeds, which would be one sentence."""

MAX_CHARACTERS_PER_WORD = 200
"""Length of the longest word that is tokenized. Longer words become [UNK]."""

_MAX_VOCABULARY_BYTES = 64 << 20
"""Limit on the size of a vocabulary file: a thousand bytes for each of 65,536 tokens."""

_CACHED_WORDS = 1 << 20
"""Number of words after which the cache is cleared. For English, the cache takes at most about 150 MB."""

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# The reference's ranges, which lack ideographs that Unicode has added since.
_CJK_RANGES = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF)),
    *((0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F)),
)

_ASCII_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))  # tab, LF and CR count as blanks
_ASCII_WORD = re.compile(r"[0-9A-Za-z]+|\S")  # all other ASCII symbols are punctuation


@dataclass(frozen=True)
class Vocabulary:
    """The word pieces of a model in id order, and the digests of their file."""

    tokens: tuple[str, ...]
    md5: str
    sha256: str

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file with one token a line.

        As in the reference, blanks around a token are dropped, and a repeated token keeps its first id. Raises
        ``ValueError`` if the file cannot be read, is not UTF-8, lacks a special token, or has too many tokens for 16 bits.
        """
        remedy = (
            "name a BERT vocabulary, one token a line; `python -m dataloading wikipedia` puts the benchmark's in place"
        )
        return cls._of(read_bounded(path, _MAX_VOCABULARY_BYTES, remedy), path)

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Read ``vocab.txt`` or ``tokenizer.json`` from a model's folder. Return None if the folder has neither.

        Raises the same ``ValueError`` as `from_file`, and also if the tokenizer is not WordPiece.
        """
        path = folder / "vocab.txt"
        if path.is_file():
            return cls.from_file(path)
        path = folder / "tokenizer.json"
        return cls.of_tokens(_pieces_of(path), path) if path.is_file() else None

    @classmethod
    def of_tokens(cls, tokens: Sequence[str], path: Path) -> Self:
        """Return the vocabulary with these tokens, as if they were read from a file. ``path`` is for error messages.

        Raises the same ``ValueError`` as `from_file`, and also if a token is repeated, has blanks around it, or contains a
        line break.
        """
        vocabulary = cls._of(_lines(tokens), path)
        if vocabulary.tokens != tuple(tokens):
            raise ValueError(f"{path}: tokens that repeat, or with blanks; expected a vocabulary of BERT's")
        return vocabulary

    @property
    def content(self) -> bytes:
        """Content of the vocabulary file, one token a line."""
        return _lines(self.tokens)

    @classmethod
    def _of(cls, content: bytes, path: Path) -> Self:
        tokens = tuple(dict.fromkeys(text_lines(content, path)))
        if missing := [token for token in SPECIAL_TOKENS if token not in tokens]:
            raise ValueError(
                f"{path}: {len(tokens):,} tokens without {', '.join(missing)}; "
                "a BERT vocabulary has one token a line, the special ones included"
            )
        if len(tokens) > 1 << 16:
            raise ValueError(f"{path}: {len(tokens):,} tokens; ids are stored in 16 bits, so at most {1 << 16:,} fit")
        return cls(
            tokens,
            # MD5, because the published digest of the benchmark's vocabulary is an MD5.
            md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
            sha256=hashlib.sha256(content).hexdigest(),
        )

    @property
    def cased(self) -> bool:
        """Whether ordinary tokens contain capital letters. If so, the text must keep its capital letters and accents."""
        plain = (token for token in self.tokens if token not in SPECIAL_TOKENS)
        return any(token != token.lower() for token in plain)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    @property
    def size(self) -> int:
        return len(self.tokens)


def _lines(tokens: Sequence[str]) -> bytes:
    return "".join(f"{token}\n" for token in tokens).encode()


def _pieces_of(path: Path) -> list[str]:
    tokenizer = read_json(path, _MAX_VOCABULARY_BYTES, "expected a tokenizer of Hugging Face's")
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    ids = model.get("vocab") if isinstance(model, dict) and model.get("type") == "WordPiece" else None
    # Compare by repr, because 1.0 and True are equal to 1.
    if not isinstance(ids, dict) or set(map(repr, ids.values())) != {str(index) for index in range(len(ids))}:
        raise ValueError(f"{path}: no WordPiece vocabulary with an id for each token; expected a tokenizer of BERT's")
    return sorted(ids, key=ids.__getitem__)


def text_lines(content: bytes, path: Path) -> list[str]:
    """Split the ``content`` of a UTF-8 file into stripped lines. ``path`` is for error messages.

    Only line feeds end a line, and all carriage returns are dropped, as in TensorFlow's
    ``BufferedInputStream::ReadLine``.
    """
    try:
        lines = content.decode("utf-8").replace("\r", "").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {line}, byte {error.start}: not UTF-8; convert the file to UTF-8") from None
    if not lines[-1]:  # the text after the last line feed
        lines.pop()
    return [line.strip() for line in lines]


class Tokenizer:
    """Tokenizer from lines of text to ids. It starts no threads, so forking afterwards is safe."""

    def __init__(self, vocabulary: Vocabulary, do_lower_case: bool = True) -> None:
        self.vocabulary = vocabulary
        self.do_lower_case = do_lower_case
        self._word_ids = _WordIds(vocabulary)

    def encode_lines(self, lines: Sequence[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the concatenated token ids of all lines [T], without [CLS] and [SEP], and their offsets [lines + 1]."""
        # __getitem__ of a dict subclass calls __missing__ for a new word.
        ids_of = self._word_ids.__getitem__
        encoded = [b"".join(map(ids_of, split_words(line, self.do_lower_case))) for line in lines]
        lengths = np.array([len(ids) // 2 for ids in encoded], np.int64)  # an id has two bytes
        return np.frombuffer(b"".join(encoded), np.uint16), np.concatenate(([0], lengths.cumsum()))


class _WordIds(dict[str, bytes]):
    """Cache of each word's ids, as the bytes of a uint16 array. Joining the words' bytes gives the ids of a line."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._pieces = models.WordPiece(
            vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_CHARACTERS_PER_WORD
        )

    def __missing__(self, word: str) -> bytes:
        ids = array("H", [piece.id for piece in self._pieces.tokenize(word)]).tobytes()
        if len(self) >= _CACHED_WORDS:
            self.clear()
        # Longer words, which are [UNK], are not cached, because they could take any amount of memory.
        if len(word) <= MAX_CHARACTERS_PER_WORD:
            self[word] = ids
        return ids


def split_words(line: str, do_lower_case: bool) -> list[str]:
    """Split a line into words like the reference's basic tokenizer. Punctuation and CJK characters are separate words.

    With ``do_lower_case``, letters are lower-cased and accents are stripped.
    """
    if line.isascii():
        if not line.isprintable():
            line = line.translate(_ASCII_CONTROLS)
        return _ASCII_WORD.findall(line.lower() if do_lower_case else line)
    line = line.translate(_CLEAN)
    # The reference lower-cases and decomposes each word separately. The whole line gives the same result: a blank ends the
    # context in which lower() chooses the form of a sigma, and NFD moves no combining mark across a blank.
    if do_lower_case:
        return unicodedata.normalize("NFD", line.lower()).translate(_SPLIT_AND_STRIP_ACCENTS).split()
    return line.translate(_SPLIT).split()


class _CharacterMap(dict[int, str | None]):
    """Table for ``str.translate`` that calls ``rule`` once for each distinct character."""

    def __init__(self, rule: Callable[[str], str | None]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code_point: int) -> str | None:
        self[code_point] = mapped = self._rule(chr(code_point))
        return mapped


def _clean(character: str) -> str | None:
    """Drop control and format characters and U+FFFD, replace blanks by spaces, and put spaces around CJK ideographs."""
    if character in "\t\n\r":  # control characters that the reference treats as blanks
        return " "
    category = unicodedata.category(character)
    if category in ("Cc", "Cf") or character == "\ufffd":
        return None
    if category == "Zs":
        return " "
    if any(first <= ord(character) <= last for first, last in _CJK_RANGES):
        return f" {character} "
    return character


def _split(character: str) -> str:
    """Put spaces around punctuation, which includes every ASCII symbol."""
    is_punctuation = not character.isalnum() if character.isascii() else unicodedata.category(character)[0] == "P"
    return f" {character} " if is_punctuation else character


def _split_and_strip_accents(character: str) -> str | None:
    """Put spaces around punctuation as in `_split`, and drop non-spacing marks."""
    return None if unicodedata.category(character) == "Mn" else _split(character)


_CLEAN = _CharacterMap(_clean)
_SPLIT = _CharacterMap(_split)
_SPLIT_AND_STRIP_ACCENTS = _CharacterMap(_split_and_strip_accents)


@dataclass(frozen=True)
class TokenizedDocuments:
    """D documents with S sentences and T tokens in total. No sentence and no document is empty."""

    token_ids: NDArray[np.uint16]
    """[T]"""
    sentence_offsets: NDArray[np.int64]
    """[S + 1] start of each sentence in ``token_ids``; the last entry is T."""
    document_offsets: NDArray[np.int64]
    """[D + 1] start of each document among the sentences; the last entry is S."""


def read_documents(paths: Sequence[Path]) -> list[list[str]]:
    """Read documents as lists of sentences, from text with one sentence a line and an empty line between documents.

    As in the reference, only an empty line ends a document, so the first lines of a file continue the last document of
    the previous file.
    """
    documents: list[list[str]] = [[]]
    for path in paths:
        lines = text_lines(read_bounded(path, _MAX_TEXT_BYTES, "split the text into smaller files"), path)
        if (longest := max(map(len, lines), default=0)) > _MAX_LINE:
            number = next(number for number, line in enumerate(lines, 1) if len(line) == longest)
            raise ValueError(f"{path}: line {number:,} has {longest:,} characters; expected one sentence a line")
        if not any(lines):
            raise ValueError(f"{path}: {NO_TEXT}")
        for line in lines:
            if line:
                documents[-1].append(line)
            else:
                documents.append([])
    return [document for document in documents if document]


def tokenize_documents(documents: Iterable[Sequence[str]], tokenizer: Tokenizer) -> TokenizedDocuments:
    """Return documents as flat token ids, without empty sentences and documents. Raises ``ValueError`` without tokens."""
    documents = list(documents)
    token_ids, line_offsets = tokenizer.encode_lines(list(chain.from_iterable(documents)))
    if not len(token_ids):
        raise ValueError("the text has no tokens (only blanks and control characters); expected sentences, one a line")
    line_lengths = np.diff(line_offsets)
    document_of_line = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    sentence_counts = np.bincount(document_of_line[line_lengths > 0])
    return TokenizedDocuments(
        token_ids=token_ids,
        sentence_offsets=np.append(0, line_lengths[line_lengths > 0].cumsum()),
        document_offsets=np.append(0, sentence_counts[sentence_counts > 0].cumsum()),
    )
