"""Conversion of WikiExtractor files to text shards, byte-identical to the reference's clean-up scripts.

The scripts are in mlcommons/training, bert. Each file goes through the steps of `dataloading.text.cleanup`. Then
neighbouring files are joined into parts:

    OUT/extract.json                 settings and inputs of the job; a job with other settings is refused
    OUT/part-00007-of-00500          training text: one sentence a line, empty lines between articles
    OUT/held-out/00007.json          held-out articles of a finished part
    OUT/eval.txt, eval.md5           written last: all held-out articles, and the MD5 sum of each
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from console.files import atomic_path, read_bounded, read_json, write_atomically
from dataloading.jobs import Made, Report, begun, make_files
from dataloading.options import ExtractionOptions, Sentences
from dataloading.text.cleanup import articles, clean, gathered, hold_out, joined, segment, sentence_splitter

JOB_NAME = "extract.json"
_HELD_OUT = "held-out"
_MAX_INPUT_BYTES = 64 << 20
"""Largest input file, which is held in memory. WikiExtractor writes files of 1 MB."""
_MAX_RECORD_BYTES = 1 << 30


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the WikiExtractor files in ``paths``: each file, and ``wiki_??`` and ``*/wiki_??`` in each folder."""
    files: list[Path] = []
    for path in paths:
        # The order of the files determines each file's part, and the seed for drawing articles from the file.
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
    inputs: Sequence[Path], out: Path, options: ExtractionOptions, *, jobs: int = 1, report: Report = lambda _: None
) -> tuple[int, int, int]:
    """Make text shards and the evaluation text in ``out`` from ``inputs`` (see `find_inputs`).

    Continues after an interruption.

    The parts are byte-identical to the reference's parts, but their names contain the actual number of parts instead of
    500. Each process needs about 15 times the size of its largest input in memory, and 0.1 GB for punkt.

    Returns the numbers of parts, of training articles with text, and of articles held out for evaluation. The last number
    includes empty articles, as in the reference.
    """
    sentence_splitter(options.sentences)  # raises before any work is done if punkt is not installed
    tasks = _plan(find_inputs(inputs), out, options)
    sizes = [[task.path.name, *((str(path), path.stat().st_size) for path in task.inputs)] for task in tasks]
    with begun(out, JOB_NAME, {**asdict(options), "inputs": sizes}, finished=f"{_HELD_OUT}/*.json"):
        (out / _HELD_OUT).mkdir(exist_ok=True)
        make_files(_make_part, tasks, jobs, report)
        records = [_record_of(task) for task in tasks]
        evaluation = [article for record in records for article in record["evaluation"]]
        md5s = (hashlib.md5(article.rstrip().encode(), usedforsecurity=False).hexdigest() for article in evaluation)
        write_atomically(out / "eval.txt", joined(evaluation))
        write_atomically(out / "eval.md5", "".join(f"{md5}\n" for md5 in md5s).encode())
    return len(tasks), sum(record["articles"] for record in records), len(evaluation)


@dataclass(frozen=True)
class _Task:
    """Task of making one text shard: the input files, and the files to write."""

    path: Path
    record_path: Path
    inputs: tuple[Path, ...]
    held_out: tuple[tuple[int, int], ...]
    """(number of evaluation articles, seed) for each input."""
    sentences: Sentences


def _plan(files: Sequence[Path], out: Path, options: ExtractionOptions) -> list[_Task]:
    """Divide files, in order, into parts of at most ``part_bytes``. A larger file becomes a part by itself."""
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
        # The reference's expression. Its rounding determines from which files articles are held out.
        return int(file * options.evaluation_articles * 1.0 / len(files))

    return [
        _Task(
            path=out / f"part-{index:05d}-of-{len(groups):05d}",
            record_path=out / _HELD_OUT / f"{index:05d}.json",
            inputs=tuple(files[file] for file in group),
            # The seeds are the reference's.
            held_out=tuple((drawn_before(file + 1) - drawn_before(file), options.seed + 13 * file) for file in group),
            sentences=options.sentences,
        )
        for index, group in enumerate(groups)
    ]


def _make_part(task: _Task) -> Made:
    """Make one part unless it exists. The returned count is the number of articles with text."""
    if task.record_path.exists() and task.path.exists():
        return task.path.name, _record_of(task)["articles"], True
    split = sentence_splitter(task.sentences)
    evaluation: list[str] = []
    with_text = 0
    with atomic_path(task.path) as temporary, temporary.open("xb") as file:
        for path, (count, seed) in zip(task.inputs, task.held_out, strict=True):
            content = read_bounded(path, _MAX_INPUT_BYTES, "give WikiExtractor's files, of 1 MB by default")
            try:
                training, held_out = hold_out(segment(clean(articles(_decoded(content))), split), count, seed)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            file.write(gathered(training))
            evaluation += held_out
            with_text += sum(bool(article.strip()) for article in training)
    # Written after the part, so that the record marks the part as complete.
    write_atomically(task.record_path, json.dumps({"articles": with_text, "evaluation": evaluation}).encode())
    return task.path.name, with_text, False


def _record_of(task: _Task) -> dict:
    return read_json(task.record_path, _MAX_RECORD_BYTES, "delete it and run the same command again")


def _decoded(content: bytes) -> str:
    if (place := content.find(0)) >= 0:
        raise ValueError(f"holds a zero byte at {place:,}; expected the text that WikiExtractor writes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start:,}; expected the text that WikiExtractor writes") from None
