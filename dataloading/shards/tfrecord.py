"""The reference's own output: TFRecord files of ``tf.train.Example``, read without TensorFlow.

A record is framed as length (uint64), masked CRC-32C of the length, data, masked CRC-32C of the data; all little-endian.
The data is a protobuf message: Example { Features features = 1 }, Features { map<string, Feature> feature = 1 }, and a
Feature holds a list of floats (2) or of integers (3), packed or not. (tensorflow/core/example/{example,feature}.proto.)

Features of a sample, padded with zeros: input_ids, input_mask, segment_ids [max_seq_length]; masked_lm_positions,
masked_lm_ids [max_predictions_per_seq] and masked_lm_weights, which are floats; next_sentence_labels [1].
"""

import mmap
import struct
from array import array
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dataloading.compiled import compiled
from dataloading.shards.samples import Samples, concatenate, offsets_of

_HEADER = struct.Struct("<QI")
_FRAME_BYTES = 16
"""Of a record, besides its data."""
_MAX_RECORD_BYTES = 1 << 20
"""A sample of 512 tokens has about 2,500; memory for a block is reserved by the lengths that the file states."""
_BLOCK_RECORDS = 256
_REMEDY = "copy or make the file again"

_FEATURES = (
    *("input_ids", "input_mask", "segment_ids"),
    *("masked_lm_positions", "masked_lm_ids", "masked_lm_weights", "next_sentence_labels"),
)
_IDS, _MASK, _SEGMENTS, _POSITIONS, _LABELS, _WEIGHTS, _NEXT = range(len(_FEATURES))
_NAMES = np.frombuffer("".join(_FEATURES).encode(), np.uint8)
_NAME_OFFSETS = np.cumsum([0, *map(len, _FEATURES)])
_ONE = 0x3F800000
"""1.0 in the bits of a float32."""

_MALFORMED, _REPEATED, _MISSING, _KIND, _LENGTHS, _NOT_PREFIX, _RANGE = range(1, 8)
_PROBLEMS = {
    _MALFORMED: "its data is no tf.train.Example",
    _REPEATED: "a feature is there twice",
    _MISSING: f"a feature is missing or empty; expected {', '.join(_FEATURES)}",
    _KIND: "a feature has values of the wrong kind; expected floats in masked_lm_weights, and integers elsewhere",
    _LENGTHS: "its lists disagree in length",
    _NOT_PREFIX: "input_mask or masked_lm_weights is not ones and then zeros, or input_mask has no one",
    _RANGE: "ids beyond 65,535, positions beyond the sample or not ascending, or labels other than 0 and 1",
}


def is_tfrecord(first_bytes: bytes) -> bool:
    """Tell whether a file that begins with these bytes (12 at least) is a TFRecord file: a length with the right CRC."""
    if len(first_bytes) < _HEADER.size:
        return False
    length, crc = _HEADER.unpack_from(first_bytes)
    return 0 < length <= _MAX_RECORD_BYTES and _masked_crc(first_bytes[:8]) == crc


def read_tfrecord(path: Path, content: mmap.mmap) -> tuple[Samples, int, int]:
    """All samples of a mapped file, without padding, and the padded lengths of the first one's tokens and masked tokens.

    Each record is compared with its CRC.

    Raises:
        ValueError: truncated or damaged, or a record is no sample.
    """
    bounds = _find_records(path, content)
    _, max_seq_length, max_predictions_per_seq = _read_block(path, content, bounds, 0, 1)
    # In blocks: while a record is decoded there has to be room for a value in every byte of it.
    firsts = range(0, len(bounds), _BLOCK_RECORDS)
    blocks = [_read_block(path, content, bounds, first, first + _BLOCK_RECORDS)[0] for first in firsts]
    return concatenate(blocks), max_seq_length, max_predictions_per_seq


def _find_records(path: Path, content: mmap.mmap) -> NDArray[np.int64]:
    """[n, 2] where the data of each record begins and ends; goes from header to header and checks their CRCs."""
    end = len(content)
    bounds = array("q")  # a record may have a single byte, and a pair of numbers takes a hundred
    place = 0
    while place < end:
        if end - place < _HEADER.size:
            raise _error(path, len(bounds) // 2, place, f"the file ends within its header; {_REMEDY}")
        length, crc = _HEADER.unpack_from(content, place)
        found = ""
        if _masked_crc(content[place : place + 8]) != crc:
            found = f"its length has another CRC: no TFRecord file, or damaged; {_REMEDY}"
        elif length > end - place - _FRAME_BYTES:
            found = f"{length:,} bytes long, and the file ends {end - place:,} bytes after its beginning; {_REMEDY}"
        elif length > _MAX_RECORD_BYTES:
            found = f"{length:,} bytes long; expected the reference's samples, of at most {_MAX_RECORD_BYTES:,}"
        if found:
            raise _error(path, len(bounds) // 2, place, found)
        place += _HEADER.size
        bounds.extend((place, place + length))
        place += length + 4  # the CRC of the data
    return np.array(bounds, np.int64).reshape(-1, 2)


def _read_block(
    path: Path, content: mmap.mmap, bounds: NDArray[np.int64], start: int, stop: int
) -> tuple[Samples, int, int]:
    """The samples of records ``start`` to ``stop``, and the padded lengths of the last one's lists."""
    bounds = bounds[start:stop]
    for record, (begin, end) in enumerate(bounds.tolist(), start):
        (crc,) = struct.unpack_from("<I", content, end)
        if _masked_crc(content[begin:end]) != crc:
            raise _error(path, record, begin - _HEADER.size, f"its data has another CRC: damaged; {_REMEDY}")
    sizes = bounds[:, 1] - bounds[:, 0]
    # A value takes a byte at least, and every list has a feature of its own.
    room, widest = int(sizes.sum()), int(sizes.max())
    tokens, segments = np.empty(room, np.uint16), np.empty(room, np.uint8)
    positions, labels = np.empty(room, np.uint16), np.empty(room, np.uint16)
    counts = np.zeros((len(bounds), 3), np.int64)
    lists = np.empty((len(_FEATURES), widest), np.int64)
    list_lengths = np.zeros(len(_FEATURES), np.int64)
    failed, problem = _decode(
        *(np.frombuffer(content, np.uint8), bounds, _NAMES, _NAME_OFFSETS, lists, list_lengths),
        *(tokens, segments, positions, labels, counts),
    )
    if problem:
        begin = int(bounds[failed, 0]) - _HEADER.size
        raise _error(path, start + failed, begin, f"{_PROBLEMS[problem]}; expected the reference's samples")
    sequence_offsets, masked_lm_offsets = offsets_of(counts[:, 0]), offsets_of(counts[:, 1])
    samples = Samples(
        # Copied, so that the room for the worst case is let go.
        input_ids=tokens[: sequence_offsets[-1]].copy(),
        segment_ids=segments[: sequence_offsets[-1]].copy(),
        sequence_offsets=sequence_offsets,
        masked_lm_positions=positions[: masked_lm_offsets[-1]].copy(),
        masked_lm_ids=labels[: masked_lm_offsets[-1]].copy(),
        masked_lm_offsets=masked_lm_offsets,
        next_sentence_labels=counts[:, 2].astype(np.uint8),
    )
    return samples, int(list_lengths[_IDS]), int(list_lengths[_LABELS])


def _error(path: Path, record: int, place: int, problem: str) -> ValueError:
    return ValueError(f"{path}: record {record:,} at byte {place:,}: {problem}")


def _masked_crc(data: bytes) -> int:
    """TFRecord's CRC: rotated and shifted, so that a CRC of data that holds CRCs stays a good one."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@compiled
def _varint(content: NDArray[np.uint8], place: int, end: int) -> tuple[int, int]:
    """(value, place behind it), as a signed 64-bit integer; the place is -1 when there is none."""
    value = 0
    for index in range(10):  # 64 bits in groups of seven
        if place + index >= end:
            return 0, -1
        byte = int(content[place + index])
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, place + index + 1
    return 0, -1


@compiled
def _field(content: NDArray[np.uint8], place: int, end: int) -> tuple[int, int, int, int]:
    """(number, wire type, begin and end of the value) of the field at ``place``; the end is -1 when it is malformed.

    The value of a length-delimited field (wire type 2) begins behind its length.
    """
    tag, begin = _varint(content, place, end)
    if begin < 0 or tag < 8:  # there is no field 0
        return 0, 0, 0, -1
    wire = tag & 7
    if wire == 0:
        return tag >> 3, wire, begin, _varint(content, begin, end)[1]
    if wire == 1 or wire == 5:
        size = 8 if wire == 1 else 4
    elif wire == 2:
        size, begin = _varint(content, begin, end)
        if begin < 0:
            return 0, 0, 0, -1
    # Groups and types that were never assigned have no length by which to skip them.
    else:
        return 0, 0, 0, -1
    # A stated length of 2^63 or more is negative here.
    if size < 0 or size > end - begin:
        return 0, 0, 0, -1
    return tag >> 3, wire, begin, begin + size


@compiled
def _read_list(content: NDArray[np.uint8], place: int, end: int, member: int, values: NDArray[np.int64]) -> int:
    """Fill ``values`` from the Feature at ``place``, floats by their bits; return how many, or minus the problem.

    ``member``: 2 for floats, 3 for integers.
    """
    count = 0
    while place < end:
        number, wire, begin, stop = _field(content, place, end)
        if stop < 0:
            return -_MALFORMED
        place = stop
        if number < 1 or number > 3:  # unknown fields are skipped, as protobuf has it
            continue
        if number != member or wire != 2:
            return -_KIND
        inner = begin
        while inner < stop:
            number, wire, begin_values, inner_stop = _field(content, inner, stop)
            if inner_stop < 0:
                return -_MALFORMED
            inner = inner_stop
            if number != 1:
                continue
            # A list is packed into one field (wire type 2), or has a field a value: four bytes of a float, or a varint.
            if wire != 2 and wire != (5 if member == 2 else 0):
                return -_KIND
            while begin_values < inner_stop:
                if member == 2:
                    if inner_stop - begin_values < 4:
                        return -_MALFORMED
                    value = np.int64(0)
                    for index in range(4):
                        value |= np.int64(content[begin_values + index]) << (8 * index)
                    begin_values += 4
                else:
                    value = np.int64(content[begin_values])
                    if value < 0x80:  # flags and padding, which are most of all
                        begin_values += 1
                    else:
                        value, begin_values = _varint(content, begin_values, inner_stop)
                        if begin_values < 0:
                            return -_MALFORMED
                # In bounds, which nobody checks: a value takes a byte, and there is a place for each.
                values[count] = value
                count += 1
    return count


@compiled
def _read_entry(
    content: NDArray[np.uint8],
    place: int,
    end: int,
    names: NDArray[np.uint8],
    name_offsets: NDArray[np.int64],
    lists: NDArray[np.int64],
    list_lengths: NDArray[np.int64],
) -> int:
    """Read one entry of the feature map into its row of ``lists`` when its name is known; return the problem or 0."""
    key = key_end = feature = feature_end = -1
    while place < end:
        number, wire, begin, stop = _field(content, place, end)
        if stop < 0 or (number <= 2 and wire != 2):
            return _MALFORMED
        if number == 1:
            key, key_end = begin, stop
        elif number == 2:
            # The reference writes each once; protobuf itself would merge them.
            if feature >= 0:
                return _REPEATED
            feature, feature_end = begin, stop
        place = stop
    for row in range(len(list_lengths)):
        first = name_offsets[row]
        same = key >= 0 and key_end - key == name_offsets[row + 1] - first
        for index in range(key_end - key if same else 0):
            same = same and content[key + index] == names[first + index]
        if same:
            if list_lengths[row] > 0:
                return _REPEATED
            count = _read_list(content, feature, feature_end, 2 if row == _WEIGHTS else 3, lists[row])
            if count < 0:
                return -count
            list_lengths[row] = count
    return 0


@compiled
def _read_example(
    content: NDArray[np.uint8],
    place: int,
    end: int,
    names: NDArray[np.uint8],
    name_offsets: NDArray[np.int64],
    lists: NDArray[np.int64],
    list_lengths: NDArray[np.int64],
) -> int:
    """Read the known features of an Example into ``lists``; return the problem or 0."""
    # Cleared first, or a record without a feature would have that of the record before.
    list_lengths[:] = 0
    while place < end:
        number, wire, features, features_end = _field(content, place, end)
        if features_end < 0 or (number == 1 and wire != 2):
            return _MALFORMED
        place = features_end
        while number == 1 and features < features_end:  # there may be several: protobuf merges them
            inner, wire, begin, stop = _field(content, features, features_end)
            if stop < 0 or (inner == 1 and wire != 2):
                return _MALFORMED
            features = stop
            if inner == 1:
                problem = _read_entry(content, begin, stop, names, name_offsets, lists, list_lengths)
                if problem:
                    return problem
    # A feature that is absent and one without values look alike, and neither is a sample's.
    for length in list_lengths:
        if length == 0:
            return _MISSING
    return 0


@compiled
def _ones(values: NDArray[np.int64], length: int, one: int) -> int:
    """Count the ``one`` that begin ``values[:length]``, when all others are 0; otherwise -1."""
    count = 0
    while count < length and values[count] == one:
        count += 1
    for index in range(count, length):
        if values[index] != 0:
            return -1
    return count


@compiled
def _decode(
    content: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    names: NDArray[np.uint8],
    name_offsets: NDArray[np.int64],
    lists: NDArray[np.int64],
    list_lengths: NDArray[np.int64],
    tokens: NDArray[np.uint16],
    segments: NDArray[np.uint8],
    positions: NDArray[np.uint16],
    labels: NDArray[np.uint16],
    counts: NDArray[np.int64],
) -> tuple[int, int]:
    """Decode the records at ``bounds`` [n, 2], one behind the other, without padding; return (record, problem or 0).

    ``counts`` [n, 3] gets tokens, masked tokens and next-sentence label of each. ``lists`` and ``list_lengths`` are scratch.
    """
    used = used_masked = 0
    for record in range(len(bounds)):
        problem = _read_example(content, bounds[record, 0], bounds[record, 1], names, name_offsets, lists, list_lengths)
        if problem:
            return record, problem
        width, masked_width = list_lengths[_IDS], list_lengths[_LABELS]
        if list_lengths[_MASK] != width or list_lengths[_SEGMENTS] != width or list_lengths[_NEXT] != 1:
            return record, _LENGTHS
        if list_lengths[_POSITIONS] != masked_width or list_lengths[_WEIGHTS] != masked_width:
            return record, _LENGTHS
        length, masked = _ones(lists[_MASK], width, 1), _ones(lists[_WEIGHTS], masked_width, _ONE)
        if length < 1 or masked < 0:
            return record, _NOT_PREFIX
        # Values are stored as they come, cut to 16 bits; where one did not fit, the record is refused after that.
        valid = 0 <= lists[_NEXT, 0] <= 1
        for index in range(length):
            valid &= 0 <= lists[_IDS, index] <= 65535 and 0 <= lists[_SEGMENTS, index] <= 1
            tokens[used + index] = lists[_IDS, index]
            segments[used + index] = lists[_SEGMENTS, index]
        before = -1
        for index in range(masked):
            position = lists[_POSITIONS, index]
            valid &= before < position < min(length, 65536) and 0 <= lists[_LABELS, index] <= 65535
            before = position
            positions[used_masked + index] = position
            labels[used_masked + index] = lists[_LABELS, index]
        if not valid:
            return record, _RANGE
        counts[record] = length, masked, lists[_NEXT, 0]
        used += length
        used_masked += masked
    return 0, 0
