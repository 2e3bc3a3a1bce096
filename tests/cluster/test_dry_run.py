"""The dry run with a forecast."""

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import SmallRun
from tests.programs import REPOSITORY, python

INTERRUPTED = """
import signal, sys
from cluster import dry_run

dry_run.memory_and_step = lambda *_: signal.raise_signal(signal.SIGTERM) or []
sys.exit(dry_run.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_ends_the_forecast(small_run: SmallRun, tmp_path: Path) -> None:
    done = python("-c", INTERRUPTED, *small_run.arguments(tmp_path, training__device="cuda"))
    assert done.returncode == -signal.SIGTERM, done.stderr


def dry_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the dry run in a folder without data."""
    return python("-m", "cluster.dry_run", *arguments, cwd=folder, PYTHONPATH=REPOSITORY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "machines"),
    [
        ("h100_1x8", "1 x 8 H100"),
        ("b200_1x8", "1 x 8 B200"),
        ("gb200_18x4", "18 x 4 GB200"),
        ("dgxa100_8x8", "8 x 8 A100"),
    ],
)
def test_without_data_the_forecast_comes_before_the_missing_inputs(recipe: str, machines: str, tmp_path: Path) -> None:
    done = dry_run(tmp_path, recipe)
    assert done.returncode == 2
    shown = rf"a rank holds [1-7]\d\.\d\d GB at most: .*\n.*\n.* a step is predicted to take \d+ ms on {machines}"
    assert re.search(shown, done.stdout), done.stdout
    for name in ("train", "evaluation", "vocab.txt", "phase1.safetensors"):
        assert f"data/wikipedia/{name}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("h100_1x8 --training.global-batch-size 769", "make it a multiple of 8"),
        ("tiny_cpu --parallel.tensor 2", "parallel.tensor is 2"),
    ],
)
def test_a_wrong_setting_is_named_before_missing_data(arguments: str, said: str, tmp_path: Path) -> None:
    done = dry_run(tmp_path, *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
