"""WikiExtractor files to text shards, with the bytes of the reference's clean-up scripts (mlcommons/training, bert).

Each file goes through the steps of `dataloading.text.cleanup`; then neighbouring files are gathered into parts:

    OUT/extract.json                 settings and inputs of the job; other settings are refused
    OUT/part-00007-of-00500          training text: one sentence a line, empty lines between articles
    OUT/eval.txt, eval.md5           held-out articles, and the MD5 sum of each
    OUT/manifest.json                written last: settings, and digests of inputs and outputs
    OUT/.finished/00007.json         record of a finished part, for continuing after a crash; may be deleted at the end
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from console.files import atomic_path, read_bounded, read_json, sha256_of, write_atomically
from dataloading.jobs import JobProgress, Report, WorkPart, begun, ignore_progress, run_tasks
from dataloading.options import ExtractionOptions, Sentences
from dataloading.text.cleanup import articles, clean, gathered, hold_out, joined, segment, sentence_splitter

JOB_NAME = "extract.json"
MANIFEST_NAME = "manifest.json"
EVALUATION_NAME = "eval.txt"
EVALUATION_MD5_NAME = "eval.md5"
_FINISHED = ".finished"

_MAX_INPUT_BYTES = 64 << 20
"""Largest file, which is held in memory; WikiExtractor makes 1 MB."""
_MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True)
class Extraction:
    """Result of an extraction."""

    parts: int
    articles: int
    """Training articles with text."""
    held_out: int
    """Articles held out for evaluation. Empty ones count, as in the reference."""


@dataclass(frozen=True)
class _PartRecord:
    """What a finished part holds and was made from."""

    output_sha256: str
    inputs: dict[str, str]
    """SHA-256 by name, in order."""
    articles: int
    evaluation: list[str]
    """Held-out articles."""


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the WikiExtractor files among ``paths``: files as they are, and of a folder ``wiki_??`` and ``*/wiki_??``.

    Raises:
        ValueError: there are none, a path does not exist, or a file is named twice.
    """
    files: list[Path] = []
    for path in paths:
        # The order decides which part a file goes into, and which seed draws its articles.
        within = [path] if path.is_file() else sorted([*path.glob("*/wiki_??"), *path.glob("wiki_??")], key=str)
        if not within:
            raise ValueError(f"{path}: no wiki_?? or */wiki_?? there; expected WikiExtractor's files or their folder")
        files += within
    if not files:
        raise ValueError("no input named; expected WikiExtractor's files or their folder")
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError("an input is named twice; its articles would repeat")
    return files


def extract(
    inputs: Sequence[Path], out: Path, options: ExtractionOptions, *, jobs: int = 1, report: Report = ignore_progress
) -> Extraction:
    """Make text shards and the evaluation text from ``inputs`` (`find_inputs`) in ``out``; continues after an interruption.

    The parts have the bytes of the reference's parts. Their names tell how many there are; the reference always says 500.
    Each process takes about 15 times the memory of its largest input, and 0.1 GB for punkt.

    Raises:
        ValueError: an input cannot be used, punkt is not installed, or ``out`` holds something else or was made with other
            settings.
        OSError: the disk is full or cannot be written.
    """
    records = extract_part(inputs, out, options, None, jobs=jobs, report=report)
    evaluation = [article for record in records for article in record.evaluation]
    md5s = (hashlib.md5(article.rstrip().encode(), usedforsecurity=False).hexdigest() for article in evaluation)
    write_atomically(out / EVALUATION_NAME, joined(evaluation))
    write_atomically(out / EVALUATION_MD5_NAME, "".join(f"{md5}\n" for md5 in md5s).encode())
    outputs = [task.path.name for task in _plan(find_inputs(inputs), out, options)]
    manifest = {
        "options": asdict(options),
        "nltk": _nltk_version(options.sentences),
        "inputs": {name: sha256 for record in records for name, sha256 in record.inputs.items()},
        "outputs": {name: sha256_of(out / name) for name in (*outputs, EVALUATION_NAME, EVALUATION_MD5_NAME)},
    }
    write_atomically(out / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())
    return Extraction(len(records), sum(record.articles for record in records), len(evaluation))


def extract_part(
    inputs: Sequence[Path],
    out: Path,
    options: ExtractionOptions,
    part: WorkPart | None,
    *,
    jobs: int = 1,
    report: Report = ignore_progress,
) -> list[_PartRecord]:
    """Make one share of the text shards, or all of them; `extract` completes them. Raises as `extract` does."""
    # Raises at once if punkt is not installed.
    sentence_splitter(options.sentences)
    tasks = _plan(find_inputs(inputs), out, options)
    description = {
        "options": asdict(options),
        # Another version may split sentences in another way.
        "nltk": _nltk_version(options.sentences),
        "inputs": [[task.path.name, *map(_input_name, task.inputs)] for task in tasks],
    }
    if part is not None:
        mine = part.share_of(len(tasks))
        tasks = tasks[mine.start : mine.stop]
    # Other processes may make other parts in the same folder.
    with begun(out, JOB_NAME, description, finished=f"{_FINISHED}/*.json", alone=part is None):
        (out / _FINISHED).mkdir(exist_ok=True)
        started = time.perf_counter()
        records: dict[int, _PartRecord] = {}  # parts finish in any order
        for done, (index, name, record, kept) in enumerate(run_tasks(_make_part, tasks, jobs), 1):
            records[index] = record
            report(JobProgress(name, record.articles, done, len(tasks), kept, time.perf_counter() - started))
        return [records[task.index] for task in tasks]


def text_names(inputs: Sequence[Path], options: ExtractionOptions) -> list[str]:
    """Return the names of the text shards that `extract` makes of ``inputs``."""
    return [task.path.name for task in _plan(find_inputs(inputs), Path(), options)]


@dataclass(frozen=True)
class _Task:
    """A part to make."""

    index: int
    path: Path
    inputs: tuple[Path, ...]
    held_out: tuple[tuple[int, int], ...]
    """(count, seed) of each input's evaluation articles."""
    sentences: Sentences

    @property
    def record_path(self) -> Path:
        return self.path.parent / _FINISHED / f"{self.index:05d}.json"


def _plan(files: Sequence[Path], out: Path, options: ExtractionOptions) -> list[_Task]:
    """Divide files, in their order, into parts of at most ``part_bytes``; a larger file is a part by itself."""
    groups: list[list[int]] = []
    size = 0
    for index, file in enumerate(files):
        file_bytes = file.stat().st_size
        if not groups or size + file_bytes > options.part_bytes:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += file_bytes

    def drawn_before(file: int) -> int:
        # The reference's own expression: its rounding decides which files give an article.
        return int(file * options.evaluation_articles * 1.0 / len(files))

    return [
        _Task(
            index=index,
            path=out / f"part-{index:05d}-of-{len(groups):05d}",
            inputs=tuple(files[file] for file in group),
            # The reference's seeds.
            held_out=tuple((drawn_before(file + 1) - drawn_before(file), options.seed + 13 * file) for file in group),
            sentences=options.sentences,
        )
        for index, group in enumerate(groups)
    ]


def _make_part(task: _Task) -> tuple[int, str, _PartRecord, bool]:
    """Make one part, unless it exists; return its index, its name, its record and whether it existed."""
    if record := _finished_part(task):
        return task.index, task.path.name, record, True
    split = sentence_splitter(task.sentences)
    inputs: dict[str, str] = {}
    evaluation: list[str] = []
    articles_with_text, digest = 0, hashlib.sha256()
    with atomic_path(task.path) as temporary, temporary.open("xb") as file:
        for path, (count, seed) in zip(task.inputs, task.held_out, strict=True):
            content = read_bounded(path, _MAX_INPUT_BYTES, "give WikiExtractor's files, of 1 MB by default")
            inputs[_input_name(path)] = hashlib.sha256(content).hexdigest()
            try:
                training, held_out = hold_out(segment(clean(articles(_decoded(content))), split), count, seed)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            output = gathered(training)
            file.write(output)
            digest.update(output)
            evaluation += held_out
            articles_with_text += sum(bool(article.strip()) for article in training)
    record = _PartRecord(digest.hexdigest(), inputs, articles_with_text, evaluation)
    # After the part: where a record is, its part is complete.
    write_atomically(task.record_path, json.dumps(asdict(record)).encode())
    return task.index, task.path.name, record, False


def _finished_part(task: _Task) -> _PartRecord | None:
    """Return the record of a part that exists, whole and made from these inputs."""
    try:
        record = msgspec.convert(read_json(task.record_path, _MAX_RECORD_BYTES, "make it again"), _PartRecord)
    except (ValueError, msgspec.MsgspecError):  # the part is made again
        return None
    whole = task.path.exists() and sha256_of(task.path) == record.output_sha256
    return record if whole and {_input_name(path): sha256_of(path) for path in task.inputs} == record.inputs else None


def _decoded(content: bytes) -> str:
    if (place := content.find(0)) >= 0:
        raise ValueError(f"holds a zero byte at {place:,}; expected the text that WikiExtractor writes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start:,}; expected the text that WikiExtractor writes") from None


def _input_name(path: Path) -> str:
    """Return file and folder, such as AA/wiki_00; the folders above do not matter."""
    return "/".join(path.absolute().parts[-2:])


@lru_cache(maxsize=1)
def _nltk_version(sentences: Sentences) -> str | None:
    if sentences == "plain":
        return None
    import nltk  # pyright: ignore[reportMissingImports]

    return nltk.__version__
