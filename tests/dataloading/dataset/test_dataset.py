"""Data sets: folders of shards, their manifest and length index."""

import hashlib
import io
import json
import mmap
import multiprocessing
import pickle
import re
import resource
from dataclasses import replace
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
from dataloading.options import Layout
from dataloading.preparation.convert import convert
from dataloading.shards.samples import Samples
from dataloading.text.tokenization import Vocabulary
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


@settings(max_examples=15)
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
    assert max(shard.samples for shard in dataset.shards) - min(shard.samples for shard in dataset.shards) <= 1
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


@pytest.mark.parametrize("index", [-1, COUNT])
def test_an_index_outside_the_data_set_is_an_index_error(folder: Path, index: int) -> None:
    with pytest.raises(IndexError, match="holds 23 samples"):
        open_dataset(folder).take(np.array([0, index]))


def digest_of(dataset: Dataset, queue: Any) -> None:
    queue.put(dataset.take(EVERYTHING[::-1]).digest())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_set_in_use_works_in_a_child_process(folder: Path, samples: Samples, method: str) -> None:
    dataset = open_dataset(folder)
    pickled = len(pickle.dumps(dataset))
    dataset.take(EVERYTHING)
    assert len(pickle.dumps(dataset)) == pickled  # the maps stay behind
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=digest_of, args=(dataset, queue))
    child.start()
    assert queue.get(timeout=PATIENCE_S) == samples.take(EVERYTHING[::-1]).digest()
    child.join()
    assert dataset.take(EVERYTHING).digest() == samples.digest()


def test_few_shards_are_open_at_a_time(folder: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_most_open_shards", lambda _: 2)
    monkeypatch.setattr(Dataset, "_take_by_shard", None)  # the slow way, which native shards do not need
    dataset = open_dataset(folder)
    for _ in range(2):
        assert dataset.take(EVERYTHING).digest() == samples.digest()
        assert len(dataset._open_shards) == 2
    dataset.close()
    assert len(dataset._open_shards) == 0
    assert dataset.take(EVERYTHING).digest() == samples.digest()


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
    dataset, tokens = open_dataset(folder), tuple(TOKENS)
    dataset.check_vocabulary(Vocabulary(tokens, md5=INFO.vocabulary_md5, sha256=INFO.vocabulary_sha256))
    with pytest.raises(ValueError, match="use that vocabulary"):
        dataset.check_vocabulary(Vocabulary(tokens, md5="3" * 32, sha256="3" * 64))


def test_missing_and_swapped_shards_are_named(folder: Path) -> None:
    paths = [folder / f"part_0000{index}_of_00004.hdf5" for index in range(3)]
    paths[2].unlink()
    dataset = open_dataset(folder)
    dataset.take(np.array([0]))
    with pytest.raises(ValueError, match=r"part_00002_of_00004\.hdf5: No such file"):
        dataset.take(EVERYTHING)
    first, second = (path.read_bytes() for path in paths[:2])
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(ValueError, match=r"part_00000_of_00004\.hdf5: not the shard that manifest\.json lists"):
        open_dataset(folder).take(np.array([0]))


@pytest.mark.parametrize("layout", ["native", "fixed", "varlength", "tfrecord"])
@pytest.mark.parametrize("seed", range(3))
def test_a_shard_that_is_overwritten_while_it_is_in_use_is_named(tmp_path: Path, layout: Layout, seed: int) -> None:
    samples = make_samples(COUNT)
    # Position 0, which other layouts have for padding, is [CLS] and never masked.
    samples = replace(samples, masked_lm_positions=np.maximum(samples.masked_lm_positions, 1))
    write_dataset(tmp_path / "native", samples, shards=4, info=INFO)
    if layout != "native":
        convert(open_dataset(tmp_path / "native"), tmp_path / layout, layout)
    dataset = open_dataset(tmp_path / layout)
    dataset.take(EVERYTHING)
    victim = dataset.folder / dataset.shards[1].name
    with victim.open("r+b") as file:
        file.write(np.random.default_rng(seed).bytes(victim.stat().st_size))
    with pytest.raises(ValueError, match=re.escape(str(victim))):
        dataset.take(EVERYTHING)


FIRST = ("shards", 0)
NO_NUMBERS = r"counts of part_00000_of_00004\.hdf5 are no whole numbers"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), 99, "schema version 99"),
        (("format",), "\x1b[2J" + "x" * 90_000, r"\\x1b\[2Jxxx"),
        (("shards",), None, "damaged or of another kind"),
        (FIRST, [], "damaged or of another kind"),
        ((*FIRST, "name"), "../../etc/passwd", "shard name '../../etc/passwd'"),
        ((*FIRST, "name"), "/etc/passwd", "shard name '/etc/passwd'"),
        ((*FIRST, "name"), "part\x1b[2J", r"shard name 'part\\x1b\[2J'"),
        ((*FIRST, "name"), "part\0", r"shard name 'part\\x00'"),
        ((*FIRST, "name"), 5, "shard name 5"),
        ((*FIRST, "samples"), -1, NO_NUMBERS),
        ((*FIRST, "samples"), "6", NO_NUMBERS),
        ((*FIRST, "samples"), True, NO_NUMBERS),
        ((*FIRST, "samples"), 10**4000 - 1, NO_NUMBERS),
        ((*FIRST, "samples"), 1 << 60, r"lengths\.npy"),
        ((*FIRST, "samples"), 7, r"lengths\.npy"),
        ((*FIRST, "digest"), 3, "digest of part_00000"),
        ((*FIRST, "unknown"), 1, "unknown"),
        (("info",), {}, "damaged or of another kind"),
        (("info", "vocab_size"), 0, "vocab_size is 0"),
        (("info", "vocab_size"), "100", "vocab_size is '100'"),
        (("info", "vocabulary_md5"), 3, "vocabulary_md5 is no text"),
        (("info", "options"), 3, "options are no settings by name"),
        (("info", "options", "random_seed"), [1], "options are no settings by name"),
        (("info", "sources"), {"text": []}, "sources are no settings by name"),
        (("lengths_sha256",), "0" * 64, r"lengths\.npy: digest differs"),
    ],
)
def test_a_manifest_that_leads_elsewhere_or_nowhere_is_refused(
    folder: Path, place: tuple[Any, ...], value: object, message: str
) -> None:
    path = folder / "manifest.json"
    manifest = changed = json.loads(path.read_text())
    for key in place[:-1]:
        changed = changed[key]
    changed[place[-1]] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message) as caught:
        open_dataset(folder)
    assert str(folder) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b"\xff", b"null", b'{"info": ' + b"[" * 900 + b"]" * 900 + b"}"]
)
def test_a_damaged_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json: damaged or of another kind"):
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


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    return file.getvalue()


def with_header(text: str) -> bytes:
    """An array file with such a header, which NumPy reads as Python source."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


DAMAGED = {
    "empty": b"",
    "text": b"text",
    "long": b"\0" * 100_000,
    "pickle": pickled(),
    "open bracket": with_header("("),
    "deep": with_header("-" * 5000 + "1"),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_length_index_is_refused(folder: Path, content: bytes, known: bool) -> None:
    """Even where the manifest has its digest."""
    (folder / "lengths.npy").write_bytes(content)
    if known:
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
    for shards in (0, COUNT + 1):
        with pytest.raises(ValueError, match="shards is"):
            write_dataset(tmp_path / "data", samples, shards=shards, info=INFO)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(dataset_module, "write_metadata", fail)
    with pytest.raises(OSError, match="disk full"):
        write_dataset(tmp_path / "data", samples, shards=2, info=INFO)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(folder: Path, samples: Samples, tmp_path: Path) -> None:
    for target in (folder, folder / "manifest.json"):
        with pytest.raises(ValueError, match="is there already"):
            write_dataset(target, samples, shards=1, info=INFO)
    empty = tmp_path / "empty"
    empty.mkdir()
    write_dataset(empty, samples, shards=1, info=INFO)
    assert len(open_dataset(empty)) == COUNT
