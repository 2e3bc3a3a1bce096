"""The four steps from the text of a WikiExtractor file to sentences, with the bytes of the reference's clean-up
scripts.

    articles     keep the lines of the articles without titles, and an empty line at the beginning of each article
    clean        remove remains of wiki markup, line by line
    segment      put one sentence on a line
    hold_out     draw articles for the evaluation set

The scripts that the functions name are in mlcommons/training, bert.
"""

import random
import re
from collections.abc import Callable, Sequence

from dataloading.options import Sentences

# The rules of `clean` in their order. The reference runs a process for each rule (clean.sh). Two of its rules never
# apply, because `articles` drops the lines that they look for.
_CATEGORY = re.compile(r"\[\[Category:[^\]\[]*\]\]")
_LINK = (re.compile(r"\[\[([^\]|\[]*)\]\]"), r"\1")
_NAMED_LINK = (re.compile(r"\[\[[^\]|\[]*\|([^\]|\[]*)\]\]"), r"\1")
_BRACKETS = (
    # Twice, for a link around a link.
    *(_LINK, _LINK, _NAMED_LINK, _NAMED_LINK),
    (re.compile(r"\[\[:*[Ff]ile:[^\]\[]*\]\]"), ""),
    (re.compile(r"\[\[[Mm]edia:[^\]\[]*\]\]"), ""),
    (re.compile(r"\[\[[Ii]mage:[^\]\[]*\]\]"), ""),
    (re.compile(r"\[([^\]|\[]*)\]"), r"\1"),
    (re.compile(r"\[\[[^\]\[]*\]\]"), ""),
)
_ELEMENTS = (
    (re.compile(r"<chem([^<]*)</chem>"), r"\1"),
    (re.compile(r"<ins([^<]*)</ins>"), r"\1"),
    (re.compile(r"<, ref [^<]*</ref>"), ""),
    (re.compile(r"<includeonly[^<]*</includeonly>"), ""),
    (re.compile(r"<graph[^<]*</graph>"), ""),
    (re.compile(r"<section[^\\]*/>"), ""),
    (re.compile(r"<meta[^\\]*/>"), ""),
    (re.compile(r"<hr[^\\]*/>"), ""),
    (re.compile(r"<gallery[^>]*>"), ""),
    (re.compile(r"<ref[^<]*</ref>"), ""),
    (re.compile(r"<ref[^>]*>"), ""),
    (re.compile(r"<http[^>]*>"), ""),
    (re.compile(r"<Ref[^>]*>"), ""),
    # The escaped slash of the rule puts a backslash into its set (GNU sed 4.9).
    (re.compile(r"<mapframe [^\\/]*/>"), ""),
    (re.compile(r"<mapframe[^>]*>"), ""),
)
_TAGS_BEFORE_DIV = ("</mapframe>", "<poem>", "</poem>", "<math>", "</math>", "<ref>", "</ref>")
_DIV = (re.compile(r"<div[^>]*>"), re.compile(r"</div[^>]*>"))
_TAGS_AFTER_DIV = (
    *("<sup>", "</sup>", "<br>", "</br>", "<BR>", "</BR>", "<Br>", "</Br>", "<del>", "</del>", "<nowiki>", "</nowiki>"),
    *("<NOWIKI>", "</NOWIKI>", "<onlyinclude>", "</onlyinclude>", "<includeonly>", "</includeonly>", "<small>"),
    *("</small>", "<chem>", "</chem>", "<noinclude>", "</noinclude>", "<gallery>", "</gallery>", "<graph>{", "<graph>"),
    *("}</graph>", "</graph>", "</references>"),
)
_POEM = re.compile(r"<poem [^>]*>")

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"(])")


def articles(text: str) -> str:
    """Return the articles of one WikiExtractor file: for each an empty line, then its lines. (cleanup_file.py.)

    The line after a ``<doc`` line, which is the title, is dropped.
    """
    kept = []
    lines = iter(_lines(text))
    for line in lines:
        if "<doc" in line:
            kept.append("\n")
            next(lines, None)
        # A single character without a line feed, at the end of the file, counts as an empty line.
        elif "</doc>" not in line and len(line) > 1:
            kept.append(line)
    return "".join(kept)


def clean(text: str) -> str:
    """Remove remains of wiki markup, line by line; the result ends in a line feed unless it is empty. (clean.sh.)"""
    # A line with a category is dropped as a whole.
    cleaned = [_clean_line(line.removesuffix("\n")) for line in _lines(text) if not _CATEGORY.search(line)]
    return "".join(line + "\n" for line in cleaned)


def segment(text: str, split: Callable[[str], list[str]]) -> str:
    """Put one sentence on a line, keep empty lines, and add one at the end. (do_sentence_segmentation.py.)"""
    lines = []
    for line in _lines(text):
        if len(line) == 1:  # the line feed alone
            lines.append("\n")
        lines += [sentence.strip() + "\n" for sentence in split(line)]
    lines.append("\n")
    return "".join(lines)


def hold_out(text: str, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Draw ``count`` articles for evaluation; return (training, evaluation), both in their order.
    (seperate_test_set.py.)

    The text behind the last empty line, which is usually empty, counts as an article and can be drawn.

    Raises:
        ValueError: there are fewer articles than ``count``.
    """
    found = text.split("\n\n")
    if count > len(found):
        raise ValueError(
            f"holds {len(found)} articles, of which {count} are to be held out; use fewer evaluation_articles"
        )
    rng = random.Random(seed)
    drawn: set[int] = set()
    while len(drawn) < count:
        # Not randrange(), which draws other numbers from the same seed.
        drawn.add(int(rng.random() * len(found)))
    training = [article for index, article in enumerate(found) if index not in drawn]
    return training, [found[index] for index in sorted(drawn)]


def gathered(training: Sequence[str]) -> bytes:
    """Return the bytes that the training articles of one file add to a part. (do_gather.py.)"""
    # A byte order mark stays if the first line of a file is no <doc> line.
    return joined(training).removeprefix("\ufeff".encode()).removesuffix(b"\n")


def sentence_splitter(sentences: Sentences) -> Callable[[str], list[str]]:
    """Return the function that splits a line into sentences.

    Raises:
        ValueError: punkt is not installed.
    """
    if sentences == "plain":
        return _split_plainly
    try:
        from nltk.tokenize import sent_tokenize  # pyright: ignore[reportMissingImports]

        # nltk looks for its data when it is called.
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
    """Return the lines of ``text`` with a line feed at the end of each, whatever ended it."""
    # splitlines() would also split at form feeds and Unicode's separators.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def _clean_line(line: str) -> str:
    # These rules need a bracket, and most lines have none.
    if "[" in line:
        for pattern, replacement in _BRACKETS:
            line = pattern.sub(replacement, line)
    line = line.replace("alt=", "")
    # All further rules need a "<".
    if "<" not in line:
        return line
    # The reference makes two lines of it.
    line = line.replace("</doc>", "\r")
    for pattern, replacement in _ELEMENTS:
        line = pattern.sub(replacement, line)
    for tag in _TAGS_BEFORE_DIV:
        line = line.replace(tag, "")
    for pattern in _DIV:
        line = pattern.sub("", line)
    for tag in _TAGS_AFTER_DIV:
        line = line.replace(tag, "")
    return _POEM.sub("", line)


def _split_plainly(line: str) -> list[str]:
    text = line.strip()
    return _SENTENCE_END.split(text) if text else []


def joined(articles: Sequence[str]) -> bytes:
    """Return articles as in a text shard, with an empty line after each."""
    return "".join(f"{article}\n\n" for article in articles).encode()
