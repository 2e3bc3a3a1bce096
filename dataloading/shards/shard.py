"""The interface of a shard, a file of samples in any layout, and checks of its content."""

import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from console.files import open_regular
from dataloading.options import Normalization
from dataloading.shards.samples import SampleBuilder, Samples
from dataloading.text.losses import TextCounts
from dataloading.text.vocabulary import Vocabulary

REMEDY = "copy or prepare the data set again"

MAX_ID = (1 << 16) - 1
"""Largest id, position and length. They are stored in 16 bits."""

VOCABULARY_FITS = "vocabulary_fits"
"""Name of the setting that tells whether normalized text can contain nearly all tokens of the vocabulary."""

_Size = Annotated[int, Meta(ge=1, le=MAX_ID + 1)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
# Only a plain file name is valid, so that a manifest cannot refer to files outside its folder.
_FileName = Annotated[str, Meta(pattern=r"^(?!\.\.?$)[^/\x00-\x1f\x7f]+$", max_length=255)]


@dataclass(frozen=True)
class DatasetInfo:
    """Description of samples and of their sources. The constraints on the fields are checked when a file is read."""

    vocab_size: _Size
    max_seq_length: _Size
    max_predictions_per_seq: _Size
    vocabulary_md5: str
    vocabulary_sha256: str
    """SHA-256 of the vocabulary. This and the MD5 are empty if the file does not name the vocabulary of its ids."""
    options: dict[str, int | float | bool | str]
    """Settings that the samples were made with, by name. They are equal in all shards of a data set."""
    sources: dict[str, str]
    """SHA-256 of each source text, by name."""
    text: TextCounts = field(default_factory=TextCounts)
    """Sizes of the text and of its lost parts. All are zero if they were not recorded."""

    @classmethod
    def of(
        cls,
        vocabulary: Vocabulary,
        max_seq_length: int,
        max_predictions_per_seq: int,
        options: dict[str, int | float | bool | str] | None = None,
        sources: dict[str, str] | None = None,
    ) -> Self:
        sizes = vocabulary.size, max_seq_length, max_predictions_per_seq
        return cls(*sizes, vocabulary.md5, vocabulary.sha256, options or {}, sources or {})

    @property
    def normalization(self) -> Normalization | None:
        """The normalization of the text, or None if it is not recorded."""
        return Normalization.recorded(self.options)

    def without_sources(self) -> Self:
        """Return the part of the description that all shards of a data set share."""
        return replace(self, sources={}, text=TextCounts())


@dataclass(frozen=True)
class ShardRecord:
    """A shard's entry in the manifest."""

    name: _FileName
    samples: _Count
    tokens: _Count
    masked_tokens: _Count
    digest: str
    """The digest of all samples in the file, as `Samples.digest` computes it."""
    file_bytes: _Count


class Shard(ABC):
    """An open file of samples in any layout. Samples are read from a memory map of the file if the layout allows it."""

    layout: str
    """native, fixed, varlength, packed or tfrecord."""
    digest: str | None = None
    """The digest that the file states, if any."""
    held_bytes: int = 0
    """Bytes of memory that this shard uses while it is open."""
    sequence_offsets: NDArray[np.int64]
    """[n + 1] start of each sample among the tokens of all samples."""
    masked_lm_offsets: NDArray[np.int64]
    """[n + 1] start of each sample among the masked tokens of all samples."""

    def __init__(self, path: Path, info: DatasetInfo, content: mmap.mmap | None) -> None:
        """Set the attributes. ``content`` is the map of the whole file, or None if the samples are held in memory."""
        self.path = path
        self.info = info
        self.file_bytes = path.stat().st_size
        self._content = content

    def __len__(self) -> int:
        return len(self.sequence_offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] number of real tokens in each sample."""
        return np.diff(self.sequence_offsets)

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] number of masked tokens in each sample."""
        return np.diff(self.masked_lm_offsets)

    @abstractmethod
    def add_to(self, builder: SampleBuilder, index: int) -> None:
        """Add one sample to ``builder`` without checking its content."""

    def _between(self, start: int, stop: int) -> Samples:
        builder = SampleBuilder()
        for index in range(start, stop):
            self.add_to(builder, index)
        return builder.samples()

    def read(self, start: int, stop: int) -> Samples:
        """Return samples ``start`` to ``stop`` in arrays that may be read-only views of the file.

        Raises ``IndexError`` if the samples are outside the shard, and ``ValueError`` if their content is invalid.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.path}: samples {start} to {stop} asked for; it holds {len(self):,}")
        self.require_whole()
        samples = self._between(start, stop)
        check_content(samples, self.info, self.path)
        return samples

    def require_whole(self) -> None:
        """Raise ``ValueError`` if the file has become shorter. Reading missing pages would kill the process (SIGBUS)."""
        # size() returns the current size of the file, and len() the size when it was mapped.
        if self._content is not None and self._content.size() < len(self._content):
            raise ValueError(f"{self.path}: the file became shorter while it was read; {REMEDY}")

    def verify(self, digest: str | None = None) -> Samples:
        """Read and return all samples. Raises ``ValueError`` if the content does not match its digest.

        ``digest`` is the expected digest from a manifest. By default, the file's own digest is used, if it has one.
        """
        # Prefer the manifest's digest, because a shard from another data set also matches the digest that it contains.
        expected = digest or self.digest
        samples = self.read(0, len(self))
        found = samples.digest()
        if expected is not None and found != expected:
            raise ValueError(f"{self.path}: content has digest {found[:16]}..., expected {expected[:16]}...; {REMEDY}")
        return samples

    def forget(self) -> None:
        """Release the mapped pages, which count as memory of this process. They are read again when they are needed."""
        if self._content is not None:
            self._content.madvise(mmap.MADV_DONTNEED)

    def expect_random_reads(self) -> None:
        """Advise the system not to read ahead around each sample."""
        if self._content is not None:
            self._content.madvise(mmap.MADV_RANDOM)


class FlatShard(Shard):
    """A shard whose samples are flat arrays: either views of the mapped file, or arrays in memory."""

    def __init__(
        self, path: Path, info: DatasetInfo, layout: str, samples: Samples, content: mmap.mmap | None = None
    ) -> None:
        super().__init__(path, info, content)
        check_offsets(samples, path)
        self.layout = layout
        self.sequence_offsets, self.masked_lm_offsets = samples.sequence_offsets, samples.masked_lm_offsets
        self._samples = samples
        self.held_bytes = 0 if content is not None else samples.nbytes
        arrays = (samples.input_ids, samples.segment_ids, samples.masked_lm_positions, samples.masked_lm_ids)
        # Slicing a memoryview is faster than slicing an array.
        self._bytes = tuple(array.data.cast("B") if len(array) else memoryview(b"") for array in arrays)
        self._labels = samples.next_sentence_labels.data
        # A memoryview cannot be cast directly from one integer format to another.
        self._offsets = tuple(
            offsets.data.cast("B").cast("q") for offsets in (self.sequence_offsets, self.masked_lm_offsets)
        )

    def _between(self, start: int, stop: int) -> Samples:
        return self._samples.slice(start, stop)

    def add_to(self, builder: SampleBuilder, index: int) -> None:
        input_ids, segment_ids, masked_lm_positions, masked_lm_ids = self._bytes
        sequence_offsets, masked_lm_offsets = self._offsets
        # Convert offsets from elements to bytes: ids and positions have two bytes each, and segment ids one.
        start, stop = sequence_offsets[index], sequence_offsets[index + 1]
        first, last = 2 * masked_lm_offsets[index], 2 * masked_lm_offsets[index + 1]
        builder.add(
            input_ids[2 * start : 2 * stop],
            segment_ids[start:stop],
            masked_lm_positions[first:last],
            masked_lm_ids[first:last],
            next_sentence_label=self._labels[index],
        )


def unknown_info(max_seq_length: int = MAX_ID, max_predictions_per_seq: int = MAX_ID) -> DatasetInfo:
    """Return the description of a file that contains none: no vocabulary, and by default the largest possible sizes."""
    return DatasetInfo(MAX_ID + 1, max_seq_length, max_predictions_per_seq, "", "", {}, {})


def map_file(path: Path) -> mmap.mmap:
    """Return a read-only memory map of a whole file. Raises ``ValueError`` if it is missing, empty or unreadable."""
    # Python's open() raises the audit event "open", which lets a timed run detect access to data.
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', error)}; {REMEDY}") from None


def check_offsets(samples: Samples, path: Path) -> None:
    """Raise ``ValueError`` unless the arrays are consistent: lengths agree, and offsets rise from 0 to the end."""
    count, token_count, masked_count = len(samples), len(samples.input_ids), len(samples.masked_lm_ids)
    if len(samples.segment_ids) != token_count or len(samples.masked_lm_positions) != masked_count:
        raise ValueError(f"{path}: arrays of tokens or of masked tokens differ in length; {REMEDY}")
    for name, offsets, end in (
        ("sequence_offsets", samples.sequence_offsets, token_count),
        ("masked_lm_offsets", samples.masked_lm_offsets, masked_count),
    ):
        has_ends = len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == end
        if not (has_ends and (offsets[1:] >= offsets[:-1]).all()):
            raise ValueError(f"{path}: {name} do not rise from 0 to {end:,} over {count:,} samples; {REMEDY}")


def check_content(samples: Samples, info: DatasetInfo, path: Path) -> None:
    """Raise ``ValueError`` unless every value is in the range that ``info`` specifies."""
    lengths, masked_counts = samples.lengths, samples.masked_counts
    # Number of tokens from each masked position to the end of its sample. Beyond the end, it is less than 1.
    room = np.repeat(lengths, masked_counts) - samples.masked_lm_positions
    for name, values, least, most in (
        ("sample length", lengths, 1, info.max_seq_length),
        ("masked tokens of a sample", masked_counts, 0, info.max_predictions_per_seq),
        ("input_ids", samples.input_ids, 0, info.vocab_size - 1),
        ("masked_lm_ids", samples.masked_lm_ids, 0, info.vocab_size - 1),
        ("segment_ids", samples.segment_ids, 0, 1),
        ("next_sentence_labels", samples.next_sentence_labels, 0, 1),
        ("tokens after a masked position", room, 1, info.max_seq_length),
    ):
        if len(values) and not (values.min() >= least and values.max() <= most):
            raise ValueError(f"{path}: {name}: {values.min()} to {values.max()}, expected {least} to {most}; {REMEDY}")


def narrow(values: NDArray[Any], dtype: Any, name: str) -> NDArray[Any]:
    """Cast non-negative integers to another type. Raises ``ValueError`` if a value does not fit."""
    most = np.iinfo(dtype).max
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {values.dtype}, expected integers; {REMEDY}")
    if len(values) and not (values.min() >= 0 and values.max() <= most):
        raise ValueError(f"{name}: {values.min()} to {values.max()}, expected 0 to {most}; {REMEDY}")
    return values.astype(dtype, copy=False)
