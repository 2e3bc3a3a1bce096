"""Docstrings begin with a verb or a plain noun, as in "Return the losses" or "Losses of a step"."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FOLDERS = ("benchmarks", "bert", "cluster", "compliance", "console", "dataloading", "kernels", "tests")
CLAUSE = re.compile(r"(What|Who|Whoever|Whose|Which|Where|When|Why|How|Whether|If|As|By|With|Of|From|Not|It|That)\b")
"""First words of a clause that has no subject but a name elsewhere."""


def clauses(path: Path) -> list[str]:
    """Docstrings of a file that begin with a clause; that of a test goes on where the test's name ends."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            name = getattr(node, "name", path.stem if path.stem != "__init__" else path.parent.name)
            text = ast.get_docstring(node) or ""
            is_test = isinstance(node, ast.FunctionDef) and name.startswith("test_")
            if CLAUSE.match(text) and not is_test:
                found.append(f"{name}: {text.splitlines()[0]}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_docstring_begins_with_a_verb_or_a_noun(folder: str) -> None:
    paths = sorted((REPOSITORY / folder).rglob("*.py"))
    assert paths
    assert {path.relative_to(REPOSITORY).as_posix(): found for path in paths if (found := clauses(path))} == {}
