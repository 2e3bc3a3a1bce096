"""Data sets: folders of shards, their manifest and length index, and how they are joined."""

import hashlib
import json
import mmap
import multiprocessing
import pickle
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloading.dataset import folder as dataset_module
from dataloading.dataset import manifest as manifest_module
from dataloading.dataset.folder import Dataset, open_dataset, write_dataset
from dataloading.dataset.manifest import write_metadata
from dataloading.shards.samples import Samples
from dataloading.text.tokenization import Vocabulary
from tests.dataloading.made_up_samples import INFO, make_samples

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
COUNT = 23

opened: list[str] = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)


@pytest.fixture
def samples() -> Samples:
    return make_samples(COUNT)


@pytest.fixture
def folder(tmp_path: Path, samples: Samples) -> Path:
    write_dataset(tmp_path / "data", samples, shards=4, info=INFO)
    return tmp_path / "data"


@settings(max_examples=25)
@given(st.integers(1, 6), st.lists(st.integers(0, COUNT - 1), max_size=40))
def test_take_gives_the_samples_in_the_order_asked(
    tmp_path_factory: pytest.TempPathFactory, shards: int, indices: list[int]
) -> None:
    samples = make_samples(COUNT)
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder, samples, shards=shards, info=INFO)
    dataset = open_dataset(folder)
    asked = np.array(indices, np.int64)
    assert dataset.take(asked).digest() == samples.take(asked).digest()
    assert len(dataset) == COUNT
    assert dataset.lengths.tolist() == samples.lengths.tolist()
    assert dataset.masked_counts.tolist() == samples.masked_counts.tolist()
    assert max(shard.samples for shard in dataset.shards) - min(shard.samples for shard in dataset.shards) <= 1
    dataset.verify()


def test_planning_touches_metadata_only_and_taking_opens_the_shards_needed(folder: Path) -> None:
    opened.clear()
    dataset = open_dataset(folder)
    assert dataset.lengths.dtype == np.uint16
    assert {Path(name).name for name in opened if str(folder) in name} == {"manifest.json", "lengths.npy"}
    opened.clear()
    dataset.take(np.array([0, COUNT - 1]))
    names = {Path(name).name for name in opened if str(folder) in name}
    assert names == {"part_00000_of_00004.hdf5", "part_00003_of_00004.hdf5"}


@pytest.mark.parametrize("index", [-1, COUNT])
def test_an_index_outside_the_data_set_is_an_index_error(folder: Path, index: int) -> None:
    with pytest.raises(IndexError, match="holds 23 samples"):
        open_dataset(folder).take(np.array([0, index]))


def digest_of(dataset: Dataset, queue: Any) -> None:
    queue.put(dataset.take(np.arange(COUNT)[::-1]).digest())


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")])
def test_a_data_set_in_use_works_in_a_child_process(folder: Path, samples: Samples, context: Any) -> None:
    dataset = open_dataset(folder)
    dataset.take(np.arange(COUNT))
    queue = context.Queue()
    child = context.Process(target=digest_of, args=(dataset, queue))
    child.start()
    assert queue.get(timeout=60) == samples.take(np.arange(COUNT)[::-1]).digest()
    child.join()
    assert dataset.take(np.arange(COUNT)).digest() == samples.digest()


def test_pickling_leaves_the_maps_behind(folder: Path, samples: Samples) -> None:
    dataset = open_dataset(folder)
    size = len(pickle.dumps(dataset))
    dataset.take(np.arange(COUNT))
    assert len(pickle.dumps(dataset)) == size
    assert pickle.loads(pickle.dumps(dataset)).take(np.arange(COUNT)).digest() == samples.digest()


def test_few_shards_are_open_at_a_time(folder: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_most_open_shards", lambda _: 2)
    dataset = open_dataset(folder)
    for _ in range(2):
        assert dataset.take(np.arange(COUNT)).digest() == samples.digest()
        assert len(dataset._open_shards) == 2
    dataset.close()
    assert len(dataset._open_shards) == 0
    assert dataset.take(np.arange(COUNT)).digest() == samples.digest()


def test_more_shards_than_the_soft_limit_of_open_files_stay_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, min(limits[1], 4096)))
        assert dataset_module._most_open_shards(10) == 10
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        assert dataset_module._most_open_shards(500) == 500
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 500 + dataset_module._OTHER_DESCRIPTORS
        assert dataset_module._most_open_shards(5000) == min(limits[1], 4096) - dataset_module._OTHER_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 4096), min(limits[1], 4096)))


def test_the_vocabulary_is_checked(folder: Path) -> None:
    dataset = open_dataset(folder)
    dataset.check_vocabulary(Vocabulary(SPECIAL_TOKENS, md5=INFO.vocabulary_md5, sha256=INFO.vocabulary_sha256))
    with pytest.raises(ValueError, match="use that vocabulary"):
        dataset.check_vocabulary(Vocabulary(SPECIAL_TOKENS, md5="3" * 32, sha256="3" * 64))


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "part_00002_of_00004.hdf5").unlink()
    dataset = open_dataset(folder)
    dataset.take(np.array([0]))
    with pytest.raises(ValueError, match=r"part_00002_of_00004\.hdf5: No such file"):
        dataset.take(np.arange(COUNT))


def test_swapped_shards_are_noticed(folder: Path) -> None:
    first, second = folder / "part_00000_of_00004.hdf5", folder / "part_00001_of_00004.hdf5"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(ValueError, match=r"part_00000_of_00004\.hdf5: not the shard that manifest\.json lists"):
        open_dataset(folder).take(np.array([0]))


def edit(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit("schema_version", value=99),
        edit("format", value="other"),
        edit("shards", value=None),
        edit("shards", 0, value=[]),
        edit("shards", 0, "name", value="../part_00000_of_00004.hdf5"),
        edit("shards", 0, "name", value="/etc/hostname"),
        edit("shards", 0, "name", value=5),
        edit("shards", 0, "samples", value=-1),
        edit("shards", 0, "samples", value="6"),
        edit("shards", 0, "unknown", value=1),
        edit("shards", 0, "samples", value=1 << 60),
        edit("shards", 0, "samples", value=7),
        edit("info", value={}),
        edit("info", "vocab_size", value=0),
        edit("info", "vocab_size", value="100"),
        edit("info", "options", value=3),
        edit("lengths_sha256", value="0" * 64),
    ],
)
def test_a_changed_manifest_is_refused(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=str(folder)):
        open_dataset(folder)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"null"])
def test_a_damaged_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        open_dataset(folder)


def test_an_oversized_manifest_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "_MAX_MANIFEST_BYTES", 100)
    with pytest.raises(ValueError, match="expected at most 100"):
        open_dataset(folder)


def test_the_length_index_stays_on_disk(folder: Path) -> None:
    lengths = open_dataset(folder).lengths
    while isinstance(lengths.base, np.ndarray):
        lengths = lengths.base
    assert isinstance(lengths.base, mmap.mmap)


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 100_000])
def test_a_damaged_length_index_is_refused(folder: Path, content: bytes) -> None:
    (folder / "lengths.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"lengths\.npy"):
        open_dataset(folder)


def test_a_length_index_that_pickles_is_refused(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{}], dtype=object), allow_pickle=True)
    content = (tmp_path / "evil.npy").read_bytes()
    (folder / "lengths.npy").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["lengths_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"lengths\.npy"):
        open_dataset(folder)


def test_verify_compares_the_length_index_with_the_shards(folder: Path, samples: Samples) -> None:
    dataset = open_dataset(folder)
    write_metadata(folder, list(dataset.shards), samples.lengths[::-1], samples.masked_counts, INFO)
    with pytest.raises(ValueError, match=r"lengths of part_00000_of_00004\.hdf5 differ"):
        open_dataset(folder).verify()


def test_a_data_set_appears_whole_or_not_at_all(
    tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(dataset_module, "write_metadata", fail)
    with pytest.raises(OSError, match="disk full"):
        write_dataset(tmp_path / "data", samples, shards=2, info=INFO)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shards", [0, COUNT + 1])
def test_the_number_of_shards_is_checked(tmp_path: Path, samples: Samples, shards: int) -> None:
    with pytest.raises(ValueError, match="shards is"):
        write_dataset(tmp_path / "data", samples, shards=shards, info=INFO)


def test_nothing_is_overwritten(folder: Path, samples: Samples, tmp_path: Path) -> None:
    for target in (folder, folder / "manifest.json"):
        with pytest.raises(ValueError, match="is there already"):
            write_dataset(target, samples, shards=1, info=INFO)
    empty = tmp_path / "empty"
    empty.mkdir()
    write_dataset(empty, samples, shards=1, info=INFO)
    assert len(open_dataset(empty)) == COUNT


@pytest.fixture(autouse=True)
def no_partial_files(tmp_path: Path) -> Iterator[None]:
    yield
    assert list(tmp_path.rglob("*.partial")) == []
