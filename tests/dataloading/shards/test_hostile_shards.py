"""Malicious shards: small files that claim huge sizes or refer to other files. Rejecting them takes little memory."""

import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dataloading.shards.formats import open_shard, write_shard
from dataloading.shards.hdf5_file import _text_sizes
from tests.dataloading.foreign_shards import RAGGED, array_of
from tests.dataloading.made_up import INFO, make_samples
from tests.dataloading.shards import test_layouts
from tests.dataloading.shards.test_tfrecord import framed
from tests.programs import python

FIXED = {"input_ids": 512, "input_mask": 512, "segment_ids": 512, "masked_lm_positions": 76, "masked_lm_ids": 76}
MOST_MEMORY = 96 << 20
"""Number of bytes by which a process may grow while it rejects all files."""

Make = Callable[[Path], object]


def never_written(rows: int, ragged: bool = False, **storage: Any) -> Make:
    """Return a function that writes a file that declares many rows but stores none."""

    def make(path: Path) -> None:
        with h5py.File(path, "w") as file:
            for name, width in dict.fromkeys(RAGGED, 0).items() if ragged else FIXED.items():
                shape, kind = ((rows,), h5py.vlen_dtype(np.dtype("i2"))) if ragged else ((rows, width), "i2")
                file.create_dataset(name, shape, kind, **storage)
            file.create_dataset("next_sentence_labels", (rows,), "i1", **storage)

    return make


def one_object_for_all_rows(path: Path) -> None:
    """Write 7,000 rows that all refer to the same 0.7 MB object on the file's heap."""
    with h5py.File(path, "w") as file:
        for name in RAGGED:
            storage = {"chunks": (7000,), "compression": "gzip"}
            column = file.create_dataset(name, (7000,), h5py.vlen_dtype(np.dtype("i2")), **storage)
            column[0] = np.full(90_000, 1)
            _, stored = column.id.read_direct_chunk((0,))
            column.id.write_direct_chunk((0,), zlib.compress(zlib.decompress(stored)[:16] * 7000))
        file.create_dataset("next_sentence_labels", data=np.zeros(7000, "i1"))


def chunk_of(size: int) -> Make:
    """Return a function that writes a native shard: the chunk of its 65,536 ids inflates to ``size`` bytes."""

    def make(path: Path) -> None:
        write_shard(path, make_samples(4), INFO)
        with h5py.File(path, "r+") as file:
            del file["input_ids"]
            options = {"chunks": (1 << 16,), "compression": "gzip"}
            ids = file.create_dataset("input_ids", (1 << 16,), "<u2", **options)
            ids.id.write_direct_chunk((0,), zlib.compress(bytes(size), 1))

    return make


def address_at(content: bytearray, place: int) -> int:
    return struct.unpack_from("<Q", content, max(place, 0) + 32)[0]


def chunks_that_share_bytes(path: Path) -> None:
    """Write a chunk of random numbers, and 600 entries of the chunk index that all refer to it."""
    rows = np.random.default_rng(0).integers(0, 30_000, (600, 512), "<i2")
    rows[1:] = 0
    with h5py.File(path, "w") as file:
        for name, width in FIXED.items():
            storage = {"chunks": (1, width), "compression": "gzip"}
            file.create_dataset(name, data=rows[:, :width] if name == "input_ids" else rows[:, :width] * 0, **storage)
        file.create_dataset("next_sentence_labels", data=np.zeros(600, "i1"))
        first = array_of(file, "input_ids").id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    small = zlib.compress(rows[1].tobytes(), 4)
    # A leaf of the index has the chunk's size, filter mask, coordinates, offset in an element (always 0), and address.
    for row in range(1, 600):
        place, key = -1, struct.pack("<IIQQQ", len(small), 0, row, 0, 0)
        while content[(address := address_at(content, place)) : address + 4] == b"TREE" or place < 0:
            place = content.index(key, place + 1)
        content[place : place + 4] = struct.pack("<I", first.size)
        content[place + 32 : place + 40] = struct.pack("<Q", first.byte_offset)
    path.write_bytes(content)


def more_elements_than_a_number_holds(path: Path) -> None:
    never_written(8)(path)
    with h5py.File(path, "r+") as file:
        for name in FIXED:
            del file[name]
            file.create_dataset(name, (1 << 33, 1 << 31), "i2", chunks=(1024, 1024))


def attribute_of_one_object(path: Path) -> None:
    """Write 4,000 strings that all refer to the same 0.3 MB string."""
    write_shard(path, make_samples(4), INFO)
    with h5py.File(path, "r+") as file:
        file.attrs["digest"] = np.array(["x" * 300_000] + ["y"] * 3999, h5py.string_dtype())
    content = path.read_bytes()
    length, next_length = struct.pack("<I", 300_000), struct.pack("<I", 1)
    place = -1
    while content[place + 16 : place + 20] != next_length:
        place = content.index(length, place + 1)
    path.write_bytes(content[:place] + content[place : place + 16] * 4000 + content[place + 64_000 :])


def attribute_of_four_gigabytes(path: Path) -> None:
    write_shard(path, make_samples(4), INFO)
    content = bytearray(path.read_bytes())
    place = content.index(struct.pack("<I", 64), content.index(b"digest\0"))
    content[place : place + 4] = b"\xff" * 4
    path.write_bytes(content)


UNWRITTEN = "input_ids claims {} bytes that are not inside the file"
DAMAGED = r"input_ids: the chunk at \(0,\) is damaged \(it does not hold the 131,072 bytes that were expected\)"
GREEDY: dict[str, tuple[Make, str]] = {
    "rows never written": (never_written(80_000), UNWRITTEN.format("81,920,000")),
    "chunks never written": (never_written(80_000, chunks=True), "input_ids: 0 of 1,024 chunks were written"),
    "references never written": (never_written(1_500_000, ragged=True), UNWRITTEN.format("24,000,000")),
    "one object for all rows": (one_object_for_all_rows, "input_ids claims 1,260,000,000 bytes in a file of 74"),
    "a chunk that inflates to more": (chunk_of(200 << 20), DAMAGED),
    "a chunk that inflates to a byte more": (chunk_of((1 << 17) + 1), DAMAGED),
    "a chunk that inflates to less": (chunk_of(100), DAMAGED),
    "chunks that share bytes": (
        chunks_that_share_bytes,
        "input_ids would unpack to more than 128 times the [\\d,]+ bytes of the file",
    ),
    "more elements than a number holds": (more_elements_than_a_number_holds, "0 of 17,592,186,044,416 chunks were"),
    "an attribute of one object": (attribute_of_one_object, "the attribute digest is missing or is neither a text"),
    "an attribute of four gigabytes": (attribute_of_four_gigabytes, "the attribute digest claims 4,294,967,295 bytes"),
    "a million records of one byte": (
        lambda path: path.write_bytes(framed(b"\n") * 1_000_000),
        r"record 0 at byte 0: its data is not a valid tf\.train\.Example; copy",
    ),
}

READ_ALL = """
import json, resource, sys
from pathlib import Path
import dataloading.shards.tfrecord
from dataloading.shards.formats import open_shard
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in map(Path, sys.argv[1:]):
    try:
        open_shard(path).verify()
        said = "read"
    except ValueError as error:
        said = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([path.name, said, grown << 10]))
"""


def test_little_memory_is_used_to_reject_shards_that_claim_huge_sizes(tmp_path: Path) -> None:
    for name, (make, _) in GREEDY.items():
        make(tmp_path / name)
    done = python("-c", READ_ALL, *(tmp_path / name for name in GREEDY))
    assert done.returncode == 0, done.stderr
    found = {name: (said, grown) for name, said, grown in map(json.loads, done.stdout.splitlines())}
    assert list(found) == list(GREEDY)
    for name, (said, grown) in found.items():
        assert re.match(f"{tmp_path / name}: .*{GREEDY[name][1]}", said), (name, said)
        assert grown < MOST_MEMORY, name


def message(kind: int, content: bytes) -> bytes:
    return struct.pack("<HH4x", kind, len(content)) + content


def attribute(version: int, name: bytes, claimed: int) -> bytes:
    """Return the header message of a variable-length attribute. Its datatype has 5 bytes and its dataspace 3."""
    unit = 8 if version == 1 else 1
    parts = (part + bytes(-len(part) % unit) for part in (name + b"\0", b"\xaa" * 5, b"\xbb" * 3))
    head = struct.pack("<BxHHH", version, len(name) + 1, 5, 3) + b"\0" * (version == 3)
    return message(0x0C, head + b"".join(parts) + struct.pack("<IQI", claimed, 0xCCCC, 0xDDDD))


def test_claimed_attribute_sizes_are_found_in_all_blocks_of_a_header() -> None:
    def sizes(messages: bytes, size: int | None = None, first: int = 1) -> list[int]:
        head = struct.pack("<BxHIII", first, 0xEE, 0xEEEE, len(messages) if size is None else size, 0xEEEE)
        return list(_text_sizes(bytes(24) + head + messages + more, 24, b"digest\0"))

    more, one, two, three = b"", attribute(1, b"digest", 11), attribute(2, b"digest", 22), attribute(3, b"digest", 33)
    others = attribute(1, b"digests", 44) + message(0x0D, one[8:]) + message(0x0C, b"\1" * 8)
    assert sizes(others + one + two + others + three) == [11, 22, 33]
    assert sizes(one + two, size=len(one + two) - 1) == [11]
    assert sizes(one, size=99_999) == [11]
    assert sizes(one, first=2) == []
    assert sizes(one[:-1]) == sizes(struct.pack("<HH4x", 0x0C, len(one)) + one[8:-1]) == []
    elsewhere = message(0x10, struct.pack("<QQ", 24 + 16 + 24 + len(one), len(two)))
    more = two + three  # the second block ends before attribute three
    assert sizes(elsewhere + one) == [11, 22]
    assert sizes(message(0x10, b"\1" * 15) + one) == [11]
    more = b""
    itself = message(0x10, struct.pack("<QQ", 24 + 16, 24 + len(one)))
    assert sizes(itself + one) == [11] * 2048, "4,096 messages are read at most"


def stored_elsewhere(file: h5py.File, folder: Path, way: str) -> None:
    """Store the ids again so that reading them needs another file, a link in this file, or a decompression plug-in."""
    data, other = array_of(file, "input_ids")[()], folder / "elsewhere"
    del file["input_ids"]
    if way == "plug-in":
        file.create_dataset("input_ids", data=data, compression="lzf")
    elif way == "soft link":
        file["hidden"] = data
        file["input_ids"] = h5py.SoftLink("/hidden")
    elif way == "bytes of a file":
        other.write_bytes(data.tobytes())
        file.create_dataset("input_ids", data.shape, data.dtype, external=[(str(other), 0, data.nbytes)])
    else:
        with h5py.File(other, "w") as source:
            source["input_ids"] = data
        if way == "external link":
            file["input_ids"] = h5py.ExternalLink(str(other), "/input_ids")
        else:
            layout = h5py.VirtualLayout(data.shape, data.dtype)
            layout[...] = h5py.VirtualSource(str(other), "input_ids", data.shape)
            file.create_virtual_dataset("input_ids", layout)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("bytes of a file", "input_ids is not stored in this file in one piece"),
        ("virtual", "input_ids is not stored in this file in one piece"),
        ("soft link", "input_ids is missing or a link to another object"),
        ("external link", "input_ids is missing or a link to another object"),
        ("plug-in", r"input_ids uses the HDF5 filters \[32000\], expected gzip, shuffle, both or none"),
    ],
)
def test_links_external_storage_and_unknown_filters_are_refused(tmp_path: Path, way: str, message: str) -> None:
    for layout in ("native", "fixed"):
        (path := tmp_path / layout / "shard").parent.mkdir()
        test_layouts.write(path, layout)
        with h5py.File(path, "r+") as file:
            stored_elsewhere(file, path.parent, way)
        with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
            open_shard(path)
