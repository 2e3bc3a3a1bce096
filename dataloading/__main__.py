"""Command line of the data stages: ``python -m dataloading prepare | demo | verify | dump``."""

import hashlib
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from dataloading.demo import write_demo
from dataloading.hdf5 import DatasetInfo, atomic_path, open_dataset, open_shard, require_absent_or_empty, write_dataset
from dataloading.pretraining_data import PretrainingOptions, create_samples, read_documents, tokenize_documents
from dataloading.samples import concatenate
from dataloading.tokenization import Tokenizer

app = tyro.extras.SubcommandApp()


@app.command
def prepare(
    text: tuple[Path, ...],
    vocab: Path,
    out: Path,
    options: Annotated[PretrainingOptions, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff],
    shards: int = 8,
) -> None:
    """Make a data set from text: tokens, next-sentence pairs, masks, HDF5 shards.

    Args:
        text: Files with one sentence a line and an empty line between documents; all go into one call of the algorithm.
        vocab: The model's vocabulary, one token a line.
        out: Folder to make; it must be absent or empty.
        options: The reference script's settings.
        shards: Number of files to divide the samples over.
    """
    require_absent_or_empty(out)
    if not text:
        raise ValueError("--text names no file; expected one or more")
    tokenizer = Tokenizer.from_vocab(vocab, options.do_lower_case)
    started = time.perf_counter()

    def report(done: str) -> None:
        print(f"{time.perf_counter() - started:7.1f} s  {done}", flush=True)

    documents = read_documents(text)
    sources = {path.as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in text}
    report(f"read {len(text)} file(s): {len(documents):,} documents, {sum(map(len, documents)):,} lines")
    tokenized = tokenize_documents(documents, tokenizer)
    report(f"tokenized: {len(tokenized.token_ids):,} tokens")
    samples = create_samples(tokenized, options, tokenizer.vocabulary)
    report(f"created {len(samples):,} samples of {len(samples.input_ids):,} tokens")
    info = DatasetInfo(
        vocab_size=tokenizer.vocab_size,
        max_seq_length=options.max_seq_length,
        max_predictions_per_seq=options.max_predictions_per_seq,
        vocabulary_md5=tokenizer.vocabulary.md5,
        vocabulary_sha256=tokenizer.vocabulary.sha256,
        options=asdict(options),
        sources=sources,
    )
    write_dataset(out, samples, shards=shards, info=info)
    report(f"wrote {out}: {shards} shard(s), manifest, length index")


@app.command
def demo(out: Path, vocab: Path) -> None:
    """Make the built-in default's data from the standard library's prose; at once when they are there and whole.

    Args:
        out: Folder for the data sets train and evaluation.
        vocab: The vocabulary that ships with the default.
    """
    started = time.perf_counter()
    made = write_demo(out, vocab)
    for name in ("train", "evaluation"):
        dataset = open_dataset(out / name)
        print(f"{dataset.folder}: {len(dataset):,} samples of {dataset.lengths.mean():.1f} tokens", flush=True)
    print(f"{'made' if made else 'verified'} in {time.perf_counter() - started:.1f} s")


@app.command
def verify(folder: tyro.conf.Positional[Path]) -> None:
    """Read a whole data set, compare every digest, and count samples that occur more than once.

    Args:
        folder: The data set.
    """
    dataset = open_dataset(folder)
    dataset.verify(lambda shard: print(f"{shard.name}: {shard.samples:,} samples, digest right", flush=True))
    digests = []
    for record in dataset.shards:
        with open_shard(folder / record.name) as shard:
            digests.append(shard.read(0, len(shard)).row_digests())
    repeated = len(dataset) - len(np.unique(np.concatenate(digests)))
    print(f"{folder}: {len(dataset):,} samples, {repeated:,} of them repeat another")


@app.command
def dump(shards: tyro.conf.Positional[tuple[Path, ...]], out: Path) -> None:
    """Write the samples of shards, in order, as plain NumPy arrays without padding.

    Args:
        shards: HDF5 shards.
        out: The .npz file to write.
    """
    if not shards:
        raise ValueError("no shard named; expected one or more HDF5 files")
    blocks = []
    for path in shards:
        with open_shard(path) as shard:
            shard.verify()
            blocks.append(shard.read(0, len(shard)))
    samples = concatenate(blocks)
    with atomic_path(out) as temporary, temporary.open("wb") as file:
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
    print(f"{out}: {len(samples):,} samples of {len(shards)} shard(s)")


def main() -> int:
    """Runs the command; a user's error is one line on stderr and exit code 2."""
    try:
        app.cli(prog="python -m dataloading")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    else:
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
