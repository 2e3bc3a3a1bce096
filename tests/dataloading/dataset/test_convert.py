"""Conversions of data sets between layouts, and data sets made of other programs' shards."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.folder import Dataset, open_dataset, shard_name, write_dataset
from dataloading.dataset.rewrite import convert, multiset_digest, shuffle
from dataloading.jobs import JobProgress
from dataloading.options import Layout
from dataloading.shards.hdf5_layouts import RaggedShard
from dataloading.shards.samples import synthetic_samples
from dataloading.shards.shard import DatasetInfo
from dataloading.text.vocabulary import Vocabulary
from tests.conftest import REPOSITORY
from tests.dataloading.conftest import Run
from tests.dataloading.foreign_shards import write_like_others
from tests.dataloading.made_up import INFO, TOKENS
from tests.dataloading.shards.tfrecord.edge_samples import edge_samples

pytestmark = pytest.mark.slow

COUNT = 700
EVERYTHING = np.arange(COUNT)
MOST_TOKENS, MOST_MASKED = 40, 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("source")
    (folder / "vocab.txt").write_text("\n".join(TOKENS))
    vocabulary = Vocabulary.from_file(folder / "vocab.txt")
    lengths = np.random.default_rng(0).integers(3, MOST_TOKENS + 1, COUNT)
    lengths[:5] = MOST_TOKENS
    info = DatasetInfo.of(vocabulary, MOST_TOKENS, MOST_MASKED, INFO.options, INFO.sources)
    write_dataset(folder / "data", synthetic_samples(lengths, len(TOKENS)), shards=4, info=info)
    return open_dataset(folder / "data")


def from_elsewhere(source: Dataset, folder: Path, layout: str) -> np.ndarray:
    """Write the samples of ``source`` as another program would, and return each sample's digest in order."""
    folder.mkdir()
    for index in range(len(source.shards)):
        shard = source.open_listed(index)
        packs = np.append(np.arange(0, len(shard), 2), len(shard))
        samples = shard.read(0, len(shard))
        write_like_others(folder / shard_name(index, len(source.shards)), layout, samples, source.info, packs)
    return source.take(EVERYTHING).sample_digests()


@pytest.mark.parametrize("layout", ["native", "packed"])
def test_an_interrupted_conversion_continues_and_gives_the_same_data_set(
    source: Dataset, tmp_path: Path, layout: Layout
) -> None:
    out, reports = tmp_path / "data", list[JobProgress]()

    def stop(progress: JobProgress) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, layout, report=stop)
    with pytest.raises(ValueError, match=r"begun with other settings \(max_sequences, seed\)"):
        convert(source, out, layout, max_sequences=2, seed=1)
    (out / shard_name(0, 4)).write_bytes(b"damaged")
    found = convert(source, out, layout, jobs=2, report=reports.append)
    assert {(report.name, report.count, report.kept) for report in reports} == {
        (record.name, record.samples, index == 1) for index, record in enumerate(source.shards)
    }
    assert not (out / "convert.json").exists()
    assert found.info == source.info
    assert [record.name for record in found.shards] == [shard_name(index, 4) for index in range(4)]
    again = convert(source, tmp_path / "again", layout)
    assert [record.digest for record in again.shards] == [record.digest for record in found.shards]
    for index, record in enumerate(source.shards):
        shard, original = found.open_listed(index), source.open_listed(index).verify()
        assert shard.layout == layout
        if not isinstance(shard, RaggedShard):
            assert shard.digest == record.digest
            continue
        assert multiset_digest([shard.verify()]) == multiset_digest([original])
        sizes = np.diff(shard.row_offsets)
        assert 1 <= sizes.min() <= sizes.max() <= 3
        assert np.add.reduceat(shard.lengths, shard.row_offsets[:-1]).max() <= MOST_TOKENS
        assert len(sizes) * MOST_TOKENS < 1.2 * original.lengths.sum()  # packs are nearly full
    # A valid shard is rejected if the manifest has another digest for it.
    shards = [replace(shard, digest="0" * 64) for shard in found.shards]
    with pytest.raises(ValueError, match=shard_name(0, 4)):
        convert(Dataset(out, found.info, tuple(shards), np.stack([found.lengths] * 2)), tmp_path / "other", layout)


@pytest.mark.parametrize("layout", ["fixed", "varlength", "packed"])
def test_shards_of_other_programs_are_indexed_in_place_or_through_links(
    run: Run, source: Dataset, vocab: Path, tmp_path: Path, layout: str
) -> None:
    folder = tmp_path / "elsewhere"
    expected = from_elsewhere(source, folder, layout)
    with pytest.raises(ValueError, match="python -m dataloading index"):
        open_dataset(folder)
    run("index", folder, "--vocab", vocab, "--out", tmp_path / "linked")
    run("index", folder, "--vocab", vocab)
    for place in (folder, tmp_path / "linked"):
        dataset = open_dataset(place)
        dataset.verify()
        dataset.check_files()
        dataset.check_vocabulary(Vocabulary.from_file(vocab))
        assert dataset.take(EVERYTHING).sample_digests().tolist() == expected.tolist()
        sizes = (dataset.info.max_seq_length, dataset.info.max_predictions_per_seq)
        assert sizes == (MOST_TOKENS, MOST_MASKED if layout == "fixed" else 6)  # 6 is 15 % of 40
        assert dataset.info.options == {}
    assert "settings: not recorded; samples of at most 40 tokens" in run("verify", folder)
    shuffled = shuffle(open_dataset(folder), tmp_path / "shuffled", shards=3, seed=1)
    assert multiset_digest(shuffled.blocks()) == multiset_digest(source.blocks())


def test_tfrecord_files_of_the_reference_script_are_converted(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    shutil.copy(Path(__file__).parents[1] / "shards" / "tfrecord" / "edge_64.tfrecord", folder / "part-00000-of-00001")
    vocab = REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt"
    command = ["convert", folder, "--to", "native", "--out", tmp_path / "data"]
    assert "--vocab" in run(*command, fails=True)
    run(*command, "--vocab", vocab)
    assert [path.name for path in folder.iterdir()] == ["part-00000-of-00001"]
    dataset, expected = open_dataset(tmp_path / "data"), edge_samples()
    assert dataset.take(np.arange(len(expected))).digest() == expected.digest()
    assert (dataset.info.max_seq_length, dataset.info.max_predictions_per_seq) == (64, 10)
