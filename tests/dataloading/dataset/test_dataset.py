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
from dataloading.dataset.folder import Dataset, new_folder, open_dataset, scan_shards, write_dataset
from dataloading.shards.formats import write_shard
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
def test_take_returns_samples_in_the_order_of_the_indices(
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


def test_opening_reads_only_metadata_and_take_opens_only_needed_shards(folder: Path, opened: list[str]) -> None:
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
def test_an_open_data_set_can_be_read_in_a_child_process(folder: Path, samples: Samples, method: str) -> None:
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


def test_the_soft_limit_of_open_files_is_raised_for_many_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(60)
    write_dataset(tmp_path / "data", samples, shards=60, info=INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        dataset = open_dataset(tmp_path / "data")
        assert dataset.take(np.arange(60)).digest() == samples.digest()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 316  # 60 shards and 256 other files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for limits, raised, most in (
        ((300, -1), 316, 60),  # -1 means no limit
        ((300, 310), 310, 54),
        ((300, 300), None, 44),
        ((256, 256), None, 1),
        ((316, -1), None, 60),
    ):
        done: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits, done=done: done.append(limits))
        assert open_dataset(tmp_path / "data")._most_open == most
        assert done == ([] if raised is None else [(raised, limits[1])])


def test_open_shards_are_limited_in_number_and_memory(
    folder: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_only_the_vocabulary_of_the_samples_is_accepted(folder: Path) -> None:
    vocabulary, other = Vocabulary(tuple(TOKENS)), Vocabulary((*TOKENS, "more"))
    dataset = open_dataset(folder)
    dataset.info = replace(dataset.info, vocabulary_sha256=vocabulary.sha256)
    dataset.check_vocabulary(vocabulary)
    made = rf"made with the vocabulary of md5 0{{32}} \(100 tokens\), not with the given one of md5 {other.md5} \(36 "
    with pytest.raises(ValueError, match=made):
        dataset.check_vocabulary(other)


def test_errors_for_missing_swapped_and_damaged_shards_name_the_path(
    folder: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [folder / f"part_0000{index}_of_00004.hdf5" for index in range(3)]
    content = paths[2].read_bytes()
    size = sum(path.stat().st_size for path in folder.glob("part_*"))
    for limit, change, complaint in (
        (size, 1, "content has digest"),
        (size - 1, 2, r"next_sentence_labels: \d to \d, expected 0 to 1"),
        (size - 1, 1, None),  # large data sets are not verified when they are opened
    ):
        monkeypatch.setattr(folder_module, "_VERIFIED_ON_OPENING", limit)
        paths[2].write_bytes(content[:-1] + bytes([content[-1] ^ change]))
        if complaint is None:
            assert len(open_dataset(folder).take(EVERYTHING)) == COUNT
            continue
        with pytest.raises(ValueError, match=f"^{paths[2]}: {complaint}"):
            open_dataset(folder).take(EVERYTHING)
    paths[2].write_bytes(content[:-1])
    listed = rf"but manifest\.json lists {len(content):,} bytes; copy"
    with pytest.raises(ValueError, match=rf"{paths[2]}: {len(content) - 1:,} bytes, {listed}"):
        open_dataset(folder).check_files()
    paths[2].unlink()
    dataset = open_dataset(folder)
    dataset.take(np.array([0]))
    with pytest.raises(ValueError, match=f"{paths[2]}: No such file"):
        dataset.take(EVERYTHING)
    with pytest.raises(ValueError, match=f"{paths[2]}: missing, {listed}"):
        dataset.check_files()
    first, second = (path.read_bytes() for path in paths[:2])
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(ValueError, match=rf"{paths[0]}: not the shard that manifest\.json lists"):
        open_dataset(folder).take(np.array([0]))
    write_shard(
        paths[0], samples.slice(0, 5), replace(INFO, options={"random_seed": 1})
    )  # right samples, other settings
    for record in (dataset.shards[0], replace(dataset.shards[0], file_bytes=paths[0].stat().st_size)):
        with pytest.raises(ValueError, match=rf"{paths[0]}: not the shard"):
            Dataset(folder, INFO, (record,), dataset._length_index[:5]).take(np.array([0]))


def test_shards_with_different_settings_or_equal_samples_are_rejected(tmp_path: Path, samples: Samples) -> None:
    for name, info in (("one", INFO), ("two", INFO), ("three", replace(INFO, options={"random_seed": 1}))):
        write_shard(tmp_path / name, samples, info)
    with pytest.raises(ValueError, match=f"{tmp_path}: two holds the same samples as one: leave out one"):
        scan_shards(tmp_path, ["one", "two"], INFO)
    with pytest.raises(ValueError, match=f"{tmp_path / 'three'}: made with other settings than the other shards"):
        scan_shards(tmp_path, ["one", "three"], INFO)
    assert scan_shards(tmp_path, ["one"], replace(INFO, sources={"a": "b"})).info.sources == {"a": "b"} | INFO.sources
    for name in ("empty", "nothing"):
        write_shard(tmp_path / name, samples.slice(0, 0), INFO)
    blocks = scan_shards(tmp_path, ["empty", "one", "nothing"], INFO)
    assert [len(block) for block in blocks.blocks(10)] == [10, 10, 3]
    assert blocks.take(np.array([22, 0])).digest() == samples.take(np.array([22, 0])).digest()


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("schema_version",), 99, "damaged or of another version .*Invalid enum value 99"),
        (("shards", 0, "name"), "../../etc/passwd", r"damaged or of another version .*shards\[0\]\.name"),
        (("shards", 0, "samples"), 7, r"not an array of type uint16 and shape \(25, 2\)"),
        (("lengths_sha256",), "0" * 64, r"digest differs from manifest\.json"),
        (("samples",), "\ud800", "damaged or of another version"),
    ],
)
def test_a_damaged_manifest_is_rejected_with_the_reason(
    folder: Path, place: tuple[Any, ...], value: object, complaint: str
) -> None:
    path = folder / "manifest.json"
    manifest = changed = json.loads(path.read_text())
    for key in place[:-1]:
        changed = changed[key]
    changed[place[-1]] = value
    for content, why in ((json.dumps(manifest), complaint), (path.read_text()[:-10], "damaged or of another kind")):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"{folder}.*: {why}.*; "):
            open_dataset(folder)


@pytest.mark.filterwarnings("error")
def test_damaged_hostile_and_wrong_length_indexes_are_rejected(folder: Path, samples: Samples) -> None:
    """The digest is no protection: whoever wrote the index wrote it, too. NumPy would warn about some of these heads."""
    lengths = open_dataset(folder).lengths
    while isinstance(lengths.base, np.ndarray):
        lengths = lengths.base
    assert isinstance(lengths.base, mmap.mmap), "it stays on disk"
    swapped = np.stack([samples.lengths[::-1], samples.masked_counts], axis=1).astype(np.uint16)
    with pytest.raises(ValueError, match=r"lengths of part_00000_of_00004\.hdf5 differ"):
        Dataset(folder, INFO, open_dataset(folder).shards, swapped).verify()
    digest, manifest = hashlib.sha256((folder / "lengths.npy").read_bytes()).hexdigest(), folder / "manifest.json"
    listed = manifest.read_text()
    content = (folder / "lengths.npy").read_bytes()
    changes = [(b"'<u2'", each) for each in (b"'>u2'", b"'|O' ", b"'\\d' ", b"1in 1", b"(((((", b"[('a'")]
    changes += [(b"(23, 2)", each) for each in (b"(2L, 2)", b"(99, 2)", b"(23, 3)", b"(-1, 2)")]
    changes += [(b"False", b"True "), (b"\x01\x00", b"\x02\x00"), (b"v\x00", b"\xff\xff")]
    spoilt = [content.replace(old, new, 1) for old, new in changes]
    for hostile in (*spoilt, content[:-1], content + b"0", b""):
        assert hostile != content
        (folder / "lengths.npy").write_bytes(hostile)
        manifest.write_text(listed.replace(digest, hashlib.sha256(hostile).hexdigest()))
        with pytest.raises(
            ValueError, match=r"/lengths\.npy: not an array of type .*; copy or prepare the data set again"
        ):
            open_dataset(folder)
        manifest.write_text(listed)
        with pytest.raises(ValueError, match=r"/lengths\.npy: digest differs from manifest\.json; copy"):
            open_dataset(folder)
    (folder / "lengths.npy").unlink()
    with pytest.raises(ValueError, match=r"/lengths\.npy: No such file or directory; copy"):
        open_dataset(folder)


def test_a_failed_write_leaves_no_data_set(tmp_path: Path, samples: Samples) -> None:
    for shards in (0, COUNT + 1):
        with pytest.raises(ValueError, match=f"shards is {shards} for 23 samples; expected 1 to the number of samples"):
            write_dataset(tmp_path / "data", samples, shards=shards, info=INFO)
    (tmp_path / "data").write_text("of somebody else")
    with pytest.raises(ValueError, match="is not an empty folder"):
        write_dataset(tmp_path / "data", samples, shards=1, info=INFO)
    (tmp_path / "data").unlink()

    def fail() -> None:
        with new_folder(tmp_path / "data") as aside:
            write_dataset(aside / "part", samples, shards=COUNT, info=INFO)
            raise OSError(28, "disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []
