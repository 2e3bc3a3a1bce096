"""``python -m dataloading wikipedia``, run on small replacements for MLCommons' downloads."""

import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bert.configuration.recipes import RECIPES
from console.files import lock_file
from dataloading import jobs
from dataloading.__main__ import main
from dataloading.dataset import known
from dataloading.dataset.folder import open_dataset
from dataloading.dataset.rewrite import shuffle
from dataloading.options import PretrainingOptions
from dataloading.preparation import mlcommons, wikipedia
from dataloading.preparation.mlcommons import CHECKPOINT, SOURCES, how_to_download
from dataloading.preparation.prepare import Job, prepare
from tests.conftest import REPOSITORY
from tests.dataloading.conftest import Run
from tests.dataloading.preparation.stand_in import PARTS, StandIn, write_stand_in

INDEX = "model.ckpt-28252.index"
ARTICLES = REPOSITORY / "tests" / "dataloading" / "text" / "wikipedia" / "text"
CHECKPOINTS = REPOSITORY / "tests" / "bert" / "checkpoints" / "tf_bundles"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return write_stand_in(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture
def own(stand_in: StandIn, tmp_path: Path) -> StandIn:
    """Copy of the downloads without checkpoints, for a test that damages files."""
    files, text = (shutil.copytree(each, tmp_path / each.name) for each in (stand_in.files, stand_in.text))
    for form in ("tf1_ckpt", "tf2_ckpt"):
        shutil.rmtree(files / form)
    return StandIn(files, text, stand_in.checksums)


@pytest.fixture(scope="module")
def whole(stand_in: StandIn, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The command's results from one run without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert child(*arguments(stand_in, out)) == 1  # 1 because no checkpoint is given
    return results(out)


@pytest.fixture(autouse=True)
def _same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock stand still, and make few evaluation samples: all 10,000 take most of the command's time."""
    monkeypatch.setattr(wikipedia, "EVALUATION_SAMPLES", 300)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7_000_000))


def arguments(given: StandIn, out: Path, *more: object) -> list[object]:
    """Return the command's arguments with the text and the vocabulary but without a checkpoint."""
    vocabulary = out.parent / "vocabulary"
    vocabulary.mkdir(exist_ok=True)
    shutil.copy2(given.files / "vocab.txt", vocabulary)
    return ["wikipedia", vocabulary, given.text, "--out", out, "--shards", 3, "--checksums", given.checksums, *more]


def from_articles(stand_in: StandIn, out: Path, *part: str) -> list[object]:
    """Return the command that makes text of articles, and the samples or a part of them."""
    (vocabulary := out.parent / "vocabulary").mkdir(exist_ok=True)
    shutil.copy(stand_in.files / "vocab.txt", vocabulary)
    words = ["wikipedia", ARTICLES, vocabulary, "--out", out, "--shards", 2, *part]
    options = ["--sentences", "plain", "--evaluation-articles", "9", "--part-bytes", "20000"]
    return [*words, "--checksums", stand_in.checksums, *options]


def results(out: Path) -> dict[str, object]:
    """Return the vocabulary, and for each data set its metadata and the digests of its shards and source texts."""
    found: dict[str, object] = {"vocab.txt": (out / "vocab.txt").read_bytes()}
    for name in ("train", "evaluation"):
        dataset = open_dataset(out / name)
        dataset.verify()
        digests = [(shard.name, shard.digest) for shard in dataset.shards]
        found[name] = dataset.info.without_sources(), digests, sorted(dataset.info.sources.values())
    return found


def left_in(out: Path) -> set[str]:
    return {path.suffix or path.name for path in (out / "preparation").iterdir()}


FRESH = multiprocessing.get_context("forkserver")
"""Fork server: its children inherit neither this process's objects nor locks that its threads hold."""
FRESH.set_forkserver_preload(
    ["dataloading.preparation.wikipedia", "tests.dataloading.preparation.compiled", "tests.conftest"]
)


def child(*words: object, prepare_child: Callable[[], object] = dict) -> int:
    """Run the command in a new process and return its exit status, which is negative after a signal."""
    process = FRESH.Process(target=run_command, args=(prepare_child, [str(word) for word in words]))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_command(prepare_child: Callable[[], object], words: list[str]) -> None:
    prepare_child()
    wikipedia.EVALUATION_SAMPLES = 300
    sys.argv = ["dataloading", *words]
    sys.exit(main())


def die_at_third_name(out: Path, before: bool) -> None:
    """Make this process kill itself just before or just after it renames its third file to a name in ``out``."""
    names = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal names
        counted = names
        if event == "os.rename":
            target = Path(os.fsdecode(arguments[1]))
            # Do not count files in hidden folders: they count when the whole folder is renamed.
            names += out in target.parents and not any(part[0] == "." for part in target.parts)
        if (names if before else counted) == 3 and event != "os.kill":
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def progress(said: list[str]) -> str:
    """Join the percents that were reported for each stage."""
    found = [match for line in said if (match := re.fullmatch(r"\[ *(\d+) %\] (\S+), about 0:0\d left", line))]
    stages = groupby(found, key=lambda match: match[2])
    return "; ".join(f"{stage} {' '.join(match[1] for match in matches)}" for stage, matches in stages)


@pytest.mark.slow
def test_both_downloads_make_what_the_recipes_expect(
    run: Run, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wikipedia, "EVALUATION_SAMPLES", 10_000)
    monkeypatch.setattr(mlcommons, "_STARTING_SECONDS", 0.02)
    out = tmp_path / "wikipedia"
    for place, name in ((out / "preparation", ".left by a killed process"), (out, ".vocab.txt")):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.0.partial").touch()
    command = ["wikipedia", stand_in.files, stand_in.text, "--out", out, "--shards", 3, "--jobs", 2]
    said = run(*command, "--checksums", stand_in.checksums).splitlines()
    data = RECIPES["h100_1x8"]().data
    assert data.initial_checkpoint is not None
    for path in (data.train, data.evaluation, data.vocab, data.initial_checkpoint):
        assert (out / path.relative_to("data/wikipedia")).exists()
    assert (out / "vocab.txt").read_bytes() == (stand_in.files / "vocab.txt").read_bytes()
    assert (left_in(out), list(out.glob(".*"))) == ({".json", "lock"}, [])

    found = [
        f"found: vocabulary, {stand_in.files / 'vocab.txt'}, 5.5 kB",
        f"found: checkpoint, {stand_in.files / 'tf1_ckpt' / 'model.ckpt-28252.index'} ... (2 files), 25.9 kB",
        f"found: text, {stand_in.text / 'part-00000-of-00003'} ... (3 files), 123.4 kB",
        f"found: evaluation text, {stand_in.text / 'eval.txt'}, 173.9 kB",
    ]
    stages = "check 0:00, phase1.safetensors 0:00, evaluation 0:00, samples 0:00, train 0:00, verify 0:00"
    needed = [
        f"to make in {out}: 1.4 MB; meanwhile 6.0 MB are needed, and 7.0 MB are free",
        f"expected time with --jobs 2 on 4 cores: 0:00 ({stages})",
    ]
    assert said[:6] == [*found, *needed]
    # The stages take 0.3, 20.1, 29.6, 10.5, 14.8 and 3.8 ms, so they end at 0, 25, 63, 76, 95 and 100 %.
    assert progress(said) == (
        "check 0; phase1.safetensors 25; evaluation 63; samples 67 72 76; train 78 80 82 84 86 88 91 93 95; verify 96 100"
    )
    sets = {name: open_dataset(out / name) for name in ("train", "evaluation")}
    names = {"train": "train", "evaluation": "evaluation", "vocab": "vocab.txt", "initial-checkpoint": CHECKPOINT}
    flags = " ".join(f"--data.{key} {out / name}" for key, name in names.items())
    ended = [
        *(f"{out / name}: {len(dataset):,} samples, verified" for name, dataset in sets.items()),
        f"accuracy before training: python -m bert.evaluate h100_1x1 --expect 0.34085 {flags}",
        f"whether a run would start: python -m bert.train h100_1x8 --dry-run {flags}",
    ]
    verified = [f"{name}: {line}" for name, dataset in sets.items() for line in known.verify(dataset)]
    assert [line for line in said[6:] if not line.startswith("[")] == [*verified, *ended]

    texts = tuple(stand_in.text / f"part-{index:05d}-of-{PARTS:05d}" for index in range(PARTS))
    samples = prepare(Job(texts, out / "vocab.txt", PretrainingOptions()), tmp_path / "samples")
    expected = shuffle(samples, tmp_path / "shuffled", shards=3, seed=24)
    assert [shard.digest for shard in sets["train"].shards] == [shard.digest for shard in expected.shards]
    of_eval = prepare(Job((stand_in.text / "eval.txt",), out / "vocab.txt", PretrainingOptions()), tmp_path / "all")
    picked = np.array([int(index * (len(of_eval) / 10_000)) for index in range(10_000)])
    assert sets["evaluation"].take(np.arange(10_000)).digest() == of_eval.take(picked).digest()
    assert len(sets["evaluation"].shards) == 1

    before = {path: path.stat().st_ino for path in out.rglob("*") if "preparation" not in path.parts}
    exist = [f"{out / name} exists already" for name in (CHECKPOINT, "evaluation", "train")]
    assert run(*command, "--checksums", stand_in.checksums).splitlines() == [*found, *exist, *ended]
    assert {path: path.stat().st_ino for path in out.rglob("*") if "preparation" not in path.parts} == before


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
def test_a_checkpoint_that_cannot_be_converted_is_refused_with_the_reason(
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


def test_inputs_come_in_any_mixture(run: Run, stand_in: StandIn, whole: dict[str, object], tmp_path: Path) -> None:
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
def test_an_incomplete_set_of_files_is_refused(
    run: Run, own: StandIn, tmp_path: Path, change: Callable[[StandIn], object], named: str
) -> None:
    change(own)
    command = ["wikipedia", own.files, own.text, "--out", tmp_path / "out", "--checksums", own.checksums]
    assert named.format(own=own) in run(*command, fails=True)
    assert not (tmp_path / "out" / "evaluation").exists()


def test_all_that_is_missing_or_wrong_is_named_at_once(run: Run, own: StandIn, tmp_path: Path) -> None:
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
    again = "again, which fetches missing files"
    assert error.split(" | ") == [
        f"error: 5 problems: {none}: no such folder; name the folders that the downloader made",
        f"the checkpoint lacks {index.with_suffix('.data-00000-of-00001')} (4,034,713,312 bytes); download "
        f"bert-input-files {again}",
        "the text lacks part-00000-of-00003, part-00002-of-00003; download bert-preprocessed-wikipedia-dataset "
        f"{again}",
        f"1 file with the wrong content: {index} (0 bytes, expected 17,371); delete and download again, or name the "
        "right MD5 sums by --checksums FILE",
        "vocab.txt is missing, without which no samples can be made",
    ]
    assert not out.exists()
    shutil.copy(own.files / "vocab.txt", none)
    words = ["wikipedia", none, "--out", none, "--shards", 0, "--part", "1/2", "--checksums", own.checksums]
    assert run(*words, fails=True).partition("error: ")[2].split(" | ") == [
        f"4 problems: {none}: a file, expected its folder; name the folders that the downloader made",
        "--part shares the work of making samples, and there is no text; leave it out",
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
def test_another_checkpoint_is_named_with_the_files_that_were_expected(
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
def test_lost_text_names_no_options_of_other_commands(
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


def test_articles_beside_other_text_do_not_pass_for_the_training_set(run: Run, own: StandIn, tmp_path: Path) -> None:
    shutil.copytree(ARTICLES, own.files / "articles")
    for path in own.text.glob("part-*"):
        path.unlink()
    said = run("wikipedia", own.files, own.text, "--out", tmp_path / "out", fails=True)  # the files are not published
    assert f", for {tmp_path / 'out' / 'train'}" in said
    first = own.files / "articles" / "AA" / "wiki_00"
    assert f"found: WikiExtractor's files (not used beside MLCommons' text), {first} ... (4 files), 31.1 kB" in said


@pytest.mark.slow
def test_it_goes_on_after_a_kill_at_every_step(stand_in: StandIn, whole: dict[str, object], tmp_path: Path) -> None:
    """Kill run after run at its third renaming of a file, until a run has fewer than three files left to make."""
    out, runs = tmp_path / "out", 0
    kept: dict[str, int] = {}
    while True:
        status = child(*arguments(stand_in, out), prepare_child=partial(die_at_third_name, out, runs % 2 == 0))
        runs += 1
        for path in kept:
            assert (out / path).stat().st_ino == kept[path], f"{path} was made again"
        kept |= {
            str(path.relative_to(out)): path.stat().st_ino
            for path in [out / "vocab.txt", out / "evaluation" / "manifest.json", out / "train" / "manifest.json"]
            if path.exists()
        }
        if status != -signal.SIGKILL:
            break
        assert runs < 60
    assert status == 1
    assert runs > 5
    assert results(out) == whole
    assert left_in(out) == {".json", "lock"}


def test_parts_make_the_same_and_the_last_one_makes_the_rest(
    run: Run, stand_in: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part in ("3/3", "1/3"):
        said = run(*arguments(stand_in, out, "--part", part)).splitlines()
        assert said[-1] == f"part {part} is done; the process that completes the last part makes the rest"
        assert progress(said) == "check 0 2; samples 100"
        assert {path.name for path in out.iterdir()} == {"vocab.txt", "preparation"}
    run(*arguments(stand_in, out, "--part", "2/3"), status=1)  # 1 because no checkpoint is given
    assert results(out) == whole
    # A part that runs again, as in a requeued job, finds everything done.
    run(*arguments(stand_in, out, "--part", "1/3"), status=1)
    assert results(out) == whole


@pytest.mark.slow
def test_the_last_part_may_end_while_another_process_still_has_its_lock(
    stand_in: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert child(*arguments(stand_in, out, "--part", "1/3")) == 0
    last = partial(child, *arguments(stand_in, out, "--part", "3/3"))
    assert child(*arguments(stand_in, out, "--part", "2/3"), prepare_child=partial(before_unlocking, out, last)) == 1
    assert results(out) == whole


def before_unlocking(out: Path, act: Callable[[], object]) -> None:
    """Make this process call ``act`` just before it first closes the lock of ``out``."""
    close, lock = os.close, out / "preparation" / "lock"

    def acting_close(descriptor: int) -> None:
        if lock.exists() and os.path.samestat(os.fstat(descriptor), lock.stat()):
            os.close = close
            act()
        close(descriptor)

    os.close = acting_close


def test_articles_of_the_dump_are_made_text_in_parts_too(run: Run, stand_in: StandIn, tmp_path: Path) -> None:
    made = []
    for name, parts in (("whole", [((), 1), ((), 1)]), ("parts", [(("--part", "2/2"), 0), (("--part", "1/2"), 1)])):
        out = tmp_path / name
        for part, status in parts:
            (out / "preparation").mkdir(parents=True, exist_ok=True)
            other = lock_file(out / "preparation" / "lock", shared=True) if status == 0 else None
            said = run(*from_articles(stand_in, out, *part), status=status).splitlines()
            if other is not None:  # a part does not wait for another part before it reads the text
                os.close(other)
        sets = {each: open_dataset(out / each) for each in ("train", "evaluation")}
        made.append({each: [shard.digest for shard in dataset.shards] for each, dataset in sets.items()})
        assert left_in(out) == {".json", ".lock", "lock"}
        if name == "whole":  # the second run has nothing to make, not even text
            assert said[4] == f"{out / 'train'}: 754 samples, verified"
    assert made[0] == made[1]


def test_what_was_made_from_something_else_is_left_alone(
    run: Run, own: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
    out, elsewhere, empty = tmp_path / "out", tmp_path / "elsewhere", tmp_path / "empty.md5"
    otherwise = "exists and was not made from these inputs and settings; move it away, or name another --out"
    run(*arguments(own, out), status=1)
    assert f"{out / 'train'} {otherwise}" in run(*arguments(own, out, "--shards", 2), fails=True)
    empty.touch()
    (own.text / f"{own.text.name}.md5").unlink()
    own.part.write_bytes(own.part.read_bytes() + b"One more sentence.\n")
    said = run(*arguments(own, out, "--checksums", empty), fails=True)
    assert f"{out / 'train'} {otherwise}" in said
    assert "note: not compared, because in no list of MD5 sums: 5 files" in said
    assert results(out) == whole
    (elsewhere / "evaluation").mkdir(parents=True)
    assert f"{elsewhere / 'evaluation'} {otherwise}" in run(
        *arguments(own, elsewhere, "--checksums", empty), fails=True
    )
    assert list((elsewhere / "evaluation").iterdir()) == []
    (elsewhere / "vocab.txt").write_bytes((own.files / "vocab.txt").read_bytes() + b"x\n")
    assert f"{elsewhere / 'vocab.txt'} is another vocabulary than " in run(
        *arguments(own, elsewhere, "--checksums", empty), fails=True
    )


def test_one_process_works_in_a_folder_at_a_time(run: Run, stand_in: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "preparation").mkdir(parents=True)
    busy = f"error: {out}: process {os.getpid()} on host {socket.gethostname()} is at work there; wait for it, or name "
    for shared in (False, True):
        lock = lock_file(out / "preparation" / "lock", shared=shared)
        assert run(*arguments(stand_in, out), fails=True).endswith(f"{busy}another --out\n")
        # If the other process works alone, it makes all parts.
        said = run(*arguments(stand_in, out, "--part", "1/3")).splitlines()[-1]
        assert said.startswith("part 1/3 is done; another" if not shared else "part 1/3 is done; the process")
        os.close(lock)
