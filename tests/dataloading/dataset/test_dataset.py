"""Data sets: folders of shards with a manifest and an index of sequence lengths."""

import hashlib
import json
import mmap
import multiprocessing
import pickle
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloading.dataset import folder as folder_module
from dataloading.dataset.folder import Dataset, new_folder, open_dataset, write_dataset
from dataloading.shards.samples import Samples
from dataloading.text.vocabulary import Vocabulary
from tests.conftest import at_most
from tests.dataloading.made_up import INFO, TOKENS, make_samples
from tests.programs import PATIENCE_S

pytestmark = pytest.mark.usefixtures("no_partial_files")

COUNT = 23
EVERYTHING = np.arange(COUNT)


@pytest.fixture
def samples() -> Samples:
    return make_samples(COUNT)


@pytest.fixture
def folder(tmp_path: Path, samples: Samples) -> Path:
    write_dataset(tmp_path / "data", samples, shards=4, info=INFO)
    return tmp_path / "data"


@at_most(15)
@given(st.integers(1, 6), st.lists(st.integers(0, COUNT - 1), max_size=40))
def test_take_gives_the_samples_in_the_order_asked(
    tmp_path_factory: pytest.TempPathFactory, shards: int, indices: list[int]
) -> None:
    samples, folder = make_samples(COUNT), tmp_path_factory.mktemp("data")
    write_dataset(folder, samples, shards=shards, info=INFO)
    dataset = open_dataset(folder)
    asked = np.array(indices, np.int64)
    assert dataset.take(asked).digest() == samples.take(asked).digest()
    assert len(dataset) == COUNT
    assert dataset.lengths.tolist() == samples.lengths.tolist()
    assert dataset.masked_counts.tolist() == samples.masked_counts.tolist()
    assert {shard.samples for shard in dataset.shards} <= {COUNT // shards, COUNT // shards + 1}
    dataset.verify()


def test_planning_touches_metadata_only_and_taking_opens_the_shards_needed(folder: Path, opened: list[str]) -> None:
    def names() -> set[str]:
        return {Path(name).name for name in opened if str(folder) in name}

    dataset = open_dataset(folder)
    assert dataset.lengths.dtype == np.uint16
    assert names() == {"manifest.json", "lengths.npy"}
    opened.clear()
    dataset.take(np.array([0, COUNT - 1]))
    assert names() == {"part_00000_of_00004.hdf5", "part_00003_of_00004.hdf5"}
    for index in (-1, COUNT):
        with pytest.raises(IndexError, match="holds 23 samples"):
            dataset.take(np.array([0, index]))


def digest_of(dataset: Dataset, queue: Any) -> None:
    queue.put(dataset.take(EVERYTHING[::-1]).digest())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_set_in_use_works_in_a_child_process(folder: Path, samples: Samples, method: str) -> None:
    dataset = open_dataset(folder)
    pickled = len(pickle.dumps(dataset))
    dataset.take(EVERYTHING)
    assert len(pickle.dumps(dataset)) == pickled  # memory maps are not pickled
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=digest_of, args=(dataset, queue))
    child.start()
    assert queue.get(timeout=PATIENCE_S) == samples.take(EVERYTHING[::-1]).digest()
    child.join()
    assert dataset.take(EVERYTHING).digest() == samples.digest()


def test_more_shards_than_the_soft_limit_of_open_files_are_read(tmp_path: Path) -> None:
    samples = make_samples(100)
    write_dataset(tmp_path / "data", samples, shards=100, info=INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        dataset = open_dataset(tmp_path / "data")
        assert dataset.take(np.arange(100)).digest() == samples.digest()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 356  # 256 are left for the rest of the process
        resource.setrlimit(resource.RLIMIT_NOFILE, (356, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_shards_stay_open(folder: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(folder)
    starts = np.cumsum([0, *(shard.samples for shard in dataset.shards[:-1])])
    dataset._most_open = 2
    for index, still_open in ((0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [1, 2]), (3, [2, 3])):
        assert dataset.take(starts[[index]]).digest() == samples.take(starts[[index]]).digest()
        assert list(dataset._open_shards) == still_open
    for limit, still_open in ((80, [2, 3]), (79, [3])):
        monkeypatch.setattr(folder_module, "_MAX_HELD_BYTES", limit)
        del dataset._open_shards[3]
        dataset._open_shards[2].held_bytes = 80
        dataset.take(starts[[3]])
        assert list(dataset._open_shards) == still_open


def test_the_vocabulary_is_checked(folder: Path) -> None:
    vocabulary = Vocabulary(tuple(TOKENS))
    dataset = open_dataset(folder)
    dataset.info = replace(dataset.info, vocabulary_sha256=vocabulary.sha256)
    dataset.check_vocabulary(vocabulary)
    with pytest.raises(ValueError, match="use that vocabulary"):
        dataset.check_vocabulary(Vocabulary((*TOKENS, "more")))


def test_missing_swapped_and_damaged_shards_are_named(folder: Path) -> None:
    paths = [folder / f"part_0000{index}_of_00004.hdf5" for index in range(3)]
    content = paths[2].read_bytes()
    paths[2].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"part_00002_of_00004\.hdf5"):
        open_dataset(folder).take(EVERYTHING)
    paths[2].unlink()
    dataset = open_dataset(folder)
    dataset.take(np.array([0]))
    with pytest.raises(ValueError, match=r"part_00002_of_00004\.hdf5: No such file"):
        dataset.take(EVERYTHING)
    with pytest.raises(ValueError, match=r"part_00002_of_00004\.hdf5: missing"):
        dataset.check_files()
    first, second = (path.read_bytes() for path in paths[:2])
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(ValueError, match=r"part_00000_of_00004\.hdf5: not the shard that manifest\.json lists"):
        open_dataset(folder).take(np.array([0]))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema_version",), 99),
        (("shards", 0, "name"), "../../etc/passwd"),
        (("shards", 0, "samples"), 7),
        (("lengths_sha256",), "0" * 64),
        (("samples",), "\ud800"),
    ],
)
def test_a_damaged_manifest_is_refused_in_one_line(folder: Path, place: tuple[Any, ...], value: object) -> None:
    path = folder / "manifest.json"
    manifest = changed = json.loads(path.read_text())
    for key in place[:-1]:
        changed = changed[key]
    changed[place[-1]] = value
    for content in (json.dumps(manifest), path.read_text()[:-10]):
        path.write_text(content)
        with pytest.raises(ValueError, match=str(folder)):
            open_dataset(folder)


def test_a_length_index_that_is_damaged_or_of_other_shards_is_refused(folder: Path, samples: Samples) -> None:
    lengths = open_dataset(folder).lengths
    while isinstance(lengths.base, np.ndarray):
        lengths = lengths.base
    assert isinstance(lengths.base, mmap.mmap), "it stays on disk"
    swapped = np.stack([samples.lengths[::-1], samples.masked_counts], axis=1).astype(np.uint16)
    with pytest.raises(ValueError, match=r"lengths of part_00000_of_00004\.hdf5 differ"):
        Dataset(folder, INFO, open_dataset(folder).shards, swapped).verify()
    for content in (b"", b"\0" * 100_000):
        (folder / "lengths.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"lengths\.npy"):
            open_dataset(folder)


@pytest.mark.parametrize(
    "head",
    [
        *(b"'", b"{", b"{'descr': '<u2'}", b"(1", b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (False, 2)}",
    ],
)
def test_a_hostile_length_index_with_its_digest_is_refused(head: bytes, folder: Path) -> None:
    """NumPy reads the head of an array as Python. Whoever wrote the data set has also written the digest."""
    original = (folder / "lengths.npy").read_bytes()
    hostile = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    listed, now = hashlib.sha256(original).hexdigest(), hashlib.sha256(hostile).hexdigest()
    (folder / "lengths.npy").write_bytes(hostile)
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace(listed, now))
    with pytest.raises(ValueError, match=r"/lengths\.npy: .*; copy or prepare the data set again"):
        open_dataset(folder)


def test_a_data_set_appears_whole_or_not_at_all(tmp_path: Path, samples: Samples) -> None:
    for shards in (0, COUNT + 1):
        with pytest.raises(ValueError, match="shards is"):
            write_dataset(tmp_path / "data", samples, shards=shards, info=INFO)
    (tmp_path / "data").write_text("of somebody else")
    with pytest.raises(ValueError, match="already exists"):
        write_dataset(tmp_path / "data", samples, shards=1, info=INFO)
    (tmp_path / "data").unlink()

    def fail() -> None:
        with new_folder(tmp_path / "data") as aside:
            write_dataset(aside / "part", samples, shards=1, info=INFO)
            raise OSError(28, "disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []
