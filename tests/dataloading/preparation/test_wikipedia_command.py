"""``python -m dataloading wikipedia``: its results, also in parts, after a kill and beside other processes."""

import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.configuration.recipes import RECIPES
from console.files import lock_file
from dataloading.dataset import known
from dataloading.dataset.folder import open_dataset
from dataloading.dataset.rewrite import shuffle
from dataloading.options import PretrainingOptions
from dataloading.preparation import mlcommons, wikipedia
from dataloading.preparation.mlcommons import CHECKPOINT
from dataloading.preparation.prepare import Job, prepare
from tests.dataloading.conftest import Run
from tests.dataloading.preparation.stand_in import ARTICLES, PARTS, StandIn, arguments, child, results, write_stand_in

pytestmark = pytest.mark.usefixtures("same_machine")


def left_in(out: Path) -> set[str]:
    return {path.suffix or path.name for path in (out / "preparation").iterdir()}


def progress(said: list[str]) -> str:
    """Return the percentages that were reported for each stage."""
    found = [match for line in said if (match := re.fullmatch(r"\[ *(\d+) %\] (\S+), about 0:0\d left", line))]
    stages = groupby(found, key=lambda match: match[2])
    return "; ".join(f"{stage} {' '.join(match[1] for match in matches)}" for stage, matches in stages)


@pytest.mark.slow
def test_all_data_of_the_recipes_are_made_from_both_downloads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = write_stand_in(tmp_path)
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
        f"{out}: the results will take 1.4 MB; while they are made, 6.0 MB are needed, and 7.0 MB are free",
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
    exist = [f"{out / name} exists and is kept" for name in (CHECKPOINT, "evaluation", "train")]
    assert run(*command, "--checksums", stand_in.checksums).splitlines() == [*found, *exist, *ended]
    assert {path: path.stat().st_ino for path in out.rglob("*") if "preparation" not in path.parts} == before


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
def test_a_repeatedly_killed_command_continues_and_keeps_finished_results(
    stand_in: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
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


def test_the_runs_of_all_parts_together_give_the_results_of_a_whole_run(
    run: Run, stand_in: StandIn, whole: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part in ("3/3", "1/3"):
        said = run(*arguments(stand_in, out, "--part", part)).splitlines()
        assert said[-1] == f"part {part} is done; the process that completes the last part makes the other results"
        assert progress(said) == "check 0 2; samples 100"
        assert {path.name for path in out.iterdir()} == {"vocab.txt", "preparation"}
    run(*arguments(stand_in, out, "--part", "2/3"), status=1)  # status 1, because no checkpoint is given
    assert results(out) == whole
    # A part that runs again, as in a requeued job, finds everything done.
    run(*arguments(stand_in, out, "--part", "1/3"), status=1)
    assert results(out) == whole


@pytest.mark.slow
def test_all_results_are_made_if_the_last_part_ends_while_another_part_holds_the_lock(
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


def from_articles(stand_in: StandIn, out: Path, *part: str) -> list[object]:
    """Return the command that makes text from articles, and then the data sets or one part of the samples."""
    options = ["--sentences", "plain", "--evaluation-articles", "9", "--part-bytes", "20000", "--shards", 2]
    return ["wikipedia", ARTICLES, stand_in.files, "--out", out, "--checksums", stand_in.checksums, *options, *part]


def test_data_sets_from_articles_are_equal_if_they_are_made_in_parts(
    run: Run, stand_in: StandIn, tmp_path: Path
) -> None:
    made = []
    for name, parts in (("whole", [((), 1), ((), 1)]), ("parts", [(("--part", "2/2"), 0), (("--part", "1/2"), 1)])):
        out = tmp_path / name
        for part, status in parts:
            (out / "preparation").mkdir(parents=True, exist_ok=True)
            other = lock_file(out / "preparation" / "lock", shared=True) if status == 0 else None
            said = run(*from_articles(stand_in, out, *part), status=status).splitlines()
            if other is not None:  # a part can extract the text while another part holds the lock
                os.close(other)
        sets = {each: open_dataset(out / each) for each in ("train", "evaluation")}
        made.append({each: [shard.digest for shard in dataset.shards] for each, dataset in sets.items()})
        assert left_in(out) == {".json", ".lock", "lock"}
        if name == "whole":  # the second run has nothing to make, not even text
            assert said[4] == f"{out / 'train'}: 754 samples, verified"
    assert made[0] == made[1]


def test_results_of_other_inputs_or_settings_are_rejected_and_kept(
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
    assert "note: no list has MD5 sums of 4 files, so they were not compared" in said
    assert results(out) == whole
    (elsewhere / "evaluation").mkdir(parents=True)
    assert f"{elsewhere / 'evaluation'} {otherwise}" in run(
        *arguments(own, elsewhere, "--checksums", empty), fails=True
    )
    assert list((elsewhere / "evaluation").iterdir()) == []
    (elsewhere / "vocab.txt").write_bytes((own.files / "vocab.txt").read_bytes() + b"x\n")
    assert f"{elsewhere / 'vocab.txt'} exists and differs from " in run(
        *arguments(own, elsewhere, "--checksums", empty), fails=True
    )


def test_a_locked_folder_is_an_error_unless_a_part_is_requested(run: Run, stand_in: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "preparation").mkdir(parents=True)
    busy = f"error: {out}: process {os.getpid()} on host {socket.gethostname()} is at work there; wait for it, or name "
    for shared in (False, True):
        lock = lock_file(out / "preparation" / "lock", shared=shared)
        assert run(*arguments(stand_in, out), fails=True).endswith(f"{busy}another --out\n")
        # A process with the exclusive lock makes all parts, and a process with a shared lock makes one part.
        said = run(*arguments(stand_in, out, "--part", "1/3")).splitlines()[-1]
        assert said.startswith("part 1/3 is done; another" if not shared else "part 1/3 is done; the process")
        os.close(lock)
