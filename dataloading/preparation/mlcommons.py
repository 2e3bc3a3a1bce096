"""The benchmark's files as MLCommons distributes them: finding them in folders, and checking their sizes and MD5 sums.

The known values come from the README of the benchmark's reference (mlcommons/training, retired_benchmarks/bert).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from console.files import open_regular, read_bounded, read_json, write_atomically
from console.text import counted
from dataloading.jobs import WorkPart, run_tasks
from dataloading.text.tokenization import text_lines

VOCABULARY, CHECKPOINT, EVALUATION, TRAIN = "vocab.txt", "phase1.safetensors", "evaluation", "train"
"""File or folder names of the results."""

TEXT_PARTS = 500
"""Number of parts of the benchmark's text."""

KNOWN: Mapping[str, tuple[int, str]] = {
    "vocab.txt": (231_508, "64800d5d8528ce344256daf115d4965e"),
    "bert_config.json": (314, "7f59165e21b7d566db610ff6756c926b"),
    "tf1_ckpt/model.ckpt-28252.index": (17_371, "f97de3ae180eb8d479555c939d50d048"),
    "tf1_ckpt/model.ckpt-28252.data-00000-of-00001": (4_034_713_312, "50797acd537880bfb5a7ade80d976129"),
    "tf2_ckpt/model.ckpt-28252.index": (6_420, "fc34dd7a54afc07f2d8e9d64471dc672"),
    "tf2_ckpt/model.ckpt-28252.data-00000-of-00001": (1_344_982_997, "77d642b721cf590c740c762c7f476e04"),
    "eval.txt": (32_851_144, "2a220f790517261547b1b45ed3ada07a"),
    "part-00000-of-00500": (27_150_902, "a64a7c31eff5cd38ae6d94f7a6229dab"),
    "part-00001-of-00500": (27_198_569, "549a9ed4f805257245bec936563abfd0"),
    "part-00002-of-00500": (27_395_616, "1a1366ddfc03aef9d41ce552ee247abf"),
    "part-00497-of-00500": (24_775_043, "66835aa75d4855f2e678e8f3d73812e9"),
    "part-00498-of-00500": (24_575_505, "e6d68a7632e9f4aa1a94128cce556dc9"),
    "part-00499-of-00500": (21_873_644, "b3b087ad24e3770d879a351664cebc5a"),
}
"""Size and MD5 by file name. The MD5 sums of the other parts are in the list that the downloader stores beside them."""

_PART = re.compile(r"part-(\d{5})-of-(\d{5})")
_CHECKPOINT = re.compile(r"(.+)\.(?:index|data-\d{5}-of-(\d{5}))")
_LISTED = re.compile(r"([0-9a-fA-F]{32}) [ *](.+)")
_MAX_LIST_BYTES = 64 << 20
_MOST_NAMED = 10


@dataclass(frozen=True)
class Inputs:
    """Input files; each tuple is empty if the folders do not hold such files."""

    vocabulary: tuple[Path, ...] = ()
    config: tuple[Path, ...] = ()
    """The file bert_config.json, which is optional."""
    checkpoint: tuple[Path, ...] = ()
    """Index file and data files of one TensorFlow checkpoint, in this order."""
    text: tuple[Path, ...] = ()
    """Parts of the preprocessed text, in order."""
    evaluation: tuple[Path, ...] = ()
    """The file eval.txt."""
    lists: tuple[Path, ...] = ()
    """Lists of MD5 sums that were found beside the data."""
    unused: tuple[Path, ...] = ()
    """Path prefixes of checkpoints that are not used."""

    @property
    def files(self) -> list[Path]:
        """Return every file whose content is used for a result."""
        return [*self.vocabulary, *self.config, *self.evaluation, *self.checkpoint, *self.text]

    @property
    def by_result(self) -> dict[str, tuple[Path, ...]]:
        """Return the input files of each result."""
        return {
            VOCABULARY: self.vocabulary,
            CHECKPOINT: self.checkpoint,
            EVALUATION: self.evaluation,
            TRAIN: self.text,
        }


def find_inputs(folders: Sequence[Path], leave_out: Path) -> Inputs:
    """Find the input files in ``folders``, at any depth, except in ``leave_out``.

    Raises:
        ValueError: a folder is missing, a set of files is incomplete, or a file was found twice.
    """
    names: dict[str, list[Path]] = {}
    for path in _walk(folders, leave_out.resolve()):
        names.setdefault(path.name, []).append(path)
    checkpoint, unused = _checkpoint(names)
    return Inputs(
        vocabulary=_single(names, "vocab.txt"),
        config=_single(names, "bert_config.json"),
        checkpoint=checkpoint,
        text=_parts(names),
        evaluation=_single(names, "eval.txt"),
        lists=tuple(path for name in names if name.endswith(".md5") for path in names[name]),
        unused=tuple(unused),
    )


def _walk(folders: Sequence[Path], leave_out: Path) -> Iterator[Path]:
    """Yield each file of the folders once."""
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
    """Return the parts of the text in order; raise ``ValueError`` if a part is missing."""
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


def _checkpoint(names: Mapping[str, list[Path]]) -> tuple[tuple[Path, ...], list[Path]]:
    """Return the files of the checkpoint to convert, and the prefixes of other checkpoints."""
    matches = [(match, path) for name in names if (match := _CHECKPOINT.fullmatch(name)) for path in names[name]]
    # TF1 checkpoints are preferred, because they contain both heads (docs/checkpoints.md).
    prefixes = sorted(
        {path.with_name(match[1]) for match, path in matches}, key=lambda prefix: (_is_tf2(prefix), prefix)
    )
    if not prefixes:
        return (), []
    if sum(not _is_tf2(prefix) for prefix in prefixes) > 1:
        raise ValueError(f"{prefixes[0]} and {prefixes[1]} are two checkpoints; name folders that hold one")
    prefix = prefixes[0]
    count = max(int(match[2] or 1) for match, path in matches if path.with_name(match[1]) == prefix)
    files = [
        Path(f"{prefix}.index"),
        *(Path(f"{prefix}.data-{at:05d}-of-{count:05d}") for at in range(min(count, 1000))),
    ]
    if missing := [path for path in files if not path.is_file()]:
        raise ValueError(f"the checkpoint lacks {_named(missing)}; download again, which fetches missing files")
    return tuple(files), prefixes[1:]


def _is_tf2(prefix: Path) -> bool:
    return prefix.parent.name.startswith("tf2")


@dataclass(frozen=True)
class Expected:
    """Size and MD5 sum that a file may have."""

    size: int | None
    md5: str


class Checksums:
    """Expected MD5 sums by file name: from a given list, or else the known sums and then the lists beside the data."""

    def __init__(self, given: Path | None, lists: Iterable[Path]) -> None:
        if given is None:
            first = [(PurePosixPath(name), Expected(size, md5)) for name, (size, md5) in KNOWN.items()]
        else:
            first = list(_read_list(given, strict=True))
        beside = [entry for path in lists for entry in _read_list(path, strict=False)]
        self._lists: list[dict[str, list[Expected]]] = [{}, {}]
        for by_name, entries in zip(self._lists, (first, beside), strict=True):
            for path, expected in entries:
                for key in (path.name, _with_folder(path)):
                    by_name.setdefault(key, []).append(expected)

    def expected(self, path: Path) -> list[Expected]:
        """Look up a file by folder and name, or else by name; return what it may contain, or an empty list if unknown."""
        for by_name in self._lists:
            if found := by_name.get(_with_folder(path)) or by_name.get(path.name):
                return found
        return []


def _with_folder(path: PurePath) -> str:
    return f"{path.parent.name}/{path.name}"


def _read_list(path: Path, *, strict: bool) -> Iterator[tuple[PurePosixPath, Expected]]:
    """Yield the entries of a list in md5sum's format; other lines are errors if ``strict``, and skipped otherwise."""
    lines = text_lines(read_bounded(path, _MAX_LIST_BYTES, "name a list that md5sum made"), path)
    for number, line in enumerate(lines, 1):
        if match := _LISTED.fullmatch(line):
            yield PurePosixPath(match[2]), Expected(None, match[1].lower())
        elif strict and line:
            raise ValueError(
                f"{path}: line {number} is {line[:80]!r}; expected an MD5 sum and a file, as md5sum writes them"
            )


def check_sizes(files: Iterable[Path], checksums: Checksums) -> None:
    """Raise ``ValueError`` with the names of all files that do not have the expected size."""
    wrong = []
    for path in files:
        size, sizes = path.stat().st_size, {expected.size for expected in checksums.expected(path)}
        if sizes and None not in sizes and size not in sizes:
            wrong.append(f"{path} ({size:,} bytes, expected {' or '.join(f'{each:,}' for each in sizes if each)})")
    _refuse(wrong)


def check_digests(md5_by_file: Mapping[Path, str], checksums: Checksums) -> int:
    """Raise ``ValueError`` with the names of all files whose MD5 sum is wrong; return the number of
    files that no list names."""
    wanted = {path: {expected.md5 for expected in checksums.expected(path)} for path in md5_by_file}
    _refuse(
        [
            f"{path} (MD5 {md5}, expected {' or '.join(sorted(wanted[path]))})"
            for path, md5 in md5_by_file.items()
            if wanted[path] and md5 not in wanted[path]
        ]
    )
    return sum(not sums for sums in wanted.values())


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError(
            f"{counted(len(wrong), 'file')} with the wrong content: {_named(wrong)}; delete and download again, or name the "
            "right MD5 sums by --checksums FILE"
        )


def digests_of(
    files: Sequence[Path], work: Path, part: WorkPart | None, jobs: int, *, report: Callable[[Path], None]
) -> dict[Path, str]:
    """Return the MD5 sum of each file, computed in ``jobs`` processes. ``report`` is called with each file that was
    read.

    Sums are cached in ``work``. A file is read again only if its size or modification time has changed.
    """
    kept: dict[str, list[int | str]] = {}
    for path in work.glob("checked*.json"):
        kept |= read_json(path, _MAX_LIST_BYTES, "delete it")
    states = {path: [(state := path.stat()).st_size, state.st_mtime_ns] for path in files}
    md5s = {path: str(kept[str(path)][2]) for path, state in states.items() if kept.get(str(path), [])[:2] == state}
    new = [path for path in files if path not in md5s]
    for path, md5 in run_tasks(_digest, new, jobs):
        md5s[path] = md5
        report(path)
    if new:
        rows = kept | {str(path): [*state, md5s[path]] for path, state in states.items()}
        # Each part has its own file, because several processes may write at the same time.
        name = f"checked_{part.index}_of_{part.count}.json" if part else "checked.json"
        write_atomically(work / name, json.dumps(rows, indent=1).encode())
    return md5s


def _digest(path: Path) -> tuple[Path, str]:
    with open_regular(path) as file:
        # Without usedforsecurity=False, FIPS builds refuse MD5.
        return path, hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _named(names: Sequence[object]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(map(str, names[:_MOST_NAMED]))}{more}"
