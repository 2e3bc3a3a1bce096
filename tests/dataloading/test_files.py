"""Rejection of pipes, of too large texts and lines, and of shards that are truncated while they are open."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bert.checkpoints.sources import open_source
from dataloading.dataset.folder import open_dataset, write_dataset
from dataloading.options import PretrainingOptions
from dataloading.preparation.prepare import Job, prepare
from dataloading.shards.formats import open_shard
from dataloading.text.documents import read_documents
from dataloading.text.vocabulary import Vocabulary
from tests.dataloading.made_up import INFO, make_samples
from tests.programs import REPOSITORY, python

VOCAB = REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt"


READERS: dict[str, Callable[[Path], object]] = {
    "a shard": open_shard,
    "a vocabulary": Vocabulary.from_file,
    "a text": lambda path: read_documents([path]),
    "a text to prepare": lambda path: prepare(Job((path,), VOCAB, PretrainingOptions()), path.parent / "out"),
    "a manifest": lambda path: open_dataset(path.parent),
    "a checkpoint": open_source,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_in_place_of_a_file_is_rejected_without_waiting(tmp_path: Path, reader: str) -> None:
    """Opening a named pipe to read it would block."""
    path = tmp_path / "manifest.json"
    os.mkfifo(path)
    with pytest.raises((ValueError, OSError)) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)
    assert "a pipe or a device, expected a file" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_too_long_lines_and_too_large_texts_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "text"
    longest = "w" * (16 << 20)
    path.write_text(f"A sentence.\n{longest}\n")
    assert read_documents([path]) == [["A sentence.", longest]]
    path.write_text(f"A sentence.\n{longest}w\nAnother.\n")
    with pytest.raises(ValueError, match=f"{path}: line 2 has 16,777,217 characters; expected one sentence a line"):
        read_documents([path])
    path.unlink()
    with path.open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(ValueError, match=f"{path}: 5,368,709,120 bytes, expected at most 4,294,967,296; split"):
        read_documents([path])


def test_reading_an_open_shard_fails_after_its_file_was_truncated(tmp_path: Path) -> None:
    """Reading a memory map beyond the end of its file would kill the process by SIGBUS."""
    code = """
import os, sys, pathlib, numpy
from dataloading.dataset.folder import open_dataset
from dataloading.shards.formats import open_shard
dataset = open_dataset(pathlib.Path(sys.argv[1]))
path = dataset.folder / dataset.shards[0].name
dataset.take(numpy.arange(len(dataset)))
shard = open_shard(path)
os.truncate(path, 0)
for read in (dataset.take, lambda _: shard.read(0, 9), lambda _: shard.verify()):
    try:
        read(numpy.arange(9))
    except ValueError as error:
        print("refused" if str(path) in str(error) else error, flush=True)
"""
    write_dataset(tmp_path / "data", make_samples(3000), shards=2, info=INFO)
    done = python("-c", code, tmp_path / "data")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["refused"] * 3), done.stderr
