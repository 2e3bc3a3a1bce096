"""Reading of text files: one sentence a line, and an empty line between documents."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from console.files import open_regular, read_bounded
from console.text import counted

NO_TEXT = "no text found; expected one sentence a line and an empty line between documents"

_MAX_TEXT_BYTES = 4 << 30
"""Largest size of a text. Processing needs 30 times as much memory. The benchmark's texts have 27 MB each."""

_MAX_LINE = 16 << 20
"""Longest line in characters. The limit detects text without line feeds, which would be one sentence."""

_MOST_NAMED = 20
_GZIP = b"\x1f\x8b"

_OTHER_FILES = {
    b"\xff\xfe": "UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    b"PK\x03\x04": "a ZIP archive or an office document; unpack it, or save it as plain text",
    b"%PDF": "a PDF document; convert it, for example with pdftotext",
    b"{\\rtf": "an RTF document; save it as plain text",
    b"\x89PNG": "a picture (PNG); leave it out",
    b"\xff\xd8\xff": "a picture (JPEG); leave it out",
    b"GIF8": "a picture (GIF); leave it out",
    b"BZh": "compressed with bzip2; bunzip2 it first",
    b"\xfd7zXZ": "compressed with xz; unxz it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unzstd it first",
    b"\x89HDF": "an HDF5 file, which holds samples and no text; leave it out",
}
"""First bytes of files that are not text in UTF-8, each with the kind of file and a remedy."""

_MARKUP = {
    re.compile(r"<doc\s", re.IGNORECASE): "WikiExtractor's output; run `python -m dataloading extract` on it",
    re.compile(r"<(!doctype|html|\?xml|mediawiki)\b", re.IGNORECASE): "HTML or XML; extract the text from it",
}


def decode_text(content: bytes, path: Path) -> str:
    """Decode UTF-8, and drop a byte order mark. Raises ``ValueError`` for other content, and names its kind if known.

    ``path`` is for error messages.
    """
    if kind := _other_kind(content):
        raise ValueError(f"{path}: {kind}")
    try:
        # U+FEFF at the start is a byte order mark.
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}: line {line}, byte {error.start}: not UTF-8; convert the file to UTF-8, for example with "
            "iconv -f ISO-8859-1 -t UTF-8 if it is Latin-1"
        ) from None
    if "\r" in text and "\n" not in text:
        raise ValueError(f"{path}: lines end with carriage returns alone; convert it: tr '\\r' '\\n'")
    return text


def _other_kind(content: bytes) -> str:
    """Return the kind of a file that is not text in UTF-8, and what to do about it; "" if it may be text."""
    for start, kind in _OTHER_FILES.items():
        if content.startswith(start):
            return kind
    # Many zero bytes indicate UTF-16, which has one for each Latin letter. Exclude gzip, whose headers contain zeros.
    if content.count(0) > len(content) // 8 and not content.startswith(_GZIP):
        return "binary, or text in UTF-16; expected text in UTF-8"
    return ""


def stripped_lines(text: str) -> list[str]:
    """Split text into lines without blanks around them.

    Only line feeds end a line, and all carriage returns are dropped, as in TensorFlow's
    ``BufferedInputStream::ReadLine``.
    """
    lines = text.replace("\r", "").split("\n")
    if not lines[-1]:  # drop the empty text after the last line feed
        lines.pop()
    return [line.strip() for line in lines]


def check_texts(paths: Sequence[Path]) -> None:
    """Raise ``ValueError`` that names all files that cannot be text. Reads only the first bytes of each file."""
    wrong = []
    for path in paths:
        try:
            with open_regular(path) as file:
                start = file.read(16)
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
            continue
        if kind := _other_kind(start) if start else NO_TEXT:
            wrong.append(f"{path}: {kind}")
    _refuse(wrong, len(paths))


def read_lines(paths: Sequence[Path]) -> list[list[str]]:
    """Return the stripped lines of each text. Raises ``ValueError`` that names all files that cannot be read as text."""
    texts, wrong = [], []
    for path in paths:
        try:
            texts.append(_checked_lines(path))
        except ValueError as error:
            wrong.append(str(error))
    _refuse(wrong, len(paths))
    return texts


def divide_lines(lines: Iterable[str], invisible: str = "") -> list[list[str]]:
    """Divide lines into documents at empty lines. A line of nothing but ``invisible`` characters counts as empty."""
    documents: list[list[str]] = [[]]
    for line in lines:
        if line.strip(invisible) if invisible else line:
            documents[-1].append(line)
        else:
            documents.append([])
    return [document for document in documents if document]


def read_documents(paths: Sequence[Path]) -> list[list[str]]:
    """Read documents as lists of sentences, from text with one sentence a line and an empty line between documents.

    As in the reference, only an empty line ends a document, so the first lines of a file continue the last document of
    the previous file.
    """
    return divide_lines(chain.from_iterable(read_lines(paths)))


def _refuse(wrong: Sequence[str], total: int) -> None:
    if len(wrong) == 1:
        raise ValueError(wrong[0])
    if wrong:
        more = [f"and {len(wrong) - _MOST_NAMED:,} more"] if len(wrong) > _MOST_NAMED else []
        raise ValueError(
            f"{len(wrong):,} of {counted(total, 'file')} cannot be read as text: {' | '.join([*wrong[:_MOST_NAMED], *more])}"
        )


def _checked_lines(path: Path) -> list[str]:
    lines = stripped_lines(decode_text(_text_bytes(path), path))
    if (longest := max(map(len, lines), default=0)) > _MAX_LINE:
        number = next(number for number, line in enumerate(lines, 1) if len(line) == longest)
        raise ValueError(f"{path}: line {number:,} has {longest:,} characters; expected one sentence a line")
    first = next(filter(None, lines), "")
    if not first:
        raise ValueError(f"{path}: {NO_TEXT}")
    for pattern, kind in _MARKUP.items():
        if pattern.match(first):
            raise ValueError(f"{path}: {kind}")
    if _is_json_object(first):
        raise ValueError(
            f"{path}: JSON with one object a line; write only its text, for example with jq -r '.text + \"\\n\"'"
        )
    return lines


def _text_bytes(path: Path) -> bytes:
    """Read a file, and unpack it if it is compressed with gzip."""
    content = read_bounded(path, _MAX_TEXT_BYTES, "split the text into smaller files")
    if not content.startswith(_GZIP):
        return content
    try:
        # The limit stops a small file that unpacks to more than memory can hold.
        text = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MAX_TEXT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be unpacked ({error}); compress it again") from None
    if len(text) > _MAX_TEXT_BYTES:
        raise ValueError(f"{path}: unpacks to more than {_MAX_TEXT_BYTES:,} bytes; split the text into smaller files")
    return text


def _is_json_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
