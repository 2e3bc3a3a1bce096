"""Blocks of samples, and shards of the native layout: read back as written, and refused with a reason if damaged."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from dataloading.shards import samples as samples_module
from dataloading.shards.formats import open_shard, write_shard
from dataloading.shards.samples import DTYPES, Samples, concatenate, row_blocks, synthetic_samples
from dataloading.shards.shard import check_offsets
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


def test_a_shard_returns_the_samples_that_were_written(shard_path: Path, samples: Samples, opened: list[str]) -> None:
    opened.clear()
    shard = open_shard(shard_path)
    assert str(shard_path) in opened
    assert [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists()].count(
        str(shard_path)
    ) == 1
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


def one_sample(length: int = 20, masked: int = 4) -> Samples:
    """Return a sample with the largest valid values."""
    values = [99] * length, [1] * length, [0, length], range(length - masked, length), [99] * masked, [0, masked], [1]
    return Samples(*map(np.array, values, DTYPES.values()))


def wrong(name: str, index: int, value: int) -> Callable[[Samples], Samples]:
    def change(samples: Samples) -> Samples:
        array = getattr(samples, name).copy()
        array[index] = value
        return replace(samples, **{name: array})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: one_sample(length=21), "sample length: 21 to 21, expected 1 to 20"),
        (lambda _: one_sample(length=0, masked=0), "sample length: 0 to 0, expected 1 to 20"),
        (lambda _: one_sample(masked=5), "masked tokens of a sample: 5 to 5, expected 0 to 4"),
        (wrong("input_ids", 3, 100), "input_ids: 0 to 100, expected 0 to 99"),
        (wrong("masked_lm_ids", 0, 100), r"masked_lm_ids: \d to 100, expected 0 to 99"),
        (wrong("masked_lm_positions", 0, 15), r"tokens after a masked position: 0 to \d+, expected 1 to 20"),
        (wrong("segment_ids", 0, 2), "segment_ids: 0 to 2, expected 0 to 1"),
        (wrong("next_sentence_labels", 0, 2), "next_sentence_labels: 0 to 2, expected 0 to 1"),
        (wrong("sequence_offsets", 0, 1), r"sequence_offsets do not rise from 0 to \d+ over 23 samples"),
        *((wrong("sequence_offsets", 2, value), "sequence_offsets do not rise") for value in (0, 1 << 40)),
        (wrong("masked_lm_offsets", -1, 1), "masked_lm_offsets do not rise"),
        (lambda samples: replace(samples, segment_ids=samples.segment_ids[1:]), "differ in length"),
        (lambda samples: replace(samples, masked_lm_ids=samples.masked_lm_ids[1:]), "differ in length"),
        (lambda samples: replace(samples, next_sentence_labels=samples.next_sentence_labels[1:]), "sequence_offsets"),
    ],
)
def test_inconsistent_samples_are_neither_written_nor_read(
    tmp_path: Path, samples: Samples, change: Callable[[Samples], Samples], message: str
) -> None:
    path, bad = tmp_path / "shard", change(samples)
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        write_shard(path, bad, INFO)
    assert list(tmp_path.iterdir()) == []
    write_shard(path, one_sample(), INFO)
    assert open_shard(path).verify().digest() == one_sample().digest()
    with h5py.File(path, "r+") as file:
        for name, dtype in DTYPES.items():
            del file[name]
            file.create_dataset(name, data=getattr(bad, name), dtype=dtype)
    with pytest.raises(ValueError, match=message):
        open_shard(path).verify()


def test_truncation_and_flipped_bits_in_arrays_are_detected(shard_path: Path) -> None:
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


def test_digests_are_equal_for_equal_samples_however_they_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, rows = make_samples(7), np.array([6, 0, 0, 3])
    whole = samples.sample_digests().tolist(), samples.take(rows).digest()
    assert [list(block) for block in row_blocks(np.array([0, 3, 4, 9, 9, 30]))] == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(samples_module, "_ELEMENTS_AT_A_TIME", 9)
    assert [list(block) for block in row_blocks(np.array([0, 3, 4, 9, 9, 30, 30, 31]))] == [[0, 1, 2, 3], [4], [5, 6]]
    assert (samples.sample_digests().tolist(), samples.take(rows).digest()) == whole
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


def test_synthetic_samples_have_two_segments_and_a_share_of_masked_tokens() -> None:
    lengths = np.array([3, 10, 40, 5] * 50)
    samples = synthetic_samples(lengths, 7, masked_lm_prob=0.25)
    check_offsets(samples, Path())
    assert samples.lengths.tolist() == lengths.tolist()
    assert samples.masked_counts.tolist() == [1, 2, 10, 1] * 50
    assert np.add.reduceat(samples.segment_ids, samples.sequence_offsets[:-1]).tolist() == [1, 5, 20, 2] * 50
    first = samples.slice(2, 3)
    assert first.segment_ids.tolist() == [0] * 20 + [1] * 20
    assert (np.diff(first.masked_lm_positions.astype(int)) > 0).all()
    assert (samples.masked_lm_positions.min(), first.masked_lm_positions.max() < 40) == (1, True)  # 0 is [CLS]
    for values, most in ((samples.input_ids, 6), (samples.masked_lm_ids, 6), (samples.next_sentence_labels, 1)):
        assert (values.min(), values.max()) == (0, most)
    assert samples.unmasked_ids[samples.masked_lm_positions[:1]] == samples.masked_lm_ids[:1]
    for wrong_lengths in ([], [3, 2]):
        with pytest.raises(ValueError, match="lengths of at least 3 tokens"):
            synthetic_samples(np.array(wrong_lengths), 7)
