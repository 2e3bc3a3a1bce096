"""TFRecord files: files from TensorFlow, other valid encodings, and every kind of damage."""

import gzip
import struct
from pathlib import Path

import google_crc32c
import pytest

from dataloading.shards.formats import open_shard
from dataloading.shards.samples import Samples, concatenate
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


def feature(values: list) -> bytes:
    floats = any(isinstance(value, float) for value in values)
    encoded = [struct.pack("<f", value) if floats else varint(value) for value in values]
    return delimited(2 if floats else 3, delimited(1, b"".join(encoded)))


def entry(name: str, value: bytes) -> bytes:
    return delimited(1, delimited(1, name.encode()) + delimited(2, value))


def example(sample: dict) -> bytes:
    return delimited(1, b"".join(entry(name, feature(values)) for name, values in sample.items()))


def masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


def sealed(content: bytes) -> bytes:
    """Return the file with checksums and lengths that match its records."""
    whole, place = b"", 0
    while place + 16 <= len(content):
        size = min(struct.unpack_from("<Q", content, place)[0], len(content) - place - 16)
        whole += framed(content[place + 12 : place + 12 + size])
        place += 16 + size
    return whole


def read(path: Path, content: bytes) -> Samples:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    shard = open_shard(path)
    return shard.read(0, len(shard))


def test_a_file_from_tensorflow_holds_the_samples_that_the_preparation_makes(tmp_path: Path, opened: list[str]) -> None:
    expected = edge_samples()
    shard = open_shard(FIXTURE)
    assert str(FIXTURE) in opened
    assert shard.layout == "tfrecord"
    assert (shard.info.max_seq_length, shard.info.max_predictions_per_seq) == (MAX_SEQ_LENGTH, MAX_PREDICTIONS_PER_SEQ)
    assert shard.read(0, len(shard)).digest() == expected.digest()
    many = read(tmp_path / "many", FIXTURE.read_bytes() * 7)
    assert many.digest() == concatenate([expected] * 7).digest()


def test_other_valid_encodings_of_a_sample_give_equal_samples(tmp_path: Path) -> None:
    backwards = b"".join(
        delimited(1, delimited(2, feature(v)) + delimited(1, k.encode())) for k, v in reversed(SAMPLE.items())
    )
    unknown = delimited(9, b"\xff\xff") + varint(10 << 3) + varint(-1) + varint(11 << 3 | 5) + bytes(4)
    unknown += varint(12 << 3 | 1) + bytes(8)
    inside = unknown + b"".join(
        delimited(1, unknown + delimited(1, k.encode()) + delimited(2, unknown + feature(v)) + unknown)
        for k, v in {**SAMPLE, "another": [1, 2], "input_id": [3], "input_idsx": [4]}.items()
    )
    halves = {**{k: feature(v[:2]) + (feature(v[2:]) if v[2:] else b"") for k, v in SAMPLE.items()}}
    encodings = {
        "backwards": delimited(1, backwards),
        "unknown fields": unknown + delimited(1, inside) + unknown,
        "one Features for each": b"".join(delimited(1, entry(k, feature(v))) for k, v in SAMPLE.items()),
        "lists in halves": delimited(1, b"".join(entry(k, v) for k, v in halves.items())),
    }
    expected = read(tmp_path / "plain", framed(example(SAMPLE)))
    assert expected.input_ids.tolist() == [2, 65000, 300, 3, 9, 3]
    assert expected.masked_lm_positions.tolist() == [1, 4]
    assert expected.masked_lm_ids.tolist() == [7, 40000]
    encodings["a mebibyte"] = example(SAMPLE) + delimited(9, bytes((1 << 20) - len(example(SAMPLE)) - 4))
    for name, encoding in encodings.items():
        assert read(tmp_path / "other", framed(encoding)).digest() == expected.digest(), name


CHANGES: tuple[tuple[dict[str, list | None], str], ...] = (
    ({"input_ids": [2, 65536, 300, 3, 9, 3, 0, 0]}, "input_ids: 2 to 65536, expected 0 to 65535"),
    ({"input_ids": [2, -1, 300, 3, 9, 3, 0, 0]}, "input_ids: -1 to 300, expected 0 to 65535"),
    ({"masked_lm_ids": [7, 65536, 0]}, "masked_lm_ids: 7 to 65536, expected"),
    *(({"masked_lm_positions": at}, "masked_lm_") for at in ([1, 6, 0], [4, 4, 0], [4, 1, 0], [0, 4, 0])),
    ({"segment_ids": [0, 0, 2, 0, 1, 1, 0, 0]}, "segment_ids or next_sentence_labels hold values other than 0 and 1"),
    ({"next_sentence_labels": [2]}, "segment_ids or next_sentence_labels hold values other than 0 and 1"),
    *(({name: [0, 1]}, "its lists disagree") for name in ("next_sentence_labels", "masked_lm_ids", "segment_ids")),
    *(({"input_mask": mask}, "input_mask is not ones") for mask in ([1, 1, 1, 1, 1, 0, 1, 0], [2] + [1] * 7, [0] * 8)),
    ({"input_mask": [1.0] * 8}, "the feature input_mask is missing, empty or of another type"),
    ({"segment_ids": None}, "the feature segment_ids is missing"),
)


def test_records_that_are_not_samples_are_refused(tmp_path: Path) -> None:
    path, good = tmp_path / "file", framed(example(SAMPLE))
    for change, message in CHANGES:
        changed = {name: values for name, values in (SAMPLE | change).items() if values is not None}
        with pytest.raises(ValueError, match=f"^{path}: record 1 at byte {len(good)}: {message}"):
            read(path, good + framed(example(changed)))
    last = read(path, framed(example(SAMPLE | {"masked_lm_positions": [1, 5, 0]})))
    assert last.masked_lm_positions.tolist() == [1, 5]
    for end in range(1, len(example(SAMPLE))):
        with pytest.raises(ValueError, match=f"^{path}: record 0 at byte 0: "):
            read(path, framed(example(SAMPLE)[:end]))


def test_a_flipped_bit_in_any_byte_and_truncated_records_are_detected(tmp_path: Path) -> None:
    whole = framed(example(SAMPLE)) + framed(example(SAMPLE | {"next_sentence_labels": [0]}))
    boundary = len(framed(example(SAMPLE)))
    path = tmp_path / "file"
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match=r"file: "):
            read(path, bytes(damaged))
        if place != boundary:
            with pytest.raises(ValueError, match="file: ") as caught:
                read(path, whole[:place])
            assert ("ends within a record's header" in str(caught.value)) == (boundary < place < boundary + 12)
    assert len(read(path, whole[:boundary])) == 1


def record_of_length(length: int, content: bytes) -> bytes:
    header = struct.pack("<Q", length)
    return header + masked_crc(header) + content


GOOD = framed(example(SAMPLE))
TWICE = example(SAMPLE) + delimited(1, entry("input_ids", feature([1] * 8)))
NUMBER_FOR_A_NAME = delimited(1, delimited(1, varint(1 << 3) + varint(5)))
ELEVEN_BYTES = b"\x80" * 9 + b"\0"
MALFORMED = (
    NUMBER_FOR_A_NAME,
    varint(1 << 3 | 2) + varint((1 << 64) - 1) + b"abc",
    b"\x8a" + ELEVEN_BYTES + example(SAMPLE)[1:],
    *(
        delimited(1, entry("input_ids", delimited(3, delimited(1, ids))))
        for ids in (b"\x82" + ELEVEN_BYTES, b"\x02\x82")
    ),
    *(varint(9 << 3 | wire) + example(SAMPLE) for wire in (3, 4, 6, 7)),
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (framed(delimited(1, entry("input_ids", delimited(1, b"text")))), "record 0 at byte 0: .*input_ids is missing"),
        (framed(TWICE), "record 0 at byte 0: .*input_ids occurs twice"),
        *((framed(content), r"record 0 at byte 0: .*not a valid tf\.train\.Example") for content in MALFORMED),
        (GOOD + framed(b""), "record 1 .*input_ids is missing"),
        (framed(b"") + GOOD, "file: not an HDF5 or TFRecord file"),
        (GOOD + record_of_length((1 << 64) - 16, bytes(100)), r"record 1 .* bytes long, but the file ends 112 bytes"),
        (GOOD + framed(bytes((1 << 20) + 1)), r"record 1 .*1,048,577 bytes long"),
        (gzip.compress(FIXTURE.read_bytes(), mtime=0), "file: compressed with gzip"),
        (b"", "file: .*empty"),
        (FIXTURE.read_bytes()[:11], "file: not an HDF5 or TFRecord file"),
        (
            FIXTURE.read_bytes()[:12],
            "record 0 at byte 0: .* bytes long, but the file ends 12 bytes after the beginning",
        ),
    ],
)
def test_malformed_records_and_other_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "file", content)
