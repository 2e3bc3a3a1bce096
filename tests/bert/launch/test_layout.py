"""Numbers of processes and threads: defaults, variables, plans, and layouts that were tuned."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES, tiny_cpu
from bert.launch.layout import VARIABLES, Layout, default_folder, default_layout, keep, kept, layout_of

FOUND = Layout(1, 2)


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
def test_a_tuned_layout_is_used_unless_something_else_states_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_cpu()
    default = default_layout(config)
    keep(config, FOUND)
    assert layout_of(config, takes_tuned=True, reads_file=False) == FOUND
    assert capsys.readouterr().out == f"==> tuned on this machine: {FOUND}\n"
    assert layout_of(config, takes_tuned=True, reads_file=True) == default
    assert "not used, as config is set" in capsys.readouterr().out
    assert layout_of(config, takes_tuned=False, reads_file=False) == default
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert layout_of(config, takes_tuned=True, reads_file=False) == Layout(default.processes, 5)
    assert "not used, as OMP_NUM_THREADS is set" in capsys.readouterr().out
    monkeypatch.setenv("TUNED", "0")
    monkeypatch.setenv("NPROC", "3")
    assert layout_of(config, takes_tuned=True, reads_file=False) == Layout(3, 5)
    assert capsys.readouterr().out == ""
    for name in ("TUNED", "NPROC", "OMP_NUM_THREADS"):
        for wrong in ("-1", "08", "1e2", "two", "1\n", "\N{ARABIC-INDIC DIGIT TWO}", "9" * 30):
            with monkeypatch.context() as patch:
                patch.setenv(name, wrong)
                with pytest.raises(ValueError, match=f"^{name} is .*, expected a whole number of at least"):
                    layout_of(config, takes_tuned=True, reads_file=False)


@pytest.mark.parametrize(
    ("recipe", "cores", "gpus", "expected"),
    [
        ("tiny_cpu", 1, 0, Layout(1, 1)),
        ("tiny_cpu", 2, 8, Layout(2, 1)),
        ("tiny_cpu", 16, 0, Layout(2, 2)),
        ("own_text_cpu", 16, 8, Layout(1, 16)),
        ("h100_1x8", 224, 8, Layout(8, 28)),
        ("h100_1x8", 4, 8, Layout(8, 1)),
        ("h100_1x8", 16, 0, Layout(1, 16)),
    ],
)
def test_defaults_follow_the_device_and_the_cores(
    recipe: str, cores: int, gpus: int, expected: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if gpus else None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert default_layout(RECIPES[recipe]()) == expected


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
