"""The benchmark's files as MLCommons distributes them: finding them in folders, checking their sizes and MD5 sums, and
estimating how long it takes to prepare them.

The known values come from the README of the benchmark's reference (mlcommons/training, retired_benchmarks/bert).
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from console.files import open_regular, read_bounded
from console.text import counted
from dataloading.text.documents import text_lines

VOCABULARY, CHECKPOINT, EVALUATION, TRAIN = "vocab.txt", "phase1.safetensors", "evaluation", "train"
"""File or folder names of the results."""

KNOWN: Mapping[str, tuple[int, str]] = {
    "vocab.txt": (231_508, "64800d5d8528ce344256daf115d4965e"),
    "bert_config.json": (314, "7f59165e21b7d566db610ff6756c926b"),
    "tf1_ckpt/model.ckpt-28252.index": (17_371, "f97de3ae180eb8d479555c939d50d048"),
    "tf1_ckpt/model.ckpt-28252.data-00000-of-00001": (4_034_713_312, "50797acd537880bfb5a7ade80d976129"),
    "eval.txt": (32_851_144, "2a220f790517261547b1b45ed3ada07a"),
    "part-00000-of-00500": (27_150_902, "a64a7c31eff5cd38ae6d94f7a6229dab"),
    "part-00001-of-00500": (27_198_569, "549a9ed4f805257245bec936563abfd0"),
    "part-00002-of-00500": (27_395_616, "1a1366ddfc03aef9d41ce552ee247abf"),
    "part-00497-of-00500": (24_775_043, "66835aa75d4855f2e678e8f3d73812e9"),
    "part-00498-of-00500": (24_575_505, "e6d68a7632e9f4aa1a94128cce556dc9"),
    "part-00499-of-00500": (21_873_644, "b3b087ad24e3770d879a351664cebc5a"),
}
"""Size in bytes and MD5 sum, by file name. For the other parts of the text, the downloader stores a list of MD5 sums."""

_PART = re.compile(r"part-(\d{5})-of-(\d{5})")
_WIKI = re.compile(r"wiki_\d\d(\.bz2)?")
_CHECKPOINT = re.compile(r"(.+)\.(?:index|data-\d{5}-of-(\d{5}))")
_LISTED = re.compile(r"([0-9a-fA-F]{32}) [ *](.+)")
_MAX_LIST_BYTES = 64 << 20
_MOST_NAMED = 10

# Seconds for each input byte of a stage, on one core of a virtual server. These constants determine the reported
# percentage. After the first file, the remaining time is corrected for this machine's speed.
_CHECKING = 2e-9
_PREPARING = 1.7e-7
_SHUFFLING = 1.2e-7
_VERIFYING = 3.1e-8
_STARTING_SECONDS = 5
"""Seconds that the checkpoint conversion takes to import PyTorch."""

_SAMPLE_BYTES = 11
"""Bytes of samples made from each byte of text, in ten passes over the text."""


@dataclass(frozen=True)
class Inputs:
    """Input files that were found. A tuple is empty if there are no such files."""

    vocabulary: tuple[Path, ...] = ()
    config: tuple[Path, ...] = ()
    """The file bert_config.json, which is optional."""
    checkpoint: tuple[Path, ...] = ()
    """Index file and data files of one TensorFlow 1 checkpoint, in this order."""
    text: tuple[Path, ...] = ()
    """Parts of the preprocessed text, in order."""
    evaluation: tuple[Path, ...] = ()
    """The file eval.txt."""
    articles: tuple[Path, ...] = ()
    """WikiExtractor's files. They are used if there is no preprocessed text. Extraction refuses compressed files."""
    lists: tuple[Path, ...] = ()
    """Lists of MD5 sums that were found beside the data."""

    @property
    def files(self) -> list[Path]:
        """Return every file whose content is used for a result."""
        return [*self.vocabulary, *self.config, *self.evaluation, *self.checkpoint, *self.text]

    @property
    def by_result(self) -> dict[str, tuple[Path, ...]]:
        return {
            VOCABULARY: self.vocabulary,
            CHECKPOINT: self.checkpoint,
            EVALUATION: self.evaluation,
            TRAIN: self.text,
        }


def find_inputs(folders: Sequence[Path], leave_out: Path) -> Inputs:
    """Find the input files in ``folders``, at any depth, except in ``leave_out``."""
    names: dict[str, list[Path]] = {}
    for path in _walk(folders, leave_out.resolve()):
        names.setdefault(path.name, []).append(path)
    return Inputs(
        vocabulary=_single(names, "vocab.txt"),
        config=_single(names, "bert_config.json"),
        checkpoint=_checkpoint(names),
        text=_parts(names),
        evaluation=_single(names, "eval.txt"),
        articles=tuple(sorted((path for name in names if _WIKI.fullmatch(name) for path in names[name]), key=str)),
        lists=tuple(path for name in names if name.endswith(".md5") for path in names[name]),
    )


def _walk(folders: Sequence[Path], leave_out: Path) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; name the folders that the downloader made")
        for top, below, files in os.walk(folder):
            here = Path(top).resolve()
            below[:] = [] if here == leave_out else sorted(name for name in below if not name.startswith("."))
            for path in (here / name for name in sorted(files) if here != leave_out):
                if path not in seen:
                    seen.add(path)
                    yield path


def _single(names: Mapping[str, list[Path]], name: str) -> tuple[Path, ...]:
    found = names.get(name, [])
    if len(found) > 1:
        raise ValueError(f"{name} is in {found[0].parent} and in {found[1].parent}; name folders that hold it once")
    return tuple(found)


def _parts(names: Mapping[str, list[Path]]) -> tuple[Path, ...]:
    """Return the parts of the text in order. Raises ``ValueError`` if a part is missing or does not belong to the text."""
    matches = [match for name in names if (match := _PART.fullmatch(name))]
    counts = sorted({int(match[2]) for match in matches})
    if len(counts) > 1:
        raise ValueError(f"parts of texts with {counts[0]:,} and {counts[1]:,} parts; name the folder of one text")
    if not counts:
        return ()
    wanted = [f"part-{index:05d}-of-{counts[0]:05d}" for index in range(counts[0])]
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"the text lacks {_named(missing)}; download again, which fetches missing files")
    if unknown := [match[0] for match in matches if match[0] not in wanted]:
        raise ValueError(f"the text has {counts[0]:,} parts, and {_named(unknown)} is not one of them; delete it")
    return tuple(path for name in wanted for path in _single(names, name))


def _checkpoint(names: Mapping[str, list[Path]]) -> tuple[Path, ...]:
    """Return the files of the TensorFlow 1 checkpoint. A TensorFlow 2 checkpoint is skipped.

    Raises ``ValueError`` if a file is missing or if there are two checkpoints.
    """
    matches = [
        (path.with_name(match[1]), int(match[2] or 1))
        for name in names
        if (match := _CHECKPOINT.fullmatch(name))
        for path in names[name]
        if not path.parent.name.startswith("tf2")
    ]
    if not matches:
        return ()
    prefix, *others = sorted({prefix for prefix, _ in matches})
    if others:
        raise ValueError(f"{prefix} and {others[0]} are two checkpoints; name folders that hold one")
    count = max(count for _, count in matches)
    parts = [Path(f"{prefix}.data-{at:05d}-of-{count:05d}") for at in range(min(count, 1000))]
    files = [Path(f"{prefix}.index"), *parts]
    if missing := [path for path in files if not path.is_file()]:
        raise ValueError(f"the checkpoint lacks {_named(missing)}; download again, which fetches missing files")
    return tuple(files)


class Checksums:
    """Expected sizes and MD5 sums of files.

    They come from the list ``given``, or else from `KNOWN`. The ``lists`` that were found beside the data add the MD5 sums
    of other files. A list contains no sizes.
    """

    def __init__(self, given: Path | None, lists: Iterable[Path]) -> None:
        self._sizes: dict[str, int] = {}
        self._md5s: dict[str, set[str]] = {}
        if given is not None:
            self._add(_read_list(given, strict=True))
        else:
            self._sizes = {PurePosixPath(name).name: size for name, (size, _) in KNOWN.items()}
            self._add((PurePosixPath(name), md5) for name, (_, md5) in KNOWN.items())
        for path in lists:
            # A list beside the data does not replace known sums.
            self._add([(name, md5) for name, md5 in _read_list(path, strict=False) if not self.expected(name)])

    def _add(self, entries: Iterable[tuple[PurePosixPath, str]]) -> None:
        for path, md5 in entries:
            for key in (path.name, _with_folder(path)):
                self._md5s.setdefault(key, set()).add(md5)

    def expected(self, path: PurePath) -> set[str]:
        """Return the MD5 sums that a file may have, listed by its folder and name or else by its name. Empty if unknown."""
        return self._md5s.get(_with_folder(path)) or self._md5s.get(path.name) or set()

    def check_sizes(self, files: Iterable[Path]) -> None:
        """Raise ``ValueError`` with the names of all files whose size differs from the known size."""
        sizes = {path: path.stat().st_size for path in files}
        _refuse(
            f"{path} ({size:,} bytes, expected {self._sizes[path.name]:,})"
            for path, size in sizes.items()
            if size != self._sizes.get(path.name, size)
        )

    def check(self, md5s: Mapping[Path, str]) -> int:
        """Return the number of files in no list. Raises ``ValueError`` with the names of all files with wrong MD5 sums."""
        wanted = {path: self.expected(path) for path in md5s}
        _refuse(
            f"{path} (MD5 {md5}, expected {' or '.join(sorted(wanted[path]))})"
            for path, md5 in md5s.items()
            if wanted[path] and md5 not in wanted[path]
        )
        return sum(not sums for sums in wanted.values())


def _with_folder(path: PurePath) -> str:
    return f"{path.parent.name}/{path.name}"


def _read_list(path: Path, *, strict: bool) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield name and MD5 sum from each line of a list in md5sum's format.

    Other lines are skipped. If ``strict``, lines with other text raise ``ValueError``.
    """
    lines = text_lines(read_bounded(path, _MAX_LIST_BYTES, "name a list that md5sum made"), path)
    for number, line in enumerate(lines, 1):
        if match := _LISTED.fullmatch(line):
            yield PurePosixPath(match[2]), match[1].lower()
        elif strict and line:
            raise ValueError(f"{path}: line {number} is {line[:80]!r}; expected an MD5 sum and the name of a file")


def _refuse(described: Iterable[str]) -> None:
    if wrong := list(described):
        raise ValueError(
            f"{counted(len(wrong), 'file')} with the wrong content: {_named(wrong)}; delete and download again, or name the "
            "right MD5 sums by --checksums FILE"
        )


def total_bytes(paths: Collection[Path]) -> int:
    """Return the total size of files. Files that another process has deleted count as empty."""
    size = 0
    for path in paths:
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def digest_of(path: Path) -> tuple[Path, str]:
    """Return ``path`` and its MD5 sum. The path tells which task of `run_tasks` a result belongs to."""
    with open_regular(path) as file:
        # Without usedforsecurity=False, FIPS builds refuse MD5.
        return path, hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def estimate(inputs: Inputs, existing: Collection[str], jobs: int) -> tuple[dict[str, float], float, float]:
    """Estimate the time and disk space for all results that ``inputs`` allow and that do not exist yet.

    Returns the seconds for each stage, in order; the bytes of the results; and the highest disk usage in bytes while the
    results are made. There are no stages if all results exist.
    """
    missing = {name for name, files in inputs.by_result.items() if files and name not in existing}
    if missing <= {VOCABULARY}:
        return {}, 0, 0
    workers = max(1, min(jobs, os.cpu_count() or 1))
    text, held_out, checkpoint = map(total_bytes, (inputs.text, inputs.evaluation, inputs.checkpoint))
    seconds = {"check": _CHECKING * total_bytes(inputs.files) / workers}
    result, most = 0.0, 0.0
    if CHECKPOINT in missing:
        seconds[CHECKPOINT] = _STARTING_SECONDS + _CHECKING * checkpoint
        result += checkpoint / 3  # a TF1 checkpoint also contains two moments for each weight
    if EVALUATION in missing:
        seconds[EVALUATION] = _PREPARING * held_out
        most += _SAMPLE_BYTES * held_out
    if TRAIN in missing:
        seconds["samples"] = _PREPARING * text / workers
        seconds[TRAIN] = _SHUFFLING * text
        result += _SAMPLE_BYTES * text
        most += 2 * _SAMPLE_BYTES * text  # the unshuffled samples and the buckets of the shuffle
    seconds["verify"] = _VERIFYING * text
    return seconds, result, result + most


def _named(names: Sequence[object]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(map(str, names[:_MOST_NAMED]))}{more}"
