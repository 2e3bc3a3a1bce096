"""Find the benchmark's files, as MLCommons distributes them, in folders. Check their sizes and MD5 sums, name the missing
files and the commands that download them, and estimate how long it takes to prepare them.

The known values come from the README of the benchmark's reference (mlcommons/training, retired_benchmarks/bert).
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from console.files import open_regular, read_bounded, read_json
from console.program import reason
from console.text import counted
from dataloading.text.documents import decode_text, stripped_lines

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


def _with_size(name: str) -> str:
    """Return "name (N bytes)" if the size of a file of this name is known, or else the name."""
    sizes = [size for path, (size, _) in KNOWN.items() if path.endswith(PurePath(name).name)]
    return f"{name} ({sizes[0]:,} bytes)" if sizes else name


INDEX, TF1_DATA = (name for name in KNOWN if name.startswith("tf1_ckpt/"))
TF1_FILES = f"{_with_size(INDEX)} and {_with_size(TF1_DATA)}"
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Name in the index of a TF2 checkpoint. An index omits the beginning of a name if the name before it begins in the same
way. This name begins in its own way, so it is stored in full and can be searched for."""
_PREFIX = PurePath(INDEX).stem

_FILES, _TEXT = "bert-input-files", "bert-preprocessed-wikipedia-dataset"
"""Names of MLCommons' downloads."""
_DOWNLOADER = "https://raw.githubusercontent.com/mlcommons/r2-downloader/refs/heads/main/mlc-r2-downloader.sh"
_METADATA = "https://training.mlcommons-storage.org/metadata"
SOURCES = {
    VOCABULARY: f"{_with_size('vocab.txt')} of {_FILES}",
    CHECKPOINT: f"{TF1_FILES} of {_FILES}",
    EVALUATION: f"{_with_size('eval.txt')} of {_TEXT}",
    TRAIN: f"part-00000-of-00500 to part-00499-of-00500 (500 files, 14 GB in all) of {_TEXT}, or WikiExtractor's files",
}
"""Files that each result is made from, and the download that they belong to."""

_PART = re.compile(r"part-(\d{5})-of-(\d{5})")
_WIKI = re.compile(r"wiki_\d\d(\.bz2)?")
_CHECKPOINT = re.compile(r"(.+)\.(?:index|data-\d{5}-of-(\d{5}))")
_LISTED = re.compile(r"([0-9a-fA-F]{32}) [ *](.+)")
_OTHERS = {
    re.compile(r".+\.(safetensors|bin|pt|pth|h5|msgpack)"): (CHECKPOINT, "is not a TensorFlow checkpoint"),
    re.compile(r".+\.xml(\.bz2)?"): (TRAIN, "is a dump: run WikiExtractor on it"),
    re.compile(r".+\.(tar|tgz|tar\.gz|zip)"): (TRAIN, "is an archive: unpack it"),
}
"""For each pattern for names of unusable files: the result that the files are meant for, and why they are unusable."""
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
"""Number of bytes of samples that ten passes over the text make from each byte of text."""


@dataclass(frozen=True)
class Inputs:
    """Input files that were found. A tuple is empty if no file of its kind was found."""

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
    """WikiExtractor's files. They are used if there is no other text. Extraction refuses compressed files."""
    lists: tuple[Path, ...] = ()
    """Lists of MD5 sums that were found beside the data."""
    others: tuple[tuple[str, str], ...] = ()
    """Files that cannot be used: the result that each is meant for, and a sentence with its name and the reason."""
    problems: tuple[str, ...] = ()
    """Sentences about missing, ambiguous or unreadable files. Unless this is empty, the command makes nothing."""

    @property
    def uses_articles(self) -> bool:
        return bool(self.articles) and not (self.text or self.evaluation)

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
    problems: list[str] = []
    for path in _walk(folders, leave_out.resolve(), problems):
        names.setdefault(path.name, []).append(path)
    others = [
        (result, f"{paths[0]} {why}")
        for name, paths in names.items()
        for pattern, (result, why) in _OTHERS.items()
        if pattern.fullmatch(name)
    ]
    return Inputs(
        vocabulary=_single(names, "vocab.txt", problems),
        config=_single(names, "bert_config.json", problems),
        checkpoint=_checkpoint(names, problems, others),
        text=_parts(names, problems),
        evaluation=_single(names, "eval.txt", problems),
        articles=tuple(sorted((path for name in names if _WIKI.fullmatch(name) for path in names[name]), key=str)),
        lists=tuple(path for name in names if name.endswith(".md5") for path in names[name]),
        others=tuple(others),
        problems=tuple(problems),
    )


def attention_heads(inputs: Inputs) -> int | None:
    """Return the number of attention heads, which a TF1 checkpoint does not contain; None if no file states it."""
    for config in inputs.config:
        stated = read_json(config, _MAX_LIST_BYTES, "download it again")
        heads = stated.get("num_attention_heads") if isinstance(stated, dict) else None
        if type(heads) is not int or heads < 1:
            raise ValueError(f"{config}: num_attention_heads is {heads!r}; expected 1 or more; download the file again")
        return heads
    return None


def how_to_download(sentences: Collection[str]) -> list[str]:
    """Return a command for each download that the ``sentences`` name."""
    return [
        f"to download {name} (docs/data.md): bash <(curl -s {_DOWNLOADER}) -d download/{folder} {_METADATA}/{name}.uri"
        for name, folder in ((_FILES, "input"), (_TEXT, "text"))
        if any(name in sentence for sentence in sentences)
    ]


def _walk(folders: Sequence[Path], leave_out: Path, problems: list[str]) -> Iterator[Path]:
    seen: set[Path] = set()
    known = {PurePath(name).name for name in KNOWN}
    for folder in folders:
        if not folder.is_dir():
            kind = "a file, expected its folder" if folder.exists() else "no such folder"
            problems.append(f"{folder}: {kind}; name the folders that the downloader made")
            continue
        unreadable: list[OSError] = []
        for top, below, files in os.walk(folder, onerror=unreadable.append, followlinks=True):
            here = Path(top).resolve()
            # Visit each folder once, because a link to a parent folder would lead here again and again.
            is_new = here != leave_out and here not in seen
            below[:] = sorted(name for name in below if is_new and not name.startswith("."))
            for path in (here / name for name in sorted(files) if is_new):
                if path.is_file():
                    yield path
                elif path.name in known or _PART.fullmatch(path.name):
                    problems.append(f"{path} is a broken link, a pipe or a device, expected a file")
            seen.add(here)
        problems += map(reason, unreadable)


def _single(names: Mapping[str, list[Path]], name: str, problems: list[str]) -> tuple[Path, ...]:
    found = names.get(name, [])
    if len(found) > 1:
        problems.append(f"{name} is in {found[0].parent} and in {found[1].parent}; name folders that hold it once")
    return tuple(found[:1])


def _parts(names: Mapping[str, list[Path]], problems: list[str]) -> tuple[Path, ...]:
    """Return the parts of the text in order. A part that is missing or does not belong to the text is a problem."""
    matches = [match for name in names if (match := _PART.fullmatch(name))]
    counts = sorted({int(match[2]) for match in matches})
    if len(counts) > 1:
        problems.append(f"parts of texts with {counts[0]:,} and {counts[1]:,} parts; name the folder of one text")
    if not counts:
        return ()
    wanted = [f"part-{index:05d}-of-{counts[0]:05d}" for index in range(counts[0])]
    if missing := [_with_size(name) for name in wanted if name not in names]:
        problems.append(f"the text lacks {_named(missing)}; download {_TEXT} again, which fetches missing files")
    if unknown := [match[0] for match in matches if match[0] not in wanted and int(match[2]) == counts[0]]:
        problems.append(f"the text has {counts[0]:,} parts, and {_named(unknown)} is not one of them; delete it")
    return tuple(path for name in wanted for path in _single(names, name, problems))


def _checkpoint(
    names: Mapping[str, list[Path]], problems: list[str], others: list[tuple[str, str]]
) -> tuple[Path, ...]:
    """Return the files of the benchmark's checkpoint. A missing file and a second checkpoint are problems.

    Other checkpoints, including the TensorFlow 2 form of the benchmark's, are added to ``others``.
    """
    counts: dict[Path, int] = {}
    for match, path in ((_CHECKPOINT.fullmatch(name), path) for name, paths in names.items() for path in paths):
        if match:
            prefix = path.with_name(match[1])
            counts[prefix] = max(int(match[2] or 1), counts.get(prefix, 1))
    found = []
    for prefix in sorted(counts):
        if _is_tf2(prefix):
            others.append((CHECKPOINT, f"{prefix} is a TF2 checkpoint"))
        elif prefix.name != _PREFIX:
            others.append((CHECKPOINT, f"{prefix} is another checkpoint"))
        else:
            found.append(prefix)
    # The contents do not show that these are TF2 checkpoints. So drop those in folders tf2*, unless there are no others.
    found = [prefix for prefix in found if not prefix.parent.name.startswith("tf2")] or found
    if not found:
        return ()
    if len(found) > 1:
        problems.append(f"{found[0]} and {found[1]} are two checkpoints; name folders that hold one")
    count = counts[found[0]]
    parts = [Path(f"{found[0]}.data-{at:05d}-of-{count:05d}") for at in range(min(count, 1000))]
    files = [Path(f"{found[0]}.index"), *parts]
    if missing := [_with_size(str(path)) for path in files if not path.is_file()]:
        problems.append(f"the checkpoint lacks {_named(missing)}; download {_FILES} again, which fetches missing files")
    return tuple(path for path in files if path.is_file())


def _is_tf2(prefix: Path) -> bool:
    with suppress(OSError), open_regular(Path(f"{prefix}.index")) as file:
        return OBJECT_GRAPH.encode() in file.read(1 << 20)
    return prefix.parent.name.startswith("tf2")


class Checksums:
    """Expected sizes and MD5 sums of files.

    They come from the list ``given``, which contains no sizes, or else from `KNOWN`. The ``lists`` that were found beside
    the data add the MD5 sums of other files.
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
        """Return the MD5 sums listed for FOLDER/NAME, or else for the bare name; empty if neither is listed."""
        return self._md5s.get(_with_folder(path)) or self._md5s.get(path.name) or set()

    def wrong_sizes(self, files: Iterable[Path]) -> list[str]:
        """Return a sentence with the names of all files whose size differs from the known size, if there are any."""
        sizes = {path: path.stat().st_size for path in files}
        return _wrong(
            f"{path} ({size:,} bytes, expected {self._sizes[path.name]:,})"
            for path, size in sizes.items()
            if size != self._sizes.get(path.name, size)
        )

    def check(self, md5s: Mapping[Path, str]) -> int:
        """Return the number of files without a known sum. Raises ``ValueError`` that names all files with wrong sums."""
        wanted = {path: self.expected(path) for path in md5s}
        wrong = _wrong(
            f"{path} (MD5 {md5}, expected {' or '.join(sorted(wanted[path]))})"
            for path, md5 in md5s.items()
            if wanted[path] and md5 not in wanted[path]
        )
        if wrong:
            raise ValueError(wrong[0])
        return sum(not sums for sums in wanted.values())


def _with_folder(path: PurePath) -> str:
    return f"{path.parent.name}/{path.name}"


def _read_list(path: Path, *, strict: bool) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the name and the MD5 sum from each line in md5sum's format.

    Skips all other lines. If ``strict``, raises ``ValueError`` for a line in another format that is not empty.
    """
    text = decode_text(read_bounded(path, _MAX_LIST_BYTES, "name a list that md5sum made"), path)
    for number, line in enumerate(stripped_lines(text), 1):
        if match := _LISTED.fullmatch(line):
            yield PurePosixPath(match[2]), match[1].lower()
        elif strict and line:
            raise ValueError(f"{path}: line {number} is {line[:80]!r}; expected an MD5 sum and the name of a file")


def _wrong(described: Iterable[str]) -> list[str]:
    if not (wrong := list(described)):
        return []
    remedy = "delete and download again, or name the right MD5 sums by --checksums FILE"
    return [f"{counted(len(wrong), 'file')} with the wrong content: {_named(wrong)}; {remedy}"]


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
        result += checkpoint / 3  # the rest of a TF1 checkpoint is two moments for each weight
    if EVALUATION in missing:
        seconds[EVALUATION] = _PREPARING * held_out
        most += _SAMPLE_BYTES * held_out
    if TRAIN in missing:
        seconds["samples"] = _PREPARING * text / workers
        seconds[TRAIN] = _SHUFFLING * text
        result += _SAMPLE_BYTES * text
        most += 2 * _SAMPLE_BYTES * text  # once as unshuffled samples, once in the shuffle's buckets
    seconds["verify"] = _VERIFYING * text
    return seconds, result, result + most


def _named(names: Sequence[object]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(map(str, names[:_MOST_NAMED]))}{more}"
