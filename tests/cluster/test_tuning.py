"""Tuning: what is kept for a machine is read back or ignored, noise is no gain, and real processes train on demand."""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.train import parse
from cluster.tuning import choice as module
from cluster.tuning.choice import TunedRun, keep, kept, main
from cluster.tuning.group import Group, Pace, TrialError
from cluster.tuning.race import Comparison, race
from cluster.tuning.tune import layouts
from tests.conftest import SmallRun

FOUND = TunedRun(1, 2, (("data.prefetch", 8), ("training.bucket_bytes", 1 << 20)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine on which nothing is set by hand."""
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*arguments: str) -> list[str]:
        assert main(["tiny_cpu", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    assert lines() == []
    keep(tiny_cpu(), FOUND)
    told = "1 process(es) x 2 thread(s), data.prefetch 8, training.bucket_bytes 1048576"
    settings = ["--data.prefetch=8", "--training.bucket-bytes=1048576"]
    assert lines("--training.seed", "3") == [f"tuned on this machine: {told}", "1", "2", *settings]
    parse(["tiny_cpu", *settings])
    for given in (["--data.prefetch", "4"], ["--training.bucket_bytes=65536"], ["--data.prefetch=4"]):
        name = given[0].partition("=")[0].removeprefix("--")
        assert lines(*given) == [f"tuned on this machine is {told}: not used, as {name} is set"]
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


def test_the_folder_belongs_to_one_machine_and_one_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLPERF_BERT_CACHE", str(tmp_path / "cache"))
    assert module.default_folder() == tmp_path / "cache"
    monkeypatch.delenv("MLPERF_BERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = module.default_folder()
    assert here.parent == tmp_path / "mlperf-bert"
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert module.default_folder() != here
    monkeypatch.undo()
    monkeypatch.delenv("MLPERF_BERT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module.default_folder() == tmp_path / ".cache" / "mlperf-bert" / here.name
    monkeypatch.setattr(module, "__file__", str(tmp_path / "cluster" / "tuning" / "choice.py"))
    assert module.default_folder().name != here.name


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


class Drawn:
    """Processes whose times are drawn: of a mean, with noise and now and then a disturbance by something else."""

    def __init__(self, mean: float, generator: np.random.Generator) -> None:
        self._mean, self._generator = mean, generator

    def pace(self, steps: int, _untimed: int) -> Pace:
        noise = self._generator.lognormal(0.0, 0.05) * (2.0 if self._generator.random() < 0.03 else 1.0)
        return Pace(steps * self._mean * noise, steps * 100, 0.0)


@pytest.mark.parametrize(
    ("mean", "least", "most"), [(1.0, 0.0, 0.02), (1.02, 0.0, 0.0), (0.85, 0.9, 1.0), (1.5, 0.0, 0.0)]
)
def test_noise_is_not_taken_for_gain_and_gain_is_found(mean: float, least: float, most: float) -> None:
    generator, taken, many = np.random.default_rng(5), 0, 200
    for _ in range(many):
        holder, challenger = (cast(Group, Drawn(each, generator)) for each in (1.0, mean))
        found = race(holder, challenger, 3, 1, time.monotonic() + 60)
        assert found is not None
        taken += found.is_faster
    assert least <= taken / many <= most


def test_too_few_turns_decide_nothing() -> None:
    generator = np.random.default_rng(5)
    holder, challenger = (cast(Group, Drawn(each, generator)) for each in (1.0, 0.9))
    assert race(holder, challenger, 3, 1, time.monotonic() - 1) is None
    assert not Comparison.of([-0.1]).is_faster


@pytest.fixture
def settings(small_run: SmallRun, tmp_path: Path) -> tuple[str, ...]:
    return tuple(small_run.arguments(tmp_path / "results")[1:])


@pytest.mark.slow
def test_processes_train_on_demand_and_leave_nothing(settings: tuple[str, ...], tmp_path: Path) -> None:
    config: Config = parse(["tiny_cpu", *settings])
    folder = str(tmp_path / "checkpoints")
    asked = (
        *settings,
        "--checkpoint.folder",
        folder,
        "--save-checkpoint",
        f"{folder}/weights",
        "--checkpoint.every-steps",
        "1",
    )
    with Group(TunedRun(2, 1, (("data.prefetch", 2),)), "tiny_cpu", asked, time.monotonic() + 300) as group:
        first, second = group.pace(3), group.pace(2, untimed=0)
        assert first.seconds > 0 < second.seconds
        assert 3 * config.training.global_batch_size * 3 <= first.tokens <= 3 * config.training.global_batch_size * 48
        assert group.memory > 50 << 20
        group._processes[1].kill()
        with pytest.raises(TrialError, match="has ended"):
            group.pace(1)
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_choice_that_cannot_run_says_why_in_a_line(settings: tuple[str, ...]) -> None:
    with pytest.raises(
        TrialError, match=r"^1 process\(es\) x 1 thread\(s\), .* has ended: data.prefetch is 0: expected"
    ):
        Group(TunedRun(1, 1, (("data.prefetch", 0),)), "tiny_cpu", settings, time.monotonic() + 300)


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
