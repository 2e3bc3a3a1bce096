"""Conversion of text to samples in plain Python. It defines the results, and tests and benchmarks compare with it.

This module defines what ``dataloading.text.tokenization`` and ``dataloading.preparation.pretraining_data`` must produce. It
follows the description in Devlin et al. 2018 (arXiv 1810.04805) and the behaviour of the benchmark's data scripts. It
processes strings character by character and token by token, and shares no code with the two modules.
"""

import random
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataloading.options import PretrainingOptions
from dataloading.shards.samples import Samples

CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class Sample(NamedTuple):
    """A sample. ``first_length`` includes [CLS] and the first [SEP]; ``masked`` lists (position, original token) pairs."""

    tokens: list[str]
    first_length: int
    masked: list[tuple[int, str]]
    is_random_next: bool


def prepare(paths: Sequence[Path], vocab: dict[str, int], options: PretrainingOptions) -> Samples:
    """Return the samples of the text files in the reference script's order."""
    # One generator makes all choices in the reference's order. An additional draw would change every later choice.
    rng = random.Random(options.random_seed)
    documents = list(read_documents(paths, vocab, options.do_lower_case))
    rng.shuffle(documents)
    words = list(vocab)
    samples: list[Sample] = []
    for _ in range(options.dupe_factor):
        for index in range(len(documents)):
            samples.extend(samples_of_document(documents, index, words, options, rng))
    rng.shuffle(samples)
    return as_arrays(samples, vocab)


def read_vocab(path: Path) -> dict[str, int]:
    """Return the id of each token. A repeated token is skipped and uses up no id."""
    vocab: dict[str, int] = {}
    # Read in binary, because universal newlines would end a line at a lone carriage return.
    with path.open("rb") as file:
        for raw in file:
            vocab.setdefault(raw.replace(b"\r", b"").decode().strip(), len(vocab))
    return vocab


def read_documents(paths: Iterable[Path], vocab: dict[str, int], do_lower_case: bool) -> Iterator[list[list[str]]]:
    """Yield each document as a list of tokenized sentences. Empty documents and sentences are left out."""
    document: list[list[str]] = []
    for path in paths:
        with path.open("rb") as file:
            for raw in file:
                # The reference removes all carriage returns, not only those at the end of a line.
                line = raw.replace(b"\r", b"").decode().strip()
                if line:
                    tokens = tokenize(line, vocab, do_lower_case)
                    if tokens:
                        document.append(tokens)
                elif document:
                    yield document
                    document = []
    if document:
        yield document


def tokenize(line: str, vocab: dict[str, int], do_lower_case: bool) -> list[str]:
    cleaned: list[str] = []
    for char in line:
        # Tab, line feed and carriage return count as spaces. Other control characters are dropped.
        if char in "\t\n\r" or unicodedata.category(char) == "Zs":
            cleaned.append(" ")
        elif char in "\0\ufffd" or unicodedata.category(char) in ("Cc", "Cf"):
            continue
        # Each ideograph is a word by itself.
        elif any(low <= ord(char) <= high for low, high in CJK):
            cleaned.extend((" ", char, " "))
        else:
            cleaned.append(char)
    pieces: list[str] = []
    for word in "".join(cleaned).split():
        if do_lower_case:
            # NFD separates accents from letters; accents have the category Mn and are dropped.
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
        for part in split_punctuation(word):
            pieces.extend(word_pieces(part, vocab))
    return pieces


def split_punctuation(word: str) -> Iterator[str]:
    """Split a word at punctuation: yield each punctuation character alone, and the text between them."""
    run = ""
    for char in word:
        if is_punctuation(char):
            if run:
                yield run
            yield char
            run = ""
        else:
            run += char
    if run:
        yield run


def is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def word_pieces(word: str, vocab: dict[str, int]) -> list[str]:
    """Split a word into the longest pieces from the left. If that fails or the word exceeds 200 characters, return [UNK]."""
    if len(word) > 200:
        return ["[UNK]"]
    pieces: list[str] = []
    # Taking the longest piece can fail even if another division would succeed. Then the whole word is unknown.
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        for end in range(len(word), start, -1):
            piece = prefix + word[start:end]
            if piece in vocab:
                pieces.append(piece)
                start = end
                break
        else:
            return ["[UNK]"]
    return pieces


def samples_of_document(
    documents: list[list[list[str]]], index: int, words: list[str], options: PretrainingOptions, rng: random.Random
) -> Iterator[Sample]:
    """Yield the samples of one pass over a document."""
    room = options.max_seq_length - 3  # [CLS] and two [SEP] take three positions
    # Some samples are short on purpose (`short_seq_prob`).
    target = rng.randint(2, room) if rng.random() < options.short_seq_prob else room
    document = documents[index]
    position = 0
    while position < len(document):
        chunk: list[list[str]] = []
        size = 0
        while position < len(document) and (not chunk or size < target):
            chunk.append(document[position])
            size += len(document[position])
            position += 1
        # Draw even if a random segment will replace the second one, because the order of draws is part of the definition.
        split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        first = [token for sentence in chunk[:split] for token in sentence]
        is_random_next = len(chunk) == 1 or rng.random() < 0.5
        if is_random_next:
            second = random_segment(documents, index, target - len(first), rng)
            position -= len(chunk) - split  # unused sentences go to the next sample
        else:
            second = [token for sentence in chunk[split:] for token in sentence]
        # Drop tokens from a random end of the longer segment.
        while len(first) + len(second) > room:
            longer = first if len(first) > len(second) else second
            longer.pop(0 if rng.random() < 0.5 else -1)
        tokens = ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
        masked = mask(tokens, words, options, rng)
        yield Sample(tokens, len(first) + 2, masked, is_random_next)


def random_segment(documents: list[list[list[str]]], index: int, size: int, rng: random.Random) -> list[str]:
    """Return consecutive sentences from a random position, normally in another document."""
    other = index
    # If ten draws in a row give the document itself, its own sentences are used.
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != index:
            break
    segment: list[str] = []
    for sentence in documents[other][rng.randint(0, len(documents[other]) - 1) :]:
        segment += sentence
        if len(segment) >= size:
            break
    return segment


def mask(tokens: list[str], words: list[str], options: PretrainingOptions, rng: random.Random) -> list[tuple[int, str]]:
    """Mask some of ``tokens`` in place, and return their (position, original token) pairs."""
    positions = [place for place, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
    rng.shuffle(positions)
    # Python's round() rounds half to even, as in the reference.
    count = min(options.max_predictions_per_seq, max(1, round(len(tokens) * options.masked_lm_prob)))
    masked = [(place, tokens[place]) for place in positions[:count]]
    for place, token in masked:
        # 80 % become [MASK], 10 % stay, 10 % become any word. The order of these draws is part of the definition.
        if rng.random() < 0.8:
            tokens[place] = "[MASK]"
        else:
            tokens[place] = token if rng.random() < 0.5 else words[rng.randint(0, len(words) - 1)]
    return sorted(masked)


def as_arrays(samples: list[Sample], vocab: dict[str, int]) -> Samples:
    lengths = [len(sample.tokens) for sample in samples]
    masked_counts = [len(sample.masked) for sample in samples]
    segments = [[0] * sample.first_length + [1] * (len(sample.tokens) - sample.first_length) for sample in samples]
    return Samples(
        input_ids=np.array([vocab[token] for sample in samples for token in sample.tokens], np.uint16),
        segment_ids=np.array([segment for sample in segments for segment in sample], np.uint8),
        sequence_offsets=np.cumsum([0, *lengths]),
        masked_lm_positions=np.array([place for sample in samples for place, _ in sample.masked], np.uint16),
        masked_lm_ids=np.array([vocab[token] for sample in samples for _, token in sample.masked], np.uint16),
        masked_lm_offsets=np.cumsum([0, *masked_counts]),
        next_sentence_labels=np.array([sample.is_random_next for sample in samples], np.uint8),
    )
