"""Reading of text files. One error names all files of other kinds, each with a remedy."""

import gzip
from pathlib import Path

import pytest

from dataloading.text import documents
from dataloading.text.documents import NO_TEXT, check_texts, decode_text, divide_lines, read_documents

TEXT = "One sentence.\nAnother \u00e9.\n\nA document.\n"
READ = [["One sentence.", "Another \u00e9."], ["A document."]]


def test_text_with_other_line_endings_a_byte_order_mark_or_gzip_is_read(tmp_path: Path) -> None:
    for content in (
        *(TEXT.encode(), b"\xef\xbb\xbf" + TEXT.encode(), TEXT.replace("\n", "\r\n").encode()),
        TEXT.replace("\n", " \n\t").encode(),
        gzip.compress(TEXT.encode(), mtime=0),
        gzip.compress(TEXT[:10].encode(), mtime=0) + gzip.compress(TEXT[10:].encode(), mtime=0),
    ):
        (tmp_path / "text").write_bytes(content)
        check_texts([tmp_path / "text"])
        assert read_documents([tmp_path / "text"]) == READ
    assert decode_text(b"\0\0" + b"a" * 14, tmp_path) == "\0\0" + "a" * 14  # with more zeros, it would count as UTF-16


OTHERS = {
    "utf16": (TEXT.encode("utf-16"), "UTF-16; convert it"),
    "utf16-without-mark": (TEXT.encode("utf-16-le"), "binary, or text in UTF-16"),
    "latin1": (f"\n{TEXT}".encode("latin-1"), "line 3, byte 23: not UTF-8; .*ISO-8859-1"),
    "carriage-returns": (TEXT.replace("\n", "\r").encode(), "carriage returns alone; convert it: tr"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(40), "a picture .PNG."),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(40), "a picture .JPEG."),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3", "a PDF document"),
    "docx": (b"PK\x03\x04" + bytes(40), "an office document"),
    "bz2": (b"BZh91AY&SY" + bytes(4), "bunzip2 it first"),
    "truncated.gz": (gzip.compress(TEXT.encode() * 100)[:-12], "cannot be unpacked"),
    "damaged.gz": (gzip.compress(TEXT.encode())[:20] + b"damaged!", "cannot be unpacked"),
    "gz-of-picture": (gzip.compress(b"\x89PNG\r\n\x1a\n" + bytes(40)), "a picture .PNG."),
    "json": (b'{"id": 1, "text": "One sentence."}\n', "JSON with one object a line"),
    "wiki": (b'<doc id="1" url="u" title="t">\nt\n\nOne.\n</doc>\n', "dataloading extract"),
    "html": (b"\n<!DOCTYPE html>\n<p>One.</p>\n", "HTML or XML"),
    "three-of-16-bytes-are-zero": (b"\0\0\0" + b"a" * 13, "binary, or text in UTF-16"),
    "empty": (b"", "no text found"),
    "blank": (b"\n \n", "no text found"),
}


def test_files_of_other_kinds_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    for name, (content, message) in OTHERS.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"^{tmp_path / name}: .*{message}"):
            read_documents([tmp_path / name])


def test_one_error_lists_all_files_that_cannot_be_read_as_text(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in OTHERS]
    for path in paths:
        path.write_bytes(OTHERS[path.name][0])
    (tmp_path / "good").write_text(TEXT)
    with pytest.raises(ValueError, match=f"{len(OTHERS)} of {len(OTHERS) + 1} files cannot be read as text") as caught:
        read_documents([tmp_path / "good", *paths])
    assert all(str(path) in str(caught.value) for path in paths)
    # check_texts() reads only the start of each file, so it cannot find all faults.
    with pytest.raises(ValueError, match="cannot be read as text") as caught:
        check_texts([tmp_path / "good", *paths, tmp_path / "absent"])
    for name in ("utf16", "png", "jpeg", "pdf", "docx", "bz2", "empty", "absent"):
        assert str(tmp_path / name) in str(caught.value)
    empty = [tmp_path / f"empty{number}" for number in range(21)]
    for path in empty:
        path.touch()
    for count, last in ((20, f"{empty[19]}: {NO_TEXT}"), (21, f"{empty[19]}: {NO_TEXT} | and 1 more")):
        with pytest.raises(ValueError, match=f"^{count} of {count} files cannot be read as text: ") as caught:
            read_documents(empty[:count])
        assert str(caught.value).endswith(last)
    assert read_documents([]) == []


def test_gzip_files_with_huge_content_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_TEXT_BYTES", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"a\n" * (1 << 19)))
    assert read_documents([tmp_path / "bomb.gz"]) == [["a"] * (1 << 19)]
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"a\n" * (1 << 19) + b"\n"))
    with pytest.raises(ValueError, match="unpacks to more than 1,048,576 bytes"):
        read_documents([tmp_path / "bomb.gz"])


def test_lines_that_look_empty_can_end_a_document() -> None:
    lines = ["a", "\u200b", "b", "\u00ad \u200b", "", "c\u200bd"]
    assert divide_lines(lines, "\u200b\u00ad ") == [["a"], ["b"], ["c\u200bd"]]
    assert divide_lines(lines) == [["a", "\u200b", "b", "\u00ad \u200b"], ["c\u200bd"]]
