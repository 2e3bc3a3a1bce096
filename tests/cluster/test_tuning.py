"""Tuning of processes and threads: saved choices, noise that must not count as a gain, and measured short runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bert.configuration.recipes import tiny_cpu
from cluster.tuning.choice import VARIABLES, TunedRun, default_folder, keep, kept, main
from cluster.tuning.tune import is_faster, layouts
from tests.conftest import SmallRun

FOUND = TunedRun(1, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of saved choices in an empty cache, and unset the variables that override a choice."""
    monkeypatch.setenv("MLPERF_BERT_CACHE", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs"


def test_a_choice_is_for_its_shape_and_damage_is_ignored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_cpu()
    assert kept(config) is None
    keep(config, FOUND)
    assert kept(config) == FOUND
    assert kept(replace(config, training=replace(config.training, seed=4, max_samples=64))) == FOUND
    assert kept(replace(config, training=replace(config.training, global_batch_size=64))) is None
    assert kept(replace(config, model=replace(config.model, hidden_size=256))) is None
    assert capsys.readouterr().out == ""
    (file,) = folder.iterdir()
    for content in ("", "[]", '{"processes": 0, "threads": 1}', '{"processes": 1, "threads": "2"}'):
        file.write_text(content)
        assert kept(config) is None
        assert capsys.readouterr().out.startswith("warning: the choice that was tuned for tiny_cpu is ignored")


@pytest.mark.usefixtures("folder")
def test_a_script_gets_lines_and_what_is_set_by_hand_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*arguments: str) -> list[str]:
        assert main(["tiny_cpu", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    assert lines() == []
    keep(tiny_cpu(), FOUND)
    assert lines("--training.seed", "3") == [f"tuned on this machine: {FOUND}", "1", "2"]
    (tmp_path / "mine.toml").write_text("")
    assert [line.endswith("as config is set") for line in lines(f"--config={tmp_path / 'mine.toml'}")] == [True]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [line.endswith("as OMP_NUM_THREADS is set") for line in lines()] == [True]
    assert lines("--model.hidden-size", "256") == lines("--no-such-setting", "1") == lines("--help") == []


def test_choices_lie_in_the_users_cache_which_may_be_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLPERF_BERT_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for cache, expected in ((str(tmp_path), tmp_path), ("relative", tmp_path / "home/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert default_folder().parent == expected / "mlperf-bert"
    (tmp_path / "home").write_text("")
    keep(tiny_cpu(), FOUND)
    assert capsys.readouterr().out.startswith("warning: ")
    assert kept(tiny_cpu()) is None


def test_layouts_use_all_cores_then_half_and_divide_the_batch() -> None:
    assert layouts(TunedRun(2, 1), 32, 2) == [TunedRun(1, 2), TunedRun(1, 1)]
    assert layouts(TunedRun(1, 1), 32, 1) == []
    twelve = [TunedRun(*each) for each in ((2, 4), (4, 2), (1, 4), (2, 2), (4, 1))]
    assert layouts(TunedRun(1, 8), 12, 8) == twelve
    assert layouts(TunedRun(1, 6), 8, 6) == [TunedRun(*each) for each in ((2, 3), (4, 1), (1, 3), (2, 1))]


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
def test_a_default_that_cannot_run_says_why(small_run: SmallRun, tmp_path: Path, refused: Callable[..., str]) -> None:
    settings = small_run.arguments(tmp_path / "results")[1:]
    assert "data.prefetch is 0" in refused("tune", "tiny_cpu", "--", *settings, "--data.prefetch", "0")
    saving = ("--save-checkpoint", tmp_path / "weights")
    assert "omit" in refused("tune", "tiny_cpu", "--", *settings, *saving)
