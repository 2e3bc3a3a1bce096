"""The demo corpus: reproducible prose from Python's standard library. Whole modules are held out for evaluation."""

import shutil
from pathlib import Path

import pytest

from dataloading.dataset.folder import open_dataset
from dataloading.preparation import demo
from dataloading.preparation.demo import HELD_OUT_PERCENT, Document, demo_documents, write_demo
from tests.conftest import REPOSITORY, SmallRun
from tests.dataloading.conftest import Run
from tests.programs import python

pytestmark = pytest.mark.slow

VOCAB = REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt"


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return demo_documents()


def test_the_corpus_is_large_and_no_text_is_on_both_sides(documents: list[Document]) -> None:
    sentences = [sentence for document in documents for sentence in document.sentences]
    assert sum(len(sentence.split()) for sentence in sentences) > 150_000
    for sentence in sentences:
        assert sentence.strip() == sentence != ""
        assert len(sentence.splitlines()) == 1
    assert all(document.sentences for document in documents)
    held_out, used = ([document for document in documents if document.held_out == side] for side in (True, False))
    names, others = ({document.name for document in some} for some in (held_out, used))
    assert not names & others  # no module is in both sets
    assert 0.5 * HELD_OUT_PERCENT / 100 < len(names) / len(names | others) < 2 * HELD_OUT_PERCENT / 100
    assert not {document.sentences for document in used} & {document.sentences for document in held_out}


def test_another_process_finds_the_same_and_imports_nothing_of_the_standard_library(documents: list[Document]) -> None:
    code = """
import sys
from dataloading.preparation.demo import demo_documents
before = set(sys.modules)
documents = demo_documents()
imported = set(sys.modules) - before
assert not imported & {"this", "antigravity", "turtle", "pydoc_data.topics", "cgi", "wsgiref"}, imported
assert len(imported) < 10, imported
print(repr(documents))
"""
    assert python("-c", code).stdout == f"{documents!r}\n"


def test_source_that_does_not_parse_or_is_not_prose_is_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the full standard library"):
        demo_documents(tmp_path)
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'a': 'Some words make up a sentence here.'}\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "module.py").write_text(
        '"""Reads the configuration from its file.  Raises an error otherwise."""\n'
        'def f():\n    """>>> f() and more words\n    1\n\n    Four plain English words.\n\n    x = 1; y = 2; z = 3"""\n'
        'def g():\n    """One two three.\n\n    ab ab ab abc1234\n\n    ac ab ab abc12345"""\n'
        'class C:\n    """The class of all the things."""\n'
        '    def method(self):\n        """Does what methods always do."""\n'
    )
    found = [(document.name, document.sentences) for document in demo_documents(tmp_path)]
    assert found == [
        ("topic a", ("Some words make up a sentence here.",)),
        ("module", ("Reads the configuration from its file.", "Raises an error otherwise.")),
        ("module", ("Four plain English words.",)),
        ("module", ("ab ab ab abc1234",)),  # letters are three quarters
        ("module", ("The class of all the things.", "Does what methods always do.")),
    ]


def test_data_are_made_once_and_other_content_and_damage_are_refused(
    run: Run, documents: list[Document], small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "demo_documents", lambda: documents[::40])
    made = tmp_path / "demo"
    for done in ("made", "verified"):
        *lines, last = run("demo", "--out", made, "--vocab", VOCAB).splitlines()
        sets = [open_dataset(made / name) for name in ("train", "evaluation")]
        told = [f"{each.folder}: {len(each):,} samples of {each.lengths.mean():.1f} tokens" for each in sets]
        assert (lines, last.split(" in ")[0]) == (told, done)
    assert [(each.info.max_seq_length, len(each.shards)) for each in sets] == [(128, 4)] * 2
    shutil.rmtree(made / "evaluation")
    assert write_demo(made, VOCAB)  # makes only what is missing
    shard = next((made / "evaluation").glob("part_*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=shard.name):
        write_demo(made, VOCAB)
    for name in ("evaluation", "train"):
        shutil.rmtree(made / name)
        if name == "train":
            shutil.copytree(small_run.folder / "train", made / name)
        else:
            (made / name).write_text("a file")
        before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match=str(made)):
            write_demo(made, VOCAB)
        assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before
