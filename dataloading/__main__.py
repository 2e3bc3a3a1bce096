"""Command line of the data stages: ``python -m dataloading COMMAND``.

Each command imports its modules when it runs, so that --help and errors in options appear without delay.
"""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from console.commands import Commands
from console.program import complain, say
from console.text import counted
from dataloading.options import AS_STATED, ExtractionOptions, Layout, OwnText, PretrainingOptions

if TYPE_CHECKING:
    from dataloading.dataset.folder import Dataset
    from dataloading.jobs import JobProgress, WorkPart

app = Commands()


@app.command
def _extract(
    inputs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path,
    # The empty name makes the fields of `options` command-line options without a prefix.
    options: Annotated[ExtractionOptions, tyro.conf.arg(name="")],
    jobs: int = 1,
) -> None:
    """Make text shards and the evaluation text from WikiExtractor's files. Continues after an interruption.

    Args:
        inputs: WikiExtractor's output folder, or files from it.
        out: Folder to make. It must be absent, empty, or from an interrupted run of the same command.
        options: The reference scripts' settings.
        jobs: Processes to use.
    """
    from dataloading.text.wikipedia import extract

    parts, articles, held_out = extract(inputs, out, options, jobs=jobs, report=_reporter("articles"))
    say(f"{out}: {counted(articles, 'article')} in {counted(parts, 'part')}, {held_out:,} held out in eval.txt")


@app.command
def _prepare(
    text: tuple[Path, ...],
    vocab: Path,
    out: Path,
    # FlagConversionOff: a flag takes True or False, as in the reference script.
    options: Annotated[PretrainingOptions, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff],
    one_call: bool = False,
    jobs: int = 1,
    accept_losses: bool = False,
) -> None:
    """Make a data set from text, one HDF5 shard per file. Continues after an interruption.

    Args:
        text: Files with one sentence a line and an empty line between documents. The algorithm is called for each.
        vocab: The model's vocabulary, one token a line.
        out: Folder to make. It must be absent, empty, or from an interrupted run of the same command.
        options: The reference script's settings.
        one_call: Call the algorithm once for all files together, which makes one shard.
        jobs: Processes to use.
        accept_losses: Go on if more than half of a text would be lost.
    """
    from dataloading.preparation.prepare import Job, prepare
    from dataloading.text.vocabulary import Vocabulary, find_normalization

    found = find_normalization(Vocabulary.read(vocab), vocab, AS_STATED)
    if found.normalization != options.normalization:
        # Warn instead of failing, because the reference also lower-cases text for cased vocabularies.
        complain(
            f"{vocab} is for text with {found}, but these options give {options.normalization}; check --do-lower-case, "
            "--strip-accents and --tokenize-chinese-chars",
            "warning",
        )
    job = Job(text, vocab, options, one_call, accept_losses)
    dataset = prepare(job, out, jobs=jobs, report=_reporter("samples"))
    say(f"{out}: {_counts(dataset)}")
    _report_text(dataset)


@app.command
def wikipedia(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    extraction: Annotated[ExtractionOptions, tyro.conf.arg(name="")],
    out: Path = Path("data/wikipedia"),
    shards: int = 4320,
    jobs: int = 1,
    part: str | None = None,
    checksums: Path | None = None,
) -> int:
    """Make all data for the GPU recipes from MLCommons' files, and verify it. Continues after an interruption.

    The exit status is 0 if all results exist, 1 if the folders lack files for a result, and 2 after an error. With
    --part, the status is also 0 while other processes still have to make results.

    Args:
        folders: Folders from the downloader (docs/data.md) with text, checkpoint and vocab.txt, or WikiExtractor's output.
        extraction: Settings for WikiExtractor's files.
        out: Folder for train, evaluation, vocab.txt and phase1.safetensors.
        shards: Number of files of the training set.
        jobs: Processes to use.
        part: i/n: make part i of n of the samples. The process that completes the last part makes the other results.
        checksums: File in md5sum's format. Its MD5 sums replace the built-in sums, for files from a mirror.
    """
    from dataloading.preparation.wikipedia import Request, make_wikipedia

    share = None if part is None else _parse_part(part)
    return 0 if make_wikipedia(Request(folders, out, extraction, shards, jobs, share, checksums)) else 1


@app.command
def from_text(
    text: tuple[Path, ...], out: Path, own: Annotated[OwnText, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]
) -> None:
    """Make a training set, an evaluation set and a vocabulary from your own text, for the recipe own_text_cpu.

    Args:
        text: Files of UTF-8 text with an empty line between documents, folders of such files, or patterns
            ("texts/**/*.txt").
        out: Folder to make, for train, evaluation and vocab.txt.
        own: Settings.
    """
    from dataloading.dataset.folder import open_dataset
    from dataloading.preparation.own_text import write_own_text

    split, vocabulary, normalization = write_own_text(text, own, out)
    if split.repeated:
        say(f"{counted(split.repeated, 'document')} left out for repeating another")
    for name, documents in (("train", split.train), ("evaluation", split.evaluation)):
        dataset = open_dataset(out / name)
        say(f"{out / name}: {counted(len(documents), 'document')}, {_counts(dataset)}")
        _report_text(dataset)
    say(f"{out / 'vocab.txt'}: {vocabulary.size:,} tokens; {normalization}")


@app.command
def demo(out: Path, vocab: Path) -> None:
    """Make the built-in default's data from the standard library's prose, or verify the existing data.

    Args:
        out: Folder for the data sets train and evaluation.
        vocab: The vocabulary file of the default, bert/artifacts/tiny_cpu/vocab.txt.
    """
    from dataloading.dataset.folder import open_dataset
    from dataloading.preparation.demo import write_demo

    started = time.perf_counter()
    made = write_demo(out, vocab)
    for name in ("train", "evaluation"):
        dataset = open_dataset(out / name)
        say(f"{dataset.folder}: {counted(len(dataset), 'sample')} of {dataset.lengths.mean():.1f} tokens")
    say(f"{'made' if made else 'verified'} in {time.perf_counter() - started:.1f} s")


@app.command
def index(folder: tyro.conf.Positional[Path], vocab: Path, out: Path | None = None) -> None:
    """Turn shards from other programs into a data set by writing a manifest and a length index. Shards are not changed.

    Args:
        folder: Shards of any layout (native, fixed, varlength, packed, TFRecord), and nothing else.
        vocab: The vocabulary that the shards' token ids refer to.
        out: Folder to make with links to the shards. Needed if the folder of the shards is not writable.
    """
    from dataloading.dataset.folder import index_shards, info_of, new_folder, open_dataset, shard_names

    names = shard_names(folder)
    info = info_of(folder, names, vocab)
    if out is None:
        dataset = index_shards(folder, names, info)
    else:
        with new_folder(out) as aside:
            for name in names:
                (aside / name).symlink_to((folder / name).resolve())
            index_shards(aside, names, info)
        dataset = open_dataset(out)
    say(f"{dataset.folder}: {_counts(dataset)}")


@app.command
def _shuffle(folder: tyro.conf.Positional[Path], out: Path, shards: int, seed: int = 24) -> None:
    """Write a data set's samples in random order to new shards. Continues after an interruption.

    Args:
        folder: The data set.
        out: Folder to make.
        shards: Number of files. The benchmark's training set usually has 4320.
        seed: Seed of the random order.
    """
    from dataloading.dataset.folder import open_dataset
    from dataloading.dataset.rewrite import shuffle

    started = time.perf_counter()
    reported = ("", 0)

    def report(step: str, done: int, total: int) -> None:
        nonlocal reported
        if reported != (now := (step, 10 * done // total)):
            reported = now
            say(f"{time.perf_counter() - started:7.1f} s  {step} {done:,} samples")

    dataset = shuffle(open_dataset(folder), out, shards=shards, seed=seed, report=report)
    say(f"{out}: {_counts(dataset)}, each sample of {folder} exactly once")


@app.command
def _convert(
    folder: tyro.conf.Positional[Path],
    out: Path,
    to: Layout,
    vocab: Path | None = None,
    max_sequences: int = 3,
    seed: int = 24,
    jobs: int = 1,
) -> None:
    """Write a data set in the native layout, or as packs of samples.

    Args:
        folder: The data set, or a folder of shards of any layout (native, fixed, varlength, packed, TFRecord).
        out: Folder to make.
        to: Layout of the new shards.
        vocab: The vocabulary that the token ids refer to. Needed if the folder has no manifest.
        max_sequences: Maximum number of samples in a pack (layout packed).
        seed: Seed for choosing the samples of each pack and the order of packs (layout packed).
        jobs: Processes to use.
    """
    from dataloading.dataset.folder import open_or_scan
    from dataloading.dataset.rewrite import convert

    source = open_or_scan(folder, vocab)
    report = _reporter("samples")
    dataset = convert(source, out, to, max_sequences=max_sequences, seed=seed, jobs=jobs, report=report)
    say(f"{out}: {_counts(dataset)}, layout {to}")


@app.command
def verify(folder: tyro.conf.Positional[Path]) -> None:
    """Read a whole data set, check every digest, look for repeated samples, and compare it with the benchmark's data.

    Args:
        folder: The data set.
    """
    from dataloading.dataset import known
    from dataloading.dataset.folder import open_dataset

    dataset = open_dataset(folder)
    for line in known.verify(
        dataset, lambda shard: say(f"{shard.name}: {counted(shard.samples, 'sample')}, digest right")
    ):
        say(line)
    for doubt in known.doubts(dataset.info):
        complain(doubt, "warning")
    say(f"{folder}: whole, {_counts(dataset)}")


@app.command
def dump(shards: tyro.conf.Positional[tuple[Path, ...]], out: Path) -> None:
    """Write the samples of some shards, in order, as plain NumPy arrays without padding.

    Args:
        shards: Shards of any layout, or folders of shards. Files of a data set are read in manifest order, others by name.
        out: The .npz file to write.
    """
    import numpy as np

    from console.files import atomic_path
    from dataloading.dataset.folder import shards_of
    from dataloading.shards.formats import open_shard
    from dataloading.shards.samples import concatenate

    if not shards:
        raise ValueError("no shard is named; name one or more shard files or folders")
    paths = [path for named in shards for path in (shards_of(named) if named.is_dir() else [named])]
    samples = concatenate([open_shard(path).verify() for path in paths])
    # Pass an open file, because NumPy would append .npz to a name.
    with atomic_path(out) as temporary, temporary.open("xb") as file:
        np.savez_compressed(
            file,
            length=samples.lengths.astype(np.int16),
            masked_count=samples.masked_counts.astype(np.int16),
            next_sentence_label=samples.next_sentence_labels,
            input_ids=samples.input_ids,
            segment_ids=samples.segment_ids,
            masked_lm_positions=samples.masked_lm_positions,
            masked_lm_ids=samples.masked_lm_ids,
        )
    say(f"{out}: {counted(len(samples), 'sample')} of {counted(len(paths), 'shard')}")


def _report_text(dataset: "Dataset") -> None:
    """Print how much of the text is in the samples, and warn of lost text."""
    from dataloading.dataset import known

    say(f"{dataset.folder}: {dataset.info.text}")
    for doubt in known.doubts(dataset.info):
        complain(f"{dataset.folder}: {doubt}", "warning")


def _reporter(noun: str) -> "Callable[[JobProgress], None]":
    """Return a function that prints a line for each finished file, with the expected remaining time."""
    from console.text import clock

    started = time.perf_counter()

    def report(progress: "JobProgress") -> None:
        seconds = time.perf_counter() - started
        left = seconds / progress.done * (progress.total - progress.done)
        rest = (", existed" if progress.kept else "") + (f", about {clock(left)} left" if left else "")
        say(f"{seconds:7.1f} s  [{progress.done}/{progress.total}] {progress.name}: {progress.count:,} {noun}{rest}")

    return report


def _counts(dataset: "Dataset") -> str:
    tokens = sum(record.tokens for record in dataset.shards)
    size = sum(record.file_bytes for record in dataset.shards)
    mean = tokens / max(len(dataset), 1)
    shards = f"{counted(len(dataset.shards), 'shard')}, {size / 1e6:,.1f} MB"
    return f"{counted(len(dataset), 'sample')} of {mean:.1f} tokens in {shards}"


def _parse_part(text: str) -> "WorkPart":
    from dataloading.jobs import WorkPart

    # Allow only digits here, because int() would also accept signs, spaces and underscores.
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--part is {text!r}; expected i/n, from 1/n to n/n")
    return WorkPart(int(match[1]), int(match[2]))


def main() -> int:
    return app.main("python -m dataloading")


if __name__ == "__main__":
    sys.exit(main())
