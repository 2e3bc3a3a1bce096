"""The HDF5 layouts in circulation: read as other programs write them, written as other programs read them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dataloading.batches.synthetic import synthetic_samples
from dataloading.shards.formats import open_shard
from dataloading.shards.hdf5_file import HDF5File
from dataloading.shards.layouts import narrow, write_fixed, write_packed, write_varlength
from dataloading.shards.samples import SampleBuilder, Samples
from dataloading.shards.shard import DatasetInfo, map_file
from dataloading.shards.variable_length import VariableLengthColumn
from tests.dataloading import made_up

INFO = replace(made_up.INFO, max_seq_length=24, max_predictions_per_seq=6)
RAGGED = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
PACKED = ("packed_input_len", "packed_masked_lm_len", "next_sentence_labels")
COUNT = 57
PACKS = np.array([0, 3, 4, 4, 20, 21, COUNT])


def make_samples(count: int = COUNT, seed: int = 5) -> Samples:
    """None of them masks position 0, which these layouts cannot hold."""
    lengths = np.random.default_rng(seed).integers(3, INFO.max_seq_length + 1, max(count, 1))
    return synthetic_samples(lengths, INFO.vocab_size, seed=seed).slice(0, count)


def array_of(file: h5py.File, name: str) -> h5py.Dataset:
    found = file[name]
    assert isinstance(found, h5py.Dataset)
    return found


def pack_rows(samples: Samples, packs: np.ndarray) -> Iterator[dict[str, list[int]]]:
    """The rows of a packed file, sample by sample, as published packing scripts compose them."""
    for first, stop in pairwise(packs):
        row: dict[str, list[int]] = {name: [] for name in (*RAGGED, *PACKED)}
        for index in range(first, stop):
            one = samples.slice(index, index + 1)
            row["masked_lm_positions"] += (one.masked_lm_positions + len(row["input_ids"])).tolist()
            for name in ("input_ids", "segment_ids", "masked_lm_ids", "next_sentence_labels"):
                row[name] += getattr(one, name).tolist()
            row["packed_input_len"].append(len(one.input_ids))
            row["packed_masked_lm_len"].append(len(one.masked_lm_ids))
        yield row


def write_like_others(path: Path, layout: str, samples: Samples, packs: np.ndarray = PACKS, **storage: Any) -> None:
    """Files made by h5py row by row, with none of our code."""
    labels = samples.next_sentence_labels.astype("i1")
    with h5py.File(path, "w") as file:
        if layout == "fixed":
            widths = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), INFO.max_seq_length)
            widths |= dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), INFO.max_predictions_per_seq)
            columns = {
                name: file.create_dataset(name, (len(samples), width), "i1" if name[-4:] == "mask" else "i2", **storage)
                for name, width in widths.items()
            }
            for index in range(len(samples)):
                one = samples.slice(index, index + 1)
                for name in RAGGED:
                    values = getattr(one, name)
                    columns[name][index, : len(values)] = values
                columns["input_mask"][index, : len(one.input_ids)] = 1
        else:
            names = (*RAGGED, *PACKED) if layout == "packed" else RAGGED
            packs = packs if layout == "packed" else np.arange(len(samples) + 1)
            for name in names:
                kind = h5py.vlen_dtype(np.dtype("i1" if name in ("segment_ids", "next_sentence_labels") else "i2"))
                file.create_dataset(name, (len(packs) - 1,), kind, **storage)
            for index, row in enumerate(pack_rows(samples, packs)):
                for name in names:
                    array_of(file, name)[index] = row[name]
        if layout != "packed":
            file.create_dataset("next_sentence_labels", data=labels, **(storage if layout == "fixed" else {}))


@pytest.mark.parametrize(
    "storage",
    [
        {},
        {"chunks": True},
        {"compression": "gzip"},
        {"compression": "gzip", "compression_opts": 9, "shuffle": True},
        {"shuffle": True},
        {"fletcher32": True},
        {"compression": "gzip", "shuffle": True, "fletcher32": True},
    ],
)
@pytest.mark.parametrize("layout", ["fixed", "varlength", "packed"])
def test_files_of_other_programs_are_read(tmp_path: Path, layout: str, storage: dict[str, Any]) -> None:
    samples = make_samples()
    path = tmp_path / "part_00000_of_00001.hdf"
    if "fletcher32" in storage and layout != "fixed":
        storage = {**storage, "fletcher32": None, "chunks": True}  # HDF5 has no checksums of references
    write_like_others(path, layout, samples, **storage)
    with open_shard(path) as shard:
        assert shard.layout == layout
        assert len(shard) == COUNT
        assert shard.lengths.tolist() == samples.lengths.tolist()
        assert shard.masked_counts.tolist() == samples.masked_counts.tolist()
        assert shard.read(0, COUNT).digest() == samples.digest()
        assert shard.read(7, 30).digest() == samples.slice(7, 30).digest()
        chosen = np.array([50, 3, 3, 0, 56])
        assert shard.take(chosen).digest() == samples.take(chosen).digest()
        assert shard.take(chosen[:0]).digest() == samples.take(chosen[:0]).digest()
        shard.verify(samples.digest())
        with pytest.raises(ValueError, match="digest"):
            shard.verify("0" * 64)
        assert (shard.held_bytes > 0) == bool(storage)
        shard.forget()
        assert shard.read(0, COUNT).digest() == samples.digest()


@pytest.mark.parametrize("storage", [{}, {"compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize("layout", ["fixed", "varlength"])
def test_big_endian_integers_are_read_as_numbers(tmp_path: Path, layout: str, storage: dict[str, Any]) -> None:
    samples = make_samples()
    written, path = tmp_path / "little", tmp_path / "big"
    write_like_others(written, layout, samples)
    with h5py.File(written) as little, h5py.File(path, "w") as big:
        for name, column in little.items():
            base = h5py.check_vlen_dtype(column.dtype)
            dtype = h5py.vlen_dtype(base.newbyteorder(">")) if base is not None else column.dtype.newbyteorder(">")
            copy = big.create_dataset(name, column.shape, dtype, **storage)
            for row in range(len(column)):
                copy[row] = column[row]
    chosen = np.array([50, 3, 3, 0, 56])
    with open_shard(path) as shard:
        shard.verify(samples.digest())
        builder = SampleBuilder()
        if all(shard.add_to(builder, row) for row in chosen.tolist()):
            assert builder.samples().digest() == samples.take(chosen).digest()


@pytest.mark.parametrize("count", [COUNT, 1, 0])
@pytest.mark.parametrize("layout", ["fixed", "varlength", "packed"])
def test_files_of_ours_are_read_by_other_programs(tmp_path: Path, layout: str, count: int) -> None:
    samples, packs = make_samples(count), np.minimum(PACKS, count)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_like_others(theirs, layout, samples, packs)
    if layout == "packed":
        write_packed(ours, samples, packs, INFO)
    else:
        {"fixed": write_fixed, "varlength": write_varlength}[layout](ours, samples, INFO)
    with h5py.File(ours) as found, h5py.File(theirs) as expected:
        assert sorted(found) == sorted(expected)
        for name in sorted(found):
            mine, other = array_of(found, name), array_of(expected, name)
            if name != "segment_ids" or layout != "fixed":
                assert mine.dtype == other.dtype, name
            assert mine.shape == other.shape
            for one, another in zip(mine, other, strict=True):
                np.testing.assert_array_equal(one, another)
    with open_shard(ours) as shard:
        assert shard.layout == layout
        assert shard.read(0, count).digest() == samples.digest()


def test_rows_are_found_in_large_and_small_heap_collections(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sizes = [0, 1, 2, 3, 5000, 7, 0, 100, 40000, 1, 4096, *rng.integers(0, 600, 300).tolist()]
    rows = [rng.integers(0, 30000, size).astype("i2") for size in sizes]
    path = tmp_path / "file"
    with h5py.File(path, "w") as file:
        column = file.create_dataset("rows", (len(rows),), h5py.vlen_dtype(np.dtype("i2")))
        for index in rng.permutation(len(rows)):
            column[index] = rows[index]
    with HDF5File(path, map_file(path)) as file:
        found = VariableLengthColumn(file, "rows")
    np.testing.assert_array_equal(found.counts, sizes)
    np.testing.assert_array_equal(found.all(), np.concatenate(rows))
    chosen = np.array([8, 3, 8, 0])
    starts = np.array([39000, 1, 0, 0])
    lengths = np.array([1000, 1, 5, 0])
    expected = [rows[row][start : start + length] for row, start, length in zip(chosen, starts, lengths, strict=True)]
    np.testing.assert_array_equal(found.take(chosen, starts, lengths), np.concatenate(expected))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fixed", "varlength", "packed"])
def test_truncated_and_flipped_files_are_refused_or_read_right(tmp_path: Path, layout: str) -> None:
    samples = make_samples()
    path = tmp_path / "file"
    write_like_others(path, layout, samples)
    content = path.read_bytes()

    def read(damaged: bytes) -> str | None:
        path.unlink()  # where a file is written over, file systems wait for the disk
        path.write_bytes(damaged)
        try:
            with open_shard(path) as shard:
                return shard.verify(samples.digest()).digest()
        except ValueError as error:
            complaint = str(error)
        assert str(path) in complaint
        return None

    for size in range(0, len(content), len(content) // 40):
        assert read(content[:size]) is None
    # Some bytes of a file mean nothing (free space, padding, access hints): the digest of the manifest decides.
    for place in np.random.default_rng(0).integers(0, len(content), 350).tolist():
        damaged = content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]
        assert read(damaged) in (None, samples.digest())


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
    """Put zeros where the second of its samples cannot have any."""
    column = array_of(file, "masked_lm_positions")
    column[0] = np.zeros_like(column[0])


def with_gap(mask: np.ndarray) -> np.ndarray:
    mask[0, 1] = 0
    return mask


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("fixed", rewrite("input_mask", with_gap), "input_mask has a gap"),
        ("fixed", rewrite("input_ids", lambda ids: ids - 200), "input_ids: -"),
        ("fixed", rewrite("input_ids", lambda ids: ids[:, :5]), "has shape"),
        ("fixed", rewrite("masked_lm_ids", lambda ids: ids[:-1]), "has shape"),
        ("fixed", rewrite("segment_ids", lambda ids: ids.astype("f4")), "segment_ids holds float32, expected integers"),
        ("fixed", rewrite("next_sentence_labels", lambda labels: labels[1:]), "has shape"),
        ("fixed", lambda file: file.__delitem__("segment_ids"), "segment_ids is missing"),
        ("varlength", set_row("input_ids", [5]), "rows of other lengths"),
        ("varlength", lambda file: file.__delitem__("segment_ids"), "segment_ids is missing"),
        ("varlength", rewrite("next_sentence_labels", lambda labels: labels[1:]), "expected 57 integers"),
        ("packed", set_row("packed_input_len", [7]), "rows of other lengths"),
        ("packed", set_row("packed_input_len", [-7]), "packed_input_len: -7"),
        ("packed", set_row("next_sentence_labels", [1, 0]), "disagree"),
        ("packed", zero_positions_of_a_pack, "masked_lm_positions: -"),
    ],
)
def test_contradictions_are_named(
    tmp_path: Path, layout: str, change: Callable[[h5py.File], None], message: str
) -> None:
    path = tmp_path / "file"
    write_like_others(path, layout, make_samples())
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(ValueError, match=message) as caught, open_shard(path) as shard:
        shard.read(0, len(shard))
    assert str(path) in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


def test_integers_are_narrowed_up_to_the_limits_of_their_type() -> None:
    path = Path("shard")
    for dtype, largest in ((np.int8, 127), (np.uint8, 255), (np.int16, 32_767)):
        assert narrow(np.array([0, largest]), dtype, "ids", path).tolist() == [0, largest]
        for wrong in (-1, largest + 1):
            with pytest.raises(ValueError, match=f"ids: .*expected 0 to {largest}"):
                narrow(np.array([0, wrong]), dtype, "ids", path)
    assert narrow(np.array([], np.int64), np.int8, "ids", path).dtype == np.int8


def test_rows_that_share_an_object_cannot_multiply_it(tmp_path: Path) -> None:
    path, count = tmp_path / "shared.hdf5", 400
    with h5py.File(path, "w") as file:
        column = file.create_dataset("ids", (count,), h5py.vlen_dtype(np.int64))
        for row in range(count):
            column[row] = np.arange(2 if row else 500)
        offset = column.id.get_offset()
    content = bytearray(path.read_bytes())
    first = content[offset : offset + 16]
    for shared, refused in ((1, False), (count, True)):
        content[offset : offset + 16 * shared] = first * shared
        path.write_bytes(content)
        with HDF5File(path, map_file(path)) as mapped:
            if refused:
                with pytest.raises(ValueError, match=r"ids claims 1,600,000 bytes in a file of"):
                    VariableLengthColumn(mapped, "ids")
            else:
                assert VariableLengthColumn(mapped, "ids").counts.sum() == 500 + 2 * (count - 1)


@pytest.mark.parametrize("write", [write_fixed, write_varlength])
def test_what_does_not_fit_a_layout_is_not_written(
    tmp_path: Path, write: Callable[[Path, Samples, DatasetInfo], None]
) -> None:
    samples = make_samples()
    at_zero, large = samples.masked_lm_positions.copy(), samples.input_ids.copy()
    at_zero[0], large[0] = 0, 40000
    wide = replace(INFO, vocab_size=50000)
    for name, values, info, message in (
        ("masked_lm_positions", at_zero, INFO, "position 0 is masked"),
        ("input_ids", large, wide, "holds ids up to 32,767"),
        ("input_ids", large, INFO, "input_ids: "),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "file", replace(samples, **{name: values}), info)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_no_known_layout_names_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with h5py.File(path, "w") as file:
        file["weights"] = np.arange(3)
    with pytest.raises(ValueError, match="of no known layout: it holds weights"):
        open_shard(path)


@pytest.mark.parametrize("least", [3, 200])
def test_lengths_that_wrapped_in_int8_are_named_with_their_cause(tmp_path: Path, least: int) -> None:
    """Rows cut as the published conversion does it, `row[:sum(mask)]`, where NumPy 2 adds int8 to int8."""
    lengths = np.random.default_rng(0).integers(least, 513, 300)
    samples, path = synthetic_samples(lengths, INFO.vocab_size), tmp_path / "file"
    with h5py.File(path, "w") as file:
        columns = {name: file.create_dataset(name, (len(samples),), h5py.vlen_dtype(np.dtype("i2"))) for name in RAGGED}
        file.create_dataset("next_sentence_labels", data=samples.next_sentence_labels.astype("i1"))
        for index, length in enumerate(lengths):
            one = samples.slice(index, index + 1)
            wrapped = int(np.ones(length, np.int8).sum(dtype=np.int8))
            for name in RAGGED:
                values = getattr(one, name)
                fixed = np.pad(values, (0, 512 - len(values)))
                columns[name][index] = fixed[:wrapped] if name in ("input_ids", "segment_ids") else values
    with pytest.raises(ValueError, match="no row has 128 to 383 tokens") as caught, open_shard(path) as shard:
        shard.read(0, len(shard))
    assert str(caught.value).startswith(f"{path}: sample length: 0 to 511, expected 1 to ")
    assert "NumPy 2" in str(caught.value)
    assert str(caught.value).endswith("python -m dataloading convert --to varlength")


def test_other_faults_are_not_said_to_be_wrapped_lengths(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for lengths in (np.arange(3, 100), np.arange(3, 512)):
        write_varlength(
            path, synthetic_samples(lengths, 100), replace(INFO, max_seq_length=512, max_predictions_per_seq=80)
        )
        with h5py.File(path, "r+") as file:
            array_of(file, "input_ids")[1] = -array_of(file, "input_ids")[1]
        with pytest.raises(ValueError, match="copy or prepare the data set again"), open_shard(path) as shard:
            shard.read(0, len(shard))
