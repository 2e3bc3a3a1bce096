"""Splitting of text into sentences: by the reference's tokenizer, or by one plain rule for all scripts."""

import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise

from dataloading.options import Sentences

# Unicode 18's property Sentence_Terminal from U+0080 to U+FFFF, without U+2024. The terminals of the higher planes
# are left out, because they belong to rare scripts and `re` searches for them seven times as slowly.
_TERMINALS = (
    r"\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965\u104a\u104b\u1362\u1367\u1368"
    r"\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945\u1aa8-\u1aab\u1b4e\u1b4f\u1b5a\u1b5b\u1b5e\u1b5f"
    r"\u1b7d-\u1b7f\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047-\u2049\u2cf9-\u2cfb\u2e2e\u2e3c\u2e53\u2e54\u2e60\u2e61"
    r"\u3002\ua4ff\ua60e\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb"
    r"\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61"
)
_CONTINUING = r",\-:;\u037e\u055d\u060c\u061b\u2013\u2014\u3001\uff0c\uff0d\uff1a\uff1b\uff64"
"""Commas, colons and dashes, which continue a sentence after a terminal."""

_NON_ASCII = [chr(code_point) for code_point in range(0x80, 0x20000)]
# Exclude Georgian letters, which are lower case but begin sentences. They are equal to their title-case forms.
_LOWER = "".join(letter for letter in _NON_ASCII if letter.islower() and letter != letter.title())
_OPENING, _CLOSING, _INITIAL, _FINAL, _INVISIBLE = (
    "".join(mark for mark in _NON_ASCII if unicodedata.category(mark) == category)
    for category in ("Ps", "Pe", "Pi", "Pf", "Cf")
)
# Languages use quotation marks in different ways. So each mark may close before a space, and open before a letter.
_CLOSES = _CLOSING + _INITIAL + _FINAL + _INVISIBLE
_OPENS = r"\"(\xbf\xa1" + _OPENING + _INITIAL + _FINAL + _INVISIBLE
_SENTENCE_END = re.compile(
    # The pattern begins with a set of characters, for which `re` searches quickly.
    rf"[.!?;\u037e{_TERMINALS}](?:"
    # A semicolon after a Greek letter is a question mark.
    rf"(?:(?<=[.!?\u037e])|(?<=[\u0370-\u03ff\u1f00-\u1fff];))[{_CLOSES}]*\s+(?=[{_OPENS}]|[^\W_a-z{_LOWER}])"
    # Before kana and ideographs, no space is needed.
    r"|(?<=[!?])(?=[\u3040-\u30ff\u3400-\u9fff])"
    rf"|(?<=[{_TERMINALS}])[\"'{_CLOSING}{_FINAL}{_INVISIBLE}]*+\s*+"
    # The full stops in decimal fractions do not end a sentence.
    rf"(?!(?<=[\ufe52\uff0e])\d|[{_CONTINUING}{_CLOSING}{_FINAL}{_TERMINALS}]|\Z)"
    ")"
)


def sentence_splitter(sentences: Sentences) -> Callable[[str], list[str]]:
    """Return a function that splits a line into sentences. Raises ``ValueError`` if nltk or its data is missing."""
    if sentences == "plain":
        return _split_plainly
    try:
        from nltk.tokenize import sent_tokenize  # pyright: ignore[reportMissingImports]

        # Call nltk now to detect missing data, because nltk looks for its data only when it is called.
        sent_tokenize("")
    except ImportError:
        raise ValueError(
            "--sentences is punkt, and the package nltk is not installed: python -m pip install nltk, or set "
            "--sentences plain"
        ) from None
    except LookupError:
        raise ValueError(
            "--sentences is punkt, and nltk finds no data for it: python -m nltk.downloader punkt_tab (punkt before nltk "
            "3.9), and set NLTK_DATA if the data is in a folder that nltk does not search; or set --sentences plain"
        ) from None
    return sent_tokenize


def _split_plainly(line: str) -> list[str]:
    """Split at sentence ends. Only the rules of Unicode (UAX #29) that need no knowledge of the language are used.

    A sentence ends with ``.``, ``!`` or ``?`` if a space follows, and then a digit, an opening mark or a letter that is not
    lower case. Closing marks may stand before the space. Other scripts' sentence ends need no space.
    """
    text = line.strip()
    starts = [0, *(end.end() for end in _SENTENCE_END.finditer(text)), len(text)]
    return [text[start:stop].rstrip() for start, stop in pairwise(starts)] if text else []
