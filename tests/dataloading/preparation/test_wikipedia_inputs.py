"""``python -m dataloading wikipedia``: which files it finds, and how it names missing, wrong and unusable files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dataloading.preparation.mlcommons import CHECKPOINT, SOURCES, how_to_download
from tests.conftest import REPOSITORY
from tests.dataloading.conftest import Run
from tests.dataloading.preparation.stand_in import ARTICLES, StandIn, results

pytestmark = pytest.mark.usefixtures("same_machine")

INDEX = "model.ckpt-28252.index"
CHECKPOINTS = REPOSITORY / "tests" / "bert" / "checkpoints" / "tf_bundles"


@pytest.mark.parametrize(
    ("checkpoint", "stated", "reason"),
    [
        pytest.param("tf1_sliced", '{"num_attention_heads": 2}', "partitioned", marks=pytest.mark.slow),
        pytest.param("tf1", None, "does not state the attention heads; expected tf1_ckpt/", marks=pytest.mark.slow),
        *(("tf1", stated, "bert_config.json: ") for stated in ("", "{", "[]")),
        *(
            ("tf1", f'{{"num_attention_heads": {heads}}}', f"num_attention_heads is {found}; expected")
            for heads, found in (('"2"', "'2'"), ("true", "True"), ("0", "0"), ("[]", "[]"))
        ),
    ],
)
def test_an_unusable_checkpoint_is_refused_with_the_reason(
    run: Run, tmp_path: Path, checkpoint: str, stated: str | None, reason: str
) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    for path in CHECKPOINTS.glob(f"{checkpoint}.*"):
        shutil.copy(path, given / path.name.replace(checkpoint, "model.ckpt-28252"))
    if stated is not None:
        (given / "bert_config.json").write_text(stated)
    (tmp_path / "empty.md5").touch()
    said = run("wikipedia", given, "--out", out, "--checksums", tmp_path / "empty.md5", fails=True)
    assert reason in said
    assert "--num-attention-heads" not in said
    is_tried = reason.startswith(("partitioned", "does not state"))
    assert ("17,371 bytes" in said.partition("error: ")[2]) is out.exists() is is_tried
    assert not (out / CHECKPOINT).exists()


def test_results_can_be_made_in_several_calls_with_different_inputs(
    run: Run, stand_in: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
    out, only = tmp_path / "out", tmp_path / "only"
    base = ["wikipedia", only, "--out", out, "--shards", 3, "--checksums", stand_in.checksums]
    only.mkdir()
    for word, kind in ((only, ""), (out, "; files in --out are not read")):
        out.mkdir(exist_ok=True)
        said = run("wikipedia", word, "--out", out, fails=True).partition("error: ")[2]
        assert said == f"{word}: none of MLCommons' files found{kind}\n"
    shutil.copy(stand_in.text / "eval.txt", only)
    assert "error: vocab.txt is missing, without which no samples can be made\n" in run(*base, fails=True)
    shutil.copy(stand_in.files / "vocab.txt", only)
    run(*base, status=1)
    assert {path.name for path in out.iterdir()} == {"vocab.txt", "evaluation", "preparation"}
    # The first call had only the evaluation text and the vocabulary. Give the second call only the training text.
    (only / "eval.txt").unlink()
    (only / "vocab.txt").unlink()
    for path in stand_in.text.glob("part-*"):
        shutil.copy(path, only)
    evaluation = (out / "evaluation" / "manifest.json").stat().st_ino
    run(*base, status=1)
    assert (out / "evaluation" / "manifest.json").stat().st_ino == evaluation
    assert results(out) == whole


def swap(own: StandIn) -> None:
    other, content = own.part.with_name("part-00002-of-00003"), own.part.read_bytes()
    own.part.write_bytes(other.read_bytes())
    other.write_bytes(content)


def damage(own: StandIn) -> None:
    for path in (own.files / "vocab.txt", own.text / "eval.txt"):
        path.write_bytes(path.read_bytes()[:-2] + b"?\n")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda own: own.part.unlink(), "the text lacks part-00001-of-00003; download"),
        (lambda own: shutil.copy(own.part, own.text / "part-00000-of-00004"), "parts of texts with 3 and 4 parts"),
        (lambda own: shutil.copy(own.part, own.text / "part-00003-of-00003"), "and part-00003-of-00003 is not one"),
        (lambda own: shutil.copy(own.text / "eval.txt", own.files), "eval.txt is in {own.files} and in {own.text}; n"),
        (lambda own: (own.files / INDEX).touch(), "lacks {own.files}/model.ckpt-28252.data-00000-of-00001 (4,0"),
        (lambda own: [(each / INDEX).touch() for each in (own.files, own.text)], "are two checkpoints"),
        (lambda own: own.part.write_bytes(b""), "1 file with the wrong content: {own.part} (MD5 d41d8cd98f00b204e"),
        (swap, "2 files with the wrong content: {own.part} (MD5 "),
        (damage, "2 files with the wrong content: {own.files}/vocab.txt (MD5 "),
        (lambda own: shutil.rmtree(own.files), "{own.files}: no such folder; name"),
        (lambda own: (own.part.unlink(), os.mkfifo(own.part)), "{own.part} is a broken link, a pipe or a device"),
    ],
)
def test_missing_ambiguous_and_wrong_files_are_rejected(
    run: Run, own: StandIn, tmp_path: Path, change: Callable[[StandIn], object], named: str
) -> None:
    change(own)
    command = ["wikipedia", own.files, own.text, "--out", tmp_path / "out", "--checksums", own.checksums]
    assert named.format(own=own) in run(*command, fails=True)
    assert not (tmp_path / "out" / "evaluation").exists()


def test_one_error_names_all_missing_and_wrong_files(run: Run, own: StandIn, tmp_path: Path) -> None:
    given, out, none = tmp_path / "given", tmp_path / "out", tmp_path / "none"
    (given / "tf1_ckpt").mkdir(parents=True)
    (given / "up").symlink_to(given)
    (index := given / "tf1_ckpt" / INDEX).touch()
    shutil.copy(own.part, given)
    *missing, error = run("wikipedia", given, none, "--out", out, fails=True).splitlines()
    assert missing[2:] == [
        f"missing: {SOURCES['vocab.txt']}, for {out / 'vocab.txt'}",
        f"missing: {SOURCES['evaluation']}, for {out / 'evaluation'}",
        *how_to_download(SOURCES.values()),
    ]
    data = index.with_suffix(".data-00000-of-00001")
    expected = (
        *(f"error: 5 problems: {none}: no such folder", f"the checkpoint lacks {data} (4,034,713,312 bytes); download"),
        *("the text lacks part-00000-of-00003, part-00002-of-00003; download", f"{index} (0 bytes, expected 17,371)"),
        "vocab.txt is missing",
    )
    assert all(named in fault for fault, named in zip(error.split(" | "), expected, strict=True)), error
    assert not out.exists()
    shutil.copy(own.files / "vocab.txt", none)
    words = ["wikipedia", none, "--out", none, "--shards", 0, "--part", "1/2", "--checksums", own.checksums]
    assert run(*words, fails=True).partition("error: ")[2].split(" | ") == [
        f"4 problems: {none}: a file, expected its folder; name the folders that the downloader made",
        "--part divides the work on the text, and there is no text; leave out --part",
        "--shards is 0; expected at least 1",
        f"--out {none} is a file; expected a folder\n",
    ]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("given/model.ckpt-28252.index", b"_CHECKPOINTABLE_OBJECT_GRAPH", "model.ckpt-28252 is a TF2 checkpoint"),
        ("tf2_ckpt/model.ckpt-28252.data-00000-of-00001", b"", "model.ckpt-28252 is a TF2 checkpoint"),
        ("given/bert_model.ckpt.index", b"", "bert_model.ckpt is another checkpoint"),
        ("given/model.safetensors", b"", "model.safetensors is not a TensorFlow checkpoint"),
    ],
)
def test_the_error_for_another_checkpoint_names_the_expected_files(
    run: Run, tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (folder := (tmp_path / name).parent).mkdir()
    (tmp_path / name).write_bytes(content)
    said, _, error = run("wikipedia", folder, "--out", tmp_path / "out", fails=True).partition("error: ")
    assert error == f"{folder}: none of MLCommons' files found; {folder / why}; expected {SOURCES[CHECKPOINT]}\n"
    missing = [f"missing: {SOURCES[name]}, for {tmp_path / 'out' / name}" for name in SOURCES]
    missing[1] += f"; {folder / why}"
    assert said.splitlines()[:4] == missing


@pytest.mark.parametrize(
    ("text", "lost", "status"),
    [
        ("я ты он она\n" * 300, "[UNK]", 2),
        ("word " * 20_000, "truncated", 2),
        ("word я house он the she\n" * 300, "[UNK]", 1),
    ],
    ids=["unknown", "truncated", "a tenth unknown"],
)
def test_messages_about_lost_text_name_no_options(
    run: Run, own: StandIn, tmp_path: Path, text: str, lost: str, status: int
) -> None:
    own.part.write_text(text)
    (own.text / f"{own.text.name}.md5").unlink()
    (own.text / "eval.txt").unlink()
    (tmp_path / "empty.md5").touch()
    words = ["wikipedia", own.files, own.text, "--out", tmp_path / "out", "--checksums", tmp_path / "empty.md5"]
    said = run(*words, "--shards", 3, status=status).partition("error: " if status == 2 else "warning: train: ")[2]
    assert "% of the tokens" in said
    assert lost in said
    assert said.endswith("; expected the benchmark's text and vocab.txt: download both again\n")
    assert "--" not in said


def test_articles_are_ignored_if_mlcommons_text_is_given(run: Run, own: StandIn, tmp_path: Path) -> None:
    shutil.copytree(ARTICLES, own.files / "articles")
    for path in own.text.glob("part-*"):
        path.unlink()
    # This fails, because the stand-in files differ from the published files.
    said = run("wikipedia", own.files, own.text, "--out", tmp_path / "out", fails=True)
    assert f", for {tmp_path / 'out' / 'train'}" in said
    first = own.files / "articles" / "AA" / "wiki_00"
    assert f"found: WikiExtractor's files (not used beside MLCommons' text), {first} ... (4 files), 31.1 kB" in said
