"""Files stay as short as a reader can take in."""

from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

ROOMS = ("benchmarks", "bert", "cluster", "compliance", "console", "dataloading", "kernels")
FILES = [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("name", ["train", "setup", "loop", "step"])
def test_the_way_from_the_command_line_to_a_step_is_short(name: str) -> None:
    assert lines(REPOSITORY / f"bert/{name}.py") < 250


def test_no_file_is_long() -> None:
    assert {path.relative_to(REPOSITORY).as_posix(): lines(path) for path in FILES if lines(path) > 425} == {}


def test_no_folder_is_crowded() -> None:
    """Fifteen modules beside ``__init__`` at most."""
    counts = Counter(path.parent.relative_to(REPOSITORY).as_posix() for path in FILES if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > 15} == {}
