"""``python -m dataloading wikipedia``, run on small replacements for MLCommons' downloads."""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.configuration.recipes import RECIPES
from console.files import lock_file
from dataloading.__main__ import main
from dataloading.dataset.folder import open_dataset
from dataloading.dataset.rewrite import shuffle
from dataloading.options import PretrainingOptions
from dataloading.preparation import wikipedia
from dataloading.preparation.mlcommons import CHECKPOINT, SOURCES
from dataloading.preparation.prepare import Job, prepare
from tests.conftest import REPOSITORY
from tests.dataloading.conftest import Run
from tests.dataloading.preparation.stand_in import PARTS, StandIn, write_stand_in


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


def arguments(given: StandIn, out: Path, *more: object) -> list[object]:
    """Return the command's arguments with the text and the vocabulary but without a checkpoint."""
    vocabulary = out.parent / "vocabulary"
    vocabulary.mkdir(exist_ok=True)
    shutil.copy2(given.files / "vocab.txt", vocabulary)
    return ["wikipedia", vocabulary, given.text, "--out", out, "--shards", 3, "--checksums", given.checksums, *more]


def results(out: Path) -> dict[str, object]:
    """Return the vocabulary, and for each data set its metadata and the digests of its shards and source texts."""
    found: dict[str, object] = {"vocab.txt": (out / "vocab.txt").read_bytes()}
    for name in ("train", "evaluation"):
        dataset = open_dataset(out / name)
        dataset.verify()
        digests = [(shard.name, shard.digest) for shard in dataset.shards]
        found[name] = dataset.info.without_sources(), digests, sorted(dataset.info.sources.values())
    return found


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
    wikipedia.EVALUATION_SAMPLES = 300  # another test makes all 10,000, which take most of the command's time here
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


@pytest.mark.slow
def test_both_downloads_make_what_the_recipes_expect(run: Run, stand_in: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "wikipedia"
    (out / "preparation").mkdir(parents=True)
    (out / "preparation" / ".left by a killed process.0.partial").touch()
    command = ["wikipedia", stand_in.files, stand_in.text, "--out", out, "--shards", 3, "--jobs", 2]
    printed = run(*command, "--checksums", stand_in.checksums)
    data = RECIPES["h100_1x8"]().data
    assert data.initial_checkpoint is not None
    for path in (data.train, data.evaluation, data.vocab, data.initial_checkpoint):
        assert (out / path.relative_to("data/wikipedia")).exists()
    assert (out / "vocab.txt").read_bytes() == (stand_in.files / "vocab.txt").read_bytes()
    assert "missing" not in printed
    counts = [f"{out / name}: {len(open_dataset(out / name)):,} samples, verified" for name in ("train", "evaluation")]
    for said in ("expected time with --jobs 2", "[ 99 %]", "GB are free", *counts):
        assert said in printed
    for key, name in (("train", "train"), ("initial-checkpoint", "phase1.safetensors")):
        assert printed.count(f"--data.{key} {out / name}") == 2  # for bert.evaluate and for the dry run
    assert {path.suffix or path.name for path in (out / "preparation").iterdir()} == {".json", "lock"}

    texts = tuple(stand_in.text / f"part-{index:05d}-of-{PARTS:05d}" for index in range(PARTS))
    samples = prepare(Job(texts, out / "vocab.txt", PretrainingOptions()), tmp_path / "samples")
    expected = shuffle(samples, tmp_path / "shuffled", shards=3, seed=24)
    assert [shard.digest for shard in open_dataset(out / "train").shards] == [shard.digest for shard in expected.shards]
    of_eval = prepare(Job((stand_in.text / "eval.txt",), out / "vocab.txt", PretrainingOptions()), tmp_path / "all")
    picked = np.array([int(index * (len(of_eval) / 10_000)) for index in range(10_000)])
    evaluation = open_dataset(out / "evaluation")
    assert evaluation.take(np.arange(10_000)).digest() == of_eval.take(picked).digest()
    assert len(evaluation.shards) == 1

    before = {path: path.stat().st_ino for path in out.rglob("*") if "preparation" not in path.parts}
    again = run(*command, "--checksums", stand_in.checksums)
    assert again.count("exists already") == 3
    assert "expected time" not in again
    assert {path: path.stat().st_ino for path in out.rglob("*") if "preparation" not in path.parts} == before


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_refused_with_the_reason(run: Run, tmp_path: Path) -> None:
    bundles = REPOSITORY / "tests" / "bert" / "checkpoints" / "tf_bundles"
    for path in bundles.glob("tf1_sliced.*"):
        (tmp_path / "tf1_ckpt").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "tf1_ckpt" / path.name.replace("tf1_sliced", "model.ckpt-28252"))
    (tmp_path / "empty.md5").touch()
    (tmp_path / "tf1_ckpt" / "bert_config.json").write_text('{"num_attention_heads": 2}')
    words = ["wikipedia", tmp_path / "tf1_ckpt", "--out", tmp_path / "out", "--checksums", tmp_path / "empty.md5"]
    said = run(*words, fails=True)
    assert "partitioned" in said
    assert "17,371 bytes" in said
    assert not (tmp_path / "out" / "phase1.safetensors").exists()


def test_inputs_come_in_any_mixture(run: Run, stand_in: StandIn, whole: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = ["--out", out, "--shards", 3, "--checksums", stand_in.checksums]
    assert "vocab.txt is missing" in run("wikipedia", stand_in.text, *base, fails=True)
    only = tmp_path / "only"
    only.mkdir()
    assert "none of MLCommons' files" in run("wikipedia", only, *base, fails=True)
    shutil.copy(stand_in.text / "eval.txt", only)
    shutil.copy(stand_in.files / "vocab.txt", only)
    assert child("wikipedia", only, *base) == 1
    assert {path.name for path in out.iterdir()} == {"vocab.txt", "evaluation", "preparation"}
    # The first call had only the evaluation text and the vocabulary. Give the second call only the training text.
    (only / "eval.txt").unlink()
    for path in stand_in.text.glob("part-*"):
        shutil.copy(path, only)
    evaluation = (out / "evaluation" / "manifest.json").stat().st_ino
    assert child("wikipedia", only, *base) == 1
    assert (out / "evaluation" / "manifest.json").stat().st_ino == evaluation
    assert results(out) == whole


def test_wrong_files_are_named_and_nothing_is_made(run: Run, own: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["wikipedia", own.files, own.text, "--out", out, "--checksums", own.checksums]
    evaluation, vocab = own.text / "eval.txt", own.files / "vocab.txt"
    first, other = own.part, own.text / own.part.name.replace("00001", "00002")
    contents = {path: path.read_bytes() for path in (first, other, evaluation, vocab)}
    flipped = bytearray(contents[first])
    flipped[100] ^= 1
    for wrong in (
        {first: bytes(flipped)},
        {first: contents[other], other: contents[first]},
        {vocab: contents[vocab] + b"x\n", evaluation: contents[evaluation][:-1]},
    ):
        for path, content in wrong.items():
            path.write_bytes(content)
        said = run(*command, fails=True).partition("error: ")[2]
        assert {path for path in contents if str(path) in said} == set(wrong)
        assert not {"train", "evaluation"} & {path.name for path in out.iterdir()}
        for path in wrong:
            path.write_bytes(contents[path])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda own: own.part.unlink(), "the text lacks part-00001-of-00003"),
        (lambda own: shutil.copy(own.part, own.text / "part-00000-of-00004"), "3 and 4 parts"),
        (lambda own: shutil.copy(own.text / "eval.txt", own.files), "eval.txt is in "),
        (lambda own: (own.files / "model.ckpt-28252.index").touch(), "model.ckpt-28252.data-00000-of-00001"),
        (lambda own: [(each / "model.ckpt-28252.index").touch() for each in (own.files, own.text)], "two checkpoints"),
        (lambda own: own.part.write_bytes(b""), "part-00001-of-00003"),
        (lambda own: shutil.rmtree(own.files), "no such folder"),
    ],
)
def test_an_incomplete_set_of_files_is_refused(
    run: Run, own: StandIn, tmp_path: Path, change: Callable[[StandIn], object], named: str
) -> None:
    change(own)
    command = ["wikipedia", own.files, own.text, "--out", tmp_path / "out", "--checksums", own.checksums]
    assert named in run(*command, fails=True)
    assert not (tmp_path / "out" / "evaluation").exists()


def test_all_that_is_missing_is_named_at_once(run: Run, own: StandIn, tmp_path: Path) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    (given / "tf1_ckpt").mkdir(parents=True)
    (given / "up").symlink_to(given)
    (given / "tf1_ckpt" / "model.ckpt-28252.index").touch()
    shutil.copy(own.part, given)
    said = run("wikipedia", given, tmp_path / "none", "--out", out, fails=True)
    sizes = ("vocab.txt (231,508", "eval.txt (32,851,144", "-of-00001 (4,034,713,312", "(0 bytes, expected 17,371)")
    for named in (*sizes, "part-00000-of-00003", "part-00002-of-00003", f"{tmp_path / 'none'}: no such folder"):
        assert named in said
    for download in ("input-files", "preprocessed-wikipedia-dataset"):
        assert f"https://training.mlcommons-storage.org/metadata/bert-{download}.uri" in said
    assert (out.exists(), " is in " in said) == (False, False)  # the link leads to no file a second time


@pytest.mark.parametrize("form", ["TF2 by content", "TF2 by folder", "another prefix", "Hugging Face"])
def test_another_checkpoint_is_named_with_the_files_that_were_expected(run: Run, tmp_path: Path, form: str) -> None:
    folder = tmp_path / ("tf2_ckpt" if form == "TF2 by folder" else "given")
    folder.mkdir()
    index = folder / ("bert_model.ckpt.index" if form == "another prefix" else "model.ckpt-28252.index")
    if form == "Hugging Face":
        (folder / "model.safetensors").touch()
    elif form == "TF2 by folder":
        index.with_suffix(".data-00000-of-00001").touch()
    else:
        index.write_bytes(b"_CHECKPOINTABLE_OBJECT_GRAPH" if form == "TF2 by content" else b"")
    path = folder / ("model.safetensors" if form == "Hugging Face" else index.stem)
    kind = {"another prefix": "another checkpoint", "Hugging Face": "not a TensorFlow checkpoint"}.get(form)
    why = f"{path} is {kind or 'a TF2 checkpoint'}"
    said, _, error = run("wikipedia", folder, "--out", tmp_path / "out", fails=True).partition("error: ")
    assert error == f"{folder}: none of MLCommons' files found; {why}; expected {SOURCES[CHECKPOINT]}\n"
    missing = [f"missing: {SOURCES[name]}, for {tmp_path / 'out' / name}" for name in SOURCES]
    missing[1] += f"; {why}"
    assert said.splitlines()[:4] == missing


@pytest.mark.parametrize("stated", ["", "{", "[]", '{"num_attention_heads": "2"}', '{"num_attention_heads": true}'])
@pytest.mark.slow
def test_the_number_of_attention_heads_comes_from_the_configuration(
    run: Run, stand_in: StandIn, tmp_path: Path, stated: str
) -> None:
    shutil.copytree(stand_in.files / "tf1_ckpt", tmp_path / "given")
    if stated:
        (tmp_path / "given" / "bert_config.json").write_text(stated)
    (tmp_path / "empty.md5").touch()
    words = ["wikipedia", tmp_path / "given", "--out", tmp_path / "out", "--checksums", tmp_path / "empty.md5"]
    said = run(*words, fails=True)
    assert "bert_config.json" in said
    assert "--num-attention-heads" not in said
    assert (tmp_path / "out").exists() is not bool(stated)  # a wrong file is refused before anything is made
    assert not (tmp_path / "out" / "phase1.safetensors").exists()


@pytest.mark.parametrize("text", ["я ты он она\n" * 300, "word " * 100_000], ids=["unknown", "truncated"])
def test_lost_text_names_no_options_of_other_commands(run: Run, own: StandIn, tmp_path: Path, text: str) -> None:
    own.part.write_text(text)
    (own.text / f"{own.text.name}.md5").unlink()
    (own.text / "eval.txt").unlink()
    (tmp_path / "empty.md5").touch()
    words = ["wikipedia", own.files, own.text, "--out", tmp_path / "out", "--checksums", tmp_path / "empty.md5"]
    said = run(*words, fails=True).partition("error: ")[2]
    assert "% of the tokens" in said
    assert "--" not in said


def test_articles_beside_other_text_do_not_pass_for_the_training_set(run: Run, own: StandIn, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "tests" / "dataloading" / "text" / "wikipedia" / "text", own.files / "articles")
    for path in own.text.glob("part-*"):
        path.unlink()
    said = run("wikipedia", own.files, own.text, "--out", tmp_path / "out", fails=True)  # the files are not published
    assert f", for {tmp_path / 'out' / 'train'}" in said


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
    assert {path.suffix or path.name for path in (out / "preparation").iterdir()} == {".json", "lock"}


def test_parts_make_the_same_and_the_last_one_makes_the_rest(
    stand_in: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part, status in (("3/3", 0), ("1/3", 0)):
        assert child(*arguments(stand_in, out, "--part", part)) == status
        assert {path.name for path in out.iterdir()} == {"vocab.txt", "preparation"}
    assert child(*arguments(stand_in, out, "--part", "2/3")) == 1  # 1 because no checkpoint is given
    assert results(out) == whole
    # A part that runs again, as in a requeued job, finds everything done.
    assert child(*arguments(stand_in, out, "--part", "1/3")) == 1
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


def test_a_part_does_not_wait_for_another_part_before_it_reads_the_text(stand_in: StandIn, tmp_path: Path) -> None:
    (work := tmp_path / "out" / "preparation").mkdir(parents=True)
    other = lock_file(work / "lock", shared=True)
    assert child(*from_articles(stand_in, tmp_path / "out", "--part", "1/2")) == 0
    os.close(other)


def test_articles_of_the_dump_are_made_text_in_parts_too(stand_in: StandIn, tmp_path: Path) -> None:
    made = []
    for name, parts in (("whole", [(), ()]), ("parts", [("--part", "2/2"), ("--part", "1/2")])):
        for part in parts:
            assert child(*from_articles(stand_in, tmp_path / name, *part)) in (0, 1)
        sets = {each: open_dataset(tmp_path / name / each) for each in ("train", "evaluation")}
        made.append({each: [shard.digest for shard in dataset.shards] for each, dataset in sets.items()})
        left = {path.name for path in (tmp_path / name / "preparation").iterdir() if path.suffix != ".json"}
        assert left == {"lock", "text.lock"}
    assert made[0] == made[1]


def from_articles(stand_in: StandIn, out: Path, *part: str) -> list[object]:
    """Return the command that makes text of articles, and the samples or a part of them."""
    articles = REPOSITORY / "tests" / "dataloading" / "text" / "wikipedia" / "text"
    (vocabulary := out.parent / "vocabulary").mkdir(exist_ok=True)
    shutil.copy(stand_in.files / "vocab.txt", vocabulary)
    words = ["wikipedia", articles, vocabulary, "--out", out, "--shards", 2, *part]
    options = ["--sentences", "plain", "--evaluation-articles", "9", "--part-bytes", "20000"]
    return [*words, "--checksums", stand_in.checksums, *options]


def test_articles_without_text_and_compressed_articles_are_refused(run: Run, own: StandIn, tmp_path: Path) -> None:
    articles = tmp_path / "articles" / "AA"
    articles.mkdir(parents=True)
    options = ["--out", tmp_path / "out", "--sentences", "plain", "--checksums", own.checksums]
    assert "vocab.txt" in run("wikipedia", tmp_path / "articles", *options, fails=True)
    words = ["wikipedia", tmp_path / "articles", own.files, *options]
    (articles / "wiki_00").write_text('<doc id="0" url="u" title="A">\nA\n\n\n</doc>\n')
    assert "no article with text" in run(*words, "--evaluation-articles", "0", fails=True)
    (articles / "wiki_01.bz2").write_bytes(b"BZh9")
    assert "wiki_01.bz2: 1 of 2 input files are compressed" in run(*words, fails=True)
    assert not (tmp_path / "out" / "train").exists()


def test_what_was_made_from_something_else_is_left_alone(
    run: Run, own: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert child(*arguments(own, out)) == 1
    assert f"{out / 'train'} exists and was not made from these" in run(*arguments(own, out, "--shards", 2), fails=True)
    empty = tmp_path / "empty.md5"
    empty.touch()
    (own.text / f"{own.text.name}.md5").unlink()
    own.part.write_bytes(own.part.read_bytes() + b"One more sentence.\n")
    assert f"{out / 'train'} exists" in run(*arguments(own, out, "--checksums", empty), fails=True)
    assert results(out) == whole
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "evaluation").mkdir(parents=True)
    assert f"{elsewhere / 'evaluation'} exists" in run(*arguments(own, elsewhere, "--checksums", empty), fails=True)
    assert list((elsewhere / "evaluation").iterdir()) == []


def test_one_process_works_in_a_folder_at_a_time(stand_in: StandIn, tmp_path: Path) -> None:
    work = tmp_path / "out" / "preparation"
    work.mkdir(parents=True)
    alone = lock_file(work / "lock")
    assert child(*arguments(stand_in, tmp_path / "out")) == 2
    assert child(*arguments(stand_in, tmp_path / "out", "--part", "1/3")) == 0  # the other process makes all parts
    os.close(alone)
    shared = lock_file(work / "lock", shared=True)
    assert child(*arguments(stand_in, tmp_path / "out")) == 2
    assert child(*arguments(stand_in, tmp_path / "out", "--part", "1/3")) == 0
    os.close(shared)
