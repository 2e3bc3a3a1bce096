"""Training from shards that other programs made: the same run, whatever their layout."""

from pathlib import Path

import pytest

from dataloading.dataset.convert import convert
from dataloading.dataset.folder import open_dataset
from dataloading.dataset.merge import index_shards
from dataloading.options import Layout
from tests.conftest import SmallRun
from tests.distributed.test_ranks import records, train


@pytest.fixture(scope="module")
def native(small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return train(small_run, tmp_path_factory.mktemp("native"), ranks=1)


@pytest.mark.parametrize("layout", ["varlength", "fixed"])
def test_a_run_reads_any_layout(
    small_run: SmallRun, tmp_path: Path, native: list[dict[str, float]], layout: Layout
) -> None:
    folders = {}
    for name in ("train", "evaluation"):
        source = open_dataset(small_run.folder / name)
        folders[name] = tmp_path / name
        convert(source, folders[name], layout)
        for made in ("manifest.json", "lengths.npy"):
            (folders[name] / made).unlink()
        shards = sorted(path.name for path in folders[name].iterdir())
        index_shards(folders[name], shards, source.info)
    found = train(small_run, tmp_path, ranks=1, data__train=folders["train"], data__evaluation=folders["evaluation"])
    assert len(found) == len(native) == 10
    for one, other in zip(native, found, strict=True):
        for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm"):
            assert other[name] == one[name], name
    assert len(records(tmp_path, "eval")) == 2
