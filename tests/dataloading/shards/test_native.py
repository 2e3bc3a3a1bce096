"""Blocks of samples, and shards of the native layout: read back as written, and refused with a reason if damaged."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from dataloading.shards.formats import open_shard, write_shard
from dataloading.shards.samples import DTYPES, Samples, concatenate
from tests.dataloading.foreign_shards import array_of
from tests.dataloading.made_up import INFO, make_samples

pytestmark = pytest.mark.usefixtures("no_partial_files")

COUNT = 23


@pytest.fixture
def samples() -> Samples:
    return make_samples(COUNT)


@pytest.fixture
def shard_path(tmp_path: Path, samples: Samples) -> Path:
    path = tmp_path / "part_00000_of_00001.hdf5"
    write_shard(path, samples, INFO)
    return path


def test_a_shard_gives_back_what_was_written(shard_path: Path, samples: Samples, opened: list[str]) -> None:
    opened.clear()
    shard = open_shard(shard_path)
    assert str(shard_path) in opened
    assert len(shard) == COUNT
    assert shard.info == INFO
    assert shard.held_bytes == 0
    assert shard.verify().digest() == samples.digest() == shard.digest
    assert shard.read(5, 9).digest() == samples.slice(5, 9).digest()
    block = shard.read(0, 3)
    del shard
    assert block.digest() == samples.slice(0, 3).digest()
    for start, stop in ((-1, 2), (3, 2), (0, COUNT + 1)):
        with pytest.raises(IndexError, match="holds 23"):
            open_shard(shard_path).read(start, stop)
    write_shard(shard_path.with_name("again"), samples, INFO)
    assert shard_path.with_name("again").read_bytes() == shard_path.read_bytes()
    unmasked = np.flatnonzero(samples.masked_counts == 0)[:1]
    for rows in (unmasked, unmasked[:0]):
        write_shard(shard_path, samples.take(rows), INFO)
        assert open_shard(shard_path).verify().digest() == samples.take(rows).digest()


def wrong(name: str, index: int, value: int) -> Callable[[Samples], Samples]:
    def change(samples: Samples) -> Samples:
        array = getattr(samples, name).copy()
        array[index] = value
        return replace(samples, **{name: array})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong("input_ids", 3, 100), "input_ids: .* expected 0 to 99"),
        (wrong("masked_lm_ids", 0, 30000), "masked_lm_ids"),
        (wrong("masked_lm_positions", 0, 20), "tokens after a masked position"),
        (wrong("segment_ids", 0, 2), "segment_ids"),
        (wrong("next_sentence_labels", 0, 2), "next_sentence_labels"),
        (wrong("sequence_offsets", 0, 1), "sequence_offsets"),
        (wrong("sequence_offsets", 2, 0), "sequence_offsets"),
        (wrong("sequence_offsets", 2, 1 << 40), "sequence_offsets"),
        (wrong("masked_lm_offsets", -1, 1), "masked_lm_offsets"),
        (lambda samples: replace(samples, segment_ids=samples.segment_ids[1:]), "differ in length"),
        (lambda samples: replace(samples, next_sentence_labels=samples.next_sentence_labels[1:]), "sequence_offsets"),
    ],
)
def test_inconsistent_samples_are_neither_written_nor_read(
    tmp_path: Path, samples: Samples, change: Callable[[Samples], Samples], message: str
) -> None:
    path = tmp_path / "shard"
    bad = change(samples)
    with pytest.raises(ValueError, match=message):
        write_shard(path, bad, INFO)
    assert list(tmp_path.iterdir()) == []
    write_shard(path, samples, INFO)
    with h5py.File(path, "r+") as file:
        for name, dtype in DTYPES.items():
            del file[name]
            file.create_dataset(name, data=getattr(bad, name), dtype=dtype)
    with pytest.raises(ValueError, match=message):
        open_shard(path).verify()


def test_any_truncation_and_any_flipped_byte_of_the_arrays_is_noticed(shard_path: Path) -> None:
    content = shard_path.read_bytes()
    with h5py.File(shard_path, "r") as file:
        arrays = [array_of(file, name) for name in DTYPES]
        places = [array.id.get_offset() + at for array in arrays for at in (0, array.nbytes - 1)]
    damaged = [content[:size] for size in [*range(0, len(content), 297), len(content) - 1]]
    for place in places:
        damaged += [content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :] for bit in (0x80, 0x01)]
    for each in damaged:
        shard_path.write_bytes(each)
        with pytest.raises(ValueError, match=shard_path.name):
            open_shard(shard_path).verify()


def test_slices_are_the_rows_in_between_and_join_to_the_whole() -> None:
    samples = make_samples(7)
    for start, stop in ((0, 7), (2, 5), (3, 3), (7, 7)):
        assert samples.slice(start, stop).digest() == samples.take(np.arange(start, stop)).digest()
    parts = [samples.slice(0, 3), samples.slice(3, 3), samples.slice(3, 7)]
    assert concatenate(parts).digest() == samples.digest()
    digests = concatenate([samples, samples.take(np.array([6, 2]))]).sample_digests()
    assert (digests.shape, len(np.unique(digests))) == ((9,), 7)
    assert digests[7:].tolist() == digests[[6, 2]].tolist()
    values = [0, 1, 2, 3, 4], [0, 0, 1, 1, 1], [0, 2, 5], [1, 2], [7, 8], [0, 0, 2], [0, 1]
    fixed = Samples(*map(np.array, values, DTYPES.values()))
    assert fixed.digest().startswith("d1bedb69764a34c2"), "which existing shards hold"
    assert fixed.sample_digests().tolist() == [5827410922221568735, 11734581181759929794]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Samples)])
def test_every_array_counts_in_the_digests(field: str) -> None:
    samples = make_samples(3)
    assert samples.masked_counts[0] > 0
    changed = getattr(samples, field).copy()
    changed[1 if "offsets" in field else 0] ^= 1
    other = dataclasses.replace(samples, **{field: changed})
    assert other.digest() != samples.digest()
    if "offsets" not in field:
        assert (other.sample_digests() != samples.sample_digests()).tolist() == [True, False, False]
