"""Conversion of documents to masked next-sentence pairs, bit-identical to the reference's ``create_pretraining_data``.

The algorithm comes from Devlin et al. 2018 (arXiv 1810.04805, section 3.1), in the form of the MLPerf BERT reference.
All choices come from one ``random.Random(random_seed)`` in a fixed order. The compiled core holds the state of this
Mersenne Twister and reimplements CPython's ``random``, ``randint`` and ``shuffle``.

Consecutive sentences are a range of one flat token array, so choosing and truncating the two segments only moves their
bounds. Tokens are copied once, when the sample is written.
"""

import logging
import random
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from console.files import is_private
from dataloading.options import PretrainingOptions
from dataloading.shards.samples import Samples, offsets_of
from dataloading.shards.shard import VOCABULARY_FITS, DatasetInfo
from dataloading.text.losses import TextCounts
from dataloading.text.tokenization import (
    TokenizedDocuments,
    Tokenizer,
    count_dropped,
    count_marks,
    cut_sentences,
    group_tokens,
)
from dataloading.text.vocabulary import Vocabulary

Function = TypeVar("Function", bound=Callable[..., Any])
Twister = NDArray[np.uint32]
"""State [625] of CPython's generator: 624 words and the next word's index (Matsumoto and Nishimura 1998, MT19937)."""
Ids = NDArray[np.uint16]
Integers = NDArray[np.int64]

_DRAWS_OF_ANOTHER_DOCUMENT = 10
"""Number of times that the reference tries to draw another document for a random next segment."""

_LOG = logging.getLogger(__name__)


def samples_info(
    vocabulary: Vocabulary, options: PretrainingOptions, sources: dict[str, str] | None = None
) -> DatasetInfo:
    """Return the description of samples that will be made with these settings.

    It includes the version of Python's Unicode tables, because these tables determine how words are split.
    """
    recorded = options.recorded | {"unicode": unicodedata.unidata_version}
    recorded[VOCABULARY_FITS] = vocabulary.fits(options.normalization)
    return DatasetInfo.of(vocabulary, options.max_seq_length, options.max_predictions_per_seq, recorded, sources)


def samples_of(
    documents: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    options: PretrainingOptions,
    longest_sentence: int | None = None,
) -> tuple[Samples, TextCounts]:
    """Tokenize documents, make samples from them, and count the text that is lost on the way.

    Sentences with more than ``longest_sentence`` tokens are cut; the reference does not cut sentences.
    """
    vocabulary, lines = tokenizer.vocabulary, list(chain.from_iterable(documents))
    token_ids, line_offsets = tokenizer.encode_lines(lines)
    tokenized = group_tokens(documents, token_ids, line_offsets)
    if longest_sentence is not None:
        tokenized = cut_sentences(tokenized, longest_sentence, vocabulary)
    used_T = np.zeros(len(tokenized.token_ids), np.bool_)
    samples = create_samples(tokenized, options, vocabulary, used_T)
    unknown = np.flatnonzero(token_ids == vocabulary.ids["[UNK]"])
    with_unknown = np.unique(np.searchsorted(line_offsets, unknown, side="right") - 1)
    counts = TextCounts(
        characters=sum(map(len, lines)),
        dropped_characters=count_dropped(lines),
        documents=len(documents),
        dropped_documents=len(documents) - (len(tokenized.document_offsets) - 1),
        tokens=len(token_ids),
        unknown_tokens=len(unknown),
        unknown_characters=sum(tokenizer.count_unknown(lines[line]) for line in with_unknown.tolist()),
        stripped_marks=count_marks(lines) if tokenizer.normalization.strip_accents else 0,
        unused_tokens=len(used_T) - int(np.count_nonzero(used_T)),
    )
    return samples, counts


def create_samples(
    documents: TokenizedDocuments,
    options: PretrainingOptions,
    vocabulary: Vocabulary,
    used_T: NDArray[np.bool_] | None = None,
) -> Samples:
    """Return the samples that the reference script makes from these documents, in the same order.

    Sets the flag in ``used_T`` [T] of each token that is in a sample. The first call in a process compiles the core, or
    loads it from Numba's cache. Needs about 10 bytes of memory per token, including 3 for the result.
    """
    # As in the reference: shuffle documents, draw samples, shuffle samples.
    twister = np.array(random.Random(options.random_seed).getstate()[1], np.uint32)
    document_order = np.arange(len(documents.document_offsets) - 1)
    _shuffle(twister, document_order)
    # Compute this in Python: like the reference's round(), it must round halves to even in double precision.
    masked_count_by_length = np.array(
        [
            min(options.max_predictions_per_seq, max(1, round(length * options.masked_lm_prob)), max(0, length - 3))
            for length in range(options.max_seq_length + 1)
        ]
    )
    input_ids, positions, labels, lengths, first_lengths, next_sentence_labels = _draw_samples(
        twister,
        documents.token_ids,
        documents.sentence_offsets,
        documents.document_offsets[np.stack([document_order, document_order + 1], axis=1)],
        options.dupe_factor,
        options.short_seq_prob,
        masked_count_by_length,
        vocabulary.size,
        np.zeros(len(documents.token_ids), np.bool_) if used_T is None else used_T,
        np.array([vocabulary.ids[token] for token in ("[CLS]", "[SEP]", "[MASK]")], np.uint16),
    )
    order = np.arange(len(lengths))
    _shuffle(twister, order)
    masked_counts = masked_count_by_length[lengths]
    segment_lengths = np.stack([first_lengths, lengths - first_lengths], axis=1)[order]
    return Samples(
        input_ids=_gather_rows(input_ids, offsets_of(lengths), order),
        segment_ids=np.repeat(np.tile(np.array([0, 1], np.uint8), len(order)), segment_lengths.ravel()),
        sequence_offsets=offsets_of(lengths[order]),
        masked_lm_positions=_gather_rows(positions, offsets_of(masked_counts), order),
        masked_lm_ids=_gather_rows(labels, offsets_of(masked_counts), order),
        masked_lm_offsets=offsets_of(masked_counts[order]),
        next_sentence_labels=next_sentence_labels[order].astype(np.uint8),
    )


# The following functions are compiled.


def compiled(function: Function) -> Function:
    """Compile ``function`` when it is first called, or load it from a cache that no other user can write.

    Numba's cache contains pickles, which can run any code. A cache beside the source is as trustworthy as the source. But
    Numba may also put its cache into ``NUMBA_CACHE_DIR`` or into the user's cache folder, which is often in /tmp in a
    container.
    """
    njit: Any = numba.njit
    try:
        kept = njit(cache=True)(function)
    except RuntimeError:  # no cache folder is writable
        return njit(function)
    if kept is function:  # NUMBA_DISABLE_JIT is set
        return function
    return kept if _is_trusted(Path(kept.stats.cache_path)) else njit(function)


@lru_cache  # so that there is only one warning for each folder
def _is_trusted(folder: Path) -> bool:
    if Path(__file__).parent in folder.parents or is_private(folder):
        return True
    _LOG.warning(
        "%s can be written by others, so compiled functions are not cached there; set NUMBA_CACHE_DIR to another folder",
        folder,
    )
    return False


@compiled
def _next_word(twister: Twister) -> int:
    index = twister[624]
    if index == 624:
        for word in range(624):
            joined = (twister[word] & 0x80000000) | (twister[(word + 1) % 624] & 0x7FFFFFFF)
            twister[word] = twister[(word + 397) % 624] ^ (joined >> 1) ^ (0x9908B0DF if joined & 1 else 0)
        index = 0
    twister[624] = index + 1
    # Use 64 bits, so that a left shift does not lose bits before they are masked.
    bits = np.int64(twister[index])
    bits ^= bits >> 11
    bits ^= (bits << 7) & 0x9D2C5680
    bits ^= (bits << 15) & 0xEFC60000
    return int(bits ^ (bits >> 18))


@compiled
def _random(twister: Twister) -> float:
    """Reimplement ``random.random()``: 53 bits from two words."""
    high = _next_word(twister) >> 5
    low = _next_word(twister) >> 6
    return (high * 67108864.0 + low) / 9007199254740992.0


@compiled
def _random_below(twister: Twister, bound: int) -> int:
    """Reimplement ``randint(0, bound - 1)``: draw as many bits as ``bound`` has until the number is below ``bound``."""
    bits = 0
    while bound >> bits:
        bits += 1
    drawn = _next_word(twister) >> (32 - bits)
    while drawn >= bound:
        drawn = _next_word(twister) >> (32 - bits)
    return drawn


@compiled
def _shuffle(twister: Twister, items: Integers) -> None:
    """Reimplement ``random.shuffle(items)`` in place: draw like `_random_below`, with decreasing bounds."""
    bits = 0
    while len(items) >> bits:
        bits += 1
    for last in range(len(items) - 1, 0, -1):
        if not (last + 1) >> (bits - 1):
            bits -= 1
        other = _next_word(twister) >> (32 - bits)
        while other > last:
            other = _next_word(twister) >> (32 - bits)
        items[last], items[other] = items[other], items[last]


@compiled
def _draw_samples(
    twister: Twister,
    token_ids: Ids,
    sentence_offsets: Integers,
    bounds_D2: Integers,
    dupe_factor: int,
    short_seq_prob: float,
    masked_count_by_length: Integers,
    vocab_size: int,
    used_T: NDArray[np.bool_],
    special_ids: Ids,
) -> tuple:
    """Draw the samples of all passes over the documents.

    ``bounds_D2`` holds the first sentence of each document and the sentence after its last. ``masked_count_by_length``
    [max_seq_length + 1] is the number of masked tokens in a sample of each length. The flags ``used_T`` are set for all
    tokens that are in a sample. ``special_ids`` are the ids of [CLS], [SEP] and [MASK]. Returns input_ids [T],
    masked_lm_positions [M] and masked_lm_ids [M], and for each sample its length, the length up to and including the first
    [SEP], and its next-sentence label.
    """
    max_num_tokens = len(masked_count_by_length) - 4  # max_seq_length without [CLS] and two [SEP]
    # Buffers grow when they are full, because the number of samples is unknown until all are drawn.
    input_ids = positions = labels = np.empty(0, np.uint16)
    lengths = first_lengths = next_sentence_labels = np.empty(0, np.int64)
    tokens_used = masked_used = count = 0
    for _ in range(dupe_factor):
        for document in range(len(bounds_D2)):
            target_seq_length = max_num_tokens
            if _random(twister) < short_seq_prob:
                target_seq_length = 2 + _random_below(twister, max_num_tokens - 1)  # randint(2, max_num_tokens)
            sentence, end = bounds_D2[document]
            while sentence < end:
                a_start, a_stop, b_start, b_stop, is_random_next, sentence = _draw_pair(
                    twister, sentence_offsets, bounds_D2, document, sentence, target_seq_length
                )
                a_start, a_stop, b_start, b_stop = _truncate(twister, a_start, a_stop, b_start, b_stop, max_num_tokens)
                first_length = a_stop - a_start + 2  # with [CLS] and the first [SEP]
                length = first_length + b_stop - b_start + 1
                masked = int(masked_count_by_length[length])
                input_ids = _with_room(input_ids, tokens_used + length)
                positions = _with_room(positions, masked_used + masked)
                labels = _with_room(labels, masked_used + masked)
                lengths = _with_room(lengths, count + 1)
                first_lengths = _with_room(first_lengths, count + 1)
                next_sentence_labels = _with_room(next_sentence_labels, count + 1)
                row = input_ids[tokens_used : tokens_used + length]
                _lay_out(row, token_ids[a_start:a_stop], token_ids[b_start:b_stop], special_ids[0], special_ids[1])
                _set(used_T[a_start:a_stop])
                _set(used_T[b_start:b_stop])
                its = slice(masked_used, masked_used + masked)
                _mask(twister, row, first_length, positions[its], labels[its], special_ids[2], vocab_size)
                lengths[count] = length
                first_lengths[count] = first_length
                next_sentence_labels[count] = is_random_next
                tokens_used += length
                masked_used += masked
                count += 1
    used = input_ids[:tokens_used], positions[:masked_used], labels[:masked_used]
    return *used, lengths[:count], first_lengths[:count], next_sentence_labels[:count]


@compiled
def _draw_pair(
    twister: Twister, sentence_offsets: Integers, bounds_D2: Integers, document: int, first: int, target_seq_length: int
) -> tuple:
    """Choose the two segments of the sample that starts at sentence ``first``.

    Returns the token ranges of both segments (a_start, a_stop, b_start, b_stop), whether the second was drawn at
    random, and the sentence where the next sample of this document starts.
    """
    stop = _sentences_for(sentence_offsets, first, int(bounds_D2[document, 1]), target_seq_length)
    split = first + 1
    if stop - first >= 2:
        split += _random_below(twister, stop - first - 1)
    a_start, a_stop = sentence_offsets[first], sentence_offsets[split]
    # The reference draws no number for a single sentence, because it cannot be divided.
    if stop - first >= 2 and _random(twister) >= 0.5:
        return a_start, a_stop, a_stop, sentence_offsets[stop], False, stop
    other = document
    # If there is only one document, or all ten draws give this document, the segment still counts as random.
    for _ in range(_DRAWS_OF_ANOTHER_DOCUMENT):
        other = _random_below(twister, len(bounds_D2))
        if other != document:
            break
    start, end = bounds_D2[other]
    start += _random_below(twister, end - start)
    b_stop = _sentences_for(sentence_offsets, start, end, target_seq_length - (a_stop - a_start))
    # The sentences after the split were not used, so the next sample starts with them.
    return a_start, a_stop, sentence_offsets[start], sentence_offsets[b_stop], True, split


@compiled
def _sentences_for(sentence_offsets: Integers, first: int, end: int, token_count: int) -> int:
    """Return the end of the shortest run of sentences from ``first`` that has ``token_count`` tokens, at most ``end``."""
    stop = first + 1
    while stop < end and sentence_offsets[stop] - sentence_offsets[first] < token_count:
        stop += 1
    return stop


@compiled
def _truncate(twister: Twister, a_start: int, a_stop: int, b_start: int, b_stop: int, max_num_tokens: int) -> tuple:
    """Drop tokens from a random end of the longer segment until both segments fit."""
    for _ in range(a_stop - a_start + b_stop - b_start - max_num_tokens):
        from_front = _random(twister) < 0.5
        if a_stop - a_start > b_stop - b_start:
            a_start += from_front
            a_stop -= not from_front
        else:
            b_start += from_front
            b_stop -= not from_front
    return a_start, a_stop, b_start, b_stop


@compiled
def _lay_out(row: Ids, first: Ids, second: Ids, cls_id: int, sep_id: int) -> None:
    row[0] = cls_id
    _copy(first, row[1:])
    row[len(first) + 1] = sep_id
    _copy(second, row[len(first) + 2 :])
    row[-1] = sep_id


@compiled
def _mask(
    twister: Twister, row: Ids, first_length: int, positions: Ids, labels: Ids, mask_id: int, vocab_size: int
) -> None:
    """Mask ``len(positions)`` tokens of a sample in place: replace 80 % by [MASK], keep 10 %, replace 10 % by any id.

    Fills ``positions`` (ascending) and ``labels``.
    """
    candidates = np.empty(len(row) - 3, np.int64)
    replacements = np.full(len(row), -1)
    # Draw in shuffled order, like the reference, which sorts by position afterwards.
    for index in range(len(candidates)):
        candidates[index] = index + 1 if index + 1 < first_length - 1 else index + 2  # skips [CLS] and [SEP]
    _shuffle(twister, candidates)
    for position in candidates[: len(positions)]:
        if _random(twister) < 0.8:
            replacements[position] = mask_id
        elif _random(twister) < 0.5:
            replacements[position] = row[position]
        else:
            replacements[position] = _random_below(twister, vocab_size)  # any token, even a special one
    masked = 0
    for position in range(len(row)):
        if replacements[position] >= 0:
            positions[masked] = position
            labels[masked] = row[position]
            row[position] = replacements[position]
            masked += 1


@compiled
def _with_room(array: np.ndarray, needed: int) -> np.ndarray:
    """Return ``array`` if it has at least ``needed`` elements, otherwise a copy of twice this length."""
    if needed <= len(array):
        return array
    larger = np.empty(2 * needed, array.dtype)
    _copy(array, larger)
    return larger


@compiled
def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy ``source`` to the start of ``target`` in a loop: Numba takes seconds to compile an assignment to a slice."""
    for index in range(len(source)):
        target[index] = source[index]


@compiled
def _set(flags: NDArray[np.bool_]) -> None:
    for index in range(len(flags)):
        flags[index] = True


@compiled
def _gather_rows(values: Ids, offsets: Integers, order: Integers) -> Ids:
    gathered = np.empty(offsets[-1], np.uint16)
    used = 0
    for row in order:
        length = offsets[row + 1] - offsets[row]
        _copy(values[offsets[row] : offsets[row + 1]], gathered[used:])
        used += length
    return gathered
