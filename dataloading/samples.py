"""A block of pretraining samples as flat arrays: the currency of the data stages.

Shapes: n samples, T real tokens in all, M masked tokens in all. Nothing is padded; sample i owns
``input_ids[sequence_offsets[i]:sequence_offsets[i + 1]]`` and likewise for the masked tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


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

    def take(self, indices: NDArray[np.int64]) -> "Samples":
        """The samples at ``indices`` (any order, repeats allowed), as a new block."""
        tokens, sequence_offsets = ragged_indices(self.sequence_offsets, indices)
        masked, masked_lm_offsets = ragged_indices(self.masked_lm_offsets, indices)
        return Samples(
            input_ids=self.input_ids[tokens],
            segment_ids=self.segment_ids[tokens],
            sequence_offsets=sequence_offsets,
            masked_lm_positions=self.masked_lm_positions[masked],
            masked_lm_ids=self.masked_lm_ids[masked],
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
        for field in fields(self):
            array = np.ascontiguousarray(getattr(self, field.name))
            state.update(f"{field.name}:{array.dtype.str}:{array.shape}\n".encode())
            state.update(array.data)
        return state.hexdigest()

    def row_digests(self) -> NDArray[np.void]:
        """[n] 16 bytes for each sample, BLAKE2b of all that belongs to it: equal for equal samples anywhere."""
        digests = bytearray()
        tokens, masked = self.sequence_offsets.tolist(), self.masked_lm_offsets.tolist()
        for row in range(len(self)):
            token_slice, masked_slice = slice(*tokens[row : row + 2]), slice(*masked[row : row + 2])
            state = hashlib.blake2b(self.next_sentence_labels[row].tobytes(), digest_size=16)
            for part in (
                self.input_ids[token_slice],
                self.segment_ids[token_slice],
                self.masked_lm_positions[masked_slice],
                self.masked_lm_ids[masked_slice],
            ):
                state.update(len(part).to_bytes(4, "little"))
                state.update(part.tobytes())
            digests += state.digest()
        return np.frombuffer(digests, "V16")


def ragged_indices(offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Flat element indices of the chosen ``rows`` of a ragged array, and the new offsets."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    new_offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    flat = np.arange(new_offsets[-1]) + np.repeat(starts - new_offsets[:-1], lengths)
    return flat, new_offsets


def concatenate(blocks: Sequence[Samples]) -> Samples:
    """Several blocks as one, in the given order."""

    def joined_offsets(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        lengths = [np.diff(part) for part in parts]
        return np.concatenate(([0], np.cumsum(np.concatenate(lengths)))).astype(np.int64)

    return Samples(
        input_ids=np.concatenate([block.input_ids for block in blocks]),
        segment_ids=np.concatenate([block.segment_ids for block in blocks]),
        sequence_offsets=joined_offsets([block.sequence_offsets for block in blocks]),
        masked_lm_positions=np.concatenate([block.masked_lm_positions for block in blocks]),
        masked_lm_ids=np.concatenate([block.masked_lm_ids for block in blocks]),
        masked_lm_offsets=joined_offsets([block.masked_lm_offsets for block in blocks]),
        next_sentence_labels=np.concatenate([block.next_sentence_labels for block in blocks]),
    )
