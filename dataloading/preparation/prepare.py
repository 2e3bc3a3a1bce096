"""Text shards to a data set of native shards, in several processes, by several machines, and again after a crash.

A unit of work is one call of the reference's algorithm: one text file, as the reference is used on its 500 parts, or all of
them. Each makes one shard. A finished shard tells what it was made from, so whoever comes back finds what is left to do:

    OUT/prepare.json                 what is being made: settings, vocabulary, texts; other settings are refused
    OUT/part_00007_of_00500.hdf5     one call's samples, in the reference's order; appears when it is on disk
    OUT/manifest.json, lengths.npy   last of all (for one part of the work: manifest_1_of_4.json, lengths_1_of_4.npy)
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from console.files import open_regular, sha256_of
from dataloading.dataset.folder import Dataset
from dataloading.dataset.manifest import shard_name
from dataloading.dataset.merge import index_shards
from dataloading.jobs import JobProgress, WorkPart, begun, run_tasks
from dataloading.options import Compression, PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples, read_documents, samples_info, tokenize_documents
from dataloading.shards.formats import whole_shard
from dataloading.shards.native import write_shard
from dataloading.shards.shard import DatasetInfo
from dataloading.text.tokenization import Tokenizer, Vocabulary

JOB_NAME = "prepare.json"


@dataclass(frozen=True)
class Job:
    """Texts and settings that a data set is made from."""

    texts: tuple[Path, ...]
    vocab: Path
    options: PretrainingOptions
    one_call: bool = False
    """All texts go into one call of the algorithm, instead of one call for each."""
    compression: Compression = "none"

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("--text names no file; expected one or more")
        names = [path.as_posix() for path in self.texts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is named twice; its samples would repeat")

    @property
    def calls(self) -> list[tuple[Path, ...]]:
        """The texts of each call."""
        return [self.texts] if self.one_call else [(path,) for path in self.texts]


def prepare(
    job: Job,
    out: Path,
    *,
    jobs: int = 1,
    part: WorkPart | None = None,
    report: Callable[[JobProgress], None] = lambda _: None,
) -> Dataset:
    """Make the data set of ``job`` in ``out``, or one part of it, in ``jobs`` processes; goes on where it was stopped.

    Each process needs about 30 bytes of memory for each byte of its largest text (0.8 GB for 27 MB).

    Raises:
        ValueError: a text or the vocabulary cannot be used, ``out`` holds something else or what was made otherwise.
        OSError: the disk is full, or will not be written for another reason.
    """
    info = samples_info(Vocabulary.from_file(job.vocab), job.options)
    mine = part.share_of(len(job.calls)) if part else range(len(job.calls))
    # Before anything is made: a text that cannot be read would else end the job after hours.
    _check_texts([path for index in mine for path in job.calls[index]])
    # Without jobs and part, which change nothing in what is made.
    description = {
        "info": asdict(info),
        "calls": [[path.as_posix() for path in call] for call in job.calls],
        "compression": job.compression,
    }
    # Parts may share the folder: what is unfinished there may be another's at work.
    with begun(out, JOB_NAME, description, finished="part_*", alone=part is None):
        started = time.perf_counter()
        tasks = [(job, info, out, index) for index in mine]
        # A single process compiles when it comes to its first text.
        if jobs > 1:
            _compile(job, info)
        for done, (name, samples, kept) in enumerate(run_tasks(_make_shard, tasks, jobs), 1):
            report(JobProgress(name, samples, done, len(tasks), kept, time.perf_counter() - started))
        return index_shards(out, [shard_name(index, len(job.calls)) for index in mine], info, part)


_Task = tuple[Job, DatasetInfo, Path, int]


def _make_shard(task: _Task) -> tuple[str, int, bool]:
    """Make the shard of one call, unless it is there; return its name, its samples and whether it was there."""
    job, info, out, index = task
    texts = job.calls[index]
    # Taken now, as the job's description has the names of its texts only.
    info = replace(info, sources={path.as_posix(): sha256_of(path) for path in texts})
    path = out / shard_name(index, len(job.calls))
    if (there := whole_shard(path)) is not None:
        found, count = there
        # Left as it is: whether the text or the shard is the wrong one cannot be told here.
        if found != info:
            raise ValueError(f"{path}: made from another text, or otherwise; delete it, or name another --out")
        return path.name, count, True
    tokenizer = _tokenizer(job.vocab, info.vocabulary_sha256, job.options.do_lower_case)
    documents = tokenize_documents(read_documents(texts), tokenizer)
    samples = create_samples(documents, job.options, tokenizer.vocabulary)
    write_shard(path, samples, info, job.compression)
    return path.name, len(samples), False


@lru_cache(maxsize=1)
def _tokenizer(vocab: Path, sha256: str, do_lower_case: bool) -> Tokenizer:
    """Return one tokenizer for all the texts of a process, as it remembers words; ValueError where the file has changed."""
    tokenizer = Tokenizer.from_vocab(vocab, do_lower_case)
    if tokenizer.vocabulary.sha256 != sha256:
        raise ValueError(f"{vocab}: changed while it was used; run the command again")
    return tokenizer


def _compile(job: Job, info: DatasetInfo) -> None:
    """Make the compiled core ready before processes are forked."""
    tokenizer = _tokenizer(job.vocab, info.vocabulary_sha256, job.options.do_lower_case)
    create_samples(tokenize_documents([["a", "b"], ["c"]], tokenizer), job.options, tokenizer.vocabulary)


def _check_texts(texts: Sequence[Path]) -> None:
    """Raise ``OSError`` or ``ValueError`` where a text cannot be read, is empty, or is another one's copy."""
    by_size: dict[int, list[Path]] = {}
    for path in texts:
        with open_regular(path) as file:
            by_size.setdefault(file.seek(0, os.SEEK_END), []).append(path)
    for path in by_size.get(0, []):
        raise ValueError(f"{path}: no text found; expected one sentence a line, an empty line between documents")
    for alike in by_size.values():  # only texts of one size can be copies: no other is read
        first: dict[str, Path] = {}
        for path in alike if len(alike) > 1 else []:
            if (other := first.setdefault(sha256_of(path), path)) != path:
                raise ValueError(f"{path} is a copy of {other}; its samples would repeat")
