"""WikiExtractor files become the same text shards, byte for byte, as by the reference's scripts, also after a stop."""

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


@pytest.mark.parametrize("name", ["AA/wiki_00", "AA/wiki_01", "AA/wiki_03", "AB/wiki_00"])
def test_each_step_gives_the_references_bytes(name: str) -> None:
    expected = FIXTURES / "expected_steps" / name.replace("/", "-")
    found = articles((TEXT / name).read_bytes().decode())
    assert found.encode() == expected.with_suffix(".1").read_bytes()
    assert clean(found).encode() == expected.with_suffix(".2").read_bytes()


@pytest.mark.parametrize(("sentences", "jobs"), [("plain", 1), ("plain", 2), ("punkt", 1)])
def test_shards_and_evaluation_text_have_the_references_bytes(sentences: Sentences, jobs: int, tmp_path: Path) -> None:
    try:
        sentence_splitter(sentences)
    except ValueError as error:
        pytest.skip(str(error))
    options = replace(PLAIN, sentences=sentences)
    reports: list[JobProgress] = []
    parts, _, held_out = extract([TEXT], tmp_path / "out", options, jobs=jobs, report=reports.append)
    same_as_expected(tmp_path / "out", sentences)
    assert [(report.done, report.total, report.kept) for report in reports] == [(1, 2, False), (2, 2, False)]
    assert (parts, held_out) == (2, 9)
    assert not list((tmp_path / "out").glob("**/*.partial"))


def test_the_rules_of_the_cleanup_apply_in_their_order() -> None:
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


def test_sentences_and_empty_lines() -> None:
    split = sentence_splitter("plain")
    text = '\nOne. Two!  Three? "Four." (Five.) [Six.] seven. 8 nine.\n \t\n\nEnd'
    lines = ["", "One.", "Two!", "Three?", '"Four." (Five.) [Six.] seven.', "8 nine.", "", "End", ""]
    assert segment(text, split) == "".join(f"{line}\n" for line in lines)


def test_all_articles_can_be_held_out_and_a_byte_order_mark_is_dropped() -> None:
    assert hold_out("\n\na\n\nb", 3, 0) == ([], ["", "a", "b"])
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
    with pytest.raises(ValueError, match="no input named"):
        find_inputs([])


@pytest.mark.parametrize(
    ("content", "message", "jobs"),
    [(b"good\xff", "wiki_00: is not UTF-8 at byte 4", 1), (b"\0b", "wiki_00: holds a zero byte at 0", 2)],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, content: bytes, message: str, jobs: int) -> None:
    shutil.copytree(TEXT, tmp_path / "text")
    (tmp_path / "text" / "AB" / "wiki_00").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        extract([tmp_path / "text"], tmp_path / "out", PLAIN, jobs=jobs)
    assert not (tmp_path / "out" / "eval.txt").exists()
    assert not list((tmp_path / "out").glob("**/*.partial"))


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
    """Return an article in the form of WikiExtractor 2, whose text begins with the title, or 3."""
    whole = {2: f"{title}\n\n{text}" if text else f"{title}\n", 3: text}[version]
    article = {"id": str(number), "revid": "1", "url": "u", "title": title, "text": whole}
    return json.dumps(article, ensure_ascii=ascii_only) + "\n"


@pytest.mark.parametrize(("version", "ascii_only"), [(2, False), (3, True), (3, False)])
def test_json_output_gives_the_bytes_of_the_plain_output(version: int, ascii_only: bool, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no text"),
        (" \n\ufeff\n", "holds no text"),
        ("<mediawiki>\n<page/>\n", "begins with '<mediawiki>"),
        ("<!doctype html><p>x", "begins with '<!doctype"),
        ("Some words.\n", "begins with 'Some words"),
        ("[1]\n", "begins with"),
        (f"{GOOD}\n{GOOD[:30]}", "line 3 is .*expected a whole JSON object"),
        (GOOD + "[]\n", "line 2 is "),
        (GOOD + '{"title": "x"}\n', "line 2 is "),
        ('{"title": "x", "text": ["<doc id=1>"]}\n', "line 1 is "),
        ('{"title": 5, "text": "x"}\n', "line 1 is "),
        ('{"text": "x\\ud800"}\n', "line 1 is "),
        ('{"text": "x\\u0000"}\n', "line 1 is "),
        ('{"a": ' + 100_000 * "[", "line 1 is "),
        ('{"a": ' + 10_000 * "1" + "}", "line 1 is "),
    ],
)
def test_another_file_among_the_inputs_is_named(content: str, message: str, tmp_path: Path) -> None:
    shutil.copytree(TEXT, tmp_path / "text")
    (tmp_path / "text" / "AB" / "wiki_01").write_text(content)
    with pytest.raises(ValueError, match=f"AB/wiki_01: (?:{message})"):
        extract([tmp_path / "text"], tmp_path / "out", replace(PLAIN, evaluation_articles=0))
    assert not (tmp_path / "out" / "eval.txt").exists()


def test_no_text_for_training_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "wiki_00"
    for text, held_out in (("", 0), ("\n[[Category:Empty]]\n", 0), ("Some text.", 2)):
        file.write_text(plain_article(0, "A", text))
        with pytest.raises(ValueError, match="no article with text is left for training"):
            extract([file], tmp_path / f"out{len(text)}", replace(PLAIN, evaluation_articles=held_out))
        assert not list(tmp_path.glob("out*/eval*"))


def test_compressed_files_are_named_unless_they_are_unpacked_beside(tmp_path: Path) -> None:
    for name in ("wiki_00.bz2", "wiki_01.bz2", "wiki_01"):
        (tmp_path / name).write_bytes(b"BZh9")
    for given in (tmp_path, tmp_path / "wiki_00.bz2"):
        with pytest.raises(ValueError, match=r"wiki_00.bz2: 1 of \d input files are compressed; unpack"):
            find_inputs([given])
    (tmp_path / "wiki_00").write_text("x")
    assert find_inputs([tmp_path]) == [tmp_path / "wiki_00", tmp_path / "wiki_01"]


def test_what_is_whole_is_kept_and_the_rest_made_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    extract([TEXT], out, PLAIN)

    def kept() -> list[bool]:
        reports: list[JobProgress] = []
        extract([TEXT], out, PLAIN, report=reports.append)
        same_as_expected(out)
        return [report.kept for report in reports]

    assert kept() == [True, True]
    (out / "part-00000-of-00002").unlink()
    assert kept() == [False, True]
    (out / "held-out" / "00001.json").unlink()
    assert kept() == [True, False]
    (out / "eval.txt").write_text("other")
    assert kept() == [True, True]


def test_other_settings_and_other_folders_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    extract([TEXT], out, PLAIN)
    for inputs, options, name in (([TEXT], replace(PLAIN, seed=1), "seed"), ([TEXT / "AA"], PLAIN, "inputs")):
        with pytest.raises(ValueError, match=rf"begun with other settings \({name}\)"):
            extract(inputs, out, options)
    same_as_expected(out)
    with pytest.raises(ValueError, match=r"AA/wiki_\d\d: holds \d+ articles, but 250 "):
        extract([TEXT], tmp_path / "many", replace(PLAIN, evaluation_articles=1000))
    for wrong in ({"evaluation_articles": -1}, {"part_bytes": 0}):
        with pytest.raises(ValueError, match=f"--{next(iter(wrong)).replace('_', '-')} is "):
            replace(PLAIN, **wrong)


def test_files_fill_a_part_to_its_last_byte_and_a_larger_one_is_its_own(tmp_path: Path) -> None:
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
