"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow, and the names of BERT's variables in them.

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
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import google_crc32c
import numpy as np

from bert.checkpoints.tensorflow_index import (
    MOST_INDEX_BYTES,
    integer,
    masked,
    message,
    message_fields,
    sorted_table,
    varint,
)
from console.files import open_regular, read_bounded

INDEX_SUFFIX = ".index"
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
# The first that fits is taken: the last one is an ending of others.
_TF1_ENDINGS = {
    "embeddings.weight": "embeddings",
    "LayerNorm.weight": "LayerNorm/gamma",
    "LayerNorm.bias": "LayerNorm/beta",
    "seq_relationship.weight": "seq_relationship/output_weights",
    "seq_relationship.bias": "seq_relationship/output_bias",
    "predictions.bias": "predictions/output_bias",
    ".weight": ".kernel",
}
# In this order: parts of attention/output before those of the output of the layer, which they end like.
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


@dataclass(frozen=True)
class Entry:
    """The place of a tensor."""

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
        content = read_bounded(self.index, MOST_INDEX_BYTES, _REMEDY)
        # MLCommons publishes MD5s. It is no protection here, which builds with FIPS have to be told.
        self.index_md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        self.index_sha256 = hashlib.sha256(content).hexdigest()
        self.index_bytes = len(content)
        try:
            records = dict(sorted_table(content))
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
        # Before anything is allocated: an index is not trusted.
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
        """Map each variable's name to its key here, of a TF2 checkpoint; a TF1 checkpoint has none.

        Raises ``ValueError`` where two variables had one name.
        """
        if _OBJECT_GRAPH not in self.entries:
            return {}
        names: dict[str, str] = {}
        try:
            for field, node in message_fields(self._object_graph()):
                if field == 1:  # TrackableObjectGraph: nodes
                    self._add_variables(message(node), names)
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.data_file(self.entries[_OBJECT_GRAPH].shard)}: the object graph is no text"
            ) from None
        return names

    def published(self) -> str | None:
        """Name which of the benchmark's files this is, by the MD5 of the index: "TF1", "TF2", or None."""
        name, index_bytes, data_bytes = _PUBLISHED.get(self.index_md5, (None, 0, 0))
        return name if (self.index_bytes, self.data_file(0).stat().st_size) == (index_bytes, data_bytes) else None

    def _add_variables(self, node: bytes, names: dict[str, str]) -> None:
        for field, attribute in message_fields(node):
            if field != 2:  # TrackableObject: attributes
                continue
            # SerializedTensor: full_name, checkpoint_key.
            parts = {number: part for number, part in message_fields(message(attribute)) if number in (2, 3)}
            name, key = (message(parts.get(number, b"")).decode() for number in (2, 3))
            # The graph is a second list of tensors, which need not agree with the index.
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
            length, start = varint(content, 0)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; {_REMEDY}") from None
        checked, text = content[start : start + 4], content[start + 4 :]
        if length != len(text) or masked(google_crc32c.value(struct.pack("<I", length))) != int.from_bytes(
            checked, "little"
        ):
            raise ValueError(f"{where}: a string of {length:,} bytes in {len(text):,}, or another checksum; {_REMEDY}")
        # The tensor's checksum covers the length as four bytes, not as the varint that is in the file
        # (WriteStringTensor of tensor_bundle.cc).
        checksum = google_crc32c.extend(google_crc32c.value(struct.pack("<I", length)), checked)
        self._compare(_OBJECT_GRAPH, entry, google_crc32c.extend(checksum, text))
        return text

    def _read(self, entry: Entry) -> np.ndarray:
        """[size] uint8."""
        # Read into an array: one made of bytes cannot be written to, of which torch.from_numpy warns.
        path, content = self.data_file(entry.shard), np.empty(entry.size, np.uint8)
        with open_regular(path) as file:
            file.seek(entry.offset)
            if file.readinto(content.data) != entry.size:
                raise ValueError(f"{path}: it ended while it was read; {_REMEDY}")
        return content

    def _compare(self, name: str, entry: Entry, checksum: int) -> None:
        if masked(checksum) != entry.checksum:
            raise ValueError(
                f"{self.data_file(entry.shard)}: {name} has the checksum {masked(checksum):08x}, the index says "
                f"{entry.checksum:08x}; {_REMEDY}"
            )

    def _check_extents(self) -> None:
        """Every tensor lies inside its data file, and no two share bytes."""
        found = {}
        # The first file also where no tensor is in it: ``published`` asks for its size.
        for shard in sorted({entry.shard for entry in self.entries.values()} | {0}):
            try:
                found[shard] = self.data_file(shard).stat().st_size
            except OSError as error:
                raise ValueError(f"{self.data_file(shard)}: {error.strerror}; {_REMEDY}") from None
        # In the order of the files, so that only neighbours need be compared.
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


def _shards(records: dict[bytes, bytes]) -> int:
    """The number of data files, from the header."""
    if b"" not in records:
        raise ValueError("no header")
    header = dict(message_fields(records[b""]))
    # BundleHeaderProto: num_shards, endianness, version; in the last, min_consumer. A field that is 0 is not written.
    shards, endianness = header.get(1, 0), header.get(2, 0)
    if endianness != 0:
        raise ValueError("written on a big-endian machine, which is not supported")
    version = dict(message_fields(message(header.get(3, b""))))
    if version.get(2, 0) != 0 and integer(version[2]) > 1:
        raise ValueError(f"needs a reader of version {version[2]}, this is one of version 1")
    # Names of data files have five digits.
    if not 0 < integer(shards) < 100_000:
        raise ValueError(f"{shards} data files")
    return integer(shards)


def _entry(key: bytes, value: bytes, shards: int) -> Entry:
    # BundleEntryProto: dtype 1, shape 2, shard_id 3, offset 4, size 5, crc32c 6, slices 7.
    numbers = {3: 0, 4: 0, 5: 0, 6: 0, 1: 0}
    shape: tuple[int, ...] = ()
    sliced = False
    for field, content in message_fields(value):
        if field in numbers:
            numbers[field] = integer(content)
        elif field == 2:
            shape = _shape(message(content))
        sliced |= field == 7
    entry = Entry(numbers[1], shape, numbers[3], numbers[4], numbers[5], numbers[6], sliced)
    # Numbers are unsigned here: a negative one of a damaged file comes as one beyond this.
    if entry.shard >= shards or max(entry.offset, entry.size) >= 1 << 62:
        raise ValueError(
            f"{key.decode()} is at byte {entry.offset:,} of data file {entry.shard} with {entry.size:,} bytes, in "
            f"{shards} file(s)"
        )
    return entry


def _shape(content: bytes) -> tuple[int, ...]:
    dimensions = []
    for field, dimension in message_fields(content):
        if field == 3 and dimension:  # TensorShapeProto: unknown_rank; below, dim and its size
            raise ValueError("a shape of unknown rank")
        if field == 2:
            dimensions.append(integer(dict(message_fields(message(dimension))).get(1, 0)))
    if len(dimensions) > 8 or any(dimension >= 1 << 40 for dimension in dimensions):
        raise ValueError(f"a shape of {len(dimensions)} dimensions up to {max(dimensions):,} (negative, or too large)")
    return tuple(dimensions)


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
