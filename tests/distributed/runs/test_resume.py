"""Resuming from a checkpoint: equal losses on any number of ranks, and broken checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from bert.optimizer import learning_rate
from bert.train import parse
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks, compare_steps, records, result_of, train, trained
from tests.programs import PATIENCE_S, Program

STEPS = 20
Whole = tuple[Path, list[dict[str, float]]]


def settings(folder: Path, **changes: object) -> dict[str, object]:
    return {
        "training__max_samples": 16 * STEPS,
        "evaluation__interval_samples": 96,
        "checkpoint__folder": folder,
        "checkpoint__every_steps": 4,
        "checkpoint__keep": 9,
    } | changes


def kept(checkpoints: Path, target: Path, step: int) -> Path:
    """Copy the checkpoint of one step to a new folder, as if the run had ended there."""
    target.mkdir()
    shutil.copytree(checkpoints / f"step_{step:08}", target / f"step_{step:08}")
    return target


def assert_same(steps: list[dict[str, float]], resumed: list[dict[str, float]], one: Path, other: Path) -> None:
    """Check that the steps and the checkpoints of a run and of the resumed run are equal bit for bit."""
    compare_steps(steps, resumed, rel=0, abs=0)
    for name in ("model.safetensors", "momentum.safetensors", "variance.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Train on 2 ranks with dropout and without interruption; return the folder and the step records."""
    folder = tmp_path_factory.mktemp("whole")
    steps = train(small_run, folder, 2, **settings(folder / "checkpoints", model__hidden_dropout=0.1))
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    return folder, steps


def test_resuming_on_equally_many_ranks_is_bit_identical(small_run: SmallRun, tmp_path: Path, whole: Whole) -> None:
    folder, steps = whole
    start = kept(folder / "checkpoints", tmp_path / "kept", 8)
    changes = settings(tmp_path / "further", model__hidden_dropout=0.1, resume=start, training__seed=None)
    resumed = train(small_run, tmp_path, 2, **changes)
    assert [record["step"] for record in resumed] == list(range(9, STEPS + 1))
    assert_same(steps[8:], resumed, folder / "checkpoints" / "step_00000020", tmp_path / "further" / "step_00000020")
    found = evaluated(tmp_path)
    assert [samples for samples, *_ in found] == [192, 288]  # it continues the evaluation schedule
    assert set(found) <= set(evaluated(folder))


def test_resuming_in_fp8_on_equally_many_ranks_is_bit_identical(small_run: SmallRun, tmp_path: Path) -> None:
    """Ranks have different FP8 scales until they write a checkpoint, which unifies the scales."""
    changes = settings(tmp_path / "checkpoints", training__precision="fp8", model__num_hidden_layers=3)
    changes |= {"training__max_samples": 16 * 8, "evaluation__interval_samples": 16 * 8, "checkpoint__every_steps": 3}
    steps = train(small_run, tmp_path / "whole", 2, **changes)
    start = kept(tmp_path / "checkpoints", tmp_path / "kept", 3)
    changes |= {"resume": start, "checkpoint__folder": tmp_path / "further"}
    resumed = train(small_run, tmp_path / "resumed", 2, **changes)
    written = [tmp_path / place / "step_00000006" for place in ("checkpoints", "further")]
    assert_same(steps[3:], resumed, *written)
    scales = [json.loads((checkpoint / "state.json").read_text())["fp8_scales"] for checkpoint in written]
    assert scales[0] == scales[1]


def test_a_resumed_run_is_untimed_and_continues_the_schedule(small_run: SmallRun, tmp_path: Path, whole: Whole) -> None:
    start = kept(whole[0] / "checkpoints", tmp_path / "kept", 8)
    path = start / "step_00000008" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"optimizer_steps": 6}))  # as if two steps were skipped
    changes = {"model__hidden_dropout": 0.1, "resume": start, "training__max_samples": 16 * STEPS}
    assert "(resumed: no timed result)" in trained(small_run, tmp_path, 1, evaluation__interval_samples=96, **changes)
    rates = [record["learning_rate"] for record in records(tmp_path, "step")]
    optimizer = parse(small_run.arguments(tmp_path)).optimizer
    assert rates == pytest.approx(learning_rate(optimizer, torch.arange(6, STEPS - 2)).tolist())
    assert f"# resumed from: {start / 'step_00000008'}\n" in result_of(tmp_path).read_text()


def test_resuming_on_more_or_fewer_ranks_changes_losses_only_by_rounding(small_run: SmallRun, tmp_path: Path) -> None:
    """Resume a run of 2 ranks on 4 ranks, and then resume that run on 1 rank.

    Dropout is off, because its masks depend on the number of ranks.
    """
    checkpoints = tmp_path / "checkpoints"
    assert "reduction: flat (one host)" in trained(small_run, tmp_path, 2, **settings(checkpoints))
    steps, counts = records(tmp_path, "step"), evaluated(tmp_path)
    assert {count for _, _, count in counts} == {len(small_run.evaluation.masked_lm_ids)}
    for count, step in ((4, 8), (1, 12)):
        further = tmp_path / f"further_{count}"
        changes = settings(further, resume=kept(checkpoints, tmp_path / f"kept_{count}", step))
        changes["training__reduction"] = "sharded" if count > 1 else "auto"
        resumed = tmp_path / f"resumed_{count}"
        compare_steps(steps[step:], train(small_run, resumed, count, **changes))
        assert evaluated(resumed) == [each for each in counts if each[0] >= 16 * step]
        checkpoints = further


def evaluated(results: Path) -> list[tuple[int, int, int]]:
    return [(record["samples"], record["correct"], record["count"]) for record in records(results, "eval")]


def test_broken_checkpoints_are_reported_and_skipped(small_run: SmallRun, tmp_path: Path, whole: Whole) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(whole[0] / "checkpoints", folder)
    shutil.rmtree(folder / "step_00000004")
    (folder / "step_00000020" / "state.json").write_text("{")
    with (folder / "step_00000016" / "variance.safetensors").open("r+b") as file:
        file.truncate(1000)
    with (folder / "step_00000012" / "momentum.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    arguments = small_run.arguments(tmp_path, resume=folder, model__hidden_dropout=0.1)
    output, _ = Program("bert.train", arguments).communicate(PATIENCE_S)
    assert f"# resumed from: {folder / 'step_00000008'}\n" in result_of(tmp_path).read_text(), output
    for bad in ("20/state.json", "16/variance.safetensors", "12/momentum.safetensors"):
        assert f"step_000000{bad} is " in output
    shutil.rmtree(folder / "step_00000008")
    with Ranks(arguments, 2) as started:
        assert started.ends() == [2, 2]
    assert f"error: no complete checkpoint in {folder}: " in started.output
    assert "Traceback" not in started.output
