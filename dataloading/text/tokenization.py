"""WordPiece tokenization with the same ids as the reference BERT tokenizer for every text.

The reference (Devlin et al. 2018, arXiv 1810.04805) splits lines into words by Unicode categories from Python's
``unicodedata``. The normalizer of the ``tokenizers`` library uses Rust's tables, drops characters that the reference
keeps, and recognises special tokens inside text. So words are split here, and ``tokenizers`` only does the greedy
longest-match search. The ids of each distinct word are cached.
"""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from dataloading.options import Normalization
from dataloading.text.vocabulary import Vocabulary, is_ideograph

MAX_CHARACTERS_PER_WORD = 200
"""Length of the longest word that is tokenized. Longer words become [UNK]."""

_CACHED_WORDS = 1 << 20
"""The cache is cleared when it has this number of words. For English, they take about 150 MB."""

_NON_ASCII = re.compile(r"[^\0-\x7f]")
_ASCII_WORD = re.compile(r"[0-9A-Za-z]+|\S")  # all other ASCII symbols are punctuation


class Tokenizer:
    """Tokenizer from lines of text to ids. It starts no threads, so forking afterwards is safe."""

    def __init__(self, vocabulary: Vocabulary, normalization: Normalization) -> None:
        self.vocabulary = vocabulary
        self.normalization = normalization
        self._word_ids = _WordIds(vocabulary)

    def encode_lines(self, lines: Sequence[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the concatenated token ids of all lines [T], without [CLS] and [SEP], and their offsets [lines + 1]."""
        # __getitem__ of a dict subclass calls __missing__ for a new word.
        ids_of = self._word_ids.__getitem__
        encoded = [b"".join(map(ids_of, split_words(line, self.normalization))) for line in lines]
        lengths = np.array([len(ids) // 2 for ids in encoded], np.int64)  # an id has two bytes
        return np.frombuffer(b"".join(encoded), np.uint16), np.concatenate(([0], lengths.cumsum()))

    def count_unknown(self, line: str) -> int:
        """Count the characters of those words in a line that become [UNK]."""
        unknown = np.uint16(self.vocabulary.ids["[UNK]"]).tobytes()
        return sum(len(word) for word in split_words(line, self.normalization) if self._word_ids[word] == unknown)


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


def split_words(line: str, normalization: Normalization) -> list[str]:
    """Normalize a line and split it into words like the reference's basic tokenizer. Punctuation marks are words."""
    if line.isascii():
        if not line.isprintable():
            line = line.translate(_CONTROLS)
        return _ASCII_WORD.findall(line.lower() if normalization.do_lower_case else line)
    line = line.translate(_CLEAN if normalization.tokenize_chinese_chars else _CLEAN_TOGETHER)
    # The reference lower-cases and decomposes each word separately. The whole line gives the same result: a blank ends the
    # context in which lower() chooses the form of a sigma, and NFD moves no combining mark across a blank.
    if normalization.do_lower_case:
        line = line.lower()
    if normalization.strip_accents:
        return unicodedata.normalize("NFD", line).translate(_SPLIT_AND_STRIP_ACCENTS).split()
    return line.translate(_SPLIT).split()


def count_dropped(lines: Iterable[str]) -> int:
    """Count the characters that are dropped from lines because the reference's tokenizer ignores them."""
    return sum(len(line) - len(line.translate(_CONTROLS)) for line in lines if not line.isprintable())


def count_marks(lines: Iterable[str]) -> int:
    """Count the accents and vowel signs that are stripped from lines if the normalization strips accents."""
    # Decompose each distinct character only once, and skip ASCII, which has no accents.
    characters = Counter(chain.from_iterable(_NON_ASCII.findall(line) for line in lines if not line.isascii()))
    return sum(
        count * [unicodedata.category(part) for part in unicodedata.normalize("NFD", character)].count("Mn")
        for character, count in characters.items()
    )


class _CharacterMap(dict[int, str | None]):
    """Table for ``str.translate`` that calls ``rule`` once for each distinct character."""

    def __init__(self, rule: Callable[[str], str | None]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code_point: int) -> str | None:
        self[code_point] = mapped = self._rule(chr(code_point))
        return mapped


def _drop_controls(character: str) -> str | None:
    """Drop control and format characters and U+FFFD, except the control characters that the reference treats as blanks."""
    is_control = unicodedata.category(character) in ("Cc", "Cf") and character not in "\t\n\r"
    return None if is_control or character == "\ufffd" else character


def _clean(character: str, separate_ideographs: bool) -> str | None:
    """Drop control characters, replace blanks by spaces, and put spaces around CJK ideographs if they are separate words."""
    if character in "\t\n\r" or unicodedata.category(character) == "Zs":
        return " "
    return f" {character} " if separate_ideographs and is_ideograph(character) else _drop_controls(character)


def _split(character: str) -> str:
    """Put spaces around punctuation, which includes every ASCII symbol."""
    is_punctuation = not character.isalnum() if character.isascii() else unicodedata.category(character)[0] == "P"
    return f" {character} " if is_punctuation else character


def _split_and_strip_accents(character: str) -> str | None:
    """Put spaces around punctuation as in `_split`, and drop non-spacing marks."""
    return None if unicodedata.category(character) == "Mn" else _split(character)


_CONTROLS = _CharacterMap(_drop_controls)
_CLEAN = _CharacterMap(partial(_clean, separate_ideographs=True))
_CLEAN_TOGETHER = _CharacterMap(partial(_clean, separate_ideographs=False))
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


def tokenize_documents(documents: Iterable[Sequence[str]], tokenizer: Tokenizer) -> TokenizedDocuments:
    """Return documents as flat token ids, without empty sentences and documents. Raises ``ValueError`` if all are empty."""
    documents = list(documents)
    return group_tokens(documents, *tokenizer.encode_lines(list(chain.from_iterable(documents))))


def group_tokens(
    documents: Sequence[Sequence[str]], token_ids: NDArray[np.uint16], line_offsets: NDArray[np.int64]
) -> TokenizedDocuments:
    """Return the documents whose lines have these ``token_ids`` [T], line after line, and ``line_offsets`` [lines + 1]."""
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


def cut_sentences(documents: TokenizedDocuments, most: int, vocabulary: Vocabulary) -> TokenizedDocuments:
    """Return documents whose sentences of more than ``most`` tokens are cut, at the start of a word if there is one."""
    starts_word = np.array([not token.startswith("##") for token in vocabulary.tokens])
    cuts = []
    offsets = documents.sentence_offsets
    for sentence in np.flatnonzero(np.diff(offsets) > most):
        start, end = int(offsets[sentence]), int(offsets[sentence + 1])
        while end - start > most:
            # Cut into pieces of about equal length, so that the last piece is not a single word.
            pieces = -(-(end - start) // most)
            wanted = start + -(-(end - start) // pieces)
            words = starts_word[documents.token_ids[start + 1 : wanted + 1]].nonzero()[0]
            start = start + 1 + int(words[-1]) if len(words) else wanted
            cuts.append(start)
    sentence_offsets = np.union1d(offsets, np.array(cuts, np.int64))
    # Documents still start with the same sentences, whose numbers are higher now.
    starts = offsets[documents.document_offsets]
    return TokenizedDocuments(documents.token_ids, sentence_offsets, np.searchsorted(sentence_offsets, starts))
