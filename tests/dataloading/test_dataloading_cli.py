"""``python -m dataloading``: text to verified shards, and one line for every mistake."""

import json
import resource
import subprocess
import sys
import unicodedata
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data_stages import reference_prepare
from dataloading.__main__ import main
from dataloading.dataset.folder import open_dataset
from dataloading.options import PretrainingOptions
from dataloading.shards.samples import concatenate

REPOSITORY = Path(__file__).parents[2]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(30))]
OPTIONS = PretrainingOptions(max_seq_length=32, max_predictions_per_seq=4, dupe_factor=3, random_seed=99)
FLAGS = ["--max_seq_length", "32", "--max-predictions-per-seq=4", "--dupe_factor=3", "--random_seed", "99"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join("" if line % 9 == 8 else f"w{line % 30} w3 w{line % 7}" for line in range(200)))
    return path


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(TOKENS))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dataloading", *map(str, arguments)])
    return main()


@pytest.mark.parametrize("one_call", [False, True])
def test_prepare_verify_and_dump(
    one_call: bool,
    tmp_path: Path,
    text: Path,
    vocab: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = tmp_path / "more.txt"
    more.write_text("w1 w2 w3\nw4 w5\n")
    out = tmp_path / "data"
    arguments = ["prepare", "--text", text, more, "--vocab", vocab, "--out", out, *FLAGS]
    assert run(monkeypatch, *arguments, *(["--one-call"] if one_call else [])) == 0
    assert "[1/" in capsys.readouterr().out
    calls = [[text, more]] if one_call else [[text], [more]]
    names = [f"part_0000{index}_of_0000{len(calls)}.hdf5" for index in range(len(calls))]
    there = sorted(path.name for path in out.iterdir())
    assert there == sorted(["lengths.npy", "manifest.json", "prepare.json", *names])

    assert run(monkeypatch, "verify", out) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in names)

    dumped = tmp_path / "samples.npz"
    assert run(monkeypatch, "dump", *(out / name for name in names), "--out", dumped) == 0
    expected = concatenate(
        [reference_prepare.prepare(call, reference_prepare.read_vocab(vocab), OPTIONS) for call in calls]
    )
    arrays = np.load(dumped, allow_pickle=False)
    np.testing.assert_array_equal(arrays["length"], expected.lengths)
    np.testing.assert_array_equal(arrays["masked_count"], expected.masked_counts)
    np.testing.assert_array_equal(arrays["next_sentence_label"], expected.next_sentence_labels)
    for name in ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids"):
        np.testing.assert_array_equal(arrays[name], getattr(expected, name))
    golden = np.load(Path(__file__).parent / "text" / "golden" / "edge_128.npz", allow_pickle=False)
    assert {name: arrays[name].dtype for name in arrays.files} == {name: golden[name].dtype for name in golden.files}

    info = open_dataset(out).info
    assert info.options == asdict(OPTIONS) | {"unicode": unicodedata.unidata_version}
    assert set(info.sources) == {text.as_posix(), more.as_posix()}
    assert info.vocab_size == len(TOKENS)


def test_from_text_says_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"This is document {number % 40}.\nIt ends here with {number % 40}.\n\n" for number in range(50))
    )
    out = tmp_path / "own"
    assert run(monkeypatch, "from-text", "--text", text, "--out", out, "--vocab-size", 60) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "10 documents that repeat others left out"
    assert printed[1].startswith(f"{out}/train: 35 documents, ")
    assert printed[2].startswith(f"{out}/evaluation: 5 documents, ")
    assert printed[3] == f"{out}/vocab.txt: 60 tokens"
    assert run(monkeypatch, "verify", out / "train") == 0
    capsys.readouterr()
    assert run(monkeypatch, "from-text", "--text", text, "--out", out) == 2
    error = capsys.readouterr().err
    assert "is there already" in error
    assert error.count("\n") == 1


def test_verify_counts_short_samples_that_chance_repeats(
    tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1\n\nw1\n")
    flags = ["--dupe_factor", 5, "--masked_lm_prob", 1.0, "--max_predictions_per_seq", 1]
    run(monkeypatch, "prepare", "--text", text, "--vocab", vocab, "--out", tmp_path / "data", *flags)
    samples = open_dataset(tmp_path / "data").take(np.arange(10))
    repeated = 10 - len(np.unique(samples.sample_digests()))
    assert repeated > 0
    assert run(monkeypatch, "verify", tmp_path / "data") == 0
    assert f"repeats: {repeated} samples repeat another, all of them short" in capsys.readouterr().out


def test_verify_says_what_the_data_are(
    tmp_path: Path, text: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "prepare", "--text", text, "--vocab", vocab, "--out", tmp_path / "data", "--dupe_factor", 2)
    capsys.readouterr()
    assert run(monkeypatch, "verify", tmp_path / "data") == 0
    printed = capsys.readouterr().out
    assert "vocabulary: not the benchmark's; 35 tokens" in printed
    assert "settings: not the benchmark's (dupe_factor 2)" in printed
    assert "neither the benchmark's training set (156,726,829) nor its evaluation set (10,000)" in printed


def test_the_evaluation_samples_are_picked_evenly(
    tmp_path: Path, text: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "evaluation"
    run(monkeypatch, "prepare", "--text", text, "--vocab", vocab, "--out", source, "--max_seq_length", 16)
    assert run(monkeypatch, "pick-evaluation", source, "--out", out, "--samples", 100) == 0
    dataset = open_dataset(source)
    ratio = len(dataset) / 100
    expected = dataset.take(np.array([int(index * ratio) for index in range(100)]))
    assert open_dataset(out).take(np.arange(100)).digest() == expected.digest()
    assert ratio > 1
    assert ratio != int(ratio)
    capsys.readouterr()
    assert run(monkeypatch, "pick-evaluation", source, "--out", tmp_path / "x", "--samples", len(dataset) + 1) == 2
    assert "are to be picked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "absent.txt"], "absent.txt: No such file"),
        (["--text"], "--text names no file"),
        (["--vocab", "absent.txt"], "absent.txt: No such file"),
        (["--vocab", "text.txt"], "text.txt: 179 tokens without [PAD]"),
        (["--text", "empty.txt"], "empty.txt: no text found"),
        (["--text", "binary.txt"], "binary.txt: line 1, byte 0: not UTF-8"),
        (["--out", "."], "is there already"),
        (["--out", "text.txt"], "is there already"),
        (["--max_seq_length", "4"], "max_seq_length is 4"),
        (["--masked_lm_prob", "15"], "masked_lm_prob is 15"),
        (["--jobs", "0"], "jobs is 0"),
        (["--part", "0/3"], "part 0/3"),
        (["--part", "4/3"], "part 4/3"),
        (["--part", "1"], "--part is '1'"),
        (["--part", "1/2"], "fewer calls than parts"),
        (["--text", "text.txt", "text.txt"], "named twice"),
        (["--text", "text.txt", "copy.txt"], "copy.txt is a copy of text.txt"),
        (["--text", "text.txt", "--vocab", "vocab.txt", "--out", "text.txt/data"], "text.txt"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(
    tmp_path: Path,
    text: Path,
    vocab: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "copy.txt").write_bytes(text.read_bytes())
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    given = {"--text": [text.name], "--vocab": [vocab.name], "--out": ["data"]}
    while arguments:
        stop = next((index for index, word in enumerate(arguments[1:], 1) if word.startswith("--")), len(arguments))
        given[arguments[0]], arguments = arguments[1:stop], arguments[stop:]
    assert run(monkeypatch, "prepare", *(word for flag, values in given.items() for word in (flag, *values))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(tmp_path.iterdir()) == before


def test_from_wikiextractors_files_to_an_evaluation_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab = REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt"
    texts = tmp_path / "text"
    settings = ["--sentences", "plain", "--part-bytes", 20_000]
    inputs = Path(__file__).parent / "text" / "wikipedia" / "text"
    assert run(monkeypatch, "extract", inputs, "--out", texts, *settings) == 2
    error = capsys.readouterr().err
    assert "are to be held out; use fewer evaluation_articles" in error
    assert error.count("\n") == 1
    assert not texts.exists()
    assert run(monkeypatch, "extract", inputs, "--out", texts, "--evaluation-articles", 9, *settings, "--jobs", 2) == 0
    printed = capsys.readouterr().out
    parts = sorted(texts.glob("part-*"))
    assert f"in {len(parts)} part(s), 9 held out in eval.txt" in printed
    assert run(monkeypatch, "prepare", "--text", *parts, "--vocab", vocab, "--out", tmp_path / "train") == 0
    assert run(monkeypatch, "prepare", "--text", texts / "eval.txt", "--vocab", vocab, "--out", tmp_path / "all") == 0
    assert run(monkeypatch, "pick-evaluation", tmp_path / "all", "--out", tmp_path / "eval", "--samples", 20) == 0
    assert run(monkeypatch, "verify", tmp_path / "train") == 0
    assert len(open_dataset(tmp_path / "eval")) == 20


def test_a_part_can_be_verified_and_parts_are_merged(
    tmp_path: Path, text: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.txt"
    more.write_text("w1 w2 w3\nw4 w5\n")
    for part in (1, 2):
        base = ["prepare", "--text", text, more, "--vocab", vocab, *FLAGS]
        assert run(monkeypatch, *base, "--out", tmp_path / str(part), "--part", f"{part}/2") == 0
        assert f"part {part}/2: join the parts by merge" in capsys.readouterr().out
    assert run(monkeypatch, "verify", tmp_path / "2") == 0
    assert "part 2/2 of a data set" in capsys.readouterr().out
    assert run(monkeypatch, "merge", tmp_path / "1", "--out", tmp_path / "out") == 2
    assert "part 2/2 is missing" in capsys.readouterr().err
    assert run(monkeypatch, "merge", tmp_path / "2", tmp_path / "1", "--out", tmp_path / "out") == 0
    assert run(monkeypatch, "verify", tmp_path / "out") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "absent"],
        ["dump", "absent.hdf5", "--out", "x.npz"],
        ["dump", "--out", "x"],
        ["merge", "absent", "--out", "x"],
        ["merge", "--out", "x"],
        ["index", "absent", "--vocab", "x"],
        ["shuffle", "absent", "--out", "x", "--shards", "2"],
        ["convert", "absent", "--out", "x", "--to", "fixed"],
        ["pick-evaluation", "absent", "--out", "x"],
    ],
)
def test_reading_mistakes_get_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_by_verify_and_dump(
    tmp_path: Path, text: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert run(monkeypatch, "prepare", "--text", text, "--vocab", vocab, "--out", out) == 0
    shard = out / "part_00000_of_00001.hdf5"
    shard.write_bytes(shard.read_bytes()[:-1000])
    for arguments in (["verify", out], ["dump", shard, "--out", tmp_path / "x.npz"]):
        capsys.readouterr()
        assert run(monkeypatch, *arguments) == 2
        assert f"error: {shard}" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


def test_a_full_disk_gets_one_line_and_leaves_nothing(tmp_path: Path, text: Path, vocab: Path) -> None:
    out = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-m", "dataloading", "prepare", "--text", text, "--vocab", vocab, "--out", out],
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


def test_the_manifest_tells_where_the_data_came_from(
    tmp_path: Path, text: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "prepare", "--text", text, "--vocab", vocab, "--out", tmp_path / "data") == 0
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    assert manifest["samples"] == manifest["shards"][0]["samples"] > 0
    assert manifest["info"]["options"]["random_seed"] == 12345
    assert len(manifest["info"]["sources"][text.as_posix()]) == 64


def test_dump_of_a_folder_reads_its_shards(
    tmp_path: Path, text: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.txt"
    more.write_text("w1 w2 w3\nw4 w5\n\nw6 w7\nw8\n")
    made = tmp_path / "made"
    assert run(monkeypatch, "prepare", "--text", text, more, "--vocab", vocab, "--out", made, *FLAGS) == 0
    shards = sorted(made.glob("*.hdf5"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for shard in shards:
        (bare / shard.name).symlink_to(shard)
    capsys.readouterr()
    arrays = []
    for number, named in enumerate((shards, [made], [bare], [bare / shards[0].name, bare / shards[1].name])):
        out = tmp_path / f"{number}.npz"
        assert run(monkeypatch, "dump", *named, "--out", out) == 0
        assert capsys.readouterr().out.endswith(" samples of 2 shard(s)\n")
        arrays.append(np.load(out, allow_pickle=False))
    for other in arrays[1:]:
        for name in arrays[0].files:
            np.testing.assert_array_equal(other[name], arrays[0][name])
    (tmp_path / "empty").mkdir()
    assert run(monkeypatch, "dump", tmp_path / "empty", "--out", tmp_path / "none.npz") == 2
    assert "holds no files; expected shards" in capsys.readouterr().err
