"""TFRecord files: what TensorFlow wrote, other legal encodings, and every kind of damage."""

import gzip
import struct
from pathlib import Path

import google_crc32c
import pytest

from dataloading.shards.formats import open_shard
from dataloading.shards.samples import Samples, concatenate
from dataloading.shards.shard import map_file
from dataloading.shards.tfrecord import is_tfrecord, read_tfrecord
from tests.conftest import REPOSITORY
from tests.dataloading.shards.tfrecord.edge_samples import MAX_PREDICTIONS_PER_SEQ, MAX_SEQ_LENGTH, edge_samples

FIXTURE = REPOSITORY / "tests" / "dataloading" / "shards" / "tfrecord" / "edge_64.tfrecord"
SAMPLE = {
    "input_ids": [2, 70000 - 5000, 300, 3, 9, 3, 0, 0],
    "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
    "segment_ids": [0, 0, 0, 0, 1, 1, 0, 0],
    "masked_lm_positions": [1, 4, 0],
    "masked_lm_ids": [7, 40000, 0],
    "masked_lm_weights": [1.0, 1.0, 0.0],
    "next_sentence_labels": [1],
}


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def delimited(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values: list, packed: bool = True) -> bytes:
    floats = any(isinstance(value, float) for value in values)
    encoded = [struct.pack("<f", value) if floats else varint(value) for value in values]
    if packed:
        content = delimited(1, b"".join(encoded))
    else:
        content = b"".join(varint(1 << 3 | (5 if floats else 0)) + value for value in encoded)
    return delimited(2 if floats else 3, content)


def entry(name: str, value: bytes) -> bytes:
    return delimited(1, delimited(1, name.encode()) + delimited(2, value))


def example(sample: dict, packed: bool = True) -> bytes:
    return delimited(1, b"".join(entry(name, feature(values, packed)) for name, values in sample.items()))


def masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


def read(path: Path, content: bytes) -> Samples:
    path.unlink(missing_ok=True)  # where a file is written over, file systems wait for the disk
    path.write_bytes(content)
    return read_tfrecord(path, map_file(path))[0]


def test_what_tensorflow_wrote_is_what_the_preparation_made(tmp_path: Path, opened: list[str]) -> None:
    expected = edge_samples()
    with open_shard(FIXTURE) as shard:
        assert str(FIXTURE) in opened
        assert shard.layout == "tfrecord"
        assert (shard.info.max_seq_length, shard.info.max_predictions_per_seq) == (
            MAX_SEQ_LENGTH,
            MAX_PREDICTIONS_PER_SEQ,
        )
        assert shard.read(0, len(shard)).digest() == expected.digest()
    many = read(tmp_path / "many", FIXTURE.read_bytes() * 7)
    assert many.digest() == concatenate([expected] * 7).digest()


def test_other_encodings_mean_the_same(tmp_path: Path) -> None:
    plain = example(SAMPLE)
    backwards = delimited(
        1,
        b"".join(
            delimited(1, delimited(2, feature(v)) + delimited(1, k.encode())) for k, v in reversed(SAMPLE.items())
        ),
    )
    unknown = delimited(9, b"\xff\xff") + varint(10 << 3) + varint(-1) + varint(11 << 3 | 5) + bytes(4)
    unknown += varint(12 << 3 | 1) + bytes(8)
    inside = unknown + b"".join(
        delimited(1, unknown + delimited(1, k.encode()) + delimited(2, unknown + feature(v)) + unknown)
        for k, v in {**SAMPLE, "another": [1, 2], "input_id": [3], "input_idsx": [4]}.items()
    )
    split = b"".join(delimited(1, entry(k, feature(v))) for k, v in SAMPLE.items())
    halves = {
        k: feature(v[:2]) + (feature(v[2:]) if v[2:] else b"") for k, v in SAMPLE.items() if k != "next_sentence_labels"
    }
    halves |= {"masked_lm_weights": feature([1.0, 1.0]) + feature([0.0]), "next_sentence_labels": feature([1])}
    in_halves = delimited(1, b"".join(entry(k, v) for k, v in halves.items()))
    encodings = {
        "unpacked": example(SAMPLE, packed=False),
        "backwards": backwards,
        "unknown fields": unknown + delimited(1, inside) + unknown,
        "one Features for each": split,
        "lists in halves": in_halves,
    }
    expected = read(tmp_path / "plain", framed(plain))
    assert expected.input_ids.tolist() == [2, 65000, 300, 3, 9, 3]
    assert expected.masked_lm_positions.tolist() == [1, 4]
    assert expected.masked_lm_ids.tolist() == [7, 40000]
    for name, encoding in encodings.items():
        assert read(tmp_path / "other", framed(encoding)).digest() == expected.digest(), name


def test_lists_may_have_any_length(tmp_path: Path) -> None:
    long = {"input_ids": list(range(3000)), "input_mask": [1] * 3000, "segment_ids": [0] * 3000}
    long |= {
        "masked_lm_positions": [2999],
        "masked_lm_ids": [5],
        "masked_lm_weights": [1.0],
        "next_sentence_labels": [0],
    }
    samples = read(tmp_path / "file", framed(example(SAMPLE)) + framed(example(long)) + framed(example(SAMPLE)))
    assert samples.lengths.tolist() == [6, 3000, 6]
    assert samples.masked_counts.tolist() == [2, 1, 2]
    assert samples.input_ids[6:3006].tolist() == list(range(3000))
    nothing_masked = SAMPLE | {"masked_lm_weights": [0.0, 0.0, 0.0]}
    assert read(tmp_path / "file", framed(example(nothing_masked))).masked_counts.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [2, 65536, 300, 3, 9, 3, 0, 0]}, "ids beyond 65,535"),
        ({"input_ids": [2, -1, 300, 3, 9, 3, 0, 0]}, "ids beyond 65,535"),
        ({"input_ids": [2, 1 << 40, 300, 3, 9, 3, 0, 0]}, "ids beyond 65,535"),
        ({"masked_lm_ids": [7, 65536, 0]}, "ids beyond 65,535"),
        ({"masked_lm_positions": [1, 6, 0]}, "positions beyond the sample"),
        ({"masked_lm_positions": [1, -4, 0]}, "positions beyond the sample"),
        ({"masked_lm_positions": [4, 1, 0]}, "not ascending"),
        ({"masked_lm_positions": [4, 4, 0]}, "not ascending"),
        ({"segment_ids": [0, 0, 2, 0, 1, 1, 0, 0]}, "labels other than 0 and 1"),
        ({"next_sentence_labels": [2]}, "labels other than 0 and 1"),
        ({"next_sentence_labels": [0, 1]}, "disagree in length"),
        ({"input_mask": [1, 1, 1, 1, 1, 0, 1, 0]}, "not ones and then zeros"),
        ({"input_mask": [1, 1, 2, 1, 1, 0, 0, 0]}, "not ones and then zeros"),
        ({"input_mask": [0] * 8}, "not ones and then zeros"),
        ({"masked_lm_weights": [1.0, 0.5, 0.0]}, "not ones and then zeros"),
        ({"masked_lm_weights": [0.0, 1.0, 0.0]}, "not ones and then zeros"),
        ({"masked_lm_weights": [1, 1, 0]}, "wrong kind"),
        ({"input_mask": [1.0] * 8}, "wrong kind"),
        ({"input_mask": [1] * 7}, "disagree in length"),
        ({"masked_lm_ids": [7]}, "disagree in length"),
        ({"masked_lm_weights": [1.0, 1.0]}, "disagree in length"),
        ({"segment_ids": []}, "missing or empty"),
        ({"segment_ids": None}, "missing or empty"),
    ],
)
def test_what_is_no_sample_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    changed = {name: values for name, values in (SAMPLE | change).items() if values is not None}
    good = framed(example(SAMPLE))
    path = tmp_path / "file"
    with pytest.raises(ValueError, match=message) as caught:
        read(path, good + framed(example(changed)))
    assert f"{path}: record 1 at byte {len(good)}: " in str(caught.value)


def test_a_flipped_bit_of_any_byte_and_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = framed(example(SAMPLE)) + framed(example(SAMPLE | {"next_sentence_labels": [0]}))
    boundary = len(framed(example(SAMPLE)))
    path = tmp_path / "file"
    for place in range(len(whole)):
        for bit in (place % 8, (place + 3) % 8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"file: record [01] at byte \d+"):
                read(path, bytes(damaged))
        if place != boundary:
            with pytest.raises(ValueError, match="file: "):
                read(path, whole[:place])
    assert len(read(path, whole[:boundary])) == 1


def test_messages_with_the_right_crc_never_do_harm(tmp_path: Path) -> None:
    """A stranger can compute a CRC too: the decoder gets every damaged message, and reads it or raises."""
    message, path = example(SAMPLE), tmp_path / "file"
    refused = 0
    changes = [(place, flip) for place in range(len(message)) for flip in (0x01, 0x04, 0x80)]
    damaged = [message[:p] + bytes([message[p] ^ flip]) + message[p + 1 :] for p, flip in changes]
    for content in [*damaged, *(message[:end] for end in range(len(message)))]:
        try:
            samples = read(path, framed(content))
        except ValueError as error:
            refused += "record 0 at byte 0" in str(error)
        else:
            assert len(samples) == 1
            assert samples.lengths[0] == len(samples.input_ids) <= 8
            assert samples.masked_lm_positions.max(initial=0) < 8
    assert refused > len(damaged) / 2 + len(message) - 1


@pytest.mark.parametrize("length", [1 << 31, 5_000_000_000, (1 << 63) + 5, (1 << 64) - 1, (1 << 64) - 16])
def test_a_length_in_the_billions_is_refused(tmp_path: Path, length: int) -> None:
    header = struct.pack("<Q", length)
    with pytest.raises(ValueError, match=r"record 0 at byte 0: .* bytes long, and the file ends 112 bytes after"):
        read(tmp_path / "file", header + masked_crc(header) + bytes(100))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes((1 << 20) + 1), "1,048,577 bytes long; expected the reference's samples"),
        (b"", "a feature is missing"),
        (delimited(1, entry("input_ids", delimited(1, b"text"))), "a feature has values of the wrong kind"),
        (
            delimited(1, delimited(1, varint(1 << 3) + varint(5))),
            r"its data is no tf\.train\.Example",
        ),  # a number for a name
        (example(SAMPLE) + delimited(1, entry("input_ids", feature([1] * 8))), "a feature is there twice"),
        *(
            (varint(1 << 3 | 2) + varint(size) + b"abc", r"its data is no tf\.train\.Example")
            for size in (1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_strange_record_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"record 0 at byte 0: {message}"):
        read(tmp_path / "file", framed(data))


def test_a_file_that_is_empty_or_compressed_is_named_for_it(tmp_path: Path) -> None:
    for content, message in (
        (gzip.compress(FIXTURE.read_bytes()), "file: compressed with gzip"),
        (b"", "file: .*empty"),
    ):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_shard(tmp_path / "file")


def test_the_first_bytes_tell() -> None:
    content = FIXTURE.read_bytes()
    assert is_tfrecord(content[:12])
    assert is_tfrecord(content)
    assert not is_tfrecord(content[:11])
    assert not is_tfrecord(b"")
    assert not is_tfrecord(b"\x89HDF\r\n\x1a\n" + bytes(8))
    assert not is_tfrecord(bytes(12))
    assert not is_tfrecord(b"".join((header := struct.pack("<Q", 1 << 40), masked_crc(header))))
    for place in range(12):
        assert not is_tfrecord(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 : 12])
