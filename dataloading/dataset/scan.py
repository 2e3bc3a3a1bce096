"""Shards without a manifest, such as shards from other programs, as a data set."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dataloading.dataset.folder import MANIFEST_NAME, Dataset, open_dataset, write_metadata
from dataloading.shards.formats import open_shard
from dataloading.shards.shard import DatasetInfo
from dataloading.text.tokenization import Vocabulary


def scan_shards(folder: Path, names: Sequence[str], info: DatasetInfo) -> Dataset:
    """Return a data set of the shards ``names`` in ``folder``. Reads every shard.

    ``info`` describes the samples. Shards that contain a description must agree with it, and no two shards may hold
    the same samples.
    """
    records, lengths = [], [np.empty((0, 2), np.uint16)]
    sources = dict(info.sources)
    names_by_digest: dict[str, str] = {}
    for name in names:
        shard = open_shard(folder / name)
        if shard.digest is None:
            shard.info = info
        elif shard.info.without_sources() != info.without_sources():
            raise ValueError(f"{shard.path}: made with other settings than the other shards; prepare it again")
        sources |= shard.info.sources
        record = shard.record()
        other = names_by_digest.setdefault(record.digest, name)
        if other != name and record.samples:  # empty shards are equal
            raise ValueError(f"{folder}: {name} holds the same samples as {other}; name each once")
        records.append(record)
        lengths.append(np.stack([shard.lengths, shard.masked_counts], axis=1).astype(np.uint16))
    return Dataset(folder, replace(info, sources=sources), tuple(records), np.concatenate(lengths))


def index_shards(folder: Path, names: Sequence[str], info: DatasetInfo) -> Dataset:
    """Turn shards into a data set: scan them with `scan_shards`, and write a manifest and a length index."""
    write_metadata(scan_shards(folder, names, info))
    return open_dataset(folder)


def shard_names(folder: Path) -> list[str]:
    """Return the names of the shards in a folder without a manifest."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    # Skip hidden files, which an interrupted command may have left.
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if MANIFEST_NAME in names:
        raise ValueError(f"{folder} already has a {MANIFEST_NAME}; delete it first to make a new one")
    if not names:
        raise ValueError(f"{folder} holds no files; expected shards")
    return names


def shards_of(folder: Path) -> list[Path]:
    """Return the shards of a data set, or of a folder that contains only shards."""
    if (folder / MANIFEST_NAME).exists():
        return [folder / record.name for record in open_dataset(folder).shards]
    return [folder / name for name in shard_names(folder)]


def info_of(folder: Path, names: Sequence[str], vocab: Path) -> DatasetInfo:
    """Describe shards from other programs: their vocabulary, and the largest sizes that they contain or declare."""
    vocabulary = Vocabulary.from_file(vocab)
    most_tokens = most_masked = 1
    for name in names:
        shard = open_shard(folder / name)
        if shard.digest is not None:  # a native shard contains its description
            return shard.info.without_sources()
        if shard.layout in ("fixed", "tfrecord"):  # these layouts declare the width of their rows
            most_tokens, most_masked = shard.info.max_seq_length, shard.info.max_predictions_per_seq
            break
        most_tokens = max(most_tokens, int(shard.lengths.max(initial=1)))
        most_masked = max(most_masked, int(shard.masked_counts.max(initial=1)))
    return DatasetInfo.of(vocabulary, most_tokens, most_masked)


def open_or_scan(folder: Path, vocab: Path | None) -> Dataset:
    """Open a data set. If the folder has no manifest, scan its shards."""
    if (folder / MANIFEST_NAME).exists():
        dataset = open_dataset(folder)
        if vocab is not None:
            dataset.check_vocabulary(Vocabulary.from_file(vocab))
        return dataset
    names = shard_names(folder)
    if vocab is None:
        raise ValueError(f"{folder} has no {MANIFEST_NAME}: name the vocabulary of its ids by --vocab FILE")
    return scan_shards(folder, names, info_of(folder, names, vocab))
