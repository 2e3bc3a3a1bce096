"""The four steps that turn a WikiExtractor file into sentences, byte-identical to the reference's clean-up scripts.

    articles     keep the articles' lines without the titles, and put an empty line before each article
    clean        remove the remaining wiki markup, line by line
    segment      put one sentence on a line
    hold_out     draw articles for the evaluation set

The docstrings of the functions name the corresponding scripts, which are in mlcommons/training, bert.
"""

import random
import re
from collections.abc import Callable, Sequence

from dataloading.options import Sentences

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

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"(])")


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
        if len(line) == 1:  # only the line feed
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
        raise ValueError(f"holds {len(found)} articles, but {count} are to be held out; use fewer evaluation_articles")
    rng = random.Random(seed)
    drawn: set[int] = set()
    while len(drawn) < count:
        # The reference's expression. randrange() would draw other numbers from the same seed.
        drawn.add(int(rng.random() * len(found)))
    training = [article for index, article in enumerate(found) if index not in drawn]
    return training, [found[index] for index in sorted(drawn)]


def gathered(training: Sequence[str]) -> bytes:
    """Return the bytes that one file's training articles add to a part. (do_gather.py.)"""
    # A byte order mark remains if the first line of a file is not a <doc> line.
    return joined(training).removeprefix("\ufeff".encode()).removesuffix(b"\n")


def sentence_splitter(sentences: Sentences) -> Callable[[str], list[str]]:
    """Return a function that splits a line into sentences. Raises ``ValueError`` if nltk or its data is missing."""
    if sentences == "plain":
        return _split_plainly
    try:
        from nltk.tokenize import sent_tokenize  # pyright: ignore[reportMissingImports]

        # nltk looks for its data only when it is called.
        sent_tokenize("")
    except ImportError:
        raise ValueError(
            "sentences is punkt, and the package nltk is not installed: pip install nltk, or use plain"
        ) from None
    except LookupError:
        raise ValueError(
            "sentences is punkt, and nltk finds no data for it: python -m nltk.downloader punkt_tab (with nltk before 3.9: "
            "punkt), and set NLTK_DATA when it is not in one of nltk's own places; or use plain"
        ) from None
    return sent_tokenize


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


def _split_plainly(line: str) -> list[str]:
    text = line.strip()
    return _SENTENCE_END.split(text) if text else []


def joined(articles: Sequence[str]) -> bytes:
    """Return articles as the bytes of a text shard, with an empty line after each article."""
    return "".join(f"{article}\n\n" for article in articles).encode()
