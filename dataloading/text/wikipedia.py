"""Conversion of WikiExtractor files to text shards, byte-identical to the reference's clean-up scripts.

The scripts are in mlcommons/training, bert; the docstrings of the functions name the corresponding scripts. Output of
WikiExtractor's ``--json`` is first converted to its plain format. Four steps turn each file into sentences:

    articles     keep the articles' lines without the titles, and put an empty line before each article
    clean        remove the remaining wiki markup, line by line
    segment      put one sentence on a line
    hold_out     draw articles for the evaluation set

Then neighbouring files are joined into parts:

    OUT/extract.json                 settings and inputs of the job; a job with other settings is refused
    OUT/part-00007-of-00500          training text: one sentence a line, empty lines between articles
    OUT/held-out/00007.json          held-out articles of a finished part
    OUT/eval.txt, eval.md5           written last: all held-out articles, and the MD5 sum of each
"""

import hashlib
import json
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from console.files import atomic_path, read_bounded, read_json, write_atomically
from console.text import counted
from dataloading.jobs import Made, Report, begun, make_files
from dataloading.options import ExtractionOptions, Sentences
from dataloading.text.sentences import sentence_splitter

JOB_NAME = "extract.json"
_HELD_OUT = "held-out"
_MAX_INPUT_BYTES = 64 << 20
"""Maximum bytes of an input file, which is held in memory as a whole. WikiExtractor writes files of 1 MB."""
_MAX_RECORD_BYTES = 1 << 30

# The rules of `clean`, in order. The reference runs a process for each rule (clean.sh). Two of its rules are omitted,
# because they match only lines that `articles` has dropped.
_CATEGORY = re.compile(r"\[\[Category:[^\]\[]*\]\]")
_LINK = (re.compile(r"\[\[([^\]|\[]*)\]\]"), r"\1")
_NAMED_LINK = (re.compile(r"\[\[[^\]|\[]*\|([^\]|\[]*)\]\]"), r"\1")
_BRACKETS = (
    # Applied twice, to resolve nested links.
    *(_LINK, _LINK, _NAMED_LINK, _NAMED_LINK),
    (re.compile(r"\[\[:*[Ff]ile:[^\]\[]*\]\]"), ""),
    (re.compile(r"\[\[[Mm]edia:[^\]\[]*\]\]"), ""),
    (re.compile(r"\[\[[Ii]mage:[^\]\[]*\]\]"), ""),
    (re.compile(r"\[([^\]|\[]*)\]"), r"\1"),
    (re.compile(r"\[\[[^\]\[]*\]\]"), ""),
)
_UNWRAPPED = (re.compile(r"<chem([^<]*)</chem>"), re.compile(r"<ins([^<]*)</ins>"))
_REMOVED: tuple[str | re.Pattern[str], ...] = (
    re.compile(r"<, ref [^<]*</ref>"),
    re.compile(r"<includeonly[^<]*</includeonly>"),
    re.compile(r"<graph[^<]*</graph>"),
    re.compile(r"<section[^\\]*/>"),
    re.compile(r"<meta[^\\]*/>"),
    re.compile(r"<hr[^\\]*/>"),
    re.compile(r"<gallery[^>]*>"),
    re.compile(r"<ref[^<]*</ref>"),
    re.compile(r"<ref[^>]*>"),
    re.compile(r"<http[^>]*>"),
    re.compile(r"<Ref[^>]*>"),
    # In GNU sed 4.9, the escaped slash in the rule's character set also adds a backslash to the set.
    re.compile(r"<mapframe [^\\/]*/>"),
    re.compile(r"<mapframe[^>]*>"),
    *("</mapframe>", "<poem>", "</poem>", "<math>", "</math>", "<ref>", "</ref>"),
    *(re.compile(r"<div[^>]*>"), re.compile(r"</div[^>]*>")),
    *("<sup>", "</sup>", "<br>", "</br>", "<BR>", "</BR>", "<Br>", "</Br>", "<del>", "</del>", "<nowiki>", "</nowiki>"),
    *("<NOWIKI>", "</NOWIKI>", "<onlyinclude>", "</onlyinclude>", "<includeonly>", "</includeonly>", "<small>"),
    *("</small>", "<chem>", "</chem>", "<noinclude>", "</noinclude>", "<gallery>", "</gallery>", "<graph>{", "<graph>"),
    *("}</graph>", "</graph>", "</references>"),
    re.compile(r"<poem [^>]*>"),
)

_NOT_IN_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that JSON can escape, but the text of a shard cannot contain."""


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return the WikiExtractor files in ``paths``: each file, and ``wiki_??`` and ``*/wiki_??`` in each folder."""
    files: list[Path] = []
    for path in paths:
        # The order of the files determines each file's part, and the seed for drawing articles from the file.
        names = ("*/wiki_??", "wiki_??", "*/wiki_??.bz2", "wiki_??.bz2")
        within = [path] if path.is_file() else sorted(chain.from_iterable(map(path.glob, names)), key=str)
        if not within:
            raise ValueError(f"{path}: no wiki_?? or */wiki_?? there; expected WikiExtractor's files or their folder")
        files += within
    if not files:
        raise ValueError("no input is named; name WikiExtractor's files or their folder")
    if packed := [file for file in files if file.suffix == ".bz2" and file.with_suffix("") not in files]:
        raise ValueError(
            f"{packed[0]}: {len(packed):,} of {len(files):,} input files are compressed; unpack them with bunzip2, or run "
            "WikiExtractor without --compress"
        )
    files = [file for file in files if file.suffix != ".bz2"]
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError("an input file is named twice, which would repeat its articles; name each folder or file once")
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
        trained = sum(record["articles"] for record in records)
        if not trained:
            raise ValueError(
                f"{inputs[0]}{' and others' if len(inputs) > 1 else ''}: no article with text is left for training, and "
                f"{len(evaluation):,} are held out; name files of articles with text, or set a smaller --evaluation-articles"
            )
        write_atomically(out / "eval.txt", joined(evaluation))
        write_atomically(out / "eval.md5", "".join(f"{md5}\n" for md5 in md5s).encode())
    return len(tasks), trained, len(evaluation)


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
        # Use the reference's expression: its rounding determines from which files articles are held out.
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
                cleaned = clean(articles(plain_format(_decoded(content))))
                training, held_out = hold_out(segment(cleaned, split), count, seed)
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


def plain_format(text: str) -> str:
    """Return the text of a WikiExtractor file in the plain format, to which the output of ``--json`` is converted.

    Raises ``ValueError`` for any other text.
    """
    beginning = text.lstrip("\ufeff" + string.whitespace)
    if beginning.startswith("{"):
        # Drop the byte order mark, because json.loads() refuses it.
        lines = enumerate(_lines(text.removeprefix("\ufeff")), 1)
        return "".join(_plain_article(line, number) for number, line in lines if line.strip())
    if "<doc" in beginning:
        return text
    found = f"begins with {beginning[:60]!r}" if beginning else "holds no text"
    raise ValueError(
        f"{found}; expected WikiExtractor's output: <doc ...>, text and </doc>, or with --json an object on each line. Run "
        "WikiExtractor on a dump of Wikipedia; give other text to from-text or prepare"
    )


def _plain_article(line: str, number: int) -> str:
    try:
        article = json.loads(line)
    except (ValueError, RecursionError):
        article = None
    text, title = (article.get("text"), article.get("title", "")) if isinstance(article, dict) else (None, "")
    if not isinstance(text, str) or not isinstance(title, str) or _NOT_IN_TEXT.search(text):
        raise ValueError(
            f"line {number:,} is {line[:60].rstrip()!r}...; expected a whole JSON object with the strings title and text; "
            "run WikiExtractor again"
        )
    # `articles` drops the line after <doc>, which should be the title. The text of WikiExtractor 2 begins with the title
    # and an empty line. Put an empty line before any other text, so that `articles` drops this line instead.
    title_line = "" if f"{text}\n".startswith(f"{title}\n\n") else "\n"
    return f"<doc>\n{title_line}{text}\n</doc>\n"


def articles(text: str) -> str:
    """Return the articles of one WikiExtractor file, with an empty line before each article. (cleanup_file.py.)

    Titles are dropped. A title is the line after a ``<doc`` line.
    """
    kept = []
    lines = iter(_lines(text))
    for line in lines:
        if "<doc" in line:
            kept.append("\n")
            next(lines, None)
        # As in the reference, a single character at the end of the file, without a line feed, counts as an empty line.
        elif "</doc>" not in line and len(line) > 1:
            kept.append(line)
    return "".join(kept)


def clean(text: str) -> str:
    """Remove the remaining wiki markup, line by line. A non-empty result ends in a line feed. (clean.sh.)"""
    # The whole line is dropped if it contains a category.
    cleaned = [_clean_line(line.removesuffix("\n")) for line in _lines(text) if not _CATEGORY.search(line)]
    return "".join(line + "\n" for line in cleaned)


def segment(text: str, split: Callable[[str], list[str]]) -> str:
    """Put one sentence on a line, keep empty lines, and add an empty line at the end. (do_sentence_segmentation.py.)"""
    lines = []
    for line in _lines(text):
        if len(line) == 1:  # a line feed alone, which is an empty line
            lines.append("\n")
        lines += [sentence.strip() + "\n" for sentence in split(line)]
    lines.append("\n")
    return "".join(lines)


def hold_out(text: str, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Draw ``count`` articles for evaluation. (seperate_test_set.py.)

    Returns the training articles and the evaluation articles, both in their original order. The text after the last empty
    line, which is usually empty, counts as an article and can be drawn.
    """
    found = text.split("\n\n")
    if count > len(found):
        raise ValueError(
            f"holds {counted(len(found), 'article')}, but {count} are to be held out; set a smaller --evaluation-articles"
        )
    rng = random.Random(seed)
    drawn: set[int] = set()
    while len(drawn) < count:
        # Use the reference's expression, because randrange() would draw other numbers from this seed.
        drawn.add(int(rng.random() * len(found)))
    training = [article for index, article in enumerate(found) if index not in drawn]
    return training, [found[index] for index in sorted(drawn)]


def gathered(training: Sequence[str]) -> bytes:
    """Return the bytes that one file's training articles add to a part. (do_gather.py.)"""
    # Drop the byte order mark, which remains if the first line of a file is not a <doc> line.
    return joined(training).removeprefix("\ufeff".encode()).removesuffix(b"\n")


def _lines(text: str) -> list[str]:
    """Return the lines of ``text``, with every line ending replaced by a line feed."""
    # splitlines() would also split at form feeds and Unicode's separators.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def _clean_line(line: str) -> str:
    # For speed, skip these rules for lines without a bracket, which are most lines.
    if "[" in line:
        for pattern, replacement in _BRACKETS:
            line = pattern.sub(replacement, line)
    line = line.replace("alt=", "")
    # No later rule matches a line without "<".
    if "<" not in line:
        return line
    # The reference splits the line at </doc>. `segment` treats the carriage return as the end of a line.
    line = line.replace("</doc>", "\r")
    for pattern in _UNWRAPPED:
        line = pattern.sub(r"\1", line)
    for rule in _REMOVED:
        line = line.replace(rule, "") if isinstance(rule, str) else rule.sub("", line)
    return line


def joined(articles: Sequence[str]) -> bytes:
    """Encode articles as in a text shard, with an empty line after each article."""
    return "".join(f"{article}\n\n" for article in articles).encode()
