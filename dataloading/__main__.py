"""Command line of the data stages: ``python -m dataloading COMMAND``.

A command imports what it needs when it runs, so that --help and a wrong option cost no second.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from console.commands import Commands
from console.interruption import end_in_order
from console.program import complain, say
from dataloading.options import EVALUATION_SAMPLES, Compression, ExtractionOptions, Layout, OwnText, PretrainingOptions

if TYPE_CHECKING:
    from dataloading.dataset.folder import Dataset
    from dataloading.dataset.manifest import WorkPart
    from dataloading.dataset.shuffle import ShuffleProgress
    from dataloading.jobs import JobProgress
    from dataloading.shards.samples import Samples
    from dataloading.shards.shard import ShardRecord

app = Commands()


@app.command(name="extract")
def _extract(
    inputs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path,
    # An empty name: its fields are options of the command itself, without a prefix.
    options: Annotated[ExtractionOptions, tyro.conf.arg(name="")],
    jobs: int = 1,
) -> None:
    """Make text shards of WikiExtractor's files, and the evaluation text. Run again, it goes on.

    Args:
        inputs: WikiExtractor's output folder, or files of it.
        out: Folder to make; it must be absent, empty, or begun by the same command.
        options: The reference scripts' settings.
        jobs: Processes to use.
    """
    from dataloading.text.wikipedia import extract

    made = extract(inputs, out, options, jobs=jobs, report=partial(_print_progress, "articles"))
    articles = sum(part.articles for part in made.parts)
    held_out = sum(part.evaluation_articles for part in made.parts)
    say(f"{out}: {articles:,} articles in {len(made.parts)} part(s), {held_out:,} held out in {made.evaluation.name}")


@app.command(name="prepare")
def _prepare(
    text: tuple[Path, ...],
    vocab: Path,
    out: Path,
    # FlagConversionOff: a flag takes True or False, as the reference script has it.
    options: Annotated[PretrainingOptions, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff],
    one_call: bool = False,
    jobs: int = 1,
    part: str | None = None,
    compression: Compression = "none",
) -> None:
    """Make a data set from text: tokens, next-sentence pairs, masks, one HDF5 shard a file. Run again, it goes on.

    Args:
        text: Files with one sentence a line and an empty line between documents; each is one call of the algorithm.
        vocab: The model's vocabulary, one token a line.
        out: Folder to make; it must be absent, empty, or begun by the same command.
        options: The reference script's settings.
        one_call: All files go into one call of the algorithm, and into one shard.
        jobs: Processes to use.
        part: i/n: make the i-th of n shares of the work only (1/4 to 4/4, say); `merge` joins them.
        compression: gzip makes shards smaller and training from them slow: for archives.
    """
    from dataloading.preparation.prepare import Job, prepare

    job = Job(text, vocab, options, one_call, compression)
    share = None if part is None else _parse_part(part)
    dataset = prepare(job, out, jobs=jobs, part=share, report=partial(_print_progress, "samples"))
    say(f"{out}: {_counts(dataset)}{f', part {share}: join the parts by merge' if share else ''}")


@app.command
def from_text(out: Path, own: Annotated[OwnText, tyro.conf.arg(name="")]) -> None:
    """Make a training set, an evaluation set and a vocabulary of your own text, for the recipe own_text_cpu.

    Args:
        out: Folder to make, for train, evaluation and vocab.txt.
        own: The text, and what is made of it.
    """
    from dataloading.dataset.folder import open_dataset
    from dataloading.preparation.own_text import write_own_text
    from dataloading.text.tokenization import Vocabulary

    split = write_own_text(own, out)
    if split.repeated:
        say(f"{split.repeated:,} documents that repeat others left out")
    for name, documents in (("train", split.train), ("evaluation", split.evaluation)):
        dataset = open_dataset(out / name)
        say(f"{dataset.folder}: {len(documents):,} documents, {_counts(dataset)}")
    say(f"{out / 'vocab.txt'}: {Vocabulary.from_file(out / 'vocab.txt').size:,} tokens")


@app.command
def demo(out: Path, vocab: Path) -> None:
    """Make the built-in default's data from the standard library's prose; at once when they are there and whole.

    Args:
        out: Folder for the data sets train and evaluation.
        vocab: The vocabulary that ships with the default.
    """
    from dataloading.dataset.folder import open_dataset
    from dataloading.preparation.demo import write_demo

    started = time.perf_counter()
    made = write_demo(out, vocab)
    for name in ("train", "evaluation"):
        dataset = open_dataset(out / name)
        say(f"{dataset.folder}: {len(dataset):,} samples of {dataset.lengths.mean():.1f} tokens")
    say(f"{'made' if made else 'verified'} in {time.perf_counter() - started:.1f} s")


@app.command(name="merge")
def _merge(folders: tyro.conf.Positional[tuple[Path, ...]], out: Path) -> None:
    """Join the parts of a data set, or whole data sets, to one.

    Args:
        folders: Where the parts are; parts may share a folder.
        out: Folder to make, or the folder that all parts share.
    """
    from dataloading.dataset.merge import merge

    say(f"{out}: {_counts(merge(list(folders), out))}")


@app.command
def index(folder: tyro.conf.Positional[Path], vocab: Path, out: Path | None = None) -> None:
    """Make a data set of shards from elsewhere, which stay as they are: write a manifest and a length index.

    Args:
        folder: Shards of any layout (native, fixed, varlength, packed, TFRecord), and nothing else.
        vocab: The vocabulary that their ids belong to.
        out: Folder to make, with links to the shards, where nothing may be written beside them.
    """
    from dataloading.dataset.folder import new_folder, open_dataset
    from dataloading.dataset.merge import index_shards
    from dataloading.dataset.sources import info_of, shard_names

    names = shard_names(folder)
    info = info_of(folder, names, vocab)
    if out is None:
        dataset = index_shards(folder, names, info)
    else:
        with new_folder(out) as aside:
            for name in names:
                # From the root on, as a link is read from the folder that it lies in.
                (aside / name).symlink_to((folder / name).resolve())
            index_shards(aside, names, info)
        # Opened under its final name, which the folder has only now.
        dataset = open_dataset(out)
    say(f"{dataset.folder}: {_counts(dataset)}")


@app.command(name="shuffle")
def _shuffle(
    folder: tyro.conf.Positional[Path], out: Path, shards: int, seed: int = 24, compression: Compression = "none"
) -> None:
    """Write a data set's samples in random order to new shards, in less than 2 GiB of memory. Run again, it goes on.

    Args:
        folder: The data set.
        out: Folder to make.
        shards: Number of files; 4320 is customary for the benchmark's training set.
        seed: Seed of the order.
        compression: gzip makes shards smaller and training from them slow: for archives.
    """
    from dataloading.dataset.folder import open_dataset
    from dataloading.dataset.shuffle import shuffle

    started = time.perf_counter()
    told: dict[str, int] = {}

    def report(progress: ShuffleProgress) -> None:
        tenths = 10 * progress.done // max(progress.total, 1)
        # A report comes with every block of samples, a line with every tenth.
        if tenths > told.get(progress.step, -1):
            told[progress.step] = tenths
            say(f"{time.perf_counter() - started:7.1f} s  {progress.step} {progress.done:,} samples")

    source = open_dataset(folder)
    dataset = shuffle(source, out, shards=shards, seed=seed, compression=compression, report=report)
    say(f"{out}: {_counts(dataset)}, each sample of {folder} exactly once")


@app.command(name="convert")
def _convert(
    folder: tyro.conf.Positional[Path],
    out: Path,
    to: Layout,
    vocab: Path | None = None,
    max_sequences: int = 3,
    seed: int = 24,
    compression: Compression = "none",
    jobs: int = 1,
) -> None:
    """Write a data set in another layout.

    Args:
        folder: The data set, or a folder of shards of any layout (native, fixed, varlength, packed, TFRecord).
        out: Folder to make.
        to: Layout of the new shards.
        vocab: The vocabulary that the ids belong to, where the folder has no manifest that says so.
        max_sequences: Most samples in a pack (layout packed).
        seed: Seed of the choice of samples that share a pack, and of the order of packs (layout packed).
        compression: gzip makes shards smaller and training from them slow: for archives (layout native).
        jobs: Processes to use (other layouts than packed).
    """
    from dataloading.dataset.sources import open_or_scan
    from dataloading.preparation.convert import convert, convert_to_packed

    # Before the source is looked at, which may mean reading all of it.
    if compression != "none" and to != "native":
        raise ValueError(f"--compression is {compression}, but layout {to} has none: leave it out, or use --to native")
    source = open_or_scan(folder, vocab)
    # Packs are drawn from the whole set, so that no shard can be converted by itself, and no process has one of its
    # own.
    if to == "packed":
        dataset = convert_to_packed(source, out, max_sequences=max_sequences, seed=seed, report=say)
    else:
        dataset = convert(source, out, to, compression=compression, jobs=jobs, report=say)
    say(f"{out}: {_counts(dataset)}, layout {to}")


@app.command
def pick_evaluation(folder: tyro.conf.Positional[Path], out: Path, samples: int = EVALUATION_SAMPLES) -> None:
    """Pick the evaluation set from the samples of the evaluation text, evenly spaced, as the reference does.

    Args:
        folder: The data set that `prepare` made of eval.txt.
        out: Folder to make.
        samples: How many to pick.
    """
    from dataloading.dataset import known
    from dataloading.dataset.folder import open_dataset, write_dataset

    source = open_dataset(folder)
    picked = source.take(known.pick_evaluation(source, samples))
    write_dataset(out, picked, shards=1, info=source.info)
    dataset = open_dataset(out)
    say(f"{out}: {_counts(dataset)}")
    say(known.describe_samples(dataset))


@app.command
def verify(folder: tyro.conf.Positional[Path], checksums: Path | None = None) -> None:
    """Read a whole data set, compare every digest, look for repeats, say whether it was shuffled and is a known one.

    Args:
        folder: The data set.
        checksums: A published list of the shards' content digests (4320_shards_varlength.chk, say) to compare with.
    """
    from dataloading.dataset import known
    from dataloading.dataset.order import OrderCheck
    from dataloading.dataset.sources import open_to_verify

    dataset = open_to_verify(folder)
    # Digests, repeats and order come of one pass over the data.
    census, order = known.Census(dataset), OrderCheck(len(dataset))

    def visit(shard: ShardRecord, samples: Samples) -> None:
        census.add(samples)
        order.add(samples)
        say(f"{shard.name}: {shard.samples:,} samples, digest right")

    dataset.verify(visit)
    if checksums is not None:
        for line in known.check_published(dataset, checksums):
            say(line)
    say(known.describe_vocabulary(dataset.info))
    say(known.describe_options(dataset.info))
    say(known.describe_samples(dataset))
    say(census.describe_repeats())
    found, unshuffled = order.finding()
    if unshuffled:
        # A warning alone: what `prepare` makes stands in the order of its text, and that is as it should be.
        complain(found, "warning")
    else:
        say(found)
    say(f"{folder}: whole, {_counts(dataset)}, multiset digest {census.multiset_digest:016x}")


@app.command
def dump(shards: tyro.conf.Positional[tuple[Path, ...]], out: Path) -> None:
    """Write the samples of shards, in order, as plain NumPy arrays without padding.

    Args:
        shards: Shards of any layout, or folders of them: data sets in the order of their manifests, others by name.
        out: The .npz file to write.
    """
    import numpy as np

    from console.files import atomic_path
    from dataloading.dataset.sources import shards_of
    from dataloading.shards.formats import open_shard
    from dataloading.shards.samples import concatenate

    if not shards:
        raise ValueError("no shard named; expected one or more files or folders")
    paths = [path for named in shards for path in (shards_of(named) if named.is_dir() else [named])]
    blocks = []
    for path in paths:
        with open_shard(path) as shard:
            blocks.append(shard.verify())  # not read(): a damaged shard must not be dumped
    samples = concatenate(blocks)
    with atomic_path(out) as temporary, temporary.open("xb") as file:
        # Into an open file: to a name NumPy would append .npz.
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
    say(f"{out}: {len(samples):,} samples of {len(paths)} shard(s)")


def _print_progress(unit: str, progress: JobProgress) -> None:
    """A line for a file that is finished."""
    left = progress.seconds / progress.done * (progress.total - progress.done)
    rest = (", was there" if progress.kept else "") + (f", about {_duration(left)} left" if left else "")
    place = f"[{progress.done}/{progress.total}] {progress.name}"
    say(f"{progress.seconds:7.1f} s  {place}: {progress.count:,} {unit}{rest}")


def _counts(dataset: Dataset) -> str:
    tokens = sum(record.tokens for record in dataset.shards)
    size = sum(record.file_bytes for record in dataset.shards)
    mean = tokens / max(len(dataset), 1)
    return f"{len(dataset):,} samples of {mean:.1f} tokens in {len(dataset.shards):,} shard(s), {size / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def _parse_part(text: str) -> WorkPart:
    from dataloading.dataset.manifest import WorkPart

    index, slash, count = text.partition("/")
    # int() would take signs, spaces and underscores too.
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise ValueError(f"--part is {text!r}; expected i/n, from 1/n to n/n")
    return WorkPart(int(index), int(count))


def main() -> int:
    """Run the command; returns the exit status."""
    return app.main("python -m dataloading")


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
