"""Reader for the reference script's output, TFRecord files of ``tf.train.Example``, without TensorFlow.

A record is framed as length (uint64), masked CRC-32C of the length, data, masked CRC-32C of the data, all
little-endian. The data is a protobuf message: Example { Features features = 1 }, Features { map<string, Feature>
feature = 1 }, and a Feature holds a packed list of integers in field 3.
(tensorflow/core/example/{example,feature}.proto.)

Features of a sample, padded with zeros: input_ids, input_mask, segment_ids [max_seq_length]; masked_lm_positions,
masked_lm_ids, masked_lm_weights [max_predictions_per_seq]; next_sentence_labels [1]. The weights, which are 1.0 for
masked tokens and 0.0 for padding, are not read.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dataloading.shards.samples import SampleBuilder
from dataloading.shards.shard import REMEDY, FlatShard, narrow, unknown_info

_HEADER = struct.Struct("<QI")
_MAX_RECORD_BYTES = 1 << 20
"""Maximum size of a record in bytes. A sample of 512 tokens has about 2,500 bytes."""

_TOKEN_LISTS = ("input_ids", "input_mask", "segment_ids")
_MASKED_LISTS = ("masked_lm_positions", "masked_lm_ids")
_FEATURES = (*_TOKEN_LISTS, *_MASKED_LISTS, "next_sentence_labels")
_MALFORMED = "its data is not a valid tf.train.Example"

_Lists = dict[str, NDArray[np.int64]]


def is_tfrecord(first_bytes: bytes) -> bool:
    """Tell whether a file begins with a record's length and its CRC. ``first_bytes`` should hold at least 12 bytes."""
    if len(first_bytes) < _HEADER.size:
        return False
    length, crc = _HEADER.unpack_from(first_bytes)
    return 0 < length <= _MAX_RECORD_BYTES and _masked_crc(first_bytes[:8]) == crc


def open_tfrecord(path: Path, content: mmap.mmap) -> FlatShard:
    """Read all samples of a mapped file into memory, without padding. Raises ``ValueError`` if a record is damaged."""
    builder = SampleBuilder()
    sizes = (1, 1)
    place = 0
    while place < len(content):
        try:
            data = _record_at(content, place)
            lists = _lists_of(data)
            _add_sample(lists, builder)
        except ValueError as error:
            raise ValueError(f"{path}: record {len(builder):,} at byte {place:,}: {error}; {REMEDY}") from None
        if place == 0:
            sizes = len(lists["input_ids"]), len(lists["masked_lm_ids"])
        place += _HEADER.size + len(data) + 4
    return FlatShard(path, unknown_info(*sizes), "tfrecord", builder.samples())


def _record_at(content: mmap.mmap, place: int) -> bytes:
    left = len(content) - place
    if left < _HEADER.size:
        raise ValueError("the file ends within a record's header")
    length, crc = _HEADER.unpack_from(content, place)
    if _masked_crc(content[place : place + 8]) != crc:
        raise ValueError("the CRC of its length is wrong: damaged, or not a TFRecord file")
    if length > left - _HEADER.size - 4:
        raise ValueError(f"{length:,} bytes long, but the file ends {left:,} bytes after the beginning of the record")
    if length > _MAX_RECORD_BYTES:
        raise ValueError(f"{length:,} bytes long; expected samples of at most {_MAX_RECORD_BYTES:,}")
    data = content[place + _HEADER.size : place + _HEADER.size + length]
    if struct.unpack_from("<I", content, place + _HEADER.size + length) != (_masked_crc(data),):
        raise ValueError("the CRC of its data is wrong: damaged")
    return data


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _add_sample(lists: _Lists, builder: SampleBuilder) -> None:
    """Add a sample without its padding. Raises ``ValueError`` if the lists do not form a sample."""
    for names, width in ((_TOKEN_LISTS, len(lists["input_ids"])), (_MASKED_LISTS, len(lists["masked_lm_ids"]))):
        if any(len(lists[name]) != width for name in names) or len(lists["next_sentence_labels"]) != 1:
            raise ValueError("its lists disagree in length")
    # Position 0 holds [CLS], which is never masked, so 0 marks padding.
    length, masked = (int(np.count_nonzero(lists[name])) for name in ("input_mask", "masked_lm_positions"))
    if not length or not (lists["input_mask"][:length] == 1).all():
        raise ValueError("input_mask is not ones and then zeros")
    ids, positions, labels = (
        narrow(lists[name][:size], "<u2", name)
        for name, size in (("input_ids", length), ("masked_lm_positions", masked), ("masked_lm_ids", masked))
    )
    segments, next_sentence = lists["segment_ids"][:length], lists["next_sentence_labels"]
    if not (np.isin(segments, (0, 1)).all() and np.isin(next_sentence, (0, 1)).all()):
        raise ValueError("segment_ids or next_sentence_labels hold values other than 0 and 1")
    if masked and (not 0 < positions[0] <= positions[-1] < length or (positions[1:] <= positions[:-1]).any()):
        raise ValueError("masked_lm_positions are not ascending numbers from 1 to the sample's last position")
    arrays = (ids, segments.astype(np.uint8), positions, labels)
    builder.add(*(array.tobytes() for array in arrays), next_sentence_label=int(next_sentence[0]))


def _lists_of(example: bytes) -> _Lists:
    """Return the known features of an Example. Raises ``ValueError`` if a feature is missing or repeated."""
    lists: _Lists = {}
    for features in _messages(example, 1):
        for entry in _messages(features, 1):
            name = b"".join(_messages(entry, 1)).decode(errors="replace")
            if name not in _FEATURES:
                continue
            if name in lists:
                raise ValueError(f"the feature {name} occurs twice")
            feature = b"".join(_messages(entry, 2))  # join repeated messages, as protobuf does
            integers = b"".join(values for each in _messages(feature, 3) for values in _messages(each, 1))
            lists[name] = _integers(integers)
    if absent := [name for name in _FEATURES if not len(lists.get(name, ()))]:
        raise ValueError(f"the feature {absent[0]} is missing, empty or of another type")
    return lists


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the content of each length-delimited field with the number ``wanted``. Other fields are skipped."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        size = 0
        if wire == 0:
            _, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        elif wire == 2:
            size, place = _varint(data, place)
        # Groups and unassigned types have no length, so they cannot be skipped.
        if wire in (3, 4, 6, 7) or number == 0 or size > len(data) - place or (number == wanted and wire != 2):
            raise ValueError(_MALFORMED)
        if number == wanted:
            yield data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the unsigned value at offset ``place``, and the offset after it."""
    value = 0
    for index, octet in enumerate(data[place : place + 10]):  # a value has at most ten bytes with seven bits each
        value |= (octet & 0x7F) << (7 * index)
        if octet < 0x80:
            return value, place + index + 1
    raise ValueError(_MALFORMED)


def _integers(packed: bytes) -> NDArray[np.int64]:
    octets = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if len(ends) == len(octets):  # every value has one byte, as flags and padding do
        return octets.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    if octets[-1] >= 0x80 or (ends - starts).max() > 9:
        raise ValueError(_MALFORMED)
    shifts = 7 * (np.arange(len(octets)) - np.repeat(starts, ends - starts + 1))
    return np.add.reduceat((octets & 0x7F).astype(np.uint64) << shifts.astype(np.uint64), starts).astype(np.int64)
