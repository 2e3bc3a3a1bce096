"""TensorFlow checkpoints: real ones are read correctly; damaged and hostile ones give one clear error."""

import shutil
import struct
from contextlib import suppress
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bert.checkpoints.hugging_face import hugging_face_names
from bert.checkpoints.sources import open_source
from bert.checkpoints.tensorflow import MAGIC, TensorBundle, _varint
from bert.configuration.sections import ModelConfig
from bert.convert import convert
from tests.bert.checkpoints.tf_bundles.expected import BUNDLES, bundle_weights
from tests.dataloading.shards.test_tfrecord import masked_crc

STATE = bundle_weights()
WHOLE = ["tf1", "tf1_snappy", "tf1_sharded"]


def sealed_index(index: bytes) -> bytes:
    """Give the blocks of an index with one block of tensors the checksums of their content."""
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
    """Copy the fixtures' folder and add the data file that belongs to tf1_snappy's index."""
    folder = tmp_path_factory.mktemp("bundles")
    for path in BUNDLES.glob("tf*"):
        shutil.copy(path, folder)
    shutil.copy(folder / "tf1.data-00000-of-00001", folder / "tf1_snappy.data-00000-of-00001")
    return folder


@pytest.mark.parametrize("name", WHOLE)
def test_every_weight_of_a_checkpoint_of_tensorflows(folder: Path, name: str):
    found = open_source(folder / name, num_attention_heads=2)
    names = hugging_face_names(2)
    assert found.weights.keys() == names.keys()
    for ours, theirs in names.items():
        expected = np.concatenate([STATE[each] for each in theirs])
        assert found.weights[ours].shape == expected.shape
        assert torch.equal(found.weights[ours].read(), torch.from_numpy(expected)), ours
    assert found.model == ModelConfig(2, 8, 2, 16, 30, 12)
    assert open_source(folder / f"{name}.index", 2).digest() == found.digest()
    with pytest.raises(ValueError, match=r"how many attention heads .* set --num-attention-heads"):
        open_source(folder / name)


def test_a_weight_that_is_not_finite_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Checksums do not help against a model that has diverged."""
    monkeypatch.setattr(TensorBundle, "array", lambda *_: np.full((8, 8), np.inf, np.float32))
    weight = open_source(folder / "tf1", 2).weights["layers.1.query_key_value.weight"]
    with pytest.raises(
        ValueError, match=r"tf1\.data-00000-of-00001: bert/encoder/layer_1/.*/kernel has NaN or infinity"
    ):
        weight.read()


def test_what_is_not_supported_is_refused_by_name(folder: Path, tmp_path: Path):
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


def copied(folder: Path, name: str, target: Path, suffix: str, content: bytes) -> Path:
    """Copy a checkpoint with one file's content replaced, and return its prefix."""
    target.mkdir(exist_ok=True)
    for path in folder.glob(f"{name}.*"):
        shutil.copy(path, target)
    (target / f"{name}{suffix}").write_bytes(content)
    return target / name


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(data=st.data(), name=st.sampled_from([*WHOLE, "tf1_sliced"]))
def test_a_flipped_bit_in_the_index(folder: Path, data: st.DataObject, name: str):
    """A damaged index is rejected, or is read as before if the flipped bit has no meaning."""
    content, original = (folder / f"{name}.index").read_bytes(), TensorBundle(folder / name)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    prefix = copied(folder, name, folder / "flipped", ".index", flipped(content, bit))
    with suppress(ValueError):
        found = TensorBundle(prefix)
        assert (found.entries, found.shards) == (original.entries, original.shards)


@given(data=st.data(), name=st.sampled_from(WHOLE))
def test_a_truncated_index(folder: Path, data: st.DataObject, name: str):
    content = (folder / f"{name}.index").read_bytes()
    kept = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(ValueError, match=rf"{name}\.index: "):
        TensorBundle(copied(folder, name, folder / "cut", ".index", content[:kept]))


@given(data=st.data(), name=st.sampled_from(["tf1", "tf1_sharded"]))
def test_a_flipped_bit_in_the_data(folder: Path, data: st.DataObject, name: str):
    """Only reading the damaged tensor reports the error. Other tensors can be read."""
    original = TensorBundle(folder / name)
    tensor = data.draw(st.sampled_from(sorted(original.entries.keys() - {"global_step"})))
    entry = original.entries[tensor]
    suffix = original.data_file(entry.shard).name.removeprefix(name)
    content = original.data_file(entry.shard).read_bytes()
    bit = data.draw(st.integers(8 * entry.offset, 8 * (entry.offset + entry.size) - 1))
    bundle = TensorBundle(copied(folder, name, folder / "data", suffix, flipped(content, bit)))
    with pytest.raises(ValueError, match=rf"{name}\.data-.*checksum"):
        bundle.array(tensor)
    other = next(each for each in sorted(original.entries) if each not in (tensor, "global_step"))
    assert np.array_equal(bundle.array(other), original.array(other))


@pytest.mark.parametrize("kept", [0, 1, 8191, 21_319])
def test_truncated_data(folder: Path, tmp_path: Path, kept: int):
    content = (folder / "tf1.data-00000-of-00001").read_bytes()[:kept]
    with pytest.raises(ValueError, match=rf"tf1\.data-00000-of-00001: {kept:,} bytes, but "):
        TensorBundle(copied(folder, "tf1", tmp_path / "cut", ".data-00000-of-00001", content))


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
    checksum = google_crc32c.value(content)
    return content + struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def table(data: bytes, kind: int = 0, handles: list[tuple[int, int]] | None = None) -> bytes:
    """Return an index file with one data block. ``handles`` replaces the (possibly invalid) references to blocks."""
    blocks = [sealed(data, kind), sealed(block())]
    places = [(0, len(data))] if handles is None else handles
    index = block(*((bytes([97 + i]), number(offset) + number(size)) for i, (offset, size) in enumerate(places)))
    start = len(blocks[0]) + len(blocks[1])
    footer = number(len(blocks[0])) + number(len(block())) + number(start) + number(len(index))
    return b"".join([*blocks, sealed(index), footer.ljust(40, b"\0"), MAGIC])


HEADER = (b"", field(1, 1))
GOOD = (b"w", entry(2, 2))
HOSTILE = {
    "negative dimension": (table(block(HEADER, (b"w", entry(2**64 - 1, 4)))), "a tensor of 2 dimensions"),
    "endless rank": (table(block(HEADER, (b"w", entry(*[1] * 300)))), "a tensor of 300 dimensions"),
    "negative size": (table(block(HEADER, (b"w", entry(2, size=2**64 - 1)))), "with 18,446"),
    "outside": (table(block(HEADER, (b"w", entry(2, 2, offset=90)))), "100 bytes, but w is at 90 to 106"),
    "data file out of range": (table(block(HEADER, (b"w", entry(2, 2, shard=1)))), "data file 1 of 1"),
    "big-endian": (table(block((b"", field(1, 1) + field(2, 1)), GOOD)), "big-endian"),
    "no data files": (table(block((b"", b""), GOOD)), "0 data files"),
    "too many data files": (table(block((b"", field(1, 2**31)), GOOD)), "2147483648 data files"),
    "no header": (table(block(GOOD)), "no header"),
    "twice": (table(block(HEADER, GOOD, GOOD)), "expected ascending keys"),
    "long name twice": (table(block(HEADER, *[(b"w" * 1000, entry(2, 2))] * 2)), "expected ascending keys"),
    "long name outside": (table(block(HEADER, (b"w" * 1000, entry(2, 2, offset=90)))), "100 bytes, but w"),
    "name too long": (table(block(HEADER, (b"w" * 1025, entry(2, 2)))), "does not fit the block"),
    "name of no characters": (table(block(HEADER, (b"\xff", entry(2, 2)))), "utf-8"),
    "prefix of nothing": (table(block(HEADER, tail=b"\5\1\0w")), "does not fit the block"),
    "value beyond the block": (table(block(HEADER, tail=b"\0\1" + number(2**40) + b"w")), "does not fit the block"),
    "endless number": (table(block(HEADER, tail=b"\xff" * 40)), "does not end"),
    "restarts": (table(block(HEADER, restarts=2**31)), "2,147,483,648 restart points"),
    "wire type": (table(block(HEADER, (b"w", b"\x0b"))), "wire type 3"),
    "field beyond the message": (table(block(HEADER, (b"w", b"\x12\x7f"))), "a field of 127 bytes"),
    "another compression": (table(block(HEADER, GOOD), kind=2), "compression type 2"),
    "index block of itself": (table(block(HEADER, GOOD), handles=[(70, 20)]), "a block at bytes"),
    "bomb": (table(number(2**40) + b"\0" * 8, kind=1), "1,099,511,627,776 bytes, expected at most"),
    "bomb that runs over": (table(number(10) + b"\0a" + b"\xfe\1\0" * 9, kind=1), "gives 65 bytes, expected 10"),
    "copy from before the start": (table(number(10) + b"\0a\x0e\2\0", kind=1), "copies from 2 bytes back after 1"),
    "copy from nowhere": (table(number(10) + b"\0a\x0e\0\0", kind=1), "copies from 0 bytes back"),
    "literal beyond the block": (table(number(10) + b"\xfc\xff\xff\xff\xff", kind=1), "gives 0 bytes"),
    "nothing compressed": (table(number(0) + b"\0a\0a", kind=1), "expected 0 and at least 4"),
}


def written(tmp_path: Path, index: bytes) -> Path:
    (tmp_path / "x.index").write_bytes(index)
    (tmp_path / "x.data-00000-of-00001").write_bytes(bytes(100))
    return tmp_path / "x"


@pytest.mark.parametrize(("index", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_index(tmp_path: Path, index: bytes, message: str):
    with pytest.raises(ValueError, match=message) as refused:
        TensorBundle(written(tmp_path, index))
    assert str(tmp_path / "x") in str(refused.value)
    assert len(str(refused.value)) - len(str(tmp_path)) < 500


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (entry(2**32, 2**32), "has 16 bytes, expected 4 an element"),
        (entry(0, 2**39, 2**39, size=0), "has 0 bytes"),
        (entry(3, 3), "has 16 bytes"),
        (entry(2, 2, dtype=7), "type number 7, expected 1"),
        (entry(2, 2), "does not have the checksum"),
        (field(2, 7), "type number 0"),
        (entry(2, 2, extra=field(7, b"")), "partitioned"),
    ],
)
def test_a_hostile_tensor(tmp_path: Path, value: bytes, message: str):
    bundle = TensorBundle(written(tmp_path, table(block(HEADER, (b"w", value)))))
    with pytest.raises(ValueError, match=message):
        bundle.array("w")


def test_a_tensor_too_large_for_a_bert_is_not_read(tmp_path: Path):
    """The data file is sparse. Rejecting it must not read it or allocate memory of its apparent size."""
    rows = 2**29
    prefix = written(tmp_path, table(block(HEADER, (b"w", entry(rows, size=4 * rows)))))
    with (tmp_path / "x.data-00000-of-00001").open("r+b") as file:
        file.truncate(4 * rows)
    with pytest.raises(ValueError, match="at most 1,073,741,824"):
        TensorBundle(prefix).array("w")


def test_a_damaged_checkpoint_leaves_nothing_behind(folder: Path, tmp_path: Path):
    content = (folder / "tf1.data-00000-of-00001").read_bytes()
    entry = TensorBundle(folder / "tf1").entries["cls/seq_relationship/output_bias"]
    damaged = copied(folder, "tf1", tmp_path / "in", ".data-00000-of-00001", flipped(content, 8 * entry.offset + 3))
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + "".join(f"{index}\n" for index in range(25)))
    for to, out in (("safetensors", tmp_path / "out" / "w.safetensors"), ("hugging-face", tmp_path / "out" / "folder")):
        with pytest.raises(ValueError, match="cls/seq_relationship/output_bias does not have the checksum"):
            convert(damaged, to, out, 2, vocab)  # pyright: ignore[reportArgumentType]
    assert list((tmp_path / "out").iterdir()) == []
