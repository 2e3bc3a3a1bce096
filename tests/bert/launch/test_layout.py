"""Numbers of processes and threads: defaults and variables."""

import os
from dataclasses import replace

import pytest

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES, tiny_cpu
from bert.launch.layout import Layout, layout_of

VARIABLES = ("NPROC", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_variables_state_the_layout_and_wrong_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_cpu()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert layout_of(config).threads == 5
    monkeypatch.setenv("NPROC", "3")
    assert layout_of(config) == Layout(3, 5)
    for name in VARIABLES:
        for wrong in ("-1", "08", "1e2", "two", "1\n", "\N{ARABIC-INDIC DIGIT TWO}", "9" * 30):
            with monkeypatch.context() as patch:
                patch.setenv(name, wrong)
                with pytest.raises(ValueError, match=f"^{name} is .*, expected a whole number of at least"):
                    layout_of(config)


def wide(config: Config) -> Config:
    return replace(config, model=replace(config.model, hidden_size=768))


def odd_batch(config: Config) -> Config:
    return replace(config, training=replace(config.training, global_batch_size=33))


@pytest.mark.parametrize(
    ("config", "cores", "gpus", "expected"),
    [
        (tiny_cpu(), 1, 0, Layout(1, 1)),
        (tiny_cpu(), 2, 8, Layout(2, 1)),
        (tiny_cpu(), 16, 0, Layout(2, 2)),
        (RECIPES["own_text_cpu"](), 2, 0, Layout(2, 1)),
        (RECIPES["own_text_cpu"](), 16, 8, Layout(2, 2)),
        (wide(RECIPES["own_text_cpu"]()), 16, 0, Layout(1, 16)),
        (odd_batch(tiny_cpu()), 16, 0, Layout(1, 2)),
        (RECIPES["h100_1x8"](), 224, 8, Layout(8, 28)),
        (RECIPES["h100_1x8"](), 4, 8, Layout(8, 1)),
        (RECIPES["h100_1x8"](), 16, 0, Layout(1, 16)),
    ],
)
def test_defaults_follow_the_device_the_cores_and_the_model(
    config: Config, cores: int, gpus: int, expected: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if gpus else None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert layout_of(config) == expected
