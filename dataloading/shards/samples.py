"""A block of pretraining samples as flat arrays, and synthetic samples for the warm-up, for benchmarks and for tests.

Shapes: n samples, T real tokens, M masked tokens, without padding. The tokens of sample i are
``input_ids[sequence_offsets[i]:sequence_offsets[i + 1]]``. ``masked_lm_offsets`` delimits its masked tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# SplitMix64's increment: 2^64 divided by the golden ratio.
SPLITMIX64_GAMMA = np.uint64(0x9E3779B97F4A7C15)

_ELEMENTS_AT_A_TIME = 1 << 16
"""Number of elements to gather or digest at a time. Temporary arrays of this size fit into the processor's cache."""


@dataclass(frozen=True)
class Samples:
    """Masked next-sentence pairs, as made by the reference's ``create_pretraining_data``."""

    input_ids: NDArray[np.uint16]
    """[T] tokens after masking. Every sample starts with [CLS] and ends with [SEP]."""
    segment_ids: NDArray[np.uint8]
    """[T] 0 up to and including the first [SEP], 1 after it."""
    sequence_offsets: NDArray[np.int64]
    """[n + 1] start of each sample in the token arrays; the last entry is T."""
    masked_lm_positions: NDArray[np.uint16]
    """[M] positions inside the sample, ascending."""
    masked_lm_ids: NDArray[np.uint16]
    """[M] original tokens at these positions."""
    masked_lm_offsets: NDArray[np.int64]
    """[n + 1] start of each sample in the masked arrays; the last entry is M."""
    next_sentence_labels: NDArray[np.uint8]
    """[n] 1 if the second segment was drawn from another document."""

    def __len__(self) -> int:
        return len(self.next_sentence_labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] number of real tokens in each sample."""
        return np.diff(self.sequence_offsets)

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] number of masked tokens in each sample."""
        return np.diff(self.masked_lm_offsets)

    @property
    def unmasked_ids(self) -> NDArray[np.uint16]:
        """[T] tokens before masking."""
        ids = self.input_ids.copy()
        ids[np.repeat(self.sequence_offsets[:-1], self.masked_counts) + self.masked_lm_positions] = self.masked_lm_ids
        return ids

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def take(self, indices: NDArray[np.int64]) -> "Samples":
        """Return the samples at ``indices`` (any order, repeats allowed) as a new block."""
        tokens, masked = (self.input_ids, self.segment_ids), (self.masked_lm_positions, self.masked_lm_ids)
        (input_ids, segment_ids), offsets = _gather_ragged(tokens, self.sequence_offsets, indices)
        (positions, masked_ids), masked_offsets = _gather_ragged(masked, self.masked_lm_offsets, indices)
        labels = self.next_sentence_labels[indices]
        return Samples(input_ids, segment_ids, offsets, positions, masked_ids, masked_offsets, labels)

    def slice(self, start: int, stop: int) -> "Samples":
        """Return samples ``start`` to ``stop`` as a block that shares this block's memory, except for the offsets."""
        tokens = slice(*self.sequence_offsets[[start, stop]])
        masked = slice(*self.masked_lm_offsets[[start, stop]])
        return Samples(
            *(self.input_ids[tokens], self.segment_ids[tokens]),
            self.sequence_offsets[start : stop + 1] - tokens.start,
            *(self.masked_lm_positions[masked], self.masked_lm_ids[masked]),
            self.masked_lm_offsets[start : stop + 1] - masked.start,
            self.next_sentence_labels[start:stop],
        )

    def digest(self) -> str:
        """Return the SHA-256 of the arrays' names, types and contents. Equal samples in equal order have equal digests."""
        state = hashlib.sha256()
        # Neither the order of the fields nor the byte order of a type may change, because the digest depends on both.
        for field in fields(self):
            array = np.ascontiguousarray(getattr(self, field.name))
            state.update(f"{field.name}:{array.dtype.str}:{array.shape}\n".encode())
            state.update(array.data)
        return state.hexdigest()

    def sample_digests(self) -> NDArray[np.uint64]:
        """Return a 64-bit digest of each sample's content [n].

        Two data sets that hold the same samples in any order have equal sums of digests modulo 2^64. The digests detect
        accidental changes, but not deliberate collisions.
        """
        # Shift the label beyond the bits of any length, so that label and length stay separate.
        digests = _mix((self.next_sentence_labels.astype(np.uint64) << np.uint64(40)) | self.lengths.astype(np.uint64))
        for kind, offsets, values in (
            (1, self.sequence_offsets, (self.input_ids, self.segment_ids)),
            (2, self.masked_lm_offsets, (self.masked_lm_ids, self.masked_lm_positions)),
        ):
            for rows in row_blocks(offsets):
                digests[rows.start : rows.stop] += _ragged_digests(kind, offsets[rows.start : rows.stop + 1], values)
        # Mix again for each sample. Otherwise, exchanging elements between samples would not change the sum of digests.
        return _mix(digests)


DTYPES = {
    "input_ids": np.dtype("<u2"),
    "segment_ids": np.dtype("u1"),
    "sequence_offsets": np.dtype("<i8"),
    "masked_lm_positions": np.dtype("<u2"),
    "masked_lm_ids": np.dtype("<u2"),
    "masked_lm_offsets": np.dtype("<i8"),
    "next_sentence_labels": np.dtype("u1"),
}
"""Stored type of each array."""


class SampleBuilder:
    """Collector of individual samples. It keeps references to their bytes and copies the bytes once at the end.

    To gather samples with index arrays would cost a fixed time for each file. If a batch's samples are in thousands of
    files, this time would far exceed the time for the copy.
    """

    def __init__(self) -> None:
        self._columns: tuple[list[memoryview | bytes], ...] = ([], [], [], [])
        self._labels = bytearray()

    def add(self, *parts: memoryview | bytes, next_sentence_label: int) -> None:
        """Add one sample, given as the bytes of its ids, segment ids, masked positions and masked ids.

        Segment ids have one byte each. The other values are little-endian uint16.
        """
        for column, part in zip(self._columns, parts, strict=True):
            column.append(part)
        self._labels.append(next_sentence_label)

    def __len__(self) -> int:
        return len(self._labels)

    def samples(self) -> Samples:
        """Return the added samples in order, in writable arrays."""
        # Use bytearray, because arrays over bytes are read-only.
        input_ids, segment_ids, positions, masked_ids = (
            np.frombuffer(bytearray().join(column), kind)
            for column, kind in zip(self._columns, ("<u2", "u1", "<u2", "<u2"), strict=True)
        )
        # Compute lengths from bytes: a segment id has one byte, and a masked id has two bytes.
        offsets = offsets_of(np.array([len(part) for part in self._columns[1]], np.int64))
        masked_offsets = offsets_of(np.array([len(part) // 2 for part in self._columns[3]], np.int64))
        labels = np.frombuffer(self._labels, "u1")
        return Samples(input_ids, segment_ids, offsets, positions, masked_ids, masked_offsets, labels)


def row_blocks(offsets: NDArray[np.int64]) -> Iterator[range]:
    """Yield consecutive ranges of at least one ragged row, with about ``_ELEMENTS_AT_A_TIME`` elements in each range."""
    start = 0
    while start < len(offsets) - 1:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _ELEMENTS_AT_A_TIME, side="right")) - 1)
        yield range(start, stop)
        start = stop


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the starts of ragged rows with these lengths, followed by the sum of the lengths [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_indices(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the flat element indices of ragged rows that start at ``starts`` and have ``lengths``, row after row."""
    shift = np.repeat(starts - offsets_of(lengths)[:-1], lengths)
    return np.arange(len(shift)) + shift


def concatenate(blocks: Sequence[Samples]) -> Samples:
    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(block, name) for block in blocks])

    return Samples(
        *(joined("input_ids"), joined("segment_ids"), offsets_of(joined("lengths"))),
        *(joined("masked_lm_positions"), joined("masked_lm_ids"), offsets_of(joined("masked_counts"))),
        joined("next_sentence_labels"),
    )


def synthetic_samples(
    lengths: NDArray[np.integer], vocab_size: int, seed: int = 0, masked_lm_prob: float = 0.15
) -> Samples:
    """Return pretraining samples of random tokens, with about ``masked_lm_prob * length`` masked tokens in each sample.

    ``lengths`` [n] must all be at least 3, for [CLS] and two segments.
    """
    if len(lengths) == 0 or lengths.min() < 3:
        raise ValueError("synthetic samples need lengths of at least 3 tokens")
    generator = np.random.default_rng(seed)
    lengths = lengths.astype(np.int64)
    masked_counts = np.maximum(1, np.rint(masked_lm_prob * lengths).astype(np.int64))
    tokens, masked = int(lengths.sum()), int(masked_counts.sum())
    first_segments = (lengths + 1) // 2
    segment_sizes = np.stack([first_segments, lengths - first_segments], axis=1).ravel()
    positions = [
        # Position 0 is [CLS], which is never masked.
        np.sort(generator.choice(np.arange(1, length), count, replace=False))
        for length, count in zip(lengths.tolist(), masked_counts.tolist(), strict=True)
    ]
    return Samples(
        input_ids=generator.integers(0, vocab_size, tokens).astype(np.uint16),
        segment_ids=np.repeat(np.tile(np.array([0, 1], dtype=np.uint8), len(lengths)), segment_sizes),
        sequence_offsets=offsets_of(lengths),
        masked_lm_positions=np.concatenate(positions).astype(np.uint16),
        masked_lm_ids=generator.integers(0, vocab_size, masked).astype(np.uint16),
        masked_lm_offsets=offsets_of(masked_counts),
        next_sentence_labels=generator.integers(0, 2, len(lengths)).astype(np.uint8),
    )


def scrambled(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014) to ``bits`` in place, and return them."""
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def _gather_ragged(
    arrays: tuple[NDArray[Any], ...], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[list[NDArray[Any]], NDArray[np.int64]]:
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
    """Hash (kind, position in the row, both values) for each element, and sum the hashes over each ragged row [n]."""
    start, stop = int(offsets[0]), int(offsets[-1])
    first, second = (array[start:stop].astype(np.uint64) for array in values)
    place = (np.arange(start, stop) - np.repeat(offsets[:-1], np.diff(offsets))).astype(np.uint64)
    # Each of the four numbers gets 16 bits.
    mixed = _mix(first | second << np.uint64(16) | place << np.uint64(32) | np.uint64(kind << 48))
    # reduceat would return the next element for an empty row, so empty rows are skipped.
    filled = np.flatnonzero(np.diff(offsets))
    sums = np.zeros(len(offsets) - 1, np.uint64)
    if len(filled):
        sums[filled] = np.add.reduceat(mixed, offsets[filled] - start)
    return sums


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return scrambled(values + SPLITMIX64_GAMMA)
