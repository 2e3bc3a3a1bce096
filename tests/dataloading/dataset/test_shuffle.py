"""The global shuffle keeps each sample once, is random, reproducible and resumable, and needs little memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset import rewrite as shuffle_module
from dataloading.dataset.folder import Dataset, open_dataset, shard_name, write_dataset
from dataloading.dataset.rewrite import shuffle
from dataloading.shards.formats import write_shard
from dataloading.shards.samples import Samples, synthetic_samples
from tests.dataloading.made_up import INFO, make_samples
from tests.programs import python

pytestmark = pytest.mark.slow

COUNT = 1000


@pytest.fixture
def source(tmp_path: Path) -> Dataset:
    write_dataset(tmp_path / "source", make_samples(COUNT), shards=3, info=INFO)
    return open_dataset(tmp_path / "source")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size limits, so that a thousand samples need several buckets, blocks and writes."""
    monkeypatch.setattr(shuffle_module, "_BUCKET_BYTES", 8000)
    monkeypatch.setattr(shuffle_module, "_BUFFERED_BYTES", 3000)
    monkeypatch.setattr(shuffle_module, "_BLOCK_SAMPLES", 70)


def order_of(dataset: Dataset, samples: Samples) -> np.ndarray:
    """Return for each sample of the data set its index in ``samples`` [n]."""
    digests = samples.sample_digests()
    assert len(np.unique(digests)) == len(digests)
    found = dataset.take(np.arange(len(dataset))).sample_digests()
    by_digest = np.argsort(digests)
    return by_digest[np.searchsorted(digests[by_digest], found)]


@pytest.mark.usefixtures("small")
def test_a_shuffle_keeps_every_sample_in_an_order_that_depends_on_the_seed(source: Dataset, tmp_path: Path) -> None:
    orders = []
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        dataset = shuffle(source, tmp_path / name, shards=7, seed=seed)
        orders.append(order_of(dataset, make_samples(COUNT)))
        assert sorted(orders[-1].tolist()) == list(range(COUNT))
        assert sorted(record.samples for record in dataset.shards) == [142, *[143] * 6]
        assert dataset.info == INFO
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert names == {"manifest.json", "lengths.npy", *(record.name for record in dataset.shards)}
    assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()
    for record in open_dataset(tmp_path / "one").shards:
        assert (tmp_path / "one" / record.name).read_bytes() == (tmp_path / "again" / record.name).read_bytes()


@pytest.mark.usefixtures("small")
def test_shuffled_positions_are_independent_of_the_original_positions(source: Dataset, tmp_path: Path) -> None:
    """New positions are independent of old ones (chi-square test, 10 x 10 table). Few neighbors stay together."""
    table = np.zeros((10, 10))
    followers = 0
    for seed in range(8):
        order = order_of(shuffle(source, tmp_path / str(seed), shards=2, seed=seed), make_samples(COUNT))
        np.add.at(table, (np.arange(COUNT) * 10 // COUNT, order * 10 // COUNT), 1)
        followers += int((np.diff(order) == 1).sum())
    statistic = ((table - 80) ** 2 / 80).sum()
    assert 40 < statistic < 145  # 81 degrees of freedom: 1 in 10,000 shuffles is outside
    assert followers < 25  # 8 are expected


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("step", "at", "made_again"), [("read", 500, 7), ("written", 300, 4), ("checked", 500, 0)])
def test_an_interrupted_shuffle_continues_and_keeps_finished_shards(
    source: Dataset, tmp_path: Path, step: str, at: int, made_again: int
) -> None:
    expected = shuffle(source, tmp_path / "expected", shards=7, seed=1)

    def stop(name: str, done: int, _: int) -> None:
        if name == step and done >= at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shuffle(source, tmp_path / "data", shards=7, seed=1, report=stop)
    with pytest.raises(ValueError, match=r"begun with other settings .*seed"):
        shuffle(source, tmp_path / "data", shards=7, seed=2)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "data").glob("part_*")}
    steps: list[str] = []
    found = shuffle(source, tmp_path / "data", shards=7, seed=1, report=lambda name, *_: steps.append(name))
    # Only an interruption during reading leaves incomplete buckets, so that samples must be read again.
    assert ("read" in steps) == (step == "read")
    after = {path.name: path.stat().st_ino for path in (tmp_path / "data").glob("part_*")}
    assert len(after.items() - before.items()) == made_again
    assert found.shards == expected.shards


def test_too_few_and_too_many_shards_are_rejected(tmp_path: Path, source: Dataset) -> None:
    for shards in (0, COUNT + 1):
        with pytest.raises(ValueError, match=f"--shards is {shards} for 1,000 samples; expected 1 or more"):
            shuffle(source, tmp_path / "data", shards=shards, seed=1)
    # At 3 bytes a token, 4 a masked token and 17 a sample, these counts fill 16 shards of 256 MiB. One more token needs 17.
    tokens, masked, count = (1 << 30) + (1 << 18), (1 << 28) - (1 << 18) * 5, 1 << 18
    assert 3 * tokens + 4 * masked + 17 * count == 16 << 28
    for more in (0, 1):
        records = (replace(source.shards[0], tokens=tokens + more, masked_tokens=masked),)
        large = Dataset(tmp_path, INFO, records, np.zeros((count, 2), np.uint16))
        with pytest.raises(ValueError, match=rf"--shards is {15 + more} .* expected {16 + more} or more"):
            shuffle(large, tmp_path / "data", shards=15 + more, seed=1)
    assert not (tmp_path / "data").exists()
    write_dataset(tmp_path / "three", make_samples(3), shards=2, info=INFO)
    for shards in (1, 3):
        dataset = shuffle(open_dataset(tmp_path / "three"), tmp_path / str(shards), shards=shards, seed=1)
        assert [record.samples for record in dataset.shards] == [3 // shards] * shards


def test_replacing_a_shard_during_a_shuffle_is_detected(source: Dataset, tmp_path: Path) -> None:
    def swap(step: str, done: int, total: int) -> None:
        if (step, done) == ("written", total):
            write_shard(tmp_path / "data" / shard_name(1, 2), make_samples(COUNT // 2), INFO.without_sources())

    with pytest.raises(ValueError, match="differ from the samples"):
        shuffle(source, tmp_path / "data", shards=2, seed=1, report=swap)


_MEASURED = """
import pathlib, resource, sys
from dataloading.dataset import rewrite as module
from dataloading.dataset.folder import open_dataset
module._BUCKET_BYTES = module._BUFFERED_BYTES = 2 << 20
module._BLOCK_SAMPLES = 4096
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
module.shuffle(open_dataset(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), shards=int(sys.argv[3]), seed=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_of_a_shuffle_does_not_grow_with_the_data_set(tmp_path: Path) -> None:
    """Shuffle 10 and 30 shards of equal size, and compare peak memory, including mapped pages."""
    grown = []
    samples = synthetic_samples(np.full(5_000, 500), 30522)
    info = replace(INFO, vocab_size=30522, max_seq_length=512, max_predictions_per_seq=80)
    for shards in (10, 30):
        drawn = samples.take(np.random.default_rng(shards).integers(0, len(samples), 2000 * shards))
        assert drawn.nbytes > 3e6 * shards
        folder = tmp_path / str(shards)
        write_dataset(folder, drawn, shards=shards, info=info)
        done = python("-c", _MEASURED, folder, tmp_path / f"out{shards}", shards)
        grown.append(int(done.stdout) / 1024)
    assert grown[1] < grown[0] + 15, f"{grown} MiB for 33 and 100 MB of samples"
