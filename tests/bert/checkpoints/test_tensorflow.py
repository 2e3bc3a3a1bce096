"""TensorFlow checkpoints: real ones are read correctly; damaged and hostile ones give one clear error."""

import hashlib
import os
import re
import shutil
import struct
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.checkpoints import tensorflow
from bert.checkpoints.hugging_face import hugging_face_names, to_hugging_face
from bert.checkpoints.sources import open_source
from bert.checkpoints.tensorflow import MAGIC, Entry, TensorBundle, _varint, tf1_name
from bert.configuration.sections import ModelConfig
from bert.convert import convert
from tests.bert.checkpoints.tf_bundles.expected import BUNDLES, bundle_weights
from tests.bert.small_models import drawn_model
from tests.dataloading.shards.test_tfrecord import masked_crc

STATE = bundle_weights()
WHOLE = ["tf1", "tf1_snappy", "tf1_sharded"]


def sealed_index(index: bytes) -> bytes:
    """Return an index with one block of tensors and the correct checksum of every block."""
    content, numbers, place = bytearray(index), [], 0
    with suppress(ValueError):
        for _ in range(4):
            number, place = _varint(index[-48:], place)
            numbers.append(number)
        for start, size in ((0, numbers[0] - 5), numbers[:2], numbers[2:]):
            if 0 < start + size < len(index) - 48:
                content[start + size + 1 : start + size + 5] = masked_crc(index[start : start + size + 1])
    return bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkpoints' folder with the data file that belongs to tf1_snappy's index."""
    folder = tmp_path_factory.mktemp("bundles")
    for path in BUNDLES.glob("tf*"):
        shutil.copy(path, folder)
    shutil.copy(folder / "tf1.data-00000-of-00001", folder / "tf1_snappy.data-00000-of-00001")
    return folder


@pytest.mark.parametrize("name", WHOLE)
def test_all_weights_written_by_tensorflow_are_read(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """The benchmark's checkpoint is recognized by the MD5 of its index and the size of its data file."""
    found = open_source(folder / name, num_attention_heads=2)
    names = hugging_face_names(2)
    assert found.weights.keys() == names.keys()
    for ours, theirs in names.items():
        expected = np.concatenate([STATE[each] for each in theirs])
        assert found.weights[ours].shape == expected.shape
        assert torch.equal(found.weights[ours].read(), torch.from_numpy(expected)), ours
    assert found.model == ModelConfig(2, 8, 2, 16, 30, 12)
    index = (folder / f"{name}.index").read_bytes()
    digest = f"sha256 of the index, which holds every tensor's checksum: {hashlib.sha256(index).hexdigest()}"
    assert open_source(folder / f"{name}.index", 2).digest() == found.digest() == digest
    size = next(folder.glob(f"{name}.data-00000-of-*")).stat().st_size
    for known in ((hashlib.md5(index).hexdigest(), size), (hashlib.md5(index).hexdigest(), size + 1)):
        monkeypatch.setattr(tensorflow, "_PUBLISHED", known)
        which = "the benchmark's phase-1 checkpoint" if known[1] == size else "not the benchmark's published file"
        kind = f"TensorFlow checkpoint (TF1), {which} by size and MD5 of its index"
        assert open_source(folder / name, 2).kind == kind
    monkeypatch.setattr(TensorBundle, "array", lambda *_: np.full((8, 8), np.inf, np.float32))
    diverged = r"data-0000\d-of-0000\d: bert/encoder/layer_1/.*/kernel has NaN or infinity"
    with pytest.raises(ValueError, match=diverged):  # a diverged model has NaN or infinity, but valid checksums
        found.weights["layers.1.query_key_value.weight"].read()
    with pytest.raises(ValueError, match=r"how many attention heads .* set --num-attention-heads"):
        open_source(folder / name)


def test_partitioned_incomplete_and_tf2_checkpoints_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(
        ValueError, match=f"holds no model.safetensors: .*; for a TensorFlow .* its prefix: {BUNDLES}/tf1$"
    ):
        open_source(BUNDLES)
    with pytest.raises(ValueError, match="word_embeddings is a partitioned variable"):
        open_source(folder / "tf1_sliced")
    shutil.copy(folder / "tf1_sharded.index", tmp_path)
    with pytest.raises(ValueError, match=r"tf1_sharded\.data-00000-of-00003: No such file"):
        TensorBundle(tmp_path / "tf1_sharded")
    graph = (b"_CHECKPOINTABLE_OBJECT_GRAPH", entry(dtype=7))
    (tmp_path / "download" / "tf2_ckpt").mkdir(parents=True)
    prefix = written(tmp_path / "download" / "tf2_ckpt", table(block(HEADER, graph)))
    for source in (prefix, prefix.parent, tmp_path / "download"):
        with pytest.raises(
            ValueError, match=r"is a TF2 checkpoint.* tf1_ckpt/.*index \(17,371 bytes\) .*4,034,713,312"
        ):
            open_source(source)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def number(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)


def field(index: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return number(index << 3) + number(value)
    return number(index << 3 | 2) + number(len(value)) + value


def entry(*dims: int, dtype: int = 1, shard: int = 0, offset: int = 0, size: int = 16, extra: bytes = b"") -> bytes:
    shape = b"".join(field(2, field(1, dim)) for dim in dims)
    return field(1, dtype) + field(2, shape) + field(3, shard) + field(4, offset) + field(5, size) + extra


def block(*records: tuple[bytes, bytes], restarts: int = 1, tail: bytes = b"") -> bytes:
    rows = b"".join(b"\0" + number(len(key)) + number(len(value)) + key + value for key, value in records)
    return rows + tail + bytes(4) + struct.pack("<I", restarts)


def sealed(content: bytes, kind: int = 0) -> bytes:
    content += bytes([kind])
    return content + masked_crc(content)


def table(data: bytes, kind: int = 0, handles: list[tuple[int, int]] | None = None) -> bytes:
    """Return an index file with one data block. ``handles`` replaces its references to blocks and may be invalid."""
    blocks = [sealed(data, kind), sealed(block())]
    places = [(0, len(data))] if handles is None else handles
    index = block(*((bytes([97 + i]), number(offset) + number(size)) for i, (offset, size) in enumerate(places)))
    start = len(blocks[0]) + len(blocks[1])
    footer = number(len(blocks[0])) + number(len(block())) + number(start) + number(len(index))
    return b"".join([*blocks, sealed(index), footer.ljust(40, b"\0"), MAGIC])


HEADER = (b"", field(1, 1))
GOOD = (b"w", entry(2, 2))
FOUND = Entry(1, (2, 2), 0, 0, 16, 0, is_partitioned=False)
LONG = b"w" * 1024


def record(shared: int, fresh: bytes) -> bytes:
    """Return a valid tensor's record. Its name is ``fresh`` after the first ``shared`` bytes of the previous name."""
    return number(shared) + number(len(fresh)) + number(len(GOOD[1])) + fresh + GOOD[1]


def literal(text: bytes, extra: int) -> bytes:
    """Return a Snappy literal. If ``extra`` is 0, the tag holds the length; otherwise ``extra`` bytes hold it."""
    size = len(text) - 1
    return (bytes([59 + extra << 2]) + size.to_bytes(extra, "little") if extra else bytes([size << 2])) + text


def copy(form: int, size: int, distance: int) -> bytes:
    """Return a Snappy copy of form 1, 2 or 3."""
    if form == 1:
        return bytes([distance >> 8 << 5 | size - 4 << 2 | 1, distance & 255])
    return bytes([size - 1 << 2 | form]) + distance.to_bytes((2, 4)[form - 2], "little")


def written(tmp_path: Path, index: bytes) -> Path:
    (tmp_path / "x.index").write_bytes(index)
    (tmp_path / "x.data-00000-of-00001").write_bytes(bytes(100))
    return tmp_path / "x"


def index(*records: tuple[bytes, bytes], tail: bytes = b"") -> bytes:
    return table(block(HEADER, *records, tail=tail))


def packed(content: bytes, size: int = 10) -> bytes:
    """Return an index with a compressed block that claims to have ``size`` bytes of content."""
    return table(number(size) + content, kind=1)


A = literal(b"a", 0)
HOSTILE = [
    (MAGIC, "(the mark at its end is missing)"),
    (bytes(99), "(the mark at its end is missing)"),
    (bytes(40) + MAGIC, "a block at bytes 0 to 0 has under 4 bytes, or its trailer ends after 0"),
    (index((b"w", entry(*[1] * 9))), "damaged: a tensor of 9 dimensions and 16 bytes at offset 0"),
    (index((b"w", entry(2**40))), "damaged: a tensor of 1 dimension and 16 bytes at offset 0"),
    (index((b"w", entry(size=2**62))), "0 dimensions and 4,611,686,018,427,387,904 bytes at offset 0"),
    (index((b"w", entry(offset=2**62))), "and 16 bytes at offset 4,611,686,018,427,387,904"),
    (index((b"w", entry(2, 2, offset=85))), "x.data-00000-of-00001: has 100 bytes, but w is at bytes 85 to 101"),
    (index((b"w", entry(2, 2, shard=1))), "a tensor is in data file 1, but the last data file is 0"),
    (table(block((b"", field(1, 1) + field(2, 1)), GOOD)), "it was written on a big-endian machine"),
    (table(block((b"", b""), GOOD)), "it states 0 data files, expected 1 to 99999"),
    (table(block((b"", field(1, 10**5)), GOOD)), "it states 100000 data files"),
    (table(block((b"", field(1, 10**5 - 1)))), "x.data-00000-of-99999: No such file or directory"),
    (table(bytes(4)), "it has no header"),
    (index(GOOD, GOOD), "the key b'w' follows b'w': expected ascending keys"),
    (index((LONG, GOOD[1]), (LONG, GOOD[1])), "www...: expected ascending keys"),
    (index((LONG + b"w", GOOD[1])), "a record of 1,025 + 18 bytes does not fit the block at byte 0"),
    (index((LONG, b""), tail=record(1024, b"x")), "a record of 1 + 18 bytes does not fit"),
    (index((b"\xff", GOOD[1])), "'utf-8' codec can't decode byte 0xff"),
    (index(tail=record(1, b"w")), "a record of 1 + 18 bytes does not fit"),
    (index(tail=b"\0\1\1w"), "a record of 1 + 1 bytes does not fit"),
    (index(tail=b"\x80" * 10 + record(0, b"w")), "the number at byte 5 does not end"),
    (table(block(restarts=2)), "a block of 8 bytes cannot hold 2 restart points"),
    (index((b"w", b"\x0b")), "a field has wire type 3, expected 0, 1, 2 or 5"),
    (index((b"w", b"\x12\x02w")), "a field takes 2 bytes, but only 1 remain"),
    (flipped(index(GOOD), 1), "the block at byte 0 does not match its checksum"),
    (table(block(HEADER, GOOD), kind=2), "a block has compression type 2, expected 0 (none) or 1 (Snappy)"),
    (table(block(), handles=[(21, 8)]), "at bytes 21 to 29 has under 4 bytes, or its trailer ends after 26"),
    (table(block(), handles=[(0, 3)]), "a block at bytes 0 to 3 has under 4 bytes"),
    (packed(bytes(8), 2**22 + 1), "a compressed block states 4,194,305 bytes, expected at most 4,194,304"),
    (packed(A + copy(2, 64, 1) * 9), "a compressed block states 10 bytes, expected 4 or more, and yields 65"),
    (packed(literal(bytes(10), 0) + A), "states 10 bytes, expected 4 or more, and yields 11"),
    (packed(literal(bytes(3), 0), 3), "states 3 bytes, expected 4 or more, and yields 3"),
    (packed(b"\xfc\xff\xff\xff\xff"), "states 10 bytes, expected 4 or more, and yields 0"),
    (packed(A + copy(2, 4, 2)), "a compressed block copies from 2 bytes back, but has 1"),
    (packed(A + copy(2, 4, 0)), "a compressed block copies from 0 bytes back, but has 1"),
    (packed(literal(bytes(64), 1) + copy(2, 64, 64) * (2**16 - 1), 2**22), "the key b'' follows b''"),
]


@pytest.mark.parametrize(("index", "message"), HOSTILE, ids=[message for _, message in HOSTILE])
def test_a_hostile_index_is_refused(tmp_path: Path, index: bytes, message: str):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        TensorBundle(written(tmp_path, index))
    assert str(refused.value).startswith(f"{tmp_path}/x.")
    assert str(refused.value).endswith("; fetch or copy the checkpoint again")
    assert len(str(refused.value)) - len(str(tmp_path)) < 500


def test_an_index_at_its_limits_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names, dimensions and offsets may be as large as the limits. Unknown fields are skipped."""
    fixed = number(6 << 3 | 5) + struct.pack("<I", 2**32 - 1) + number(9 << 3 | 1) + bytes(8)
    wide = entry(*[1] * 7, 2**40 - 1, offset=84)
    made = index((b"v", wide), (LONG[:1000], entry(2, 2, extra=fixed)), tail=record(1000, b"x" * 24))
    assert TensorBundle(written(tmp_path, made)).entries == {
        "v": Entry(1, (*[1] * 7, 2**40 - 1), 0, 84, 16, 0, is_partitioned=False),
        "w" * 1000: replace(FOUND, checksum=2**32 - 1),
        "w" * 1000 + "x" * 24: FOUND,
    }
    assert TensorBundle(written(tmp_path, index())).entries == {}
    monkeypatch.setattr(tensorflow, "_MOST_TENSORS", 3)
    for more, handles, refused in (
        ([], 3, ""),
        ([(b"x", wide)], 1, "it has more than 3 tensors"),
        ([], 4, "a block has more than 3 records"),
    ):
        data = block(HEADER, (b"v", wide), GOOD, *more)
        places = [(0, len(data)), *[(len(sealed(data)), len(block()))] * (handles - 1)]
        with pytest.raises(ValueError, match=refused) if refused else nullcontext():
            TensorBundle(written(tmp_path, table(data, handles=places)))


def test_all_forms_of_literals_and_copies_are_decompressed(tmp_path: Path):
    text = np.random.default_rng(0).integers(97, 123, 70_000, dtype=np.uint8).tobytes()
    name = text[5:69] + text[-300:-236] + text[-1900:-1889] + text[-1900:-1896] + b"z" * 10
    plain = block(HEADER, (b"a", entry(2, 2, extra=field(15, text))), (name, entry(2, 2)))
    start, at = plain.index(text), plain.index(name)
    end, elements = start + len(text), [plain[:60], plain[60:121], plain[121:421], plain[421:at]]
    elements = [literal(each, extra) for extra, each in enumerate(elements)]
    for form, source, size in ((3, start + 5, 64), (2, end - 300, 64), (1, end - 1900, 11), (1, end - 1900, 4)):
        elements.append(copy(form, size, at - source))
        at += size
    elements += [literal(b"z", 0), copy(1, 8, 1), copy(2, 1, 9), literal(plain[at + 10 :], 4)]
    found = TensorBundle(written(tmp_path, packed(b"".join(elements), len(plain))))
    assert found.entries == {"a": FOUND, name.decode(): FOUND}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (entry(2**32, 2**32), "of shape .* has 16 bytes, expected 4 per element and at most 1,0"),
        (entry(0, 2**39, 2**39, size=0), r"of shape \(0, .*\) has 0 bytes"),
        (entry(5, size=16), r"of shape \(5,\) has 16 bytes"),
        (entry(2, 2, dtype=7), r"is of TensorFlow's type number 7, expected 1 \(float32\)"),
        (entry(2, 2), "does not match its checksum in the index; fetch"),
        (field(2, 7), "is of TensorFlow's type number 0"),
        (entry(2, 2, extra=field(7, b"")), "is a partitioned variable"),
    ],
)
def test_a_hostile_tensor_is_refused(tmp_path: Path, value: bytes, message: str):
    bundle = TensorBundle(written(tmp_path, index((b"w", value))))
    with pytest.raises(ValueError, match=f": w {message}"):
        bundle.array("w")


def test_a_tensor_too_large_for_a_bert_is_not_read(tmp_path: Path):
    """The size is checked without reading the tensor. Its data file is sparse and seems to have 1 GiB."""
    for rows in (2**28, 2**28 + 1):
        prefix = written(tmp_path, index((b"w", entry(rows, size=4 * rows))))
        os.truncate(tmp_path / "x.data-00000-of-00001", 4 * rows)
        with pytest.raises(ValueError, match="at most 1,073,741,824") if rows > 2**28 else nullcontext():
            assert TensorBundle(prefix).readable("w") == Entry(1, (rows,), 0, 0, 4 * rows, 0, is_partitioned=False)


def test_the_number_of_heads_is_the_hidden_size_divided_by_64(tmp_path: Path):
    tensors = to_hugging_face(drawn_model(ModelConfig(1, 128, 2, 16, 30, 12), 0).state_dict())
    entries = {}
    for name, tensor in tensors.items():
        variable = tf1_name(name)
        shape = tensor.shape[::-1] if variable.endswith("/kernel") else tensor.shape
        entries[variable.encode()] = entry(*shape, size=4 * tensor.numel())
    prefix = written(tmp_path, index(*sorted(entries.items())))
    os.truncate(tmp_path / "x.data-00000-of-00001", 1 << 20)
    assert open_source(prefix).model == ModelConfig(1, 128, 2, 16, 30, 12)


def test_converting_a_damaged_checkpoint_leaves_no_files(folder: Path, tmp_path: Path):
    damaged = shutil.copytree(folder, tmp_path / "in") / "tf1"
    entry = TensorBundle(damaged).entries["cls/seq_relationship/output_bias"]
    data = damaged.with_name("tf1.data-00000-of-00001")
    data.write_bytes(flipped(data.read_bytes(), 8 * entry.offset + 3))
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + "".join(f"{index}\n" for index in range(25)))
    for to, out in (("safetensors", tmp_path / "out" / "w.safetensors"), ("hugging-face", tmp_path / "out" / "folder")):
        with pytest.raises(ValueError, match="cls/seq_relationship/output_bias does not match its checksum"):
            convert(damaged, to, out, 2, vocab)  # pyright: ignore[reportArgumentType]
    assert list((tmp_path / "out").iterdir()) == []
