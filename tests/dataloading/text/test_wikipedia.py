"""WikiExtractor files become text shards that are byte-identical to the reference's, also after an interruption."""

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dataloading.jobs import JobProgress
from dataloading.options import ExtractionOptions, Sentences
from dataloading.text.sentences import sentence_splitter
from dataloading.text.wikipedia import _plan, articles, clean, extract, find_inputs, gathered, hold_out, segment
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

FIXTURES = REPOSITORY / "tests" / "dataloading" / "text" / "wikipedia"
TEXT = FIXTURES / "text"
PLAIN = ExtractionOptions("plain", evaluation_articles=9, part_bytes=int(0.02 * 1024 * 1024))


def test_articles_and_clean_return_what_the_reference_returns() -> None:
    for name in ("AA/wiki_00", "AA/wiki_01", "AA/wiki_03", "AB/wiki_00"):
        expected = FIXTURES / "expected_steps" / name.replace("/", "-")
        found = articles((TEXT / name).read_bytes().decode())
        assert found.encode() == expected.with_suffix(".1").read_bytes()
        assert clean(found).encode() == expected.with_suffix(".2").read_bytes()


@pytest.mark.parametrize(("sentences", "jobs"), [("plain", 1), ("plain", 2), ("punkt", 1)])
def test_shards_and_evaluation_text_equal_the_references_files(sentences: Sentences, jobs: int, tmp_path: Path) -> None:
    try:
        sentence_splitter(sentences)
    except ValueError as error:
        pytest.skip(str(error))
    options = replace(PLAIN, sentences=sentences)
    reports: list[JobProgress] = []
    assert extract([TEXT], tmp_path / "out", options, jobs=jobs, report=reports.append) == (2, 36, 9)
    same_as_expected(tmp_path / "out", sentences)
    assert [(report.done, report.total, report.kept) for report in reports] == [(1, 2, False), (2, 2, False)]
    assert sorted(report.count for report in reports) == [17, 19]
    assert not list((tmp_path / "out").glob("**/*.partial"))


def test_clean_returns_what_the_references_commands_return() -> None:
    """The expected lines were made by the commands of the reference's clean.sh with GNU sed 4.9."""
    for line, expected in (
        ("a [[b|c]] [[d]] [e] [[File:x|y [[z]] w]].", "a c d e y z w."),
        ("[[File:x|y|z]] [[:file:y|z|w]] [[image:a|b|[c]]] end", "   end"),
        ("<mapframe a> b/> <mapframe c\\d> e/>", "  e/>"),
        ("[[Category:Things]] gone", None),
        ("[[a|b|c]] [[[[n]]]] [x|y]", " n [x|y]"),
        ("alt=alt=x aalt=lt=y", "x alt=y"),
        ("<ref name=x>gone</ref>kept<ref/> <Ref a>b", "kept b"),
        ("A <s<br>up>B", "A <sup>B"),
        ("x <[/doc]> y", "x \n y"),
        ("<graph>{ 1 }</graph><mapframe a/b>c</mapframe>", "c"),
        ("<section a/> b /> c", " c"),
    ):
        made = clean(line + "\n").replace("\r", "\n")
        assert made == ("" if expected is None else expected + "\n"), line


def test_functions_split_sentences_hold_out_articles_and_gather_parts() -> None:
    text = '\nOne. Two!  Three? "Four." (Five.) [Six.] seven. 8 nine.\n \t\n\nEnd'
    lines = ["", "One.", "Two!", "Three?", '"Four." (Five.) [Six.] seven.', "8 nine.", "", "End", ""]
    assert segment(text, sentence_splitter("plain")) == "".join(f"{line}\n" for line in lines)
    assert hold_out("\n\na\n\nb", 3, 0) == ([], ["", "a", "b"])
    with pytest.raises(ValueError, match="holds 3 articles, but 4 are to be held out"):
        hold_out("\n\na\n\nb", 4, 0)
    assert gathered(["\ufeffa", "b", ""]) == b"a\n\nb\n\n\n"
    assert gathered([]) == b""


def test_inputs_are_found_in_the_references_order(tmp_path: Path) -> None:
    for name in ("AB/wiki_00", "AA/wiki_10", "AA/wiki_02", "AA/wiki_100", "AA/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [path.relative_to(tmp_path).as_posix() for path in find_inputs([tmp_path])]
    assert found == ["AA/wiki_02", "AA/wiki_10", "AB/wiki_00"]
    assert find_inputs([tmp_path / "AB", tmp_path / "AA" / "notes.txt"])[1].name == "notes.txt"
    with pytest.raises(ValueError, match="named twice"):
        find_inputs([tmp_path, tmp_path / "AB" / "wiki_00"])
    with pytest.raises(ValueError, match=r"missing: no wiki_\?\?"):
        find_inputs([tmp_path / "missing"])
    with pytest.raises(ValueError, match="no input is named"):
        find_inputs([])


ARTICLES = [
    ("River", "A [[river|river]] flows. It opens.\nSecond paragraph <ref>x</ref> here.\n"),
    ("Empty", ""),
    ("Éclair", "Éclair\nis a <br>cake.\r\n\n- Good? Yes!\u2028\x1cNo."),
    ("Tags", 'One <doc id=1> two\ndropped line\nthree </doc> four\n{"text": 5}\n[[Category:Tags]]'),
    ("House", "\nHouse\n\nends here without a line feed"),
]


def plain_article(number: int, title: str, text: str) -> str:
    return (
        f'<doc id="{number}" url="https://example.org/?curid={number}" title="{title}">\n{title}\n\n{text}\n\n</doc>\n'
    )


def json_article(number: int, title: str, text: str, *, version: int, ascii_only: bool = False) -> str:
    """Return an article as JSON from WikiExtractor 2 or 3. In version 2, the text begins with the title."""
    whole = {2: f"{title}\n\n{text}" if text else f"{title}\n", 3: text}[version]
    article = {"id": str(number), "revid": "1", "url": "u", "title": title, "text": whole}
    return json.dumps(article, ensure_ascii=ascii_only) + "\n"


@pytest.mark.parametrize(("version", "ascii_only"), [(2, False), (3, True), (3, False)])
def test_json_and_plain_files_are_extracted_to_equal_text(version: int, ascii_only: bool, tmp_path: Path) -> None:
    json_form = partial(json_article, version=version, ascii_only=ascii_only)
    for form, article in (("plain", plain_article), ("json", json_form)):
        for file in ("AA/wiki_00", "AA/wiki_01"):
            (tmp_path / form / file).parent.mkdir(parents=True, exist_ok=True)
            content = "".join(article(number, *each) for number, each in enumerate(ARTICLES))
            (tmp_path / form / file).write_text(f"\ufeff{content}" if file.endswith("0") else content, newline="")
        extract([tmp_path / form], tmp_path / f"{form}-out", replace(PLAIN, evaluation_articles=3))
    outputs = [tmp_path / f"{form}-out" / "part-00000-of-00001" for form in ("plain", "json")]
    assert outputs[0].read_bytes().count(b"\n") > 20
    for path in (outputs[0], outputs[0].with_name("eval.txt")):
        assert (tmp_path / "json-out" / path.name).read_bytes() == path.read_bytes()


GOOD = json_article(1, "Good", "Some text.", version=3)


OTHERS = {
    b"good\xff": "is not UTF-8 at byte 4",
    b"\0b": "holds a zero byte at 0",
    b"": "holds no text;",
    " \n\ufeff\n".encode(): "holds no text;",
    b"<mediawiki>\n<page/>\n": r"begins with '<mediawiki>\\n<page/>\\n'; expected WikiExtractor's output",
    b"Some words." * 6: rf"begins with '{'Some words.' * 5}Some '; expected",
    b"[1]\n": r"begins with '\[1\]",
    f"{GOOD}\n{GOOD[:-8]}".encode(): f"line 3 is '{re.escape(GOOD[:60])}'...; expected a whole JSON object",
    f"{GOOD}[]\n".encode(): r"line 2 is '\[\]'...;",
    f'{GOOD}{{"title": "x"}}\n'.encode(): "line 2 is ",
    **{
        content.encode(): "line 1 is "
        for content in (
            *('{"title": "x", "text": ["<doc id=1>"]}\n', '{"title": 5, "text": "x"}\n', '{"text": "x\\ud800"}\n'),
            *('{"text": "x\\u0000"}\n', '{"a": ' + 100_000 * "[", '{"a": ' + 10_000 * "1" + "}"),
        )
    },
}


def test_the_error_names_an_input_that_is_not_from_wikiextractor(tmp_path: Path) -> None:
    shutil.copytree(TEXT, tmp_path / "text")
    for number, (content, message) in enumerate(OTHERS.items()):
        (tmp_path / "text" / "AB" / "wiki_01").write_bytes(content)
        options, jobs = replace(PLAIN, evaluation_articles=0), 1 + number % 2
        with pytest.raises(ValueError, match=f"AB/wiki_01: {message}"):
            extract([tmp_path / "text"], tmp_path / f"out{number}", options, jobs=jobs)
        assert not list(tmp_path.glob("out*/eval.txt"))
        assert not list(tmp_path.glob("out*/**/*.partial"))


def test_no_text_for_training_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "wiki_00"
    for text, held_out in (("", 0), ("\n[[Category:Empty]]\n", 0), ("Some text.", 2)):
        file.write_text(plain_article(0, "A", text))
        with pytest.raises(ValueError, match=f"wiki_00: no article .* left for training, and {held_out} are held out;"):
            extract([file], tmp_path / f"out{len(text)}", replace(PLAIN, evaluation_articles=held_out))
        assert not list(tmp_path.glob("out*/eval*"))


def test_compressed_inputs_are_rejected_unless_unpacked_copies_are_beside_them(tmp_path: Path) -> None:
    for name in ("wiki_00.bz2", "wiki_01.bz2", "wiki_01"):
        (tmp_path / name).write_bytes(b"BZh9")
    for given in (tmp_path, tmp_path / "wiki_00.bz2"):
        with pytest.raises(ValueError, match=r"wiki_00.bz2: 1 of \d input files are compressed; unpack"):
            find_inputs([given])
    (tmp_path / "wiki_00").write_text("x")
    assert find_inputs([tmp_path]) == [tmp_path / "wiki_00", tmp_path / "wiki_01"]


def test_complete_parts_are_kept_and_other_settings_or_inputs_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    extract([TEXT], out, PLAIN)
    for removed, expected in (
        (None, [True, True]),
        ("part-00000-of-00002", [False, True]),
        ("held-out/00001.json", [True, False]),
        ("eval.txt", [True, True]),
    ):
        if removed is not None:
            (out / removed).unlink()
        reports: list[JobProgress] = []
        assert extract([TEXT], out, PLAIN, report=reports.append) == (2, 36, 9)
        assert [report.kept for report in reports] == expected
        same_as_expected(out)
    for inputs, options, name in (([TEXT], replace(PLAIN, seed=1), "seed"), ([TEXT / "AA"], PLAIN, "inputs")):
        with pytest.raises(ValueError, match=rf"begun with other settings \({name}\)"):
            extract(inputs, out, options)
    same_as_expected(out)
    with pytest.raises(ValueError, match=r"AA/wiki_\d\d: holds \d+ articles, but 250 "):
        extract([TEXT], tmp_path / "many", replace(PLAIN, evaluation_articles=1000))


def test_a_part_holds_files_up_to_the_size_limit_or_one_larger_file(tmp_path: Path) -> None:
    files = [tmp_path / f"wiki_{place:02d}" for place in range(6)]
    for file, size in zip(files, (10, 10, 1, 30, 5, 15), strict=True):
        file.write_bytes(bytes(size))
    tasks = _plan(files, tmp_path, replace(PLAIN, part_bytes=20, evaluation_articles=4))
    assert [task.inputs for task in tasks] == [tuple(files[:2]), (files[2],), (files[3],), tuple(files[4:])]
    # 4 articles are held out from 6 files, floor(n * 4 / 6) of them from the first n files.
    assert [count for task in tasks for count, _ in task.held_out] == [0, 1, 1, 0, 1, 1]


def test_without_nltk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(ValueError, match="the package nltk is not installed: python -m pip install nltk"):
        extract([TEXT], tmp_path / "out", ExtractionOptions())
    assert not (tmp_path / "out").exists()


def same_as_expected(out: Path, sentences: Sentences = "plain") -> None:
    for path in (FIXTURES / f"expected_{sentences}").iterdir():
        assert (out / re.sub("-of-.*", "-of-00002", path.name)).read_bytes() == path.read_bytes(), path.name
