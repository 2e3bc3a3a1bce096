"""The guard that keeps the clock honest. Each case runs in a process of its own: audit hooks cannot be taken back."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, SmallRun

PRELUDE = """
import sys
from pathlib import Path
from bert.clock import DataGuard, DataTouchedEarlyError
from dataloading.dataset import open_dataset
from dataloading.formats import open_shard
folder = Path(sys.argv[1])
guard = DataGuard([folder])
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)


@pytest.mark.parametrize(
    "touch",
    [
        "open_shard(next(folder.glob('part_*')))",
        "open_dataset(folder).take(__import__('numpy').array([0]))",
        "next(folder.glob('part_*')).read_bytes()",
        "__import__('os').open(str(next(folder.glob('part_*'))), 0)",
        "__import__('numpy').memmap(next(folder.glob('part_*')), mode='r')",
        "(folder / '..' / folder.name / next(folder.glob('part_*')).name).open('rb')",
    ],
)
def test_touching_data_before_the_clock_fails_the_run(small_run: SmallRun, touch: str) -> None:
    done = run(touch, small_run.folder / "train")
    assert done.returncode == 1
    assert "DataTouchedEarlyError" in done.stderr
    assert "was opened before run_start" in done.stderr


def test_a_swallowed_touch_still_fails_at_the_start_of_the_clock(small_run: SmallRun) -> None:
    code = """
try:
    next(folder.glob('part_*')).read_bytes()
except DataTouchedEarlyError:
    pass
guard.release()
"""
    done = run(code, small_run.folder / "train")
    assert done.returncode == 1
    assert "data were opened before run_start" in done.stderr


def test_a_link_to_the_data_is_the_data(small_run: SmallRun, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere"
    link.symlink_to(small_run.folder / "train")
    done = run(f"next(Path({str(link)!r}).glob('part_*')).read_bytes()", small_run.folder / "train")
    assert "DataTouchedEarlyError" in done.stderr


def test_metadata_before_and_data_after_are_fine(small_run: SmallRun) -> None:
    code = """
dataset = open_dataset(folder)
assert dataset.lengths.sum() > 0
Path(__file__ if '__file__' in globals() else sys.executable).open('rb').close()
guard.release()
assert len(dataset.take(__import__('numpy').arange(5))) == 5
"""
    done = run(code, small_run.folder / "train")
    assert done.returncode == 0, done.stderr
