"""WikiExtractor files to text shards, with the bytes of the reference's clean-up scripts (mlcommons/training, bert).

Each file goes through the steps of `dataloading.text.cleanup` by itself; then neighbouring files are gathered into parts:

    OUT/extract.json                 what is being made: settings and inputs; other settings are refused
    OUT/part-00007-of-00500          training text: one sentence a line, empty lines between articles
    OUT/eval.txt, eval.md5           the articles held out, and a digest of each
    OUT/manifest.json                last of all: settings, digests and sizes of inputs and outputs
    OUT/.finished/00007.json         what belongs to a finished part, for whoever goes on after a crash; may go at the end
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from console.files import atomic_path, read_bounded, read_json, sha256_of, write_atomically
from dataloading.jobs import JobProgress, WorkPart, begun, run_tasks
from dataloading.options import ExtractionOptions, Sentences
from dataloading.text.cleanup import articles, clean, gathered, hold_out, joined, segment, sentence_splitter

JOB_NAME = "extract.json"
MANIFEST_NAME = "manifest.json"
EVALUATION_NAME = "eval.txt"
EVALUATION_MD5_NAME = "eval.md5"
_FINISHED = ".finished"

_MAX_INPUT_BYTES = 64 << 20
"""Of one file, which is held in memory; WikiExtractor makes 1 MB."""
_MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True)
class FileRecord:
    """A file in the manifest."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PartRecord:
    """A text shard in the manifest."""

    output: FileRecord
    inputs: tuple[FileRecord, ...]
    articles: int
    """Training articles with text."""
    evaluation_articles: int
    """Articles of these inputs that were held out, empty ones included: the reference counts them."""
    evaluation_sha256: str
    """Of their text as it stands in eval.txt."""


@dataclass(frozen=True)
class Extraction:
    """Result of an extraction."""

    parts: tuple[PartRecord, ...]
    evaluation: FileRecord
    evaluation_md5: FileRecord


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """The WikiExtractor files among ``paths``: files as they are, for a folder its ``wiki_??`` or ``*/wiki_??``, sorted.

    Raises:
        ValueError: there are none, a name is no file or folder, or a file is there twice.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        # Their order decides which part a file goes into, and which seed draws its articles.
        within = sorted([*path.glob("*/wiki_??"), *path.glob("wiki_??")], key=str)
        if not within:
            raise ValueError(f"{path}: no wiki_?? or */wiki_?? there; expected WikiExtractor's files or their folder")
        files += within
    if not files:
        raise ValueError("no input named; expected WikiExtractor's files or their folder")
    if len({file.resolve() for file in files}) < len(files):  # by way of links, too
        raise ValueError("an input is named twice; its articles would repeat")
    return files


def extract(
    inputs: Sequence[Path],
    out: Path,
    options: ExtractionOptions,
    *,
    jobs: int = 1,
    report: Callable[[JobProgress], None] = lambda _: None,
) -> Extraction:
    """Make text shards and the evaluation text from ``inputs`` (`find_inputs`) in ``out``; go on where it was stopped.

    The parts have the bytes of the reference's; their names tell how many there are, where the reference always says 500.
    Memory: for each process about 15 times its largest input and 0.1 GB for punkt, and in this one the evaluation text.

    Raises:
        ValueError: an input cannot be used, punkt is not installed, or ``out`` holds something else or what was made
            otherwise.
        OSError: the disk is full, or will not be written for another reason.
    """
    return _finish(out, extract_part(inputs, out, options, None, jobs=jobs, report=report))


def extract_part(
    inputs: Sequence[Path],
    out: Path,
    options: ExtractionOptions,
    part: WorkPart | None,
    *,
    jobs: int = 1,
    report: Callable[[JobProgress], None] = lambda _: None,
) -> list[PartRecord]:
    """Make one share of the text shards, or all of them; `extract` joins the shares. Raises as `extract` does."""
    # For its error alone: that punkt is missing is said before anything is made.
    sentence_splitter(options.sentences)
    tasks = _plan(find_inputs(inputs), out, options)
    description = {
        "options": asdict(options),
        # Another version may split sentences otherwise, so that its parts do not belong with these.
        "nltk": _nltk_version() if options.sentences == "punkt" else None,
        "inputs": [[task.path.name, *map(_input_name, task.inputs)] for task in tasks],
    }
    if part is not None:
        mine = part.share_of(len(tasks))
        tasks = tasks[mine.start : mine.stop]
    # Other parts may be at work in the same folder.
    with begun(out, JOB_NAME, description, finished=f"{_FINISHED}/*.json", alone=part is None):
        (out / _FINISHED).mkdir(exist_ok=True)
        started = time.perf_counter()
        records: dict[int, PartRecord] = {}  # they finish in any order
        for done, (index, record, kept) in enumerate(run_tasks(_make_part, tasks, jobs), 1):
            records[index] = record
            seconds = time.perf_counter() - started
            report(JobProgress(record.output.name, record.articles, done, len(tasks), kept, seconds))
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


def _make_part(task: _Task) -> tuple[int, PartRecord, bool]:
    """Make one part, unless it is there; return its index, its record and whether it was there."""
    if record := _finished_part(task):
        return task.index, record, True
    split = sentence_splitter(task.sentences)
    sources, evaluation = [], []
    articles_with_text, digest = 0, hashlib.sha256()
    with atomic_path(task.path) as temporary, temporary.open("xb") as file:
        for path, (count, seed) in zip(task.inputs, task.held_out, strict=True):
            content = read_bounded(path, _MAX_INPUT_BYTES, "give WikiExtractor's files, of 1 MB by default")
            sources.append(FileRecord(_input_name(path), len(content), _sha256(content)))
            try:
                training, held_out = hold_out(segment(clean(articles(_decoded(content))), split), count, seed)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            output = gathered(training)
            file.write(output)
            # Taken while it is written: the file is complete only when the block ends.
            digest.update(output)
            evaluation += held_out
            articles_with_text += sum(bool(article.strip()) for article in training)
        made = FileRecord(task.path.name, file.tell(), digest.hexdigest())
    record = PartRecord(made, tuple(sources), articles_with_text, len(evaluation), _sha256(joined(evaluation)))
    # After the part itself: where a record is, its part is whole.
    write_atomically(task.record_path, json.dumps({"record": asdict(record), "evaluation": evaluation}).encode())
    return task.index, record, False


def _finished_part(task: _Task) -> PartRecord | None:
    """The record of a part that is there, whole and of these inputs."""
    finished = _read_record(task.record_path)
    if finished is None:
        return None
    record = finished[0]
    # Digests are taken anew, as an input may have changed since.
    there = tuple(_file_record(path, _input_name(path)) for path in task.inputs)
    same = there == record.inputs and task.path.exists() and _file_record(task.path, task.path.name) == record.output
    return record if same else None


def _read_record(path: Path) -> tuple[PartRecord, list[str]] | None:
    """(record, evaluation articles) of a finished part; None where there is none, or a damaged one."""
    try:
        content = read_json(path, _MAX_RECORD_BYTES, "make it again")
        row, evaluation = content["record"], content["evaluation"]
        inputs = tuple(FileRecord(**source) for source in row["inputs"])
        record = PartRecord(**row | {"output": FileRecord(**row["output"]), "inputs": inputs})
        return (record, evaluation) if _sha256(joined(evaluation)) == record.evaluation_sha256 else None
    # A damaged record counts as none, and its part is made again.
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _finish(out: Path, records: Sequence[PartRecord]) -> Extraction:
    """Write the evaluation text and the manifest."""
    evaluation: list[str] = []
    for index in range(len(records)):
        # From the parts' files, as parts that were there already were not made by this process.
        finished = _read_record(out / _FINISHED / f"{index:05d}.json")
        if finished is None:
            raise ValueError(f"{out / _FINISHED}: part {index} has gone; run the same command again")
        evaluation += finished[1]
    md5s = (hashlib.md5(article.rstrip().encode(), usedforsecurity=False).hexdigest() for article in evaluation)
    written = []
    for name, content in (
        (EVALUATION_NAME, joined(evaluation)),
        (EVALUATION_MD5_NAME, "".join(f"{md5}\n" for md5 in md5s).encode()),
    ):
        write_atomically(out / name, content)
        written.append(FileRecord(name, len(content), _sha256(content)))
    extraction = Extraction(tuple(records), *written)
    description = json.loads((out / JOB_NAME).read_bytes())
    manifest = {"options": description["options"], "nltk": description["nltk"], **asdict(extraction)}
    write_atomically(out / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())
    return extraction


def _decoded(content: bytes) -> str:
    if (place := content.find(0)) >= 0:
        raise ValueError(f"holds a zero byte at {place:,}; expected the text that WikiExtractor writes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start:,}; expected the text that WikiExtractor writes") from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _input_name(path: Path) -> str:
    """File and folder, as in AA/wiki_00; the folders above say nothing of the text."""
    return "/".join(path.absolute().parts[-2:])


def _file_record(path: Path, name: str) -> FileRecord:
    return FileRecord(name, path.stat().st_size, sha256_of(path))


@lru_cache(maxsize=1)
def _nltk_version() -> str:
    import nltk  # pyright: ignore[reportMissingImports]

    return nltk.__version__
