"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow, and BERT's variables in them.

A bundle is ``PREFIX.index`` and the data files ``PREFIX.data-0000i-of-0000n``. The index is a sorted table in LevelDB's
format (its doc/table_format.md): a header under the empty key, and under each tensor's name where its bytes are and their
checksum (tensorflow/core/protobuf/tensor_bundle.proto). Files are not trusted: every length is compared with what is there
before anything is allocated, every block and every tensor that is read with its checksum. What is wrong is a ``ValueError``
that names the file.
"""

import hashlib
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import google_crc32c
import numpy as np

from dataloading.files import open_regular, read_bounded

INDEX_SUFFIX = ".index"
MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
"""The last eight bytes of an index."""
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
"""One byte of compression type and the checksum after each block."""
_MOST_INDEX_BYTES = 4 << 20
_MOST_TENSORS = 1 << 16
_MOST_NAME_BYTES = 1024
_MOST_TEXT_BYTES = 64 << 20
_MOST_TENSOR_BYTES = 1 << 30
"""BERT-Large's largest is an eighth of that."""
_CHUNK_BYTES = 16 << 20
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_STRING = 7
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 3: np.dtype("<i4"), 9: np.dtype("<i8"), 19: np.dtype("<f2")}
"""TensorFlow's number of a type to NumPy's, for the types that are read."""
_REMEDY = "fetch or copy the checkpoint again"
_PUBLISHED = {
    "f97de3ae180eb8d479555c939d50d048": ("TF1", 17_371, 4_034_713_312),
    "fc34dd7a54afc07f2d8e9d64471dc672": ("TF2", 6_420, 1_344_982_997),
}
"""MD5 of the index of the benchmark's phase-1 checkpoints: name, bytes of the index, bytes of the data file."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is."""

    dtype: int
    """TensorFlow's number of the type"""
    shape: tuple[int, ...]
    shard: int
    offset: int
    """bytes"""
    size: int
    """bytes"""
    checksum: int
    """masked CRC-32C"""
    sliced: bool


class TensorBundle:
    """A checkpoint of TensorFlow, opened.

    Raises ``ValueError`` where the index is damaged, is not one, or does not fit the data files.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.index = prefix.with_name(prefix.name + INDEX_SUFFIX)
        content = read_bounded(self.index, _MOST_INDEX_BYTES, _REMEDY)
        self.index_md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        self.index_sha256 = hashlib.sha256(content).hexdigest()
        self.index_bytes = len(content)
        try:
            records = dict(_table(content))
            self.shards = _shards(records)
            self.entries = {
                key.decode(): _entry(key, value, self.shards)
                for key, value in records.items()
                if not key.startswith(b"\0") and key  # a part of a partitioned variable, and the header
            }
        except UnicodeDecodeError:
            raise ValueError(f"{self.index}: a tensor's name is not UTF-8; {_REMEDY}") from None
        except ValueError as error:
            raise ValueError(f"{self.index}: {error}; {_REMEDY}") from None
        self._check_extents()

    def data_file(self, shard: int) -> Path:
        """The data file of one shard."""
        return self.prefix.with_name(f"{self.prefix.name}.data-{shard:05d}-of-{self.shards:05d}")

    def array(self, name: str) -> np.ndarray:
        """The tensor ``name`` in its own type and shape, compared with its checksum. Raises ``ValueError``."""
        entry = self.entries[name]
        if entry.sliced:
            raise ValueError(
                f"{self.index}: {name} is a partitioned variable, which is not supported: save it in one piece"
            )
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError(f"{self.index}: {name} is of TensorFlow's type number {entry.dtype}: expected numbers")
        if entry.size != math.prod(entry.shape) * dtype.itemsize or 0 in entry.shape:
            raise ValueError(
                f"{self.index}: {name} of shape {entry.shape} has {entry.size:,} bytes, expected "
                f"{math.prod(entry.shape) * dtype.itemsize:,} and more than none; {_REMEDY}"
            )
        if entry.size > _MOST_TENSOR_BYTES:
            raise ValueError(f"{self.index}: {name} has {entry.size:,} bytes, expected at most {_MOST_TENSOR_BYTES:,}")
        array = np.frombuffer(self._read(entry), dtype).reshape(entry.shape)
        checksum = 0
        for start in range(0, array.nbytes, _CHUNK_BYTES):
            checksum = google_crc32c.extend(checksum, array.reshape(-1).view(np.uint8)[start : start + _CHUNK_BYTES])
        self._compare(name, entry, checksum)
        return array

    @cached_property
    def variable_names(self) -> dict[str, str]:
        """Of a TF2 checkpoint: the name that each variable had to its key here; a TF1 checkpoint has none.

        Raises ``ValueError`` where two variables had one name.
        """
        if _OBJECT_GRAPH not in self.entries:
            return {}
        names: dict[str, str] = {}
        try:
            for field, node in _fields(self._object_graph()):
                if field == 1:
                    self._add_variables(_bytes(node), names)
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.data_file(self.entries[_OBJECT_GRAPH].shard)}: the object graph is no text"
            ) from None
        return names

    def published(self) -> str | None:
        """Which of the benchmark's files this is, by the MD5 of the index: "TF1", "TF2", or None."""
        name, index_bytes, data_bytes = _PUBLISHED.get(self.index_md5, (None, 0, 0))
        return name if (self.index_bytes, self.data_file(0).stat().st_size) == (index_bytes, data_bytes) else None

    def _add_variables(self, node: bytes, names: dict[str, str]) -> None:
        for field, attribute in _fields(node):
            if field != 2:
                continue
            parts = {number: part for number, part in _fields(_bytes(attribute)) if number in (2, 3)}
            name, key = (_bytes(parts.get(number, b"")).decode() for number in (2, 3))
            if key not in self.entries:
                raise ValueError(f"{self.index}: the object graph names {key!r}, which is not there; {_REMEDY}")
            if name and names.setdefault(name, key) != key:
                raise ValueError(
                    f"{self.index}: {key} and {names[name]} are both the variable {name}: expected one model"
                )

    def _object_graph(self) -> bytes:
        """The one string of a tensor of strings: its length, the checksum of that, its bytes."""
        entry = self.entries[_OBJECT_GRAPH]
        where = f"{self.data_file(entry.shard)}: {_OBJECT_GRAPH}"
        if entry.dtype != _STRING or entry.shape or entry.size > _MOST_TEXT_BYTES:
            raise ValueError(f"{where} is not one string of at most {_MOST_TEXT_BYTES:,} bytes; {_REMEDY}")
        content = self._read(entry).tobytes()
        try:
            length, start = _varint(content, 0)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; {_REMEDY}") from None
        checked, text = content[start : start + 4], content[start + 4 :]
        if length != len(text) or _masked(google_crc32c.value(struct.pack("<I", length))) != int.from_bytes(
            checked, "little"
        ):
            raise ValueError(f"{where}: a string of {length:,} bytes in {len(text):,}, or another checksum; {_REMEDY}")
        checksum = google_crc32c.extend(google_crc32c.value(struct.pack("<I", length)), checked)
        self._compare(_OBJECT_GRAPH, entry, google_crc32c.extend(checksum, text))
        return text

    def _read(self, entry: Entry) -> np.ndarray:
        """[size] uint8."""
        path, content = self.data_file(entry.shard), np.empty(entry.size, np.uint8)
        with open_regular(path) as file:
            file.seek(entry.offset)
            if file.readinto(content.data) != entry.size:
                raise ValueError(f"{path}: it ended while it was read; {_REMEDY}")
        return content

    def _compare(self, name: str, entry: Entry, checksum: int) -> None:
        if _masked(checksum) != entry.checksum:
            raise ValueError(
                f"{self.data_file(entry.shard)}: {name} has the checksum {_masked(checksum):08x}, the index says "
                f"{entry.checksum:08x}; {_REMEDY}"
            )

    def _check_extents(self) -> None:
        """Every tensor lies inside its data file, and no two share bytes."""
        found = {}
        for shard in sorted({entry.shard for entry in self.entries.values()} | {0}):
            try:
                found[shard] = self.data_file(shard).stat().st_size
            except OSError as error:
                raise ValueError(f"{self.data_file(shard)}: {error.strerror}; {_REMEDY}") from None
        placed = sorted((entry.shard, entry.offset, entry.size, name) for name, entry in self.entries.items())
        for shard, offset, size, name in placed:
            if offset + size > found[shard]:
                raise ValueError(
                    f"{self.data_file(shard)}: {found[shard]:,} bytes, but {name} is at {offset:,} to {offset + size:,}; "
                    f"{_REMEDY}"
                )
        for (shard, offset, size, name), (next_shard, next_offset, _, next_name) in pairwise(placed):
            if shard == next_shard and offset + size > next_offset:
                raise ValueError(f"{self.index}: {name} and {next_name} share bytes of one file; {_REMEDY}")


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a sorted table, in order. Raises ``ValueError``."""
    if len(content) < _FOOTER_BYTES or not content.endswith(MAGIC):
        raise ValueError("not the index of a TensorFlow checkpoint (the mark at its end is missing)")
    blocks_end, footer = len(content) - _FOOTER_BYTES, content[-_FOOTER_BYTES:]
    position, handles = 0, []
    for _ in range(2):
        offset, position = _varint(footer, position)
        size, position = _varint(footer, position)
        handles.append((offset, size))
    (meta_offset, meta_size), (index_offset, index_size) = handles
    for _ in _block(content, meta_offset, meta_size, blocks_end):
        pass  # nothing of it is used, but its checksum is compared
    end, last, tensors = 0, None, 0
    for _, handle in _block(content, index_offset, index_size, blocks_end):
        offset, after = _varint(handle, 0)
        size, after = _varint(handle, after)
        if offset < end:
            raise ValueError(f"the block at byte {offset:,} begins before the end of the one before, {end:,}")
        end = offset + size + _TRAILER_BYTES
        for key, value in _block(content, offset, size, index_offset):
            tensors += 1
            if last is not None and key <= last:
                raise ValueError(f"the key {key!r} stands after {last!r}: expected ascending keys")
            if tensors > _MOST_TENSORS:
                raise ValueError(f"more than {_MOST_TENSORS:,} tensors")
            last = key
            yield key, value


def _block(content: bytes, offset: int, size: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one block that must end, with its trailer, before ``end``."""
    after = offset + size
    if after + _TRAILER_BYTES > end or size < 4:
        raise ValueError(f"a block at bytes {offset:,} to {after:,}, expected at least four bytes before {end:,}")
    kind, checksum = struct.unpack_from("<BI", content, after)
    if _masked(google_crc32c.value(content[offset : after + 1])) != checksum:
        raise ValueError(f"the block at byte {offset:,} does not have its checksum")
    if kind > 1:
        raise ValueError(f"a block of compression type {kind}: expected 0 (none) or 1 (Snappy)")
    block = _unpacked(content[offset:after]) if kind else content[offset:after]
    restarts = int.from_bytes(block[-4:], "little")
    if restarts > len(block) // 4 - 1:
        raise ValueError(f"a block of {len(block):,} bytes with {restarts:,} restart points")
    block, position, key, records = block[: len(block) - 4 * (restarts + 1)], 0, b"", 0
    while position < len(block):
        shared, position = _varint(block, position)
        fresh, position = _varint(block, position)
        length, position = _varint(block, position)
        if shared > len(key) or shared + fresh > _MOST_NAME_BYTES or position + fresh + length > len(block):
            raise ValueError(f"a record of {fresh:,} + {length:,} bytes does not fit the block at byte {offset:,}")
        records += 1
        if records > _MOST_TENSORS:
            raise ValueError(f"a block of more than {_MOST_TENSORS:,} records")
        key = key[:shared] + block[position : position + fresh]
        position += fresh + length
        yield key, block[position - length : position]


def _unpacked(packed: bytes) -> bytes:
    """A block without its Snappy compression (format_description.txt of google/snappy), of at most what an index may have.

    TensorFlow's released versions write no compressed block, but those of the benchmark's checkpoints are.
    """
    length, position = _varint(packed, 0)
    if length > _MOST_INDEX_BYTES:
        raise ValueError(f"a compressed block of {length:,} bytes, expected at most {_MOST_INDEX_BYTES:,}")
    result = bytearray()
    while position < len(packed):
        tag = packed[position]
        kind, count, position = tag & 3, tag >> 2, position + 1
        # How many bytes after the tag belong to it: those of a long literal's length, or of a copy's distance.
        extra = (max(0, count - 59), 1, 2, 4)[kind]
        number = int.from_bytes(packed[position : position + extra], "little")
        position += extra
        if kind == 0:
            count = (number if extra else count) + 1
            result += packed[position : position + count]
            position += count
        else:
            count, distance = (count % 8 + 4, tag >> 5 << 8 | number) if kind == 1 else (count + 1, number)
            if not 0 < distance <= len(result):
                raise ValueError(f"a compressed block that copies from {distance:,} bytes back after {len(result):,}")
            start = len(result) - distance
            piece = result[start : start + count]
            result += (piece * (-(-count // len(piece))))[:count]  # a copy may reach into what it writes
        if position > len(packed) or len(result) > length:
            break
    if position != len(packed) or len(result) != length or length < 4:
        raise ValueError(f"a compressed block that gives {len(result):,} bytes, expected {length:,} and at least 4")
    return bytes(result)


def _shards(records: dict[bytes, bytes]) -> int:
    """The number of data files, from the header."""
    if b"" not in records:
        raise ValueError("no header")
    header = dict(_fields(records[b""]))
    shards, endianness = header.get(1, 0), header.get(2, 0)
    if endianness != 0:
        raise ValueError("written on a big-endian machine, which is not supported")
    version = dict(_fields(_bytes(header.get(3, b""))))
    if version.get(2, 0) != 0 and _integer(version[2]) > 1:
        raise ValueError(f"needs a reader of version {version[2]}, this is one of version 1")
    if not 0 < _integer(shards) < 100_000:
        raise ValueError(f"{shards} data files")
    return _integer(shards)


def _entry(key: bytes, value: bytes, shards: int) -> Entry:
    numbers = {3: 0, 4: 0, 5: 0, 6: 0, 1: 0}
    shape: tuple[int, ...] = ()
    sliced = False
    for field, content in _fields(value):
        if field in numbers:
            numbers[field] = _integer(content)
        elif field == 2:
            shape = _shape(_bytes(content))
        sliced |= field == 7
    entry = Entry(numbers[1], shape, numbers[3], numbers[4], numbers[5], numbers[6], sliced)
    if entry.shard >= shards or max(entry.offset, entry.size) >= 1 << 62:
        raise ValueError(
            f"{key.decode()} is at byte {entry.offset:,} of data file {entry.shard} with {entry.size:,} bytes, in "
            f"{shards} file(s)"
        )
    return entry


def _shape(content: bytes) -> tuple[int, ...]:
    dimensions = []
    for field, dimension in _fields(content):
        if field == 3 and dimension:
            raise ValueError("a shape of unknown rank")
        if field == 2:
            dimensions.append(_integer(dict(_fields(_bytes(dimension))).get(1, 0)))
    if len(dimensions) > 8 or any(dimension >= 1 << 40 for dimension in dimensions):
        raise ValueError(f"a shape of {len(dimensions)} dimensions up to {max(dimensions):,} (negative, or too large)")
    return tuple(dimensions)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protocol buffer's message. Raises ``ValueError``."""
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        kind, length = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        if kind == 0:
            value, position = _varint(content, position)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, position = _varint(content, position)
        elif kind not in (1, 5):
            raise ValueError(f"a field of wire type {kind}")
        if position + length > len(content):
            raise ValueError(f"a field of {length:,} bytes where {len(content) - position:,} are left")
        value = content[position : position + length]
        position += length
        yield tag >> 3, value if kind == 2 else int.from_bytes(value, "little")


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """An unsigned number of up to 64 bits, seven a byte, and the position after it."""
    number = 0
    for index, byte in enumerate(content[position : position + 10]):
        number |= (byte & 127) << 7 * index
        if byte < 128:
            if number >= 1 << 64:
                break
            return number, position + index + 1
    raise ValueError(f"a number at byte {position:,} that does not end, or is too large")


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("text where a number is expected")
    return value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message is expected")
    return value


def _masked(checksum: int) -> int:
    """A CRC-32C as LevelDB stores it: turned by 15 bits, plus a constant."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


_TF1_ENDINGS = {
    "embeddings.weight": "embeddings",
    "LayerNorm.weight": "LayerNorm/gamma",
    "LayerNorm.bias": "LayerNorm/beta",
    "seq_relationship.weight": "seq_relationship/output_weights",
    "seq_relationship.bias": "seq_relationship/output_bias",
    "predictions.bias": "predictions/output_bias",
    ".weight": ".kernel",
}
_TF2_PARTS = (
    (r"^bert/embeddings/word_embeddings$", "word_embeddings/embeddings"),
    (r"^bert/embeddings/position_embeddings$", "position_embedding/embeddings"),
    (r"^bert/embeddings/token_type_embeddings$", "type_embeddings/embeddings"),
    (r"^bert/embeddings/LayerNorm/", "embeddings/layer_norm/"),
    (r"^bert/encoder/", "transformer/"),
    (r"/attention/output/dense/", "/self_attention_output/"),
    (r"/attention/output/LayerNorm/", "/self_attention_layer_norm/"),
    (r"/attention/self/", "/self_attention/"),
    (r"/(intermediate|output)/dense/", r"/\1/"),
    (r"/output/LayerNorm/", "/output_layer_norm/"),
    (r"^bert/pooler/dense/", "pooler_transform/"),
    (r"^cls/predictions/output_bias$", "cls/predictions/output_bias/bias"),
    (r"^cls/seq_relationship/output_weights$", "predictions/transform/logits/kernel"),
    (r"^cls/seq_relationship/output_bias$", "predictions/transform/logits/bias"),
)


def tf1_name(name: str) -> str:
    """The name of a weight in the reference's graph, from that in Hugging Face's ``BertForPreTraining``."""
    for theirs, ours in _TF1_ENDINGS.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
            break
    return re.sub(r"\.layer\.(\d+)", r".layer_\1", name).replace(".", "/")


def tf2_names(name: str) -> list[str]:
    """The names that the variable can have in the Keras model of TensorFlow's model garden.

    They are those of its converter of checkpoints, which finds variables by them
    (official/nlp/bert/tf1_checkpoint_converter_lib); the second of two is that of its later versions.
    """
    name = tf1_name(name)
    for theirs, ours in _TF2_PARTS:
        name = re.sub(theirs, ours, name)
    later = name.replace("/self_attention_output/", "/self_attention/attention_output/")
    return [name, f"bert/{name}"] if name.startswith("cls/") else [name, later]
