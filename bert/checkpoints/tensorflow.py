"""TensorFlow 1 checkpoints ("tensor bundles"), read without TensorFlow, and the names of BERT's variables in them.

A bundle consists of ``PREFIX.index`` and the data files ``PREFIX.data-0000i-of-0000n``. The index is a sorted table in
LevelDB's format (doc/table_format.md of LevelDB). In this table, the empty key maps to a header, and the name of each
tensor maps to its position and checksum (tensorflow/core/protobuf/tensor_bundle.proto). Files are not trusted. Every
length is compared with the file size before memory is allocated, and every block and tensor that is read is verified by
its checksum. All errors are ``ValueError``.
"""

import hashlib
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from console.files import open_regular, read_bounded, shown
from console.text import counted
from dataloading.preparation.mlcommons import INDEX, KNOWN, OBJECT_GRAPH, TF1_DATA, TF1_FILES

INDEX_SUFFIX = ".index"
MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
"""The last eight bytes of an index."""
_MOST_INDEX_BYTES = 4 << 20
_MOST_TENSORS = 1 << 16
_MOST_NAME_BYTES = 1024
_MOST_TENSOR_BYTES = 1 << 30
"""Maximum number of bytes in a tensor. It is about eight times the size of BERT-Large's largest tensor."""
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
"""Each block is followed by one byte for the compression type and a checksum of four bytes."""
_FLOAT32 = 1
_REMEDY = "fetch or copy the checkpoint again"
_PUBLISHED = (KNOWN[INDEX][1], KNOWN[TF1_DATA][0])
"""MD5 of the index, and size of the data file in bytes, of the benchmark's phase-1 checkpoint."""
# Map from endings of Hugging Face's names to TensorFlow's endings. The first match is used, so ".weight" comes last.
_ENDINGS = {
    "embeddings.weight": "embeddings",
    "LayerNorm.weight": "LayerNorm/gamma",
    "LayerNorm.bias": "LayerNorm/beta",
    "seq_relationship.weight": "seq_relationship/output_weights",
    "seq_relationship.bias": "seq_relationship/output_bias",
    "predictions.bias": "predictions/output_bias",
    ".weight": ".kernel",
}


@dataclass(frozen=True)
class Entry:
    """Type, shape and position of a tensor. Offsets and sizes are in bytes."""

    dtype: int
    """TensorFlow's number for the dtype."""
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    """CRC-32C of the tensor, in the masked form in which LevelDB stores it."""
    is_partitioned: bool


class TensorBundle:
    """An open TensorFlow checkpoint.

    Raises ``ValueError`` if the index is damaged, is not an index, or does not match the data files.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.index = prefix.with_name(prefix.name + INDEX_SUFFIX)
        content = read_bounded(self.index, _MOST_INDEX_BYTES, _REMEDY)
        try:
            records = dict(_sorted_table(content))
            self.shards = _shard_count(records)
            self.entries = {
                key.decode(): _entry(value)
                for key, value in records.items()
                if not key.startswith(b"\0") and key  # skip parts of partitioned variables, and the header
            }
        except ValueError as error:  # UnicodeDecodeError, for a name that is not UTF-8, is a ValueError too
            raise ValueError(f"{self.index}: {error}; {_REMEDY}") from None
        if OBJECT_GRAPH in self.entries:
            raise ValueError(
                f"{self.index} is a TF2 checkpoint, which is not supported; use a Hugging Face folder, or the TF1 files "
                f"of MLCommons' download: {TF1_FILES}"
            )
        self._require_extents()
        # Use MD5, because MLCommons publishes MD5 digests. FIPS builds allow it only for purposes other than security.
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        self.is_published = (md5, self.data_file(0).stat().st_size) == _PUBLISHED

    def data_file(self, shard: int) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.data-{shard:05d}-of-{self.shards:05d}")

    def readable(self, name: str) -> Entry | None:
        """Return a tensor's entry, or None if it is absent. Raises ``ValueError`` if the tensor is not whole or not fp32."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        problem = None
        if entry.is_partitioned:
            problem = "is a partitioned variable, which is not supported: save it in one piece"
        elif entry.dtype != _FLOAT32:
            problem = f"is of TensorFlow's type number {entry.dtype}, expected {_FLOAT32} (float32)"
        elif entry.size != 4 * math.prod(entry.shape) or not 0 < entry.size <= _MOST_TENSOR_BYTES:
            problem = f"of shape {entry.shape} has {entry.size:,} bytes, expected 4 per element and at most "
            problem += f"{_MOST_TENSOR_BYTES:,}"
        if problem:
            raise ValueError(f"{self.index}: {name} {problem}")
        return entry

    def array(self, name: str) -> np.ndarray:
        """Read a tensor. Raises ``ValueError`` if its checksum is wrong, or if it is not a whole fp32 tensor."""
        entry = self.readable(name)
        assert entry is not None
        # Read into a writable array, because torch.from_numpy warns about read-only arrays.
        path, content = self.data_file(entry.shard), np.empty(entry.size, np.uint8)
        with open_regular(path) as file:
            file.seek(entry.offset)
            read = file.readinto(content.data)
        if read != entry.size or _masked(google_crc32c.extend(0, content)) != entry.checksum:
            raise ValueError(f"{path}: {name} does not match its checksum in the index; {_REMEDY}")
        return content.view("<f4").reshape(entry.shape)

    def _require_extents(self) -> None:
        found = {}
        # Include the first file even if it contains no tensor: `is_published` needs its size.
        for shard in {entry.shard for entry in self.entries.values()} | {0}:
            if shard >= self.shards:
                raise ValueError(
                    f"{self.index}: a tensor is in data file {shard}, but the last data file is {self.shards - 1}; {_REMEDY}"
                )
            try:
                found[shard] = self.data_file(shard).stat().st_size
            except OSError as error:
                raise ValueError(f"{self.data_file(shard)}: {error.strerror}; {_REMEDY}") from None
        for name, entry in self.entries.items():
            if entry.offset + entry.size > found[entry.shard]:
                raise ValueError(
                    f"{self.data_file(entry.shard)}: has {found[entry.shard]:,} bytes, but {shown(name)} is at bytes "
                    f"{entry.offset:,} to {entry.offset + entry.size:,}; {_REMEDY}"
                )


def tf1_name(name: str) -> str:
    """Return the name of a weight in the reference's graph, given its name in Hugging Face's ``BertForPreTraining``."""
    for theirs, ours in _ENDINGS.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
            break
    return re.sub(r"\.layer\.(\d+)", r".layer_\1", name).replace(".", "/")


def _shard_count(records: dict[bytes, bytes]) -> int:
    if b"" not in records:
        raise ValueError("it has no header")
    # In BundleHeaderProto, field 1 is num_shards, and field 2 is endianness. A missing field has the value 0.
    header, _ = _fields(records[b""])
    shards = header.get(1, 0)
    if header.get(2, 0) != 0:
        raise ValueError("it was written on a big-endian machine, which is not supported")
    if not 0 < shards < 100_000:  # names of data files state this number in five digits
        raise ValueError(f"it states {shards} data files, expected 1 to 99999")
    return shards


def _entry(value: bytes) -> Entry:
    # In BundleEntryProto, the fields 1 to 7 are dtype, shape, shard_id, offset, size, crc32c and slices.
    numbers, messages = _fields(value)
    dtype, shard, offset, size, checksum = (numbers.get(field, 0) for field in (1, 3, 4, 5, 6))
    # In TensorShapeProto, each field 2 is a dimension. In a dimension, field 1 is its size.
    dims = [dim for field, message in messages if field == 2 for number, dim in _fields(message)[1] if number == 2]
    shape = tuple(_fields(dim)[0].get(1, 0) for dim in dims)
    # Numbers are read as unsigned, so a negative number in a damaged file is very large and exceeds these bounds.
    if len(shape) > 8 or any(dim >= 1 << 40 for dim in shape) or max(offset, size) >= 1 << 62:
        raise ValueError(
            f"damaged: a tensor of {counted(len(shape), 'dimension')} and {size:,} bytes at offset {offset:,}"
        )
    return Entry(dtype, shape, shard, offset, size, checksum, 7 in dict(messages))


def _sorted_table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of an index, in the order of the keys. Raises ``ValueError`` if the index is damaged."""
    if len(content) < _FOOTER_BYTES or not content.endswith(MAGIC):
        raise ValueError("not the index of a TensorFlow checkpoint (the mark at its end is missing)")
    blocks_end, footer = len(content) - _FOOTER_BYTES, content[-_FOOTER_BYTES:]
    # The footer holds the offset and size of the meta index, which is not needed, and then those of the index of blocks.
    position, numbers = 0, []
    for _ in range(4):
        number, position = _varint(footer, position)
        numbers.append(number)
    _, _, index_offset, index_size = numbers
    last, tensors = None, 0
    for _, handle in _block(content, index_offset, index_size, blocks_end):
        offset, after = _varint(handle, 0)
        size, after = _varint(handle, after)
        for key, value in _block(content, offset, size, index_offset):
            tensors += 1
            if last is not None and key <= last:
                raise ValueError(f"the key {shown(key)} follows {shown(last)}: expected ascending keys")
            # Limit the number of keys. Keys share prefixes, so that even a small file can contain very many of them.
            if tensors > _MOST_TENSORS:
                raise ValueError(f"it has more than {_MOST_TENSORS:,} tensors")
            last = key
            yield key, value


def _block(content: bytes, offset: int, size: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of one block. The block and the trailer after it must end before the byte ``end``."""
    after = offset + size
    if after + _TRAILER_BYTES > end or size < 4:
        raise ValueError(
            f"a block at bytes {offset:,} to {after:,} has under 4 bytes, or its trailer ends after {end:,}"
        )
    kind, checksum = struct.unpack_from("<BI", content, after)
    # The checksum covers the block and its type byte.
    if _masked(google_crc32c.value(content[offset : after + 1])) != checksum:
        raise ValueError(f"the block at byte {offset:,} does not match its checksum")
    if kind > 1:
        raise ValueError(f"a block has compression type {kind}, expected 0 (none) or 1 (Snappy)")
    block = _uncompressed(content[offset:after]) if kind else content[offset:after]
    # A block consists of records, then restart points (offsets that speed up searches), then the number of these points.
    restarts = int.from_bytes(block[-4:], "little")
    if restarts > len(block) // 4 - 1:
        raise ValueError(f"a block of {len(block):,} bytes cannot hold {restarts:,} restart points")
    block, position, key = block[: len(block) - 4 * (restarts + 1)], 0, b""
    for _ in range(_MOST_TENSORS + 1):
        if position >= len(block):
            return
        # A record starts with the length of the prefix shared with the last key, of the rest of its key, and of its value.
        shared, position = _varint(block, position)
        fresh, position = _varint(block, position)
        length, position = _varint(block, position)
        if shared > len(key) or shared + fresh > _MOST_NAME_BYTES or position + fresh + length > len(block):
            raise ValueError(f"a record of {fresh:,} + {length:,} bytes does not fit the block at byte {offset:,}")
        key = key[:shared] + block[position : position + fresh]
        position += fresh + length
        yield key, block[position - length : position]
    raise ValueError(f"a block has more than {_MOST_TENSORS:,} records")


def _uncompressed(packed: bytes) -> bytes:
    """Decompress a Snappy block (format_description.txt of google/snappy). The benchmark's index contains such blocks."""
    length, position = _varint(packed, 0)
    if length > _MOST_INDEX_BYTES:
        raise ValueError(f"a compressed block states {length:,} bytes, expected at most {_MOST_INDEX_BYTES:,}")
    result = bytearray()
    while position < len(packed) and len(result) <= length:
        tag = packed[position]
        # Kind 0 is a literal. Kinds 1 to 3 are copies whose distance takes 1, 2 or 4 bytes.
        kind, count, position = tag & 3, tag >> 2, position + 1
        # The tag states a literal's length up to 60 bytes. For a longer one, it states how many bytes the length takes.
        extra = (max(0, count - 59), 1, 2, 4)[kind]
        number = int.from_bytes(packed[position : position + extra], "little")
        position += extra
        if kind == 0:
            count = (number if extra else count) + 1
            result += packed[position : position + count]
            position += count
        else:
            # The short form of a copy copies 4 to 11 bytes. Its tag also holds the upper three bits of the distance.
            count, distance = (count % 8 + 4, tag >> 5 << 8 | number) if kind == 1 else (count + 1, number)
            if not 0 < distance <= len(result):
                raise ValueError(f"a compressed block copies from {distance:,} bytes back, but has {len(result):,}")
            start = len(result) - distance
            piece = result[start : start + count]
            result += (piece * (-(-count // len(piece))))[
                :count
            ]  # repeats the piece if the copy overlaps its own output
    if position != len(packed) or len(result) != length or length < 4:
        raise ValueError(f"a compressed block states {length:,} bytes, expected 4 or more, and yields {len(result):,}")
    return bytes(result)


def _fields(content: bytes) -> tuple[dict[int, int], list[tuple[int, bytes]]]:
    """Parse a protocol buffer message. Return its numbers by field, and its byte strings in order, each with its field."""
    numbers, messages, position = dict[int, int](), list[tuple[int, bytes]](), 0
    while position < len(content):
        tag, position = _varint(content, position)
        # Of the wire types, 0 is a varint, 1 and 5 are numbers of a fixed size, and 2 is a byte string after its length.
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            numbers[field], position = _varint(content, position)
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field has wire type {kind}, expected 0, 1, 2 or 5")
        length, position = _varint(content, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
        if position + length > len(content):
            raise ValueError(f"a field takes {length:,} bytes, but only {len(content) - position:,} remain")
        value = content[position : position + length]
        position += length
        if kind == 2:
            messages.append((field, value))
        else:
            numbers[field] = int.from_bytes(value, "little")
    return numbers, messages


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Parse a varint of up to ten bytes, each with seven bits. Return the number and the position after the varint."""
    number = 0
    for index, byte in enumerate(content[position : position + 10]):
        number |= (byte & 127) << 7 * index
        if byte < 128:
            return number, position + index + 1
    raise ValueError(f"the number at byte {position:,} does not end")


def _masked(checksum: int) -> int:
    """Return a CRC-32C as LevelDB stores it: rotated by 15 bits, plus a constant."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
