"""A block of pretraining samples as flat arrays: the currency of the data stages.

Shapes: n samples, T real tokens in all, M masked tokens in all. Nothing is padded; sample i owns
``input_ids[sequence_offsets[i]:sequence_offsets[i + 1]]`` and likewise for the masked tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# 2^64 over the golden ratio: the step of SplitMix64.
SPLITMIX64_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Samples:
    """Next-sentence pairs with masked tokens, as the reference's ``create_pretraining_data`` makes them."""

    input_ids: NDArray[np.uint16]
    """[T] tokens after masking, [CLS] first and [SEP] last in every sample."""
    segment_ids: NDArray[np.uint8]
    """[T] 0 up to and including the first [SEP], 1 after it."""
    sequence_offsets: NDArray[np.int64]
    """[n + 1] where each sample starts in the token arrays; the last entry is T."""
    masked_lm_positions: NDArray[np.uint16]
    """[M] positions inside the sample, ascending."""
    masked_lm_ids: NDArray[np.uint16]
    """[M] the tokens that stood at those positions."""
    masked_lm_offsets: NDArray[np.int64]
    """[n + 1] where each sample starts in the masked arrays; the last entry is M."""
    next_sentence_labels: NDArray[np.uint8]
    """[n] 1 where the second segment was drawn from another document."""

    def __len__(self) -> int:
        return len(self.next_sentence_labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] real tokens of each sample."""
        return np.diff(self.sequence_offsets)

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] masked tokens of each sample."""
        return np.diff(self.masked_lm_offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def take(self, indices: NDArray[np.int64]) -> "Samples":
        """The samples at ``indices`` (any order, repeats allowed), as a new block."""
        tokens = (self.input_ids, self.segment_ids)
        # Both arrays at once, as the elements to take are the same.
        (input_ids, segment_ids), sequence_offsets = _gather_ragged(tokens, self.sequence_offsets, indices)
        masked = (self.masked_lm_positions, self.masked_lm_ids)
        (positions, masked_lm_ids), masked_lm_offsets = _gather_ragged(masked, self.masked_lm_offsets, indices)
        return Samples(
            input_ids=input_ids,
            segment_ids=segment_ids,
            sequence_offsets=sequence_offsets,
            masked_lm_positions=positions,
            masked_lm_ids=masked_lm_ids,
            masked_lm_offsets=masked_lm_offsets,
            next_sentence_labels=self.next_sentence_labels[indices],
        )

    def slice(self, start: int, stop: int) -> "Samples":
        """Samples ``start`` to ``stop`` as a block that shares this one's memory (offsets apart)."""
        tokens = slice(*self.sequence_offsets[[start, stop]])
        masked = slice(*self.masked_lm_offsets[[start, stop]])
        return Samples(
            input_ids=self.input_ids[tokens],
            segment_ids=self.segment_ids[tokens],
            sequence_offsets=self.sequence_offsets[start : stop + 1] - tokens.start,
            masked_lm_positions=self.masked_lm_positions[masked],
            masked_lm_ids=self.masked_lm_ids[masked],
            masked_lm_offsets=self.masked_lm_offsets[start : stop + 1] - masked.start,
            next_sentence_labels=self.next_sentence_labels[start:stop],
        )

    def digest(self) -> str:
        """SHA-256 over names, types and contents: equal for equal samples in equal order."""
        state = hashlib.sha256()
        # In the order of the class, which is part of the digest.
        for field in fields(self):
            array = np.ascontiguousarray(getattr(self, field.name))
            # Types with their byte order, so that the digest is one of the bytes that follow.
            state.update(f"{field.name}:{array.dtype.str}:{array.shape}\n".encode())
            state.update(array.data)
        return state.hexdigest()

    def sample_digests(self) -> NDArray[np.uint64]:
        """[n] 64 bits for each sample, a mix of all that belongs to it: equal for equal samples anywhere.

        Their sum modulo 2^64 is a digest of a multiset: it tells whether two data sets hold the same samples in whatever
        order. Meant against accidents, not against somebody who looks for collisions; `digest` is for those.
        """
        # Shifted beyond any length, so that the two do not mix.
        digests = _mix((self.next_sentence_labels.astype(np.uint64) << np.uint64(40)) | self.lengths.astype(np.uint64))
        for kind, offsets, values in (
            (1, self.sequence_offsets, (self.input_ids, self.segment_ids)),
            (2, self.masked_lm_offsets, (self.masked_lm_ids, self.masked_lm_positions)),
        ):
            for rows in row_blocks(offsets):
                digests[rows.start : rows.stop] += _ragged_digests(kind, offsets[rows.start : rows.stop + 1], values)
        # Once more, by samples: the sum of them all would else not say which elements belong together.
        return _mix(digests)


class SampleBuilder:
    """Collector of samples, one by one, from wherever their bytes lie: a reference each, and one copy at the end.

    Gathering by index arrays costs a fixed time for every array that is read from; with samples spread over thousands of
    files that is a fixed time a sample, many times that of the copy.
    """

    def __init__(self) -> None:
        self._input_ids: list[memoryview] = []
        self._segment_ids: list[memoryview] = []
        self._masked_lm_positions: list[memoryview] = []
        self._masked_lm_ids: list[memoryview] = []
        self._labels = bytearray()

    def add(
        self,
        input_ids: memoryview,
        segment_ids: memoryview,
        masked_lm_positions: memoryview,
        masked_lm_ids: memoryview,
        next_sentence_label: int,
    ) -> None:
        """Add one sample: bytes of little-endian uint16 arrays, uint8 for ``segment_ids``."""
        self._input_ids.append(input_ids)
        self._segment_ids.append(segment_ids)
        self._masked_lm_positions.append(masked_lm_positions)
        self._masked_lm_ids.append(masked_lm_ids)
        self._labels.append(next_sentence_label)

    def samples(self) -> Samples:
        """Return the samples that were added, in that order; the arrays may be written to."""
        return Samples(
            # bytearray, as arrays over bytes cannot be written to.
            input_ids=np.frombuffer(bytearray().join(self._input_ids), "<u2"),
            segment_ids=np.frombuffer(bytearray().join(self._segment_ids), "u1"),
            # A byte a token.
            sequence_offsets=offsets_of(np.fromiter(map(len, self._segment_ids), np.int64, len(self._segment_ids))),
            masked_lm_positions=np.frombuffer(bytearray().join(self._masked_lm_positions), "<u2"),
            masked_lm_ids=np.frombuffer(bytearray().join(self._masked_lm_ids), "<u2"),
            masked_lm_offsets=offsets_of(
                np.fromiter((len(part) // 2 for part in self._masked_lm_ids), np.int64, len(self._masked_lm_ids))
            ),
            next_sentence_labels=np.frombuffer(self._labels, "u1"),
        )


_ELEMENTS_AT_A_TIME = 1 << 16
"""Elements gathered or digested at once: temporary arrays stay within the processor's cache, and memory bounded."""


def row_blocks(offsets: NDArray[np.int64]) -> Iterator[range]:
    """Yield consecutive ranges of ragged rows, of about ``_ELEMENTS_AT_A_TIME`` elements; one row alone may have more."""
    start = 0
    while start < len(offsets) - 1:
        # One row at least, even if it is longer than a whole block.
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _ELEMENTS_AT_A_TIME, side="right")) - 1)
        yield range(start, stop)
        start = stop


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """[n + 1] starts of ragged rows with these lengths, and their sum."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_indices(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Flat element indices of ragged rows that start at ``starts`` and have ``lengths``, row after row."""
    # What leads from the place in the result to the place in the array, the same for a whole row.
    shift = np.repeat(starts - offsets_of(lengths)[:-1], lengths)
    return np.arange(len(shift)) + shift


def _gather_ragged(
    arrays: tuple[NDArray[Any], ...], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[list[NDArray[Any]], NDArray[np.int64]]:
    """The chosen ``rows`` of ragged arrays that share ``offsets``, and the new offsets."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    new_offsets = offsets_of(lengths)
    gathered = [np.empty(new_offsets[-1], array.dtype) for array in arrays]
    for block in row_blocks(new_offsets):
        chosen = slice(block.start, block.stop)
        flat = ragged_indices(starts[chosen], lengths[chosen])
        for array, target in zip(arrays, gathered, strict=True):
            target[new_offsets[block.start] : new_offsets[block.stop]] = array[flat]
    return gathered, new_offsets


def _ragged_digests(kind: int, offsets: NDArray[np.int64], values: tuple[NDArray[Any], ...]) -> NDArray[np.uint64]:
    """[n] sums over each ragged row of a mix of (kind, place in the row, both values)."""
    start, stop = int(offsets[0]), int(offsets[-1])
    first, second = (array[start:stop].astype(np.uint64) for array in values)
    place = (np.arange(start, stop) - np.repeat(offsets[:-1], np.diff(offsets))).astype(np.uint64)
    # 16 bits each, so that none covers another.
    mixed = _mix(first | second << np.uint64(16) | place << np.uint64(32) | np.uint64(kind << 48))
    # reduceat takes the next element for an empty row, so those are left out.
    filled = np.flatnonzero(np.diff(offsets))
    sums = np.zeros(len(offsets) - 1, np.uint64)
    if len(filled):
        sums[filled] = np.add.reduceat(mixed, offsets[filled] - start)
    return sums


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return scrambled(values + SPLITMIX64_GAMMA)


def scrambled(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``bits``, changed in place by the finalizer of SplitMix64 (Steele, Lea and Flood 2014): each changes half of all."""
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def concatenate(blocks: Sequence[Samples]) -> Samples:
    """Join several blocks into one, in the given order."""
    return Samples(
        input_ids=np.concatenate([block.input_ids for block in blocks]),
        segment_ids=np.concatenate([block.segment_ids for block in blocks]),
        sequence_offsets=offsets_of(np.concatenate([block.lengths for block in blocks])),
        masked_lm_positions=np.concatenate([block.masked_lm_positions for block in blocks]),
        masked_lm_ids=np.concatenate([block.masked_lm_ids for block in blocks]),
        masked_lm_offsets=offsets_of(np.concatenate([block.masked_counts for block in blocks])),
        next_sentence_labels=np.concatenate([block.next_sentence_labels for block in blocks]),
    )
