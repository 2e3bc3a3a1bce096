"""Sources that a command is given to read: a data set, its only part, or a folder of shards from elsewhere."""

from pathlib import Path

from console.program import say
from dataloading.dataset.folder import Dataset, open_dataset
from dataloading.dataset.manifest import MANIFEST_NAME, parts_in
from dataloading.dataset.merge import scan_shards
from dataloading.shards.formats import open_shard
from dataloading.shards.shard import DatasetInfo
from dataloading.text.tokenization import Vocabulary


def shard_names(folder: Path) -> list[str]:
    """The files of a folder of shards."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    # Hidden ones may be what an interrupted command has left.
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if MANIFEST_NAME in names:
        raise ValueError(f"{folder} has a {MANIFEST_NAME} already; delete it first to make it anew")
    if not names:
        raise ValueError(f"{folder} holds no files; expected shards")
    return names


def shards_of(folder: Path) -> list[Path]:
    """The shards of a data set, or of a folder that holds nothing else."""
    if (folder / MANIFEST_NAME).exists():
        return [folder / record.name for record in open_dataset(folder).shards]
    return [folder / name for name in shard_names(folder)]


def info_of(folder: Path, names: list[str], vocab: Path) -> DatasetInfo:
    """Describe shards from elsewhere: their vocabulary, and the largest sizes found or promised."""
    vocabulary = Vocabulary.from_file(vocab)
    most_tokens = most_masked = 1
    for name in names:
        with open_shard(folder / name) as shard:
            if shard.digest is not None:
                # Native shards say it themselves, and the first speaks for all: `scan_shards` compares them.
                return shard.info.without_sources()
            promised = shard.info.max_seq_length, shard.info.max_predictions_per_seq
            if shard.layout in ("fixed", "tfrecord"):  # the width of their rows is the promise: one file tells
                most_tokens, most_masked = promised
                break
            most_tokens = max(most_tokens, int(shard.lengths.max(initial=1)))
            most_masked = max(most_masked, int(shard.masked_counts.max(initial=1)))
    return DatasetInfo.of(vocabulary, most_tokens, most_masked)


def open_or_scan(folder: Path, vocab: Path | None) -> Dataset:
    """A data set, or what a folder of shards without a manifest would make."""
    if (folder / MANIFEST_NAME).exists():
        dataset = open_dataset(folder)
        if vocab is not None:
            dataset.check_vocabulary(Vocabulary.from_file(vocab))
        return dataset
    names = shard_names(folder)
    if vocab is None:
        raise ValueError(f"{folder} has no {MANIFEST_NAME}: name the vocabulary that its ids belong to by --vocab FILE")
    return scan_shards(folder, names, info_of(folder, names, vocab))


def open_to_verify(folder: Path) -> Dataset:
    """A data set, or the only part that a folder holds."""
    parts = parts_in(folder) if folder.is_dir() else []
    if len(parts) == 1 and not (folder / MANIFEST_NAME).exists():
        say(f"{folder}: part {parts[0]} of a data set")
        return open_dataset(folder, parts[0])
    return open_dataset(folder)
