"""Conversion of text files to a data set of native shards, in several processes or on several machines.

A unit of work is one call of the reference's algorithm, on one text file (as the reference processes its 500 parts) or on
all files together. Each call makes one shard, which records its texts and settings. A job can continue after a crash:

    OUT/prepare.json                 settings, vocabulary and texts of the job; a job with other settings is refused
    OUT/part_00007_of_00500.hdf5     one call's samples, in the reference's order; appears once it is complete
    OUT/manifest.json, lengths.npy   written last
"""

import os
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from console.files import open_regular, sha256_of
from dataloading.dataset.folder import Dataset, index_shards, shard_name
from dataloading.jobs import Made, Report, WorkPart, begun, make_files
from dataloading.options import PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples, samples_info
from dataloading.shards.formats import whole_shard, write_shard
from dataloading.shards.shard import DatasetInfo
from dataloading.text.tokenization import NO_TEXT, Tokenizer, Vocabulary, read_documents, tokenize_documents

JOB_NAME = "prepare.json"


@dataclass(frozen=True)
class Job:
    """Texts and settings from which a data set is made."""

    texts: tuple[Path, ...]
    vocab: Path
    options: PretrainingOptions
    one_call: bool = False
    """Whether the algorithm is called once with all texts, instead of once for each text."""

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("--text names no file; expected one or more")
        names = [path.as_posix() for path in self.texts]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{repeated[0]} is named twice; its samples would repeat")

    @property
    def calls(self) -> list[tuple[Path, ...]]:
        return [self.texts] if self.one_call else [(path,) for path in self.texts]

    @property
    def shard_names(self) -> list[str]:
        return [shard_name(index, len(self.calls)) for index in range(len(self.calls))]


def prepare(job: Job, out: Path, *, jobs: int = 1, report: Report = lambda _: None) -> Dataset:
    """Make the data set of ``job`` in the folder ``out`` with ``jobs`` processes, or continue an interrupted preparation.

    Each process needs about 30 bytes of memory for each byte of its largest text (0.8 GB for 27 MB).
    """
    info = make_shards(job, out, jobs=jobs, report=report)
    return index_shards(out, job.shard_names, info)


def make_shards(
    job: Job, out: Path, *, jobs: int = 1, part: WorkPart | None = None, report: Report = lambda _: None
) -> DatasetInfo:
    """Make all shards of a data set, or only one ``part``, without a manifest. Return the shards' common description."""
    info = samples_info(Vocabulary.from_file(job.vocab), job.options)
    mine = part.share_of(len(job.calls)) if part else range(len(job.calls))
    # Check first, so that an unreadable text does not end the job after hours.
    for path in (path for index in mine for path in job.calls[index]):
        with open_regular(path) as file:
            if not file.seek(0, os.SEEK_END):
                raise ValueError(f"{path}: {NO_TEXT}")
    calls = [[path.as_posix() for path in call] for call in job.calls]
    description = {**info.options, "vocabulary": info.vocabulary_sha256, "calls": calls}
    # Processes that make other parts may use the same folder at the same time.
    with begun(out, JOB_NAME, description, finished="part_*", alone=part is None):
        if jobs > 1:
            # Compile the core before forking, so that the processes share it.
            tokenizer = _tokenizer(job.vocab, info.vocabulary_sha256, job.options.do_lower_case)
            create_samples(tokenize_documents([["a", "b"], ["c"]], tokenizer), job.options, tokenizer.vocabulary)
        make_files(partial(_make_shard, job, info, out), mine, jobs, report)
    return info


def _make_shard(job: Job, info: DatasetInfo, out: Path, index: int) -> Made:
    """Make the shard of call ``index`` unless it exists."""
    texts = job.calls[index]
    info = replace(info, sources={path.as_posix(): sha256_of(path) for path in texts})
    path = out / job.shard_names[index]
    if (existing := whole_shard(path)) is not None:
        found, count = existing
        if found != info:
            raise ValueError(f"{path}: made from another text or with other settings; delete it, or name another --out")
        return path.name, count, True
    tokenizer = _tokenizer(job.vocab, info.vocabulary_sha256, job.options.do_lower_case)
    documents = tokenize_documents(read_documents(texts), tokenizer)
    samples = create_samples(documents, job.options, tokenizer.vocabulary)
    write_shard(path, samples, info)
    return path.name, len(samples), False


@lru_cache(maxsize=1)
def _tokenizer(vocab: Path, sha256: str, do_lower_case: bool) -> Tokenizer:
    """Return the tokenizer that a process uses for all of its texts, so that the texts share its cache of words."""
    tokenizer = Tokenizer(Vocabulary.from_file(vocab), do_lower_case)
    if tokenizer.vocabulary.sha256 != sha256:
        raise ValueError(f"{vocab}: changed while it was used; run the command again")
    return tokenizer
