"""The README's commands, and links and results on all pages. Other files in this folder test the pages' commands."""

import re
from pathlib import Path

import pytest

from compliance.check.checker import check_file
from tests.conftest import REPOSITORY
from tests.e2e.docs.documented import FIRST, PAGES, SHORTENED, assert_works, commands


@pytest.mark.parametrize("command", [line for line in commands("README.md") if line != FIRST])
def test_a_command_of_the_readme_works(command: str, checkout: Path) -> None:
    assert_works(command, checkout)


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [*PAGES, REPOSITORY / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_commands_that_are_shortened_are_documented_ones() -> None:
    assert FIRST in commands()
    assert [pattern for pattern in SHORTENED if not any(re.search(pattern, line) for line in commands())] == []


@pytest.mark.parametrize("log", sorted(REPOSITORY.glob("results/cpu_2cores/bert/result_*")), ids=lambda log: log.name)
def test_a_committed_result_is_valid(log: Path) -> None:
    verdict = check_file(log)
    assert verdict.passed, verdict.findings
