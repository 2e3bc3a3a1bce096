"""Preparation in parts, in processes, and after a crash: always the same samples as in one go."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.folder import open_dataset
from dataloading.dataset.manifest import shard_name
from dataloading.dataset.merge import merge
from dataloading.jobs import WorkPart
from dataloading.options import PretrainingOptions
from dataloading.preparation.prepare import Job, JobProgress, prepare
from tests.conftest import REPOSITORY
from tests.programs import PATIENCE_S

OPTIONS = PretrainingOptions(max_seq_length=64, max_predictions_per_seq=10, dupe_factor=3)
TEXTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = [f"w{index}" for index in range(300)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    for index in range(TEXTS):
        lines = [" ".join(rng.choice(words, rng.integers(0, 12))) for _ in range(300)]
        (folder / f"text{index}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    texts = tuple(folder / f"text{index}.txt" for index in range(TEXTS))
    return Job(texts, folder / "vocab.txt", OPTIONS)


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "data"
    prepare(job, out)
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "prepare.json"}


def test_processes_make_no_difference(job: Job, whole: dict[str, bytes], tmp_path: Path) -> None:
    told: list[JobProgress] = []
    prepare(job, tmp_path / "data", jobs=3, report=told.append)
    assert contents(tmp_path / "data") == whole
    assert [progress.done for progress in told] == [1, 2, 3, 4, 5]
    assert not any(progress.kept for progress in told)


@pytest.mark.parametrize(("count", "shared"), [(2, True), (3, False), (5, True)])
def test_parts_make_the_same_data_set(
    job: Job, whole: dict[str, bytes], tmp_path: Path, count: int, shared: bool
) -> None:
    folders = [tmp_path / ("shared" if shared else f"part{index}") for index in range(count)]
    for index in reversed(range(count)):
        prepare(job, folders[index], part=WorkPart(index + 1, count))
    if shared:
        merge(folders[:1], folders[0])
        found = {
            name: content for name, content in contents(folders[0]).items() if "_of_0000" in name or "_" not in name
        }
        assert found == whole
    merge(list(dict.fromkeys(folders))[::-1], tmp_path / "out")
    assert contents(tmp_path / "out") == whole
    open_dataset(tmp_path / "out").verify()


def test_merge_refuses_gaps_repeats_and_strangers(job: Job, tmp_path: Path) -> None:
    for index in (1, 2, 3):
        prepare(job, tmp_path / str(index), part=WorkPart(index, 3))
    folders = [tmp_path / str(index) for index in (1, 2, 3)]
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="part 2/3 is missing"):
        merge([folders[0], folders[2]], out)
    with pytest.raises(ValueError, match=r"part 1/3 is in .* and in"):
        merge([*folders, folders[0]], out)
    with pytest.raises(ValueError, match="it holds parts of a data set: join them"):
        open_dataset(folders[0])
    shorter = replace(job, options=replace(OPTIONS, max_seq_length=32))
    prepare(shorter, tmp_path / "other", part=WorkPart(2, 3))
    with pytest.raises(ValueError, match="max_seq_length 32 instead of 64"):
        merge([folders[0], tmp_path / "other", folders[2]], out)
    prepare(job, tmp_path / "half", part=WorkPart(1, 2))
    with pytest.raises(ValueError, match="parts of 2 and parts of 3 do not make one data set"):
        merge([*folders, tmp_path / "half"], out)
    same = replace(job, texts=(job.texts[1], job.texts[0], *job.texts[2:]))
    prepare(same, tmp_path / "same", part=WorkPart(2, 3))
    with pytest.raises(ValueError, match="holds the same samples"):
        merge([folders[0], tmp_path / "same", folders[2]], out)
    (folders[1] / shard_name(1, TEXTS)).unlink()
    with pytest.raises(ValueError, match="missing"):
        merge(folders, out)
    assert not out.exists()


def test_whole_data_sets_are_joined_in_the_order_named(job: Job, tmp_path: Path) -> None:
    for name, texts in (("first", job.texts[3:]), ("second", job.texts[:3])):
        prepare(replace(job, texts=texts), tmp_path / name)
    joined = merge([tmp_path / "second", tmp_path / "first"], tmp_path / "out")
    prepare(job, tmp_path / "data")
    expected = open_dataset(tmp_path / "data")
    everything = np.arange(len(expected))
    assert joined.take(everything).digest() == expected.take(everything).digest()
    assert joined.info == expected.info
    with pytest.raises(ValueError, match="holds the same samples"):
        merge([tmp_path / "first", tmp_path / "first"], tmp_path / "twice")
    prepare(replace(job, texts=job.texts[2:], one_call=True), tmp_path / "overlapping")
    with pytest.raises(ValueError, match=r"text2.txt was prepared for .* already"):
        merge([tmp_path / "second", tmp_path / "overlapping"], tmp_path / "twice")
    with pytest.raises(ValueError, match="expected the parts of one, or several to join"):
        merge([tmp_path / "first"], tmp_path / "alone")


def test_a_killed_preparation_goes_on(job: Job, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "data"
    flags = ["--max_seq_length=64", "--max_predictions_per_seq=10", "--dupe_factor=3", "--jobs=2"]
    command = [sys.executable, "-m", "dataloading", "prepare", "--vocab", job.vocab, "--out", out, *flags]
    process = subprocess.Popen(
        [*command, "--text", *job.texts], cwd=REPOSITORY, start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + PATIENCE_S
    while not list(out.glob("part_*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (out / f".{shard_name(3, TEXTS)}.123.partial").write_bytes(b"half")
    there = {path.name for path in out.glob("part_*")}
    assert there
    told: list[JobProgress] = []
    prepare(job, out, report=told.append)
    assert contents(out) == whole
    assert {progress.name for progress in told if progress.kept} == there


def test_damaged_shards_are_made_again_and_a_folder_begun_otherwise_is_left_alone(
    job: Job, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "data"
    prepare(job, out)
    flipped, truncated = (out / shard_name(index, TEXTS) for index in (2, 3))
    content = bytearray(flipped.read_bytes())
    content[-10] ^= 1
    flipped.write_bytes(content)
    truncated.write_bytes(truncated.read_bytes()[:-1])
    told: list[JobProgress] = []
    prepare(job, out, report=told.append)
    assert contents(out) == whole
    assert [progress.name for progress in told if not progress.kept] == [flipped.name, truncated.name]
    for changed, difference in (
        ({"options": PretrainingOptions(max_seq_length=64, max_predictions_per_seq=9)}, "dupe_factor"),
        ({"texts": job.texts[1:]}, "calls"),
        ({"one_call": True}, "calls"),
        ({"compression": "gzip"}, "compression"),
    ):
        with pytest.raises(ValueError, match=f"begun with other settings .*{difference}"):
            prepare(replace(job, **changed), out)
    assert contents(out) == whole


def test_a_changed_text_is_noticed(job: Job, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2\nw3\n\nw4 w5\n")
    mine = replace(job, texts=(text,))
    prepare(mine, tmp_path / "data")
    text.write_text("w1 w2\nw3\n\nw4 w6\n")
    with pytest.raises(ValueError, match="made from another text"):
        prepare(mine, tmp_path / "data")


def test_compressed_shards_hold_the_same(job: Job, tmp_path: Path) -> None:
    prepare(job, tmp_path / "plain")
    packed = prepare(replace(job, compression="gzip"), tmp_path / "packed")
    plain = open_dataset(tmp_path / "plain")
    assert [record.digest for record in packed.shards] == [record.digest for record in plain.shards]
    assert sum(record.file_bytes for record in packed.shards) < 0.9 * sum(record.file_bytes for record in plain.shards)
    chosen = np.random.default_rng(1).permutation(len(plain))[:100]
    assert packed.take(chosen).digest() == plain.take(chosen).digest()


def test_another_vocabulary_under_the_same_name_is_used(job: Job, tmp_path: Path) -> None:
    vocab, text = tmp_path / "vocab.txt", tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4\nw3 w4\n\nw4 w5 w1\n")
    lines = job.vocab.read_text().splitlines()
    dumped = []
    for name, words in (("first", lines), ("second", [*lines[:5], *reversed(lines[5:])])):
        vocab.write_text("\n".join(words))
        dataset = prepare(Job((text,), vocab, OPTIONS), tmp_path / name)
        samples = dataset.take(np.arange(len(dataset)))
        dumped.append([[words[index] for index in samples.masked_lm_ids], samples.lengths.tolist()])
        assert set(dumped[-1][0]) <= {"w1", "w2", "w3", "w4", "w5"}
    assert dumped[0] == dumped[1]
