"""Conversion of text files to a data set of native shards, in several processes or on several machines.

A unit of work is one call of the reference's algorithm, on one text file (as the reference processes its 500 parts) or on
all files together. Each call makes one shard, which records its texts and settings. A job can continue after a crash:

    OUT/prepare.json                 settings, vocabulary and texts of the job; a job with other settings is refused
    OUT/part_00007_of_00500.hdf5     one call's samples, in the reference's order; appears once it is complete
    OUT/manifest.json, lengths.npy   written last
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from console.files import sha256_of
from dataloading.dataset.folder import Dataset, index_shards, shard_name
from dataloading.jobs import Made, Report, WorkPart, begun, make_files
from dataloading.options import Normalization, PretrainingOptions
from dataloading.preparation.pretraining_data import samples_info, samples_of
from dataloading.shards.formats import whole_shard, write_shard
from dataloading.shards.shard import DatasetInfo
from dataloading.text.documents import check_texts, read_documents
from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import Vocabulary

JOB_NAME = "prepare.json"


@dataclass(frozen=True)
class Job:
    """Texts and settings from which a data set is made."""

    texts: tuple[Path, ...]
    vocab: Path
    options: PretrainingOptions
    one_call: bool = False
    """Whether the algorithm is called once with all texts, instead of once for each text."""
    accept_losses: bool = False
    """Whether to go on if more than half of a text is lost."""
    remedy: str = ""
    """Remedy that messages about lost text name. A program sets it if it lacks the options that the usual remedies name."""

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("--text names no file; expected one or more")
        names = [path.as_posix() for path in self.texts]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"--text names {repeated[0]} twice, which would repeat its samples; name it once")

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
    """Make all shards of a data set, or those of one ``part``, and return their description. Write no manifest."""
    info = samples_info(Vocabulary.read(job.vocab), job.options)
    mine = part.share_of(len(job.calls)) if part else range(len(job.calls))
    # Check the texts first, because an unreadable text would otherwise end the job after hours.
    check_texts([path for index in mine for path in job.calls[index]])
    calls = [[path.as_posix() for path in call] for call in job.calls]
    description = {**info.options, "vocabulary": info.vocabulary_sha256, "calls": calls}
    # If this process makes only a part, other processes may be making other parts in this folder now.
    with begun(out, JOB_NAME, description, finished="part_*", alone=part is None):
        if jobs > 1:
            # Compile the functions that make samples before forking, so that the processes share them.
            tokenizer = _tokenizer(job.vocab, info.vocabulary_sha256, job.options.normalization)
            samples_of([["a", "b"], ["c"]], tokenizer, job.options)
        make_files(partial(_make_shard, job, info, out), mine, jobs, report)
    return info


def _make_shard(job: Job, info: DatasetInfo, out: Path, index: int) -> Made:
    """Make the shard of call ``index`` unless it exists."""
    texts = job.calls[index]
    info = replace(info, sources={path.as_posix(): sha256_of(path) for path in texts})
    path = out / job.shard_names[index]
    if (existing := whole_shard(path)) is not None:
        found, count = existing
        if replace(found, text=info.text) != info:
            raise ValueError(f"{path}: made from another text or with other settings; delete it, or name another --out")
        return path.name, count, True
    tokenizer = _tokenizer(job.vocab, info.vocabulary_sha256, job.options.normalization)
    samples, counts = samples_of(read_documents(texts), tokenizer, job.options)
    if not job.accept_losses:
        counts.require_enough(texts[0], job.remedy)
    write_shard(path, samples, replace(info, text=counts))
    return path.name, len(samples), False


@lru_cache(maxsize=1)
def _tokenizer(vocab: Path, sha256: str, normalization: Normalization) -> Tokenizer:
    """Return the tokenizer that a process uses for all of its texts, so that the texts share its cache of words."""
    vocabulary = Vocabulary.read(vocab)
    if vocabulary.sha256 != sha256:
        raise ValueError(f"{vocab}: changed while it was used; run the command again")
    return Tokenizer(vocabulary, normalization)
