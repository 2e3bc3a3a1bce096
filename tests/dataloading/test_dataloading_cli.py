"""``python -m dataloading``: it turns text into verified shards, and reports every mistake in one line."""

import hashlib
import itertools
import resource
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.data_stages import reference_prepare
from console.text import counted, visible
from dataloading import __main__ as program
from dataloading.dataset.folder import open_dataset
from dataloading.options import ExtractionOptions, OwnText, PretrainingOptions
from dataloading.shards.formats import write_shard
from dataloading.shards.samples import Samples, concatenate
from tests.conftest import REPOSITORY
from tests.dataloading.conftest import Run
from tests.dataloading.made_up import INFO, TOKENS, make_samples
from tests.hostile import LONG, NAME, assert_harmless

OPTIONS = PretrainingOptions(max_seq_length=32, max_predictions_per_seq=4, dupe_factor=3, random_seed=99)
FLAGS = ["--max_seq_length", "32", "--max-predictions-per-seq=4", "--dupe_factor=3", "--random_seed", "99"]


@pytest.fixture
def _minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute pass between readings of the clock."""
    monkeypatch.setattr(program, "time", SimpleNamespace(perf_counter=itertools.count(5.0, 60.0).__next__))


def described(folder: Path, samples: Samples) -> str:
    shards = list(folder.glob("part_*"))
    size = sum(shard.stat().st_size for shard in shards) / 1e6
    sizes = f"{samples.lengths.mean():.1f} tokens in {counted(len(shards), 'shard')}, {size:.1f} MB"
    return f"{len(samples):,} samples of {sizes}"


@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.usefixtures("_minutes")
def test_commands_report_what_they_made_and_detect_damage(
    run: Run, one_call: bool, tmp_path: Path, text: Path, vocab: Path
) -> None:
    """``dump`` reads data sets, folders without a manifest, and files. ``verify`` and ``dump`` detect damage."""
    names = (NAME, f"1{NAME}", f"2{NAME}", "linked", "more.txt", "last.txt", "bare", f"{LONG[:200]}.npz")
    out, shuffled, converted, linked, more, last, bare, dumped = (tmp_path / name for name in names)
    more.write_text("w1 w2 w3\nw4 w5\n\nw6 w7\nw8\n")
    last.write_text("w9 w10\nw13 w14 w15 w16\n\nw10 w11 w12\nw17\n")
    bare.mkdir()
    assert "holds no files" in run("dump", bare, "--out", dumped, fails=True)
    texts = [text, more, last]
    calls = [texts] if one_call else [[each] for each in texts]
    made = [reference_prepare.prepare(call, reference_prepare.read_vocab(vocab), OPTIONS) for call in calls]
    expected, counts = concatenate(made), [len(each) for each in made]
    shards = [f"part_0000{index}_of_0000{len(calls)}.hdf5" for index in range(len(calls))]
    lines = ["\n".join(path.read_text().rstrip("\n") for path in call).split("\n") for call in calls]
    documents = sum(has_text for each in lines for has_text, _ in itertools.groupby(each, bool))
    words = [line.split() for line in itertools.chain(*lines)]
    characters, tokens = (sum(map(len, each)) for each in (itertools.chain(*lines), words))
    lost = f"{characters:,} characters, {documents} documents, {tokens} tokens; nothing lost"

    command = ["prepare", "--text", *texts, "--vocab", vocab, "--out", out, *FLAGS, *["--one-call"] * one_call]
    left = [", about 2:00 left", ", about 1:00 left", ""][-len(calls) :]
    for existed in ("", ", existed"):
        printed = run(*command).splitlines()
        files = enumerate(zip(shards, counts, left, strict=True), 1)
        said = [f"{60 * n:7.1f} s  [{n}/{len(calls)}] {a}: {b} samples{existed}{c}" for n, (a, b, c) in files]
        said += [f"{visible(out)}: {described(out, expected)}", f"{visible(out)}: {lost}"]
        assert printed == said
    assert {path.name for path in out.iterdir()} == {"lengths.npy", "manifest.json", "prepare.json", *shards}
    info = open_dataset(out).info
    assert info.options == OPTIONS.recorded | {"unicode": unicodedata.unidata_version, "vocabulary_fits": True}
    digests = {path.as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in texts}
    assert (info.sources, info.vocab_size) == (digests, len(TOKENS))

    *read, _vocabulary, settings, _, what_was_lost, _, _, _, _, whole = run("verify", out).splitlines()
    assert read == [f"{shard}: {count} samples, digest right" for shard, count in zip(shards, counts, strict=True)]
    changed = "max_seq_length 32, max_predictions_per_seq 4, dupe_factor 3, random_seed 99"
    assert (settings, what_was_lost) == (f"settings: not the benchmark's ({changed})", f"text: {lost}")
    assert whole == f"{visible(out)}: whole, {described(out, expected)}"
    for shard in shards:
        (bare / shard).symlink_to(out / shard)
    of_shards = f"{len(expected)} samples of {counted(len(calls), 'shard')}"
    assert run("dump", out if one_call else bare, "--out", dumped) == f"{visible(dumped)}: {of_shards}\n"
    arrays = np.load(dumped, allow_pickle=False)
    golden = np.load(Path(__file__).parent / "preparation" / "golden" / "edge_128.npz", allow_pickle=False)
    assert {name: arrays[name].dtype for name in arrays.files} == {name: golden[name].dtype for name in golden.files}
    derived = {"length": "lengths", "masked_count": "masked_counts", "next_sentence_label": "next_sentence_labels"}
    for name in arrays.files:
        np.testing.assert_array_equal(arrays[name], getattr(expected, derived.get(str(name), str(name))), str(name))

    assert run("index", bare, "--vocab", vocab, "--out", linked) == f"{linked}: {described(linked, expected)}\n"
    *steps, said = run("shuffle", out, "--out", shuffled, "--shards", 20).splitlines()
    assert said == f"{visible(shuffled)}: {described(shuffled, expected)}, each sample of {visible(out)} exactly once"
    written = [int(len(expected) * shard / 20) for shard in range(1, 21)]
    first: dict[tuple[str, int], int] = {}  # a step prints a line for each tenth
    for step, several in (("read", np.cumsum(counts).tolist()), ("written", written), ("checked", written)):
        for done in several:
            first.setdefault((step, 10 * done // len(expected)), done)
    assert steps == [f"{60 * n:7.1f} s  {step} {done} samples" for n, ((step, _), done) in enumerate(first.items(), 1)]
    said = run("convert", out, "--out", converted, "--to", "packed", "--max-sequences", 2)
    assert said.splitlines()[-1] == f"{visible(converted)}: {described(converted, expected)}, layout packed"
    assert_harmless(said)

    shard = out / shards[0]
    shard.write_bytes(shard.read_bytes()[:-1000])
    dumped.unlink()
    for command in (["verify", out], ["dump", shard, "--out", dumped]):
        assert shards[0] in run(*command, fails=True)
    assert not dumped.exists()


def test_index_reports_a_data_set_without_samples(run: Run, tmp_path: Path, vocab: Path) -> None:
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "part", make_samples(0), INFO)
    said = f"{tmp_path / 'data'}: 0 samples of 0.0 tokens in 1 shard, 0.0 MB\n"
    assert run("index", tmp_path / "data", "--vocab", vocab) == said


@pytest.mark.usefixtures("_minutes")
def test_extract_reports_the_numbers_of_articles_and_parts(run: Run, tmp_path: Path) -> None:
    articles, out = tmp_path / "wiki_00", tmp_path / "out"
    one = '<doc id="{0}" url="u" title="T{0}">\nT{0}\n\nThis is sentence {0} of the text.\n</doc>\n'
    articles.write_text("".join(one.format(number) for number in range(1234)))
    printed = run("extract", articles, "--out", out, "--sentences", "plain", "--evaluation-articles", 234)
    assert printed.splitlines() == [
        "   60.0 s  [1/1] part-00000-of-00001: 1,000 articles",
        f"{out}: 1,000 articles in 1 part, 234 held out in eval.txt",
    ]


def test_from_text_reports_its_data_sets_and_lost_text(run: Run, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "own"
    documents = (f"This is document {number % 40}.\nIt ends here with {number % 40}.\n\n" for number in range(50))
    text.write_text("".join(documents))
    printed = run("from-text", "--text", text, "--out", out, "--vocab-size", 60).splitlines()
    assert printed[0] == "10 documents left out for repeating another"
    assert printed[1].startswith(f"{out}/train: 35 documents, 542 samples of 21.6 tokens in 1 shard, ")
    lost = "1,421 characters, 45 documents, 546 tokens; lost: 22.2 % of the documents are dropped"
    assert printed[2] == f"{out}/train: {lost}"
    assert printed[3].startswith(f"{out}/evaluation: 5 documents, 74 samples of 20.7 tokens in 1 shard, ")
    assert printed[5].startswith(f"{out}/vocab.txt: 60 tokens; lower case, accents stripped")
    assert printed[6].startswith(f"warning: {out}/train: 22.2 % of the documents are dropped; ")
    assert f"text: {lost}" in run("verify", out / "train")
    assert "is not an empty folder" in run("from-text", "--text", text, "--out", out, fails=True)


PREPARE = "prepare --text text.txt --vocab vocab.txt --out data "
FROM_TEXT = "from-text --text text.txt --out data "


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{PREPARE} --text absent.txt", "absent.txt: No such file"),
        (f"{PREPARE} --text", "--text names no file"),
        (f"{PREPARE} --vocab absent.txt", "absent.txt: No such file"),
        (f"{PREPARE} --vocab text.txt", "text.txt: 200 tokens without [PAD]"),
        (f"{PREPARE} --text empty.txt", "empty.txt: no text found"),
        (f"{PREPARE} --text binary.txt", "binary.txt: UTF-16; convert it"),
        (f"{PREPARE} --text text.txt text.txt", "--text names text.txt twice"),
        (f"{PREPARE} --out .", "is not an empty folder"),
        (f"{PREPARE} --out text.txt", "is not an empty folder"),
        (f"{PREPARE} --out text.txt/data", "text.txt"),
        (f"{PREPARE} --max_seq_length 4", "max_seq_length is 4; expected 5 to 32767"),
        (f"{PREPARE} --max_seq_length 32768", "max_seq_length is 32768"),
        (f"{PREPARE} --max_predictions_per_seq 0", "max_predictions_per_seq is 0; expected at least 1"),
        (f"{PREPARE} --dupe_factor 0", "dupe_factor is 0"),
        (f"{PREPARE} --short_seq_prob 1.5", "short_seq_prob is 1.5"),
        (f"{PREPARE} --short_seq_prob -0.1", "short_seq_prob is -0.1"),
        (f"{PREPARE} --masked_lm_prob nan", "masked_lm_prob is nan"),
        (f"{PREPARE} --jobs 0", "--jobs is 0"),
        ("from-text --out data --text", "no text is named"),
        (f"{FROM_TEXT} --text absent", "absent: there is no such file"),
        (f"{FROM_TEXT} --text folder", "folder: the folder holds no files"),
        (f"{FROM_TEXT} --text few.txt", "19 different documents, expected at least 20"),
        *(
            (f"{FROM_TEXT} --evaluation-share {share}", f"evaluation-share is {share}")
            for share in ("0.0", "0.51", "nan")
        ),
        (f"{FROM_TEXT} --max-seq-length 4", "max_seq_length is 4"),
        (f"{FROM_TEXT} --vocab-size 5", "--vocab-size is 5, which leaves no room"),
        (f"{FROM_TEXT} --vocab folder", "folder holds neither vocab.txt nor tokenizer.json"),
        (f"{FROM_TEXT} --vocab absent", "absent: No such file"),
        ("extract --sentences plain --out data", "no input is named"),
        ("extract text.txt --out data --evaluation-articles -1", "--evaluation-articles is -1; expected 0 or more"),
        ("extract text.txt --out data --part-bytes 0", "--part-bytes is 0; expected at least 1"),
        ("dump --out data", "no shard is named"),
        *(
            (f"wikipedia --out data --part {part}", f"--part is '{part}'")
            for part in ("0/3", "4/3", "1/0", "+1/3", "1")
        ),
    ],
)
@pytest.mark.usefixtures("vocab", "text")
def test_invalid_arguments_give_an_error_and_leave_no_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "few.txt").write_text("\n\n".join(f"Document {number}." for number in range(19)))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert message in run(*command.split(), fails=True)
    assert sorted(tmp_path.iterdir()) == before


def test_settings_at_their_limits_are_accepted() -> None:
    for name, value in (
        *(("max_seq_length", 5), ("max_seq_length", 32767), ("max_predictions_per_seq", 1), ("dupe_factor", 1)),
        *(("short_seq_prob", 0), ("short_seq_prob", 1), ("masked_lm_prob", 0), ("masked_lm_prob", 1)),
    ):
        assert replace(PretrainingOptions(), **{name: value}).recorded[name] == value
    assert OwnText(evaluation_share=0.5).evaluation_share == 0.5
    assert ExtractionOptions(evaluation_articles=0, part_bytes=1).part_bytes == 1


def test_a_failed_write_gives_a_one_line_error_and_leaves_no_files(tmp_path: Path, text: Path, vocab: Path) -> None:
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
