"""The benchmark's files as MLCommons distributes them: found in folders, and compared with their sizes and MD5 sums.

The known values are those of the README of the benchmark's reference (mlcommons/training, retired_benchmarks/bert).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from console.files import open_regular, read_bounded, read_json, write_atomically
from console.text import counted
from dataloading.jobs import WorkPart, run_tasks
from dataloading.text.tokenization import text_lines

TEXT_PARTS = 500
"""Parts of the benchmark's text."""

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
"""Size and MD5 by name. The MD5 sums of the other parts are in the list that the downloader leaves beside them."""

_PART = re.compile(r"part-(\d{5})-of-(\d{5})")
_WIKI = re.compile(r"wiki_\d\d")
_CHECKPOINT = re.compile(r"(.+)\.(?:index|data-\d{5}-of-(\d{5}))")
_LISTED = re.compile(r"([0-9a-fA-F]{32}) [ *](.+)")
_MAX_LIST_BYTES = 64 << 20
_MOST_NAMED = 10


@dataclass(frozen=True)
class Inputs:
    """Input files, each empty or None where the folders do not hold it."""

    vocabulary: Path | None = None
    config: Path | None = None
    """bert_config.json, which is compared and not needed."""
    checkpoint: tuple[Path, ...] = ()
    """Index and data files of one TensorFlow checkpoint, the index first."""
    text: tuple[Path, ...] = ()
    """Parts of the preprocessed text, in order."""
    evaluation: Path | None = None
    """eval.txt."""
    articles: tuple[Path, ...] = ()
    """WikiExtractor's files, sorted."""
    lists: tuple[Path, ...] = ()
    """Lists of MD5 sums beside the data."""
    notes: tuple[str, ...] = ()
    """What was found and is not used."""

    @property
    def files(self) -> list[Path]:
        """Every file whose content goes into the result."""
        single = [path for path in (self.vocabulary, self.config, self.evaluation) if path]
        return [*single, *self.checkpoint, *self.text, *self.articles]


def find_inputs(folders: Sequence[Path], leave_out: Path) -> Inputs:
    """Find the input files in ``folders``, at any depth, except in ``leave_out``.

    Raises:
        ValueError: a folder is missing, a set of files is incomplete, or a file is there twice.
    """
    names: dict[str, list[Path]] = {}
    for path in _walk(folders, leave_out.resolve()):
        names.setdefault(path.name, []).append(path)
    text = _parts(names)
    articles = sorted((path for name in names if _WIKI.fullmatch(name) for path in names[name]), key=str)
    evaluation = _single(names, "eval.txt")
    notes = []
    # The two must not be mixed: an article could be in the training text of one and the evaluation text of the other.
    if articles and (text or evaluation):
        notes.append("WikiExtractor's files are not used: the preprocessed text is there")
        articles = []
    prefix, others = _checkpoint_prefix(names)
    notes += [f"{other}: not used, {prefix} is taken" for other in others]
    return Inputs(
        vocabulary=_single(names, "vocab.txt"),
        config=_single(names, "bert_config.json"),
        checkpoint=tuple(_checkpoint_files(prefix, names)) if prefix else (),
        text=text,
        evaluation=evaluation,
        articles=tuple(articles),
        lists=tuple(path for name in names if name.endswith(".md5") for path in names[name]),
        notes=tuple(notes),
    )


def _walk(folders: Sequence[Path], leave_out: Path) -> Iterator[Path]:
    """Yield the files of the folders, each file once."""
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


def _single(names: Mapping[str, list[Path]], name: str) -> Path | None:
    found = names.get(name, [])
    if len(found) > 1:
        raise ValueError(f"{name} is in {found[0].parent} and in {found[1].parent}; name folders that hold it once")
    return found[0] if found else None


def _parts(names: Mapping[str, list[Path]]) -> tuple[Path, ...]:
    """Return the parts of the text in order; raise ``ValueError`` unless they are complete."""
    matches = [match for name in names if (match := _PART.fullmatch(name))]
    counts = sorted({int(match[2]) for match in matches})
    if len(counts) > 1:
        raise ValueError(f"parts of texts with {counts[0]:,} and {counts[1]:,} parts; name the folder of one text")
    if not counts:
        return ()
    wanted = [f"part-{index:05d}-of-{counts[0]:05d}" for index in range(counts[0])]
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"the text lacks {_named(missing)}; download again, which fetches what is missing")
    if unknown := [match[0] for match in matches if match[0] not in wanted]:
        raise ValueError(f"the text has {counts[0]:,} parts, and {_named(unknown)} is no part of it; delete it")
    return tuple(path for name in wanted if (path := _single(names, name)))


def _checkpoint_prefix(names: Mapping[str, list[Path]]) -> tuple[Path | None, list[Path]]:
    """Return the checkpoint to convert, by the prefix of its files, and the checkpoints that are left."""
    matches = [(match, path) for name in names if (match := _CHECKPOINT.fullmatch(name)) for path in names[name]]
    prefixes = sorted({path.with_name(match[1]) for match, path in matches})
    # The TF1 form is the one that holds both heads (docs/checkpoints.md).
    first = sorted(prefixes, key=lambda prefix: prefix.parent.name.startswith("tf2"))
    if sum(not prefix.parent.name.startswith("tf2") for prefix in prefixes) > 1:
        raise ValueError(f"{first[0]} and {first[1]} are two checkpoints; name folders that hold one")
    return (first[0], first[1:]) if first else (None, [])


def _checkpoint_files(prefix: Path, names: Mapping[str, list[Path]]) -> list[Path]:
    """Return the index and the data files of a checkpoint; raise ``ValueError`` where one is missing."""
    begin = f"{prefix.name}.data-"
    data = [path for name in names if name.startswith(begin) for path in names[name] if path.parent == prefix.parent]
    count = max((int(match[2]) for path in data if (match := _CHECKPOINT.fullmatch(path.name)) and match[2]), default=1)
    wanted = [f"{prefix}.index", *(f"{prefix}.data-{shard:05d}-of-{count:05d}" for shard in range(min(count, 1000)))]
    if missing := [path for path in wanted if not Path(path).is_file()]:
        raise ValueError(
            f"{prefix}: the checkpoint lacks {_named(missing)}; download again, which fetches what is missing"
        )
    return [Path(path) for path in wanted]


@dataclass(frozen=True)
class Expected:
    """Content that a file may have."""

    size: int | None
    md5: str


class Checksums:
    """Expected MD5 sums by file name: a given list or else the known sums, then the lists beside the data."""

    def __init__(self, given: Path | None, lists: Iterable[Path]) -> None:
        if given is None:
            first = [(PurePosixPath(name), Expected(size, md5)) for name, (size, md5) in KNOWN.items()]
        else:
            first = list(_read_list(given, strict=True))
        self._lists = [_by_name(first), _by_name(entry for path in lists for entry in _read_list(path, strict=False))]

    def expected(self, path: Path) -> list[Expected]:
        """Return the content that the file may have: nothing where no list has its name.

        Of several entries with one name those count that have the most folders in common with ``path``.
        """
        for entries in self._lists:
            if found := entries.get(path.name):
                most = max(_common(path, name) for name, _ in found)
                return [expected for name, expected in found if _common(path, name) == most]
        return []


_Entries = Iterable[tuple[PurePosixPath, Expected]]


def _by_name(entries: _Entries) -> dict[str, list[tuple[PurePosixPath, Expected]]]:
    by_name: dict[str, list[tuple[PurePosixPath, Expected]]] = {}
    for name, expected in entries:
        by_name.setdefault(name.name, []).append((name, expected))
    return by_name


def _common(path: Path, name: PurePosixPath) -> int:
    """Return how many of the last parts of two paths agree."""
    pairs = zip(reversed(path.parts), reversed(name.parts), strict=False)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(name.parts))


def _read_list(path: Path, *, strict: bool) -> _Entries:
    """Yield the entries of a list in the format of md5sum; other lines are an error if ``strict``, and skipped otherwise."""
    lines = text_lines(read_bounded(path, _MAX_LIST_BYTES, "name a list that md5sum made"), path)
    for number, line in enumerate(lines, 1):
        if match := _LISTED.fullmatch(line):
            yield PurePosixPath(match[2]), Expected(None, match[1].lower())
        elif strict and line:
            raise ValueError(
                f"{path}: line {number} is {line[:80]!r}; expected an MD5 sum and a file, as md5sum writes them"
            )


def check_sizes(files: Iterable[Path], checksums: Checksums) -> None:
    """Raise ``ValueError`` that names the files whose size is not the expected one."""
    wrong = []
    for path in files:
        size, sizes = path.stat().st_size, {expected.size for expected in checksums.expected(path)}
        if sizes and None not in sizes and size not in sizes:
            wrong.append(f"{path} ({size:,} bytes, expected {' or '.join(f'{each:,}' for each in sizes if each)})")
    _refuse(wrong)


def check_digests(md5_by_file: Mapping[Path, str], checksums: Checksums) -> int:
    """Raise ``ValueError`` that names the files with another MD5 sum; return how many files no list has."""
    wrong, unlisted = [], 0
    for path, md5 in md5_by_file.items():
        wanted = {expected.md5 for expected in checksums.expected(path)}
        unlisted += not wanted
        if wanted and md5 not in wanted:
            wrong.append(f"{path} (MD5 {md5}, expected {' or '.join(sorted(wanted))})")
    _refuse(wrong)
    return unlisted


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError(
            f"{counted(len(wrong), 'file')} with the wrong content: {_named(wrong)}; delete and download again, or name the "
            "right MD5 sums by --checksums FILE"
        )


def digests_of(
    files: Sequence[Path], work: Path, part: WorkPart | None, jobs: int, *, report: Callable[[Path], None]
) -> dict[Path, str]:
    """Return the MD5 sum of each file, computed in ``jobs`` processes; ``report`` is told of every file that is read.

    Sums are kept in ``work``: a file that has the size and the time of change of then is not read again.
    """
    kept: dict[str, list[int | str]] = {}
    for path in work.glob("checked*.json"):
        found = read_json(path, _MAX_LIST_BYTES, "delete it")
        kept |= {name: row for name, row in found.items() if isinstance(row, list) and len(row) == 3}
    states = {path: [(state := path.stat()).st_size, state.st_mtime_ns] for path in files}
    md5s = {path: str(kept[str(path)][2]) for path, state in states.items() if kept.get(str(path), [])[:2] == state}
    new = [path for path in files if path not in md5s]
    for path, md5 in run_tasks(_digest, new, jobs):
        md5s[path] = md5
        report(path)
    if new:
        rows = kept | {str(path): [*state, md5s[path]] for path, state in states.items()}
        # A file for each part, as several may write at a time.
        name = f"checked_{part.index}_of_{part.count}.json" if part else "checked.json"
        write_atomically(work / name, json.dumps(rows, indent=1).encode())
    return md5s


def _digest(path: Path) -> tuple[Path, str]:
    with open_regular(path) as file:
        # MD5 is what MLCommons publishes; it is no protection here, which builds with FIPS have to be told.
        return path, hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"
