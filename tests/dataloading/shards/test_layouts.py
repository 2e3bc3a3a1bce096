"""HDF5 layouts: this project reads files of other programs, and other programs can read its files."""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dataloading.shards import hdf5_layouts
from dataloading.shards.formats import open_shard, write_shard
from dataloading.shards.hdf5_file import HDF5File
from dataloading.shards.hdf5_layouts import _objects_of, write_packed
from dataloading.shards.samples import SampleBuilder, Samples, synthetic_samples
from dataloading.shards.shard import Shard, map_file
from tests.dataloading import made_up
from tests.dataloading.foreign_shards import array_of, write_like_others

INFO = replace(made_up.INFO, max_seq_length=24, max_predictions_per_seq=6)
COUNT = 57
PACKS = np.array([0, 3, 4, 4, 20, 21, COUNT])
CHOSEN = np.array([50, 3, 3, 0, 56])


def make_samples(count: int = COUNT, seed: int = 5) -> Samples:
    """Return samples whose masked positions are not 0, because in these layouts 0 means padding."""
    lengths = np.random.default_rng(seed).integers(3, INFO.max_seq_length + 1, max(count, 1))
    return synthetic_samples(lengths, INFO.vocab_size, seed=seed).slice(0, count)


def write(path: Path, layout: str) -> None:
    if layout == "native":
        write_shard(path, make_samples(), INFO)
    else:
        write_like_others(path, layout, make_samples(), INFO, PACKS)


def chosen(shard: Shard) -> Samples:
    builder = SampleBuilder()
    for index in CHOSEN.tolist():
        shard.add_to(builder, index)
    return builder.samples()


@pytest.mark.parametrize(
    ("integers", "storage"),
    [
        *((kind, {}) for kind in ("i2", ">i2", "<i4")),
        *(("i2", {"compression": "gzip", "shuffle": on}) for on in (0, 1)),
    ],
)
@pytest.mark.parametrize("layout", ["fixed", "varlength", "packed"])
def test_files_of_other_programs_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, integers: str, storage: dict[str, Any]
) -> None:
    monkeypatch.setattr(hdf5_layouts, "_ROWS_AT_A_TIME", 20)
    samples, path = make_samples(), tmp_path / "part_00000_of_00001.hdf"
    chunks = {"chunks": (10, 6) if layout == "fixed" else (4,)} if storage else {}  # some chunks are partly filled
    write_like_others(path, layout, samples, INFO, PACKS, integers, **storage, **chunks)
    shard = open_shard(path)
    assert shard.layout == layout
    assert len(shard) == COUNT
    assert shard.lengths.tolist() == samples.lengths.tolist()
    assert shard.masked_counts.tolist() == samples.masked_counts.tolist()
    assert shard.read(7, 30).digest() == samples.slice(7, 30).digest()
    assert chosen(shard).digest() == samples.take(CHOSEN).digest()
    found = samples.digest()[:16]
    with pytest.raises(ValueError, match=rf"{path}: content has digest {found}\.\.\., expected 0{{16}}\.\.\.; copy"):
        shard.verify("0" * 64)
    if integers == "i2":  # unpacked: four columns of 16-byte references
        of_rows = 4 * 16 * (len(PACKS) - 1 if layout == "packed" else COUNT) if storage else 0
        assert shard.held_bytes == (samples.nbytes if layout == "fixed" else of_rows)
    shard.forget()
    shard.verify(samples.digest())
    for count in (0, 1):
        write_like_others(path, layout, make_samples(count), INFO, np.array([0, count]), integers)
        assert open_shard(path).verify().digest() == make_samples(count).digest()


@pytest.mark.parametrize("count", [COUNT, 1, 0])
def test_packed_files_have_the_columns_and_types_of_other_programs(tmp_path: Path, count: int) -> None:
    samples, packs = make_samples(count), np.minimum(PACKS, count)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_like_others(theirs, "packed", samples, INFO, packs)
    write_packed(ours, samples, packs, INFO)
    with h5py.File(ours) as found, h5py.File(theirs) as expected:
        assert sorted(found) == sorted(expected)
        for name in sorted(found):
            mine, other = array_of(found, name), array_of(expected, name)
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape), name
            for one, another in zip(mine, other, strict=True):
                np.testing.assert_array_equal(one, another)
    assert open_shard(ours).read(0, count).digest() == samples.digest()


def test_each_chunk_is_unpacked_by_its_own_filters_within_the_size_limit(tmp_path: Path) -> None:
    values = np.arange(12, dtype="<i4")
    with h5py.File(tmp_path / "file", "w") as file:
        column = file.create_dataset("column", (10,), "<i4", chunks=(4,), compression="gzip", shuffle=True)
        for start in (0, 4, 8):
            raw = values[start : start + 4].tobytes()
            shuffled = np.frombuffer(raw, "u1").reshape(4, 4).T.tobytes()
            # Each bit of the mask is a filter that was skipped: first shuffle, then gzip.
            content, skipped = {0: (raw, 0b11), 4: (zlib.compress(raw), 0b01), 8: (shuffled, 0b10)}[start]
            column.id.write_direct_chunk((start,), content, filter_mask=skipped)
    found = HDF5File(tmp_path / "file", map_file(tmp_path / "file"))
    assert found.names == ["column"]
    found._room = 10 * 4 + 4 * 4  # room for exactly the array and one chunk
    array = found.array("column")
    assert (array.values.tolist(), array.in_place, found._room) == (list(range(10)), False, 0)
    found._room = 10 * 4 + 4 * 4 - 1
    with pytest.raises(ValueError, match="column would unpack to more than 128 times the"):
        found.array("column")


def test_heap_objects_end_at_free_space_a_repeated_number_or_the_collections_end() -> None:
    def collection(*objects: tuple[int, bytes]) -> bytes:
        packed = (struct.pack("<H6xQ", number, len(data)) + data + bytes(-len(data) % 8) for number, data in objects)
        return b"GCOL\x01" + bytes(3) + struct.pack("<Q", 16 + len(body := b"".join(packed))) + body

    first, second = (1, b"12345"), (7, b"12345678")
    whole, found = collection(first, second), {1: (40, 5), 7: (64, 8)}
    for content, numbers in (
        *((whole, (1, 7)), (whole + whole, (1, 7)), (whole[:-1], (1,)), (whole[:36], ()), (whole[:15], ())),
        *((collection(first, (0, b"12345678"), second), (1,)), (collection(first, first), (1,))),
        (whole.replace(b"\x01", b"\x02", 1), ()),
    ):
        assert _objects_of(bytes(8) + content, 8) == {number: found[number] for number in numbers}


def rewrite(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[h5py.File], None]:
    def apply(file: h5py.File) -> None:
        data = change(array_of(file, name)[()])
        del file[name]
        file.create_dataset(name, data=data)

    return apply


def set_row(name: str, values: list[int]) -> Callable[[h5py.File], None]:
    def apply(file: h5py.File) -> None:
        column = array_of(file, name)
        column[1] = np.array(values, h5py.check_vlen_dtype(column.dtype) or column.dtype)

    return apply


def zero_positions_of_a_pack(file: h5py.File) -> None:
    """Set all masked positions of the first pack to 0, which lies before the start of its second sample."""
    column = array_of(file, "masked_lm_positions")
    column[0] = np.zeros_like(column[0])


def with_gap(mask: np.ndarray) -> np.ndarray:
    mask[0, 1] = 0
    return mask


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("fixed", rewrite("input_mask", with_gap), "input_mask has a gap: real entries after padding; copy"),
        ("fixed", rewrite("input_ids", lambda ids: ids - 200), "input_ids: -"),
        ("fixed", rewrite("input_ids", lambda ids: ids[:, :5]), r"has shape \(57, 24\), but input_ids has \(57, 5\)"),
        ("fixed", rewrite("segment_ids", lambda ids: ids.astype("f4")), "segment_ids holds float32, expected integers"),
        ("fixed", lambda file: file.__delitem__("segment_ids"), "segment_ids is missing"),
        ("varlength", set_row("input_ids", [5]), "lengths of the rows of segment_ids disagree with the other"),
        ("varlength", rewrite("next_sentence_labels", lambda labels: labels[1:]), r"\(56,\), expected 57 integers"),
        ("packed", set_row("packed_input_len", [7]), "the lengths of the rows of input_ids disagree"),
        ("packed", set_row("packed_input_len", [-7]), "packed_input_len: -7 to 24, expected 0 to 65535"),
        ("packed", set_row("next_sentence_labels", [1, 0]), "packed_masked_lm_len, next_sentence_labels disagree"),
        ("packed", zero_positions_of_a_pack, "masked_lm_positions: -"),
        ("native", lambda file: file.attrs.__setitem__("schema_version", 2), "schema version 2; expected .*, 1"),
        ("native", lambda file: file.attrs.__setitem__("info", json.dumps({"vocab_size": 3})), "damaged"),
        ("native", lambda file: file.attrs.__delitem__("digest"), "the attribute digest is missing or is neither"),
        ("native", lambda file: file.__delitem__("segment_ids"), "segment_ids is missing"),
        ("native", rewrite("input_ids", lambda ids: ids.astype("<i4")), r"is int32 \(\d+,\), expected a flat uint16"),
    ],
)
def test_errors_name_contradictory_or_missing_columns(
    tmp_path: Path, layout: str, change: Callable[[h5py.File], None], message: str
) -> None:
    path = tmp_path / "file"
    write(path, layout)
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(ValueError, match=message) as caught:
        open_shard(path).verify()
    assert str(caught.value).count(str(path)) == 1


def test_writing_fails_for_samples_that_the_packed_layout_cannot_hold(tmp_path: Path) -> None:
    def changed(name: str, value: int) -> Samples:
        values = getattr(make_samples(), name).copy()
        values[0] = value
        return replace(make_samples(), **{name: values})

    wide = replace(INFO, vocab_size=50000)
    for name, value, info, message in (
        ("masked_lm_positions", 0, INFO, "position 0 is masked, but 0 marks padding"),
        ("input_ids", 32768, wide, "input_ids is up to 32,768; the packed layout holds up to 32,767: use"),
        ("input_ids", 100, INFO, "input_ids: 0 to 100, expected 0 to 99"),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path / 'file'}: {message}"):
            write_packed(tmp_path / "file", changed(name, value), PACKS, info)
    assert list(tmp_path.iterdir()) == []
    write_packed(tmp_path / "file", samples := changed("input_ids", 32767), PACKS, wide)
    open_shard(tmp_path / "file").verify(samples.digest())


def test_unknown_layouts_missing_files_and_folders_are_rejected(tmp_path: Path) -> None:
    for name in ("weights", "nothing"):
        with h5py.File(tmp_path / name, "w") as file:
            if name == "weights":
                file["weights"] = file["bias"] = np.arange(3)
    (tmp_path / "ff").write_bytes(b"\x89HDF\r\n\x1a\n" + b"\xff" * 3000)
    (tmp_path / "text").write_bytes(b"text")
    for name, why in (
        ("weights", r"damaged or of another kind \(its layout is unknown: it holds bias, weights\)"),
        ("nothing", r"damaged or of another kind \(its layout is unknown: it holds nothing\)"),
        *(("ff", "damaged or of another kind "), ("text", "not an HDF5 or TFRecord file, or its beginning is lost")),
        *(("absent", "No such file or directory"), ("", "Is a directory")),
    ):
        with pytest.raises(ValueError, match=f"^{tmp_path / name}: {why}.*; copy or prepare the data set again$"):
            open_shard(tmp_path / name)
