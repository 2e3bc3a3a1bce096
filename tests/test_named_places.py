"""Every file and module that is mentioned in code, comments and pages exists."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.programs import OWN, REPOSITORY

PATH = re.compile(
    rf"(?<![\w./<>-])(?:{'|'.join(OWN)}|docs|launch)/(?:[\w./-]*\.(?:csv|json|md|py|sh|sub|toml|txt|yaml)\b|[\w/]*(?=/?`))"
)
MODULE = re.compile(rf"`((?:{'|'.join(OWN)})(?:\.\w+)+)(?:\(\))?`")
ELSEWHERE = re.compile(
    r"benchmarks/(bert|a)\b|benchmarks/results/|\w+/__pycache__|bert/(embeddings|encoder|pooler|result_|untracked)"
)
"""Paths that look like the repository's but are in a submission or a checkpoint, or are created by a command."""


def texts() -> list[Path]:
    patterns = ["*.py", "*.md", "*.sh", "*.sub", "*.toml", "*.yaml", "*.yml", "Dockerfile", ".ci/run"]
    command = ["git", "ls-files", "-z", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a clone with git")
    return [REPOSITORY / name for name in listed.stdout.split("\0") if name]


@cache
def words_in(module: Path) -> set[str]:
    text = module.read_text(encoding="utf-8")
    starred = [name.replace(".", "/") for name in re.findall(r"from ([\w.]+) import \*", text)]
    return set(re.findall(r"\w+", text)).union(*(words_in(REPOSITORY / f"{name}.py") for name in starred))


def is_there(dotted: str) -> bool:
    """Return whether a dotted name is a module or a name in a module."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place, rest = REPOSITORY.joinpath(*parts[:length]), parts[length:]
        for module in (place.with_suffix(".py"), place / "__init__.py"):
            if module.is_file():
                return set(rest) <= words_in(module)
    return False


def test_files_and_modules_mentioned_in_texts_exist() -> None:
    missing: list[str] = []
    for file in texts():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            paths = [name for name in PATH.findall(line) if not ELSEWHERE.match(name)]
            wrong = [name for name in paths if not (REPOSITORY / name).exists()]
            wrong += [name for name in MODULE.findall(line) if not name.endswith(".sif") and not is_there(name)]
            missing += [f"{file.relative_to(REPOSITORY)}:{number}: {name}" for name in wrong]
    assert missing == []
