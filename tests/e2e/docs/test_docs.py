"""The README's commands, and links and results on all pages. Other files in this folder test the pages' commands."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compliance.check.checker import check_file
from compliance.log.reader import read_log
from tests.conftest import REPOSITORY
from tests.e2e.docs.documented import FIRST, PAGES, SHORTENED, assert_works, commands


@pytest.mark.in_order
@pytest.mark.parametrize("command", [line for line in commands("README.md") if line != FIRST])
def test_each_command_of_the_readme_succeeds(command: str, checkout: Path) -> None:
    assert_works(command, checkout)


def test_links_between_the_pages_lead_to_existing_files() -> None:
    for page in [*PAGES, REPOSITORY / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_pattern_of_shortened_commands_matches_a_documented_command() -> None:
    assert FIRST in commands()
    assert [pattern for pattern in SHORTENED if not any(re.search(pattern, line) for line in commands())] == []


LOGS = sorted(REPOSITORY.glob("results/cpu_2cores/bert/result_*"))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_each_committed_result_is_valid(log: Path) -> None:
    verdict = check_file(log)
    assert verdict.passed, verdict.findings


def test_the_times_to_train_on_the_pages_equal_the_committed_logs() -> None:
    runs = [read_log(log).run for log in LOGS]
    seconds = sorted(run.seconds or 0.0 for run in runs)[1:-1]
    mean = f"| {sum(seconds) / len(seconds):.1f} s |"
    for page in ("README.md", "results/README.md", "benchmarks/results/README.md"):
        assert mean in (REPOSITORY / page).read_text(encoding="utf-8"), page
    table = (REPOSITORY / "docs/tiny_cpu.md").read_text(encoding="utf-8")
    for number, run in enumerate(runs):
        assert f"| {number} | {run.seed} | {run.seconds:.1f} s | {run.accuracy:.4f} | {run.trained:,} |" in table


@pytest.mark.parametrize(
    ("file", "figure"),
    [
        ("cpu_step", lambda found: f"{found['ratios']['Hugging Face, padded']:.1f}x"),
        ("own_text", lambda found: f"{found['medians']['time_to_target']:.1f}x"),
        ("prepare_wikipedia", lambda found: f"{found['ratio']:.1f}x"),
        ("packing", lambda found: f"{100 * found['algorithms'][0]['efficiency']:.3f} %"),
        ("prediction", lambda found: f"{100 * found['errors']['submitter: all']['median']:.1f} %"),
    ],
)
def test_figures_on_the_pages_equal_the_committed_benchmarks(file: str, figure: Callable[[Any], str]) -> None:
    found = json.loads((REPOSITORY / f"benchmarks/results/cpu_2cores/{file}.json").read_bytes())
    for page in ("README.md", "benchmarks/results/README.md"):
        assert f"| {figure(found)} | [{file}.json]" in (REPOSITORY / page).read_text(encoding="utf-8"), page


def test_the_table_of_prediction_errors_equals_the_committed_benchmark() -> None:
    found = json.loads((REPOSITORY / "benchmarks/results/cpu_2cores/prediction.json").read_bytes())["errors"]
    rows = []
    for each in found.values():
        errors = " | ".join(f"{100 * each[name]:.1f} %" for name in ("median", "three_quarters", "nine_tenths"))
        rows.append(f"| {each['results']} | {errors} | {100 * each['in_interval']:.0f} % |")
    page = (REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| one .*?( ?\| \d+ \|.*)$", page, re.M) == [f" {row}" for row in rows]
