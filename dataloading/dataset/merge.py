"""Data sets of shards that are there: a manifest for shards in a folder, and several data sets or parts joined to one."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from console.files import sync
from dataloading.dataset.folder import Dataset, new_folder, open_dataset
from dataloading.dataset.manifest import parts_in, shard_name, write_metadata
from dataloading.jobs import WorkPart
from dataloading.shards.formats import open_shard
from dataloading.shards.shard import DatasetInfo, ShardRecord


def scan_shards(folder: Path, names: Iterable[str], info: DatasetInfo) -> Dataset:
    """The data set that some shards in ``folder`` make, whether or not it has a manifest; reads every shard.

    ``info`` is what is to be said of the shards; those that say it themselves must agree.

    Raises:
        ValueError: a shard is damaged, differs from ``info``, or holds what another one holds.
    """
    records, lengths = [], [np.empty((0, 2), np.uint16)]  # concatenate() takes no empty list
    sources: dict[str, str] = dict(info.sources)
    for name in names:
        with open_shard(folder / name) as shard:
            # A layout from elsewhere promises nothing of its own, so what is said of it holds.
            if shard.digest is None:
                shard.info = info
            elif shard.info.without_sources() != info.without_sources():
                raise ValueError(f"{shard.path}: made otherwise than the rest ({_difference(shard.info, info)})")
            sources |= shard.info.sources
            records.append(shard.record())
            lengths.append(np.stack([shard.lengths, shard.masked_counts], axis=1).astype(np.uint16))
    check_records(records, folder)
    return Dataset(folder, replace(info, sources=sources), tuple(records), np.concatenate(lengths))


def index_shards(folder: Path, names: Iterable[str], info: DatasetInfo, part: WorkPart | None = None) -> Dataset:
    """Make the shards that `scan_shards` finds a data set, or one part of it, by a manifest and a length index."""
    found = scan_shards(folder, names, info)
    write_metadata(folder, list(found.shards), found.lengths, found.masked_counts, found.info, part)
    return open_dataset(folder, part)


def merge(folders: list[Path], out: Path) -> Dataset:
    """Join the parts of a data set in ``folders``, or whole data sets in the order named, to one in ``out``.

    Shards are linked where the file system can, and copied otherwise; parts that share one folder may be joined in place
    (``out`` is that folder).

    Raises:
        ValueError: a part is missing or there twice, parts were made otherwise than others, or two shards hold the same.
    """
    members = _members(folders)
    infos = [dataset.info.without_sources() for dataset in members]
    for dataset, info in zip(members, infos, strict=True):
        # Sizes are compared before anything is linked: a shard that was cut off would else be part of the whole.
        dataset.check_files()
        if info != infos[0]:
            raise ValueError(
                f"{dataset.folder}: made otherwise than {members[0].folder} ({_difference(info, infos[0])})"
            )
    records = [record for dataset in members for record in dataset.shards]
    check_records(records, out)
    _check_sources(members)
    sources = {name: digest for dataset in members for name, digest in dataset.info.sources.items()}
    paths = [dataset.folder / record.name for dataset in members for record in dataset.shards]
    lengths = np.concatenate([dataset.lengths for dataset in members])
    masked_counts = np.concatenate([dataset.masked_counts for dataset in members])
    info = replace(infos[0], sources=sources)
    # In place: the shards keep their names, and only the metadata is new.
    if {path.parent.absolute() for path in paths} == {out.absolute()}:
        write_metadata(out, records, lengths, masked_counts, info)
    else:
        records = [replace(record, name=shard_name(index, len(records))) for index, record in enumerate(records)]
        with new_folder(out) as aside:
            for path, record in zip(paths, records, strict=True):
                _link_or_copy(path, aside / record.name)
            write_metadata(aside, records, lengths, masked_counts, info)
    return open_dataset(out)


def check_records(records: list[ShardRecord], folder: Path) -> None:
    """Raise ``ValueError`` where two shards hold the same samples."""
    seen: dict[str, str] = {}
    for record in records:
        if record.digest in seen and record.samples:  # empty shards are all alike
            raise ValueError(f"{folder}: {record.name} holds the same samples as {seen[record.digest]}; name each once")
        seen[record.digest] = record.name


def _members(folders: list[Path]) -> list[Dataset]:
    """The data sets to join: whole ones as named, parts in the order of their numbers."""
    parts: dict[WorkPart, Path] = {}
    wholes: list[Dataset] = []
    for folder in folders:
        found = parts_in(folder)
        for part in found:
            if part in parts:
                raise ValueError(f"part {part} is in {parts[part]} and in {folder}; name each part once")
            parts[part] = folder
        if not found:
            wholes.append(open_dataset(folder))
    if not parts:
        if len(wholes) < 2:
            raise ValueError(f"{len(wholes)} data set(s) named; expected the parts of one, or several to join")
        return wholes
    counts = sorted({part.count for part in parts})
    if wholes or len(counts) > 1:
        kinds = [f"parts of {count}" for count in counts] + [f"the whole data set {whole.folder}" for whole in wholes]
        raise ValueError(f"{' and '.join(kinds)} do not make one data set")
    missing = [
        str(WorkPart(index, counts[0])) for index in range(1, counts[0] + 1) if WorkPart(index, counts[0]) not in parts
    ]
    if missing:
        raise ValueError(f"part {', '.join(missing)} is missing; name the folder that holds it, or prepare it")
    return [open_dataset(parts[part], part) for part in sorted(parts, key=lambda part: part.index)]


def _check_sources(members: list[Dataset]) -> None:
    """Raise ``ValueError`` where one text went into two of the data sets: its samples would be there twice."""
    owner: dict[str, Path] = {}
    for dataset in members:
        for name, digest in dataset.info.sources.items():
            # By content: one text may have been given under two names.
            if digest in owner:
                raise ValueError(
                    f"{dataset.folder}: {name} was prepared for {owner[digest]} already; prepare each once"
                )
        owner |= dict.fromkeys(dataset.info.sources.values(), dataset.folder)


def _difference(found: DatasetInfo, expected: DatasetInfo) -> str:
    """The settings in which two descriptions differ, in words."""
    ours, theirs = ({**asdict(info), **info.options} for info in (found, expected))
    names = sorted(name for name in ours.keys() | theirs.keys() if name not in ("options", "sources"))
    different = [name for name in names if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {ours.get(name)} instead of {theirs.get(name)}" for name in different)


def _link_or_copy(source: Path, target: Path) -> None:
    """``target`` with the content of ``source``, sharing its place on disk where both are on one file system."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
        sync(target)  # on disk before a manifest lists it
