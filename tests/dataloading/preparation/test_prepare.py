"""Preparation in parts, in several processes or after a crash gives the same samples as one uninterrupted run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.folder import shard_name
from dataloading.jobs import JobProgress, WorkPart
from dataloading.options import PretrainingOptions
from dataloading.preparation.prepare import Job, make_shards, prepare

OPTIONS = PretrainingOptions(max_seq_length=64, max_predictions_per_seq=10, dupe_factor=3)
TEXTS = 5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = [f"w{index}" for index in range(300)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    for index in range(TEXTS):
        lines = [" ".join(rng.choice(words, rng.integers(0, 12))) for _ in range(300)]
        (folder / f"text{index}.txt").write_text("\n".join(lines))
    texts = tuple(folder / f"text{index}.txt" for index in range(TEXTS))
    return Job(texts, folder / "vocab.txt", OPTIONS)


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "data"
    prepare(job, out)
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "prepare.json"}


def test_several_processes_or_parts_make_the_same_data_set_as_one_process(
    job: Job, whole: dict[str, bytes], tmp_path: Path
) -> None:
    told: list[JobProgress] = []
    prepare(job, tmp_path / "processes", jobs=3, report=told.append)
    for index in (2, 1):
        make_shards(job, tmp_path / "parts", part=WorkPart(index, 2))
    prepare(job, tmp_path / "parts", report=told.append)
    assert contents(tmp_path / "processes") == contents(tmp_path / "parts") == whole
    expected = [(done, kept) for kept in (False, True) for done in range(1, TEXTS + 1)]
    assert [(progress.done, progress.kept) for progress in told] == expected


def test_damaged_shards_are_made_again_and_other_settings_are_rejected(
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
        ({"options": replace(OPTIONS, dupe_factor=9, random_seed=9)}, "dupe_factor, random_seed"),
        ({"one_call": True}, "calls"),
    ):
        with pytest.raises(ValueError, match=rf"begun with other settings \({difference}\)"):
            prepare(replace(job, **changed), out)
    assert contents(out) == whole


def test_a_changed_text_is_rejected(job: Job, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2\nw3\n\nw4 w5\n")
    mine = replace(job, texts=(text,))
    prepare(mine, tmp_path / "data")
    text.write_text("w1 w2\nw3\n\nw4 w6\n")
    with pytest.raises(ValueError, match="made from another text"):
        prepare(mine, tmp_path / "data")


def test_a_changed_vocabulary_file_is_read_again(job: Job, tmp_path: Path) -> None:
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
