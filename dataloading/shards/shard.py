"""A shard: one file of samples, whatever its layout, and what may be said of it.

Readers differ in how they find the samples of a file; what they promise, and how they refuse damaged content, is here.
"""

import json
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from console.files import open_regular
from dataloading.shards.samples import SampleBuilder, Samples

# For the type alone: that module brings the tokenizers library.
if TYPE_CHECKING:
    from dataloading.text.tokenization import Vocabulary

REMEDY = "copy or prepare the data set again"

MAX_ID = (1 << 16) - 1
"""Ids, positions and lengths are held in 16 bits."""


@dataclass(frozen=True)
class DatasetInfo:
    """Description of the samples and of what they were made from."""

    vocab_size: int
    max_seq_length: int
    max_predictions_per_seq: int
    vocabulary_md5: str
    vocabulary_sha256: str
    """Both digests are empty where a file does not say which vocabulary its ids belong to."""
    options: dict[str, int | float | bool | str]
    """The settings that made the samples, by name; the same in every shard of a data set."""
    sources: dict[str, str]
    """SHA-256 of each text that the samples of this file, or of the whole data set, were made from, by name."""

    def __post_init__(self) -> None:
        limits = {"vocab_size": MAX_ID + 1, "max_seq_length": MAX_ID, "max_predictions_per_seq": MAX_ID}
        for name, most in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:  # JSON's true is an int too, and 1
                raise ValueError(f"{name} is {value!r}; expected 1 to {most:,}")
        for name in ("vocabulary_md5", "vocabulary_sha256"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is no text")
        for name, kinds in (("options", (int, float, bool, str)), ("sources", (str,))):
            values = getattr(self, name)
            if not isinstance(values, dict) or not all(isinstance(value, kinds) for value in values.values()):
                raise ValueError(f"{name} are no settings by name")

    @classmethod
    def of(
        cls,
        vocabulary: "Vocabulary",
        max_seq_length: int,
        max_predictions_per_seq: int,
        options: dict[str, int | float | bool | str] | None = None,
        sources: dict[str, str] | None = None,
    ) -> Self:
        """Describe samples that are made with ``vocabulary``."""
        return cls(
            vocabulary.size,
            max_seq_length,
            max_predictions_per_seq,
            vocabulary.md5,
            vocabulary.sha256,
            options or {},
            sources or {},
        )

    def without_sources(self) -> Self:
        """Return what all shards of a data set agree on."""
        return replace(self, sources={})

    def to_json(self) -> str:
        """Return one line of JSON, keys sorted."""
        # Sorted, so that equal descriptions make equal files.
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class ShardRecord:
    """Row of the manifest."""

    name: str
    samples: int
    tokens: int
    masked_tokens: int
    digest: str
    """`Samples.digest` of the content."""
    file_bytes: int

    def __post_init__(self) -> None:
        # A name, not a path: a manifest must not lead out of its folder.
        plain = isinstance(self.name, str) and self.name not in ("", "..") and self.name.isprintable()
        if not plain or Path(self.name).name != self.name:
            raise ValueError(f"shard name {self.name!r}; expected a file name such as part_00000_of_00001.hdf5")
        counts = (self.samples, self.tokens, self.masked_tokens, self.file_bytes)
        if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
            raise ValueError(f"counts of {self.name} are no whole numbers from 0")
        if not isinstance(self.digest, str):
            raise ValueError(f"digest of {self.name} is {self.digest!r}; expected text")


class Shard(ABC):
    """A file of samples that is open for reading; a context manager.

    A file that can be read in place is mapped, and mapped pages that were read count as this process's memory until
    `forget`; others are held in memory.
    """

    layout: str
    """Name of the layout, as ``convert --to`` takes it."""
    digest: str | None = None
    """`Samples.digest` of the content, where the file carries it."""
    remedy: str = REMEDY
    """What to do about bad content."""
    held_bytes: int = 0
    """Memory that this shard holds as long as it is open."""
    _content: mmap.mmap | None = None

    def __init__(self, path: Path, info: DatasetInfo) -> None:
        self.path = path
        self.info = info
        self.file_bytes = path.stat().st_size

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.int64]:
        """[n] real tokens of each sample."""

    @property
    @abstractmethod
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] masked tokens of each sample."""

    @abstractmethod
    def _between(self, start: int, stop: int) -> Samples:
        """Samples ``start`` to ``stop``, unchecked."""

    @abstractmethod
    def _at(self, indices: NDArray[np.int64]) -> Samples:
        """The samples at ``indices``, unchecked."""

    @abstractmethod
    def add_to(self, builder: SampleBuilder, index: int) -> bool:
        """Add one sample, unchecked, to ``builder``; False where this file has no short way to do so."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, start: int, stop: int) -> Samples:
        """Samples ``start`` to ``stop``; IndexError outside the shard, ValueError for bad content.

        The arrays may be read-only views of the file, which stays mapped as long as they live.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.path}: samples {start} to {stop} asked for; it holds {len(self):,}")
        return self._checked(lambda: self._between(start, stop))

    def take(self, indices: NDArray[np.int64]) -> Samples:
        """The samples at ``indices`` in that order, copied; errors as in `read`."""
        check_indices(indices, len(self), self.path)
        return self._checked(lambda: self._at(indices))

    def _checked(self, find: Callable[[], Samples]) -> Samples:
        """Return samples after checking them; ``ValueError`` names this file, which others may overwrite at any time."""
        self.require_whole()
        try:
            samples = find()
            check_content(samples, self.info, self.path, self.remedy)
        except (ValueError, IndexError, MemoryError) as error:
            if str(error).startswith(str(self.path)):
                raise
            raise ValueError(f"{self.path}: overwritten while it was read ({error}); {REMEDY}") from None
        return samples

    def verify(self, digest: str | None = None) -> Samples:
        """Read and return everything; ValueError if the content is not what was written.

        ``digest`` is what a manifest says of the content; without one, what the file itself says, if it does.
        """
        # The manifest counts first: a shard that was put in the place of another one carries its own digest, and a
        # right one.
        expected = digest or self.digest
        samples = self.read(0, len(self))
        found = samples.digest()
        if expected is not None and found != expected:
            raise ValueError(f"{self.path}: content has digest {found[:16]}..., expected {expected[:16]}...; {REMEDY}")
        return samples

    def record(self) -> ShardRecord:
        """Return what a manifest says of this file; everything is read where the file carries no digest."""
        return ShardRecord(
            name=self.path.name,
            samples=len(self),
            tokens=int(self.lengths.sum()),
            masked_tokens=int(self.masked_counts.sum()),
            digest=self.digest or self.read(0, len(self)).digest(),
            file_bytes=self.file_bytes,
        )

    def require_whole(self) -> None:
        """Raise ``ValueError`` where the file has become shorter: reading what is gone would end the process (SIGBUS)."""
        # size() asks the file, len() the map.
        if self._content is not None and self._content.size() < len(self._content):
            raise ValueError(f"{self.path}: it has become shorter while it was read; {REMEDY}")

    def forget(self) -> None:
        """Give the memory of mapped pages back; they are read again when needed."""
        if self._content is not None:
            self._content.madvise(mmap.MADV_DONTNEED)

    def expect_random_reads(self) -> None:
        """Tell the system that what lies around a sample is not wanted, which it would read ahead otherwise."""
        if self._content is not None:
            self._content.madvise(mmap.MADV_RANDOM)

    def close(self) -> None:
        """Let go of the file; samples that were read stay valid."""
        # Dropped and not closed: a map refuses to close while there are views of it, and it goes with the last of them.
        # Whatever of a shard of any kind may be a view of the map.
        for name in ("_content", "_samples", "_columns", "_bytes", "_labels", "_offsets"):
            vars(self).pop(name, None)


class FlatShard(Shard):
    """A shard whose samples lie in flat arrays, either views of the mapped file or held in memory."""

    def __init__(
        self, path: Path, info: DatasetInfo, layout: str, samples: Samples, content: mmap.mmap | None = None
    ) -> None:
        super().__init__(path, info)
        check_offsets(samples, path)  # slices beyond an end are short, and say nothing
        self.layout = layout
        self._samples = samples
        self._content = content
        self.held_bytes = 0 if content is not None else samples.nbytes
        arrays = (samples.input_ids, samples.segment_ids, samples.masked_lm_positions, samples.masked_lm_ids)
        # Memoryviews, out of which a slice or a number costs less than out of an array.
        self._bytes = tuple(array.data.cast("B") if len(array) else memoryview(b"") for array in arrays)
        self._labels = samples.next_sentence_labels.data
        # By way of bytes, as a view cannot be cast from one integer format to another.
        self._offsets = tuple(
            offsets.data.cast("B").cast("q") for offsets in (samples.sequence_offsets, samples.masked_lm_offsets)
        )

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] real tokens of each sample."""
        return self._samples.lengths

    @property
    def masked_counts(self) -> NDArray[np.int64]:
        """[n] masked tokens of each sample."""
        return self._samples.masked_counts

    def _between(self, start: int, stop: int) -> Samples:
        return self._samples.slice(start, stop)

    def _at(self, indices: NDArray[np.int64]) -> Samples:
        samples, info = self._samples, self.info
        # Memory for a batch is allocated by its lengths, which may have changed since the file was opened.
        for offsets, most in (
            (samples.sequence_offsets, info.max_seq_length),
            (samples.masked_lm_offsets, info.max_predictions_per_seq),
        ):
            lengths = offsets[indices + 1] - offsets[indices]
            if len(lengths) and not (lengths.min() >= 0 and lengths.max() <= most):
                raise ValueError(f"lengths of {lengths.min()} to {lengths.max()}, expected 0 to {most}")
        return samples.take(indices)

    def add_to(self, builder: SampleBuilder, index: int) -> bool:
        """Add one sample, unchecked, to ``builder``."""
        input_ids, segment_ids, masked_lm_positions, masked_lm_ids = self._bytes
        sequence_offsets, masked_lm_offsets = self._offsets
        # Offsets count elements; ids and positions have two bytes each.
        start, stop = sequence_offsets[index], sequence_offsets[index + 1]
        first, last = 2 * masked_lm_offsets[index], 2 * masked_lm_offsets[index + 1]
        builder.add(
            input_ids[2 * start : 2 * stop],
            segment_ids[start:stop],
            masked_lm_positions[first:last],
            masked_lm_ids[first:last],
            self._labels[index],
        )
        return True


def map_file(path: Path) -> mmap.mmap:
    """A read-only memory map of a whole file.

    Raises:
        ValueError: it is missing, empty or unreadable.
    """
    # Python's own open(): opened by another library, the file would raise no audit event "open", by which a timed run
    # notices that data is touched.
    try:
        with open_regular(path) as file:
            # The map keeps a descriptor of its own.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {REMEDY}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {REMEDY}") from None


def check_indices(indices: NDArray[np.int64], count: int, path: Path) -> None:
    """Raise ``IndexError`` unless every index is from 0 to ``count`` - 1."""
    if len(indices) and not (indices.min() >= 0 and indices.max() < count):
        raise IndexError(f"{path}: indices {indices.min()} to {indices.max()} asked for; it holds {count:,} samples")


def check_offsets(samples: Samples, path: Path) -> None:
    """Raise ``ValueError`` unless the arrays fit together: lengths agree, offsets rise from 0 to the end."""
    count, token_count, masked_count = len(samples), len(samples.input_ids), len(samples.masked_lm_ids)
    if len(samples.segment_ids) != token_count or len(samples.masked_lm_positions) != masked_count:
        raise ValueError(f"{path}: arrays of one kind differ in length; {REMEDY}")
    for name, offsets, end in (
        ("sequence_offsets", samples.sequence_offsets, token_count),
        ("masked_lm_offsets", samples.masked_lm_offsets, masked_count),
    ):
        rises = (
            len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == end and (offsets[1:] >= offsets[:-1]).all()
        )
        if not rises:
            raise ValueError(f"{path}: {name} do not rise from 0 to {end:,} over {count:,} samples; {REMEDY}")


def check_content(samples: Samples, info: DatasetInfo, path: Path, remedy: str = REMEDY) -> None:
    """Raise ``ValueError``, which ends in ``remedy``, unless every value is in the range that ``info`` promises."""
    lengths, masked_counts = samples.lengths, samples.masked_counts
    # From a masked position to the end of its sample, in int64: below 1 where the position lies beyond it.
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
            raise ValueError(f"{path}: {name}: {values.min()} to {values.max()}, expected {least} to {most}; {remedy}")
