"""Tuning: saved choices are loaded or ignored, noise does not count as a gain, and short runs measure choices."""

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bert.configuration.recipes import tiny_cpu
from bert.train import parse
from cluster.tuning import choice as module
from cluster.tuning.choice import TunedRun, keep, kept, main
from cluster.tuning.tune import is_faster, layouts
from tests.cluster.conftest import Command
from tests.conftest import SmallRun

FOUND = TunedRun(1, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine where the user has set none of the tuned environment variables."""
    monkeypatch.setenv("MLPERF_BERT_CACHE", str(tmp_path))
    for name in module.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs"


def test_a_choice_is_for_its_machine_and_its_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_cpu()
    assert kept(config) is None
    keep(config, FOUND)
    assert kept(config) == FOUND
    assert [path.name.startswith("tiny_cpu-") for path in folder.iterdir()] == [True]
    assert kept(replace(config, training=replace(config.training, seed=4, max_samples=64))) == FOUND
    assert kept(replace(config, training=replace(config.training, global_batch_size=64))) is None
    assert kept(replace(config, model=replace(config.model, hidden_size=256))) is None
    monkeypatch.setattr(module, "processor_name", lambda: "another")
    assert kept(config) is None


@pytest.mark.usefixtures("folder")
def test_a_script_gets_lines_and_what_is_set_by_hand_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*arguments: str) -> list[str]:
        assert main(["tiny_cpu", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    assert lines() == []
    keep(tiny_cpu(), FOUND)
    told = "1 process(es) x 2 thread(s)"
    assert lines("--training.seed", "3") == [f"tuned on this machine: {told}", "1", "2"]
    (tmp_path / "mine.toml").write_text("")
    assert lines(f"--config={tmp_path / 'mine.toml'}") == [
        f"tuned on this machine is {told}: not used, as config is set"
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert lines() == [f"tuned on this machine is {told}: not used, as OMP_NUM_THREADS is set"]
    assert lines("--model.hidden-size", "256") == lines("--no-such-setting", "1") == lines("--help") == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"key": {}, "choice": {"processes": 0, "threads": 1}}',
        '{"key": {}, "choice": {"processes": 1, "threads": "2"}}',
    ],
)
def test_a_file_that_holds_no_choice_is_ignored_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    keep(tiny_cpu(), FOUND)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert kept(tiny_cpu()) is None
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("warning: ")
    assert "tiny_cpu" in said


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLPERF_BERT_CACHE", str(tmp_path / "file"))
    keep(tiny_cpu(), FOUND)
    assert capsys.readouterr().out.startswith("warning: ")
    assert kept(tiny_cpu()) is None


def test_choices_lie_in_the_users_cache_for_one_machine_and_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MLPERF_BERT_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for cache, expected in ((str(tmp_path), tmp_path), ("relative", tmp_path / "home/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert module.default_folder().parent == expected / "mlperf-bert"
        assert module.default_folder().name.startswith(f"{platform.node()}-")


def test_layouts_use_all_cores_then_half_and_divide_the_batch() -> None:
    assert layouts(TunedRun(2, 1), 32, 2) == [TunedRun(1, 2), TunedRun(1, 1)]
    assert layouts(TunedRun(1, 1), 32, 1) == []
    assert layouts(TunedRun(1, 8), 12, 8) == [
        TunedRun(2, 4),
        TunedRun(4, 2),
        TunedRun(1, 4),
        TunedRun(2, 2),
        TunedRun(4, 1),
    ]
    assert layouts(TunedRun(1, 6), 8, 6) == [TunedRun(2, 3), TunedRun(4, 1), TunedRun(1, 3), TunedRun(2, 1)]


@pytest.mark.parametrize(
    ("mean", "least", "most"), [(1.0, 0.0, 0.05), (1.02, 0.0, 0.03), (0.7, 0.9, 1.0), (1.5, 0.0, 0.0)]
)
def test_noise_is_not_taken_for_gain_and_gain_is_found(mean: float, least: float, most: float) -> None:
    generator = np.random.default_rng(5)
    times = generator.lognormal(0.0, 0.05, (1000, 2, 3)) * np.where(generator.random((1000, 2, 3)) < 0.02, 1.5, 1.0)
    taken = [is_faster((mean * one).tolist(), other.tolist()) for one, other in times]
    assert least <= np.mean(taken) <= most
    assert not is_faster([0.1], [1.0]), "once is luck"


@pytest.mark.slow
def test_short_runs_choose_processes_and_leave_nothing(
    small_run: SmallRun, tmp_path: Path, folder: Path, cluster: Command
) -> None:
    settings = small_run.arguments(tmp_path / "results")[1:]
    done = cluster("tune", "tiny_cpu", "--seconds", 300, "--", *settings)
    assert done.status == 0, done.err
    assert "ms a step, the default" in done.out
    assert "of the default's time" in done.out
    found = kept(parse(["tiny_cpu", *settings]))
    assert f"kept for tiny_cpu on this machine: {found}" in done.out
    assert [path.name for path in folder.parent.iterdir()] == ["runs"], "no results"


@pytest.mark.slow
def test_a_default_that_cannot_run_says_why(small_run: SmallRun, tmp_path: Path, refused: Callable[..., str]) -> None:
    settings = small_run.arguments(tmp_path / "results")[1:]
    assert "data.prefetch is 0" in refused("tune", "tiny_cpu", "--", *settings, "--data.prefetch", "0")
    saving = ("--save-checkpoint", tmp_path / "weights")
    assert "omit" in refused("tune", "tiny_cpu", "--", *settings, *saving)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tiny_gpu"], "unknown recipe 'tiny_gpu'"),
        (["tiny_cpu", "--seconds", "1"], "--seconds is 1, expected 10 to 86,400"),
        (["tiny_cpu", "--seconds", "nan"], "--seconds is nan"),
        ([], "RECIPE"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], complaint: str, refused: Callable[..., str]) -> None:
    assert complaint in refused("tune", *arguments)
