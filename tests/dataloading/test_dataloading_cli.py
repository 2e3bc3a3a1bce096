"""``python -m dataloading``: it turns text into verified shards, and reports every mistake in one line."""

import itertools
import resource
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.data_stages import reference_prepare
from console.text import counted
from dataloading import __main__ as program
from dataloading.dataset.folder import open_dataset
from dataloading.jobs import JobProgress
from dataloading.options import PretrainingOptions
from dataloading.shards.samples import concatenate
from tests.conftest import REPOSITORY
from tests.dataloading.conftest import Run
from tests.dataloading.made_up import TOKENS
from tests.hostile import LONG, NAME, assert_harmless

OPTIONS = PretrainingOptions(max_seq_length=32, max_predictions_per_seq=4, dupe_factor=3, random_seed=99)
FLAGS = ["--max_seq_length", "32", "--max-predictions-per-seq=4", "--dupe_factor=3", "--random_seed", "99"]


@pytest.mark.parametrize("one_call", [False, True])
def test_prepare_verify_and_dump(run: Run, one_call: bool, tmp_path: Path, text: Path, vocab: Path) -> None:
    """``dump`` reads data sets, folders without a manifest, and files. ``verify`` and ``dump`` detect damage."""
    out, more, bare, dumped = (tmp_path / name for name in (NAME, "more.txt", "bare", f"{LONG[:200]}.npz"))
    more.write_text("w1 w2 w3\nw4 w5\n\nw6 w7\nw8\n")
    bare.mkdir()
    assert "holds no files" in run("dump", bare, "--out", dumped, fails=True)
    calls = [[text, more]] if one_call else [[text], [more]]
    arguments = ["prepare", "--text", text, more, "--vocab", vocab, "--out", out, *FLAGS]
    prepared = run(*arguments, *(["--one-call"] if one_call else []))
    names = [f"part_0000{index}_of_0000{len(calls)}.hdf5" for index in range(len(calls))]
    assert {path.name for path in out.iterdir()} == {"lengths.npy", "manifest.json", "prepare.json", *names}
    info = open_dataset(out).info
    assert info.options == OPTIONS.recorded | {"unicode": unicodedata.unidata_version, "vocabulary_fits": True}
    assert {name: len(digest) for name, digest in info.sources.items()} == {text.as_posix(): 64, more.as_posix(): 64}
    assert info.vocab_size == len(TOKENS)

    printed = run("verify", out)
    for said in (*(f"{name}: " for name in names), "not the benchmark's; 35 tokens", "not the benchmark's (max"):
        assert said in printed
    assert "neither the benchmark's training set (156,726,829) nor its evaluation set (10,000)" in printed

    for name in names:
        (bare / name).symlink_to(out / name)
    printed += run("dump", out if one_call else bare, "--out", dumped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "time", SimpleNamespace(perf_counter=itertools.count(5.0, 60.0).__next__))
        shuffled = run("shuffle", out, "--out", tmp_path / f"1{NAME}", "--shards", 2)
    converted = run("convert", out, "--out", tmp_path / f"2{NAME}", "--to", "packed", "--max-sequences", 2)
    assert_harmless(printed + shuffled + converted)
    vocabulary = reference_prepare.read_vocab(vocab)
    made = [reference_prepare.prepare(call, vocabulary, OPTIONS) for call in calls]
    expected = concatenate(made)
    count, mean = len(expected), expected.lengths.mean()
    steps = [("read", done) for done in np.cumsum([len(each) for each in made])]
    steps += [(step, done) for step in ("written", "checked") for done in (count // 2, count)]
    lines = shuffled.splitlines()
    assert lines[:-1] == [f"{60 * n:7.1f} s  {step} {done:,} samples" for n, (step, done) in enumerate(steps, 1)]
    for line, folder, shards in ((prepared, "", len(calls)), (lines[-1], "1", 2), (converted, "2", len(calls))):
        size = sum(path.stat().st_size for path in (tmp_path / f"{folder}{NAME}").glob("part_*")) / 1e6
        assert f": {count:,} samples of {mean:.1f} tokens in {counted(shards, 'shard')}, {size:.1f} MB" in line
    arrays = np.load(dumped, allow_pickle=False)
    np.testing.assert_array_equal(arrays["length"], expected.lengths)
    np.testing.assert_array_equal(arrays["masked_count"], expected.masked_counts)
    np.testing.assert_array_equal(arrays["next_sentence_label"], expected.next_sentence_labels)
    for name in ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids"):
        np.testing.assert_array_equal(arrays[name], getattr(expected, name))
    golden = np.load(Path(__file__).parent / "preparation" / "golden" / "edge_128.npz", allow_pickle=False)
    assert {name: arrays[name].dtype for name in arrays.files} == {name: golden[name].dtype for name in golden.files}

    shard = out / names[0]
    shard.write_bytes(shard.read_bytes()[:-1000])
    dumped.unlink()
    for command in (["verify", out], ["dump", shard, "--out", dumped]):
        assert names[0] in run(*command, fails=True)
    assert not dumped.exists()


def test_the_time_left_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([5.0, 65.0, 125.0])
    monkeypatch.setattr(program, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    report = program._reporter("samples")
    report(JobProgress("one", 1234, 1, 3, kept=False))
    report(JobProgress("last", 1, 3, 3, kept=True))
    assert capsys.readouterr().out.splitlines() == [
        "   60.0 s  [1/3] one: 1,234 samples, about 2:00 left",
        "  120.0 s  [3/3] last: 1 samples, existed",
    ]


def test_extracted_articles_and_parts_are_counted(run: Run, tmp_path: Path) -> None:
    articles, out = tmp_path / "wiki_00", tmp_path / "out"
    one = '<doc id="{0}" url="u" title="T{0}">\nT{0}\n\nThis is sentence {0} of the text.\n</doc>\n'
    articles.write_text("".join(one.format(number) for number in range(1234)))
    printed = run("extract", articles, "--out", out, "--sentences", "plain", "--evaluation-articles", 234)
    held_out = (out / "eval.txt").read_text().count("of the text")
    assert printed.splitlines()[-1] == f"{out}: 1,000 articles in 1 part, {held_out:,} held out in eval.txt"


def test_from_text_says_what_it_made(run: Run, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "own"
    documents = (f"This is document {number % 40}.\nIt ends here with {number % 40}.\n\n" for number in range(50))
    text.write_text("".join(documents))
    printed = run("from-text", "--text", text, "--out", out, "--vocab-size", 60).splitlines()
    assert printed[0] == "10 documents left out for repeating another"
    assert printed[1].startswith(f"{out}/train: 35 documents, ")
    assert printed[3].startswith(f"{out}/evaluation: 5 documents, ")
    assert printed[5].startswith(f"{out}/vocab.txt: 60 tokens; lower case, accents stripped")
    assert printed[2].replace(f"{out}/train: ", "text: ") in run("verify", out / "train")
    assert "already exists" in run("from-text", "--text", text, "--out", out, fails=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--text": "absent.txt"}, "absent.txt: No such file"),
        ({"--text": ""}, "--text names no file"),
        ({"--vocab": "absent.txt"}, "absent.txt: No such file"),
        ({"--vocab": "text.txt"}, "text.txt: 200 tokens without [PAD]"),
        ({"--text": "empty.txt"}, "empty.txt: no text found"),
        ({"--text": "binary.txt"}, "binary.txt: UTF-16; convert it"),
        ({"--out": "."}, "already exists"),
        ({"--out": "text.txt"}, "already exists"),
        ({"--max_seq_length": "4"}, "max_seq_length is 4"),
        ({"--max_seq_length": "65536"}, "max_seq_length is 65536"),
        ({"--dupe_factor": "0"}, "dupe_factor is 0"),
        ({"--short_seq_prob": "1.5"}, "short_seq_prob is 1.5"),
        ({"--masked_lm_prob": "nan"}, "masked_lm_prob is nan"),
        ({"--jobs": "0"}, "--jobs is 0"),
        ({"--text": "text.txt text.txt"}, "named twice"),
        ({"--out": "text.txt/data"}, "text.txt"),
    ],
)
@pytest.mark.usefixtures("vocab", "text")
def test_a_mistake_gets_one_line_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    given = {"--text": "text.txt", "--vocab": "vocab.txt", "--out": "data"} | changed
    words = [word for flag, values in given.items() for word in (flag, *values.split())]
    assert message in run("prepare", *words, fails=True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_gets_one_line_and_leaves_nothing(tmp_path: Path, text: Path, vocab: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataloading", "prepare", "--text", text, "--vocab", vocab, "--out", tmp_path / "data"],
        cwd=REPOSITORY,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
        env={"NUMBA_DISABLE_JIT": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert sorted(tmp_path.iterdir()) == [text, vocab]
