"""Predictions that a dry run prints before the errors of its check."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import RunPlan, settings_of, write_plan
from bert.configuration.sections import ModelConfig
from cluster import dry_run
from tests.cluster.test_documented_outputs import assert_shown
from tests.conftest import SmallRun
from tests.programs import python

INTERRUPTED = """
import signal, sys
from cluster import dry_run

dry_run.memory_and_step = lambda *_: signal.raise_signal(signal.SIGTERM) or []
sys.exit(dry_run.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_ends_the_prediction(small_run: SmallRun, tmp_path: Path) -> None:
    done = python("-c", INTERRUPTED, *small_run.arguments(tmp_path, training__device="cuda"))
    assert done.returncode == -signal.SIGTERM, done.stderr


@pytest.fixture(autouse=True)
def _without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, and restore the environment after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_the_prediction_matches_scaling_md_and_precedes_errors_about_inputs(capfd: pytest.CaptureFixture[str]) -> None:
    assert dry_run.main(["bert_3_9b_8x8"]) == 2
    said = capfd.readouterr()
    assert_shown(said.out, "scaling.md")
    folder = "data/wikipedia"
    missing = f"data.train {folder}/train, data.evaluation {folder}/evaluation, data.vocab {folder}/vocab.txt"
    assert said.err.startswith(f"error: missing: {missing}. ")


def test_without_launcher_ranks_come_from_the_plan_or_recipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times: dict[str, float] = dict.fromkeys(("data_wait", "forward_backward", "reduce", "update", "other"), 0.0)
    settings = settings_of(RECIPES["h100_1x8"]())
    write_plan(RunPlan("h100_1x8", "H100-SXM-80GB", 2, 8, settings, "", times, 1.0), tmp_path / "plan.json")
    for arguments, machines in (("--plan plan.json", "2 x 8"), ("h100_1x8", "1 x 8")):
        assert dry_run.main(arguments.split()) == 2
        assert f" ms on {machines} H100-SXM-80GB: forward backward " in capfd.readouterr().out
        del os.environ["WORLD_SIZE"]


def test_an_invalid_setting_is_reported_instead_of_missing_data(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, said in {
        "h100_1x8 --training.global-batch-size 769": "make it a multiple of 8",
        "tiny_cpu --parallel.tensor 2": "parallel.tensor is 2",
        "h100_1x8 --plan missing.json": "missing.json",
    }.items():
        os.environ.pop("WORLD_SIZE", None)  # set by the previous run
        assert dry_run.main(arguments.split()) == 2
        shown = capfd.readouterr()
        assert (shown.out, shown.err.count("\n"), said in shown.err) == ("", 1, True)


def test_on_cpus_only_ranks_that_share_a_copy_get_a_prediction_of_memory(
    small_run: SmallRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skip the check, because it forbids this process to open data files until a run starts."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dry_run, "train", lambda _: 0)
    for tensor in (1, 2):
        assert dry_run.main(small_run.arguments(tmp_path, parallel__tensor=tensor)) == 0
        assert ("training.recompute is none; " in capfd.readouterr().out) == (tensor == 2)


def prediction(world_size: int, local_size: int = 0, recipe: str = "h100_1x8") -> list[str]:
    """Return the lines of a dry run of a small model without data."""
    config = RECIPES["h100_1x8"]()
    training, log = replace(config.training, global_batch_size=48 * 8), replace(config.log, division="open")
    model = ModelConfig(2, 128, 4, 512, 1000, 512)
    small = replace(config, recipe=recipe, model=model, training=training, log=log)
    return list(dry_run.memory_and_step(small, world_size, local_size))


def test_node_size_comes_from_the_launcher_or_the_device() -> None:
    ranks = {(4, 0): "1 x 4", (16, 0): "2 x 8", (12, 0): "3 x 4", (12, 5): "3 x 4", (16, 4): "4 x 4", (8, 8): "1 x 8"}
    for (world, local), machines in ranks.items():
        *_, modes, step = prediction(world, local)
        assert re.search(rf"take (\d+) ms on {machines} H100-SXM-80GB: forward backward \d+", step)
        assert re.match(r"training.recompute is none; selective would hold .*, full would hold ", modes)


def test_step_time_needs_a_known_device_and_too_little_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = prediction(3, recipe="tiny_cpu")
    assert [line.split()[0] for line in lines[-2:]] == ["a", "training.recompute"]
    monkeypatch.setattr("cluster.model.memory.USABLE_MEMORY", 1e-4)
    too_large = "H100-SXM-80GB has only 8.00 MB of usable memory; `python -m cluster plan` finds settings that fit"
    assert prediction(8)[-2] == too_large
