"""The demo corpus: reproducible prose from Python's standard library. Whole modules are held out for evaluation."""

import platform
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataloading import __main__ as program
from dataloading.dataset.folder import open_dataset
from dataloading.preparation import demo
from dataloading.preparation.demo import HELD_OUT_PERCENT, Document, demo_documents, write_demo
from tests.conftest import REPOSITORY, SmallRun
from tests.dataloading.conftest import Run
from tests.programs import python

VOCAB = REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt"


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return demo_documents()


@pytest.mark.slow
def test_the_demo_corpus_is_large_and_no_module_is_in_both_data_sets(documents: list[Document]) -> None:
    sentences = [sentence for document in documents for sentence in document.sentences]
    assert sum(len(sentence.split()) for sentence in sentences) > 150_000
    assert all(sentence.strip() == sentence != "" and len(sentence.splitlines()) == 1 for sentence in sentences)
    assert all(document.sentences for document in documents)
    held_out, used = ([document for document in documents if document.held_out == side] for side in (True, False))
    names, others = ({document.name for document in some} for some in (held_out, used))
    assert not names & others  # no module is in both sets
    assert 0.5 * HELD_OUT_PERCENT / 100 < len(names) / len(names | others) < 2 * HELD_OUT_PERCENT / 100
    assert not {document.sentences for document in used} & {document.sentences for document in held_out}


@pytest.mark.slow
def test_another_process_finds_equal_documents_without_importing_their_modules(documents: list[Document]) -> None:
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


MODULE = '''"""Reads the configuration from its file.  Raises an error otherwise."""
def f():
    """>>> f() and more words
    1

    Four plain English words.

    x = 1; y = 2; z = 3"""
def g():
    """One two three.

    ab ab ab abc1234

    ac ab ab abc12345"""
class C:
    """The class of all the things."""
    def method(self):
        """Does what methods always do."""
if True:
    def hidden():
        """Definitions inside of others are not read."""
def h():
    """Four plain English words."""
'''


def test_invalid_source_and_text_without_prose_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no {tmp_path}/pydoc_data/topics.py: the demo corpus needs the full"):
        demo_documents(tmp_path)
    for path, content in (
        ("pydoc_data/topics.py", "topics = {'b': 'All of this comes later.', 'a': 'Some words make a sentence.'}\n"),
        *(("broken.py", "def (:\n"), ("module.py", MODULE), ("module.txt", MODULE)),
        ("idlelib/a.py", '"""All of this is left out."""'),
        *(("pkg/test/a.py", '"""This is left out."""'), ("pkg/pydoc_data/a.py", '"""Only one folder is left out."""')),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    found = [(document.name, document.sentences) for document in demo_documents(tmp_path)]
    assert found == [
        ("topic a", ("Some words make a sentence.",)),
        ("topic b", ("All of this comes later.",)),
        ("module", ("Reads the configuration from its file.", "Raises an error otherwise.")),
        ("module", ("Four plain English words.",)),
        ("module", ("ab ab ab abc1234",)),  # accepted, because three quarters are letters and spaces
        ("module", ("The class of all the things.", "Does what methods always do.")),
        ("pkg.pydoc_data.a", ("Only one folder is left out.",)),
    ]


def test_demo_data_are_made_once_and_damaged_or_other_data_are_rejected(
    run: Run, small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        Document(f"{number}", (f"Some words of {number}.", "And more words.", "The end.")) for number in range(200)
    ]
    held_out = [4, 21, 25, 44, 48, 70, 79, 126, 134, 145, 162, 166, 174, 176, 197]
    assert [int(document.name) for document in texts if document.held_out] == held_out
    monkeypatch.setattr(demo, "demo_documents", lambda: texts)
    monkeypatch.setattr(program, "time", SimpleNamespace(perf_counter=count(5.0, 60.0).__next__))
    made = tmp_path / "demo"
    for done in ("made", "verified"):
        said = run("demo", "--out", made, "--vocab", VOCAB).splitlines()
        sets = [open_dataset(made / name) for name in ("train", "evaluation")]
        told = [f"{each.folder}: {len(each):,} samples of {each.lengths.mean():.1f} tokens" for each in sets]
        assert said == [*told, f"{done} in 60.0 s"]
    for each, number, passes, seed in zip(
        sets, (200 - len(held_out), len(held_out)), (10, 2), (12345, 54321), strict=True
    ):
        assert (each.info.max_seq_length, each.info.max_predictions_per_seq, len(each.shards)) == (128, 19, 4)
        assert (each.info.options["dupe_factor"], each.info.options["random_seed"]) == (passes, seed)
        assert each.info.options["python"] == platform.python_version()
        assert (each.info.text.documents, len(each) >= number * passes) == (number, True)
    shutil.rmtree(made / "evaluation")
    assert write_demo(made, VOCAB)  # makes only what is missing
    shard = next((made / "evaluation").glob("part_*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
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
