"""Hooks and workflow for other repositories, installation without extras, and imports of each command."""

import ast
import json
import re
import sys
import tomllib
from importlib.metadata import distribution

import pytest
import yaml

from compliance.__main__ import main
from tests.programs import REPOSITORY, python

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())}
WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/results.yml").read_text())
COMMAND = "mlperf-bert-compliance"


def test_the_checker_imports_only_packages_of_the_installation_without_extras() -> None:
    imported = set()
    rooms = [REPOSITORY / "compliance" / room for room in ("check", "convergence", "log", "official", "submission")]
    for path in [path for room in rooms for path in room.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    others = imported - sys.stdlib_module_names - {"compliance", "console"}
    files = [file for name in PROJECT["project"]["dependencies"] for file in distribution(name).files or ()]
    assert others
    assert others <= {file.parts[0].removesuffix(".py") for file in files}


def test_the_example_hooks_and_workflow_use_the_installed_command() -> None:
    assert PROJECT["project"]["scripts"] == {COMMAND: "compliance.__main__:main"}
    assert callable(main)
    assert {hook["entry"] for hook in HOOKS.values()} == {f"{COMMAND} check"}
    steps = [step["run"] for step in WORKFLOW["jobs"]["check"]["steps"] if "run" in step]
    assert any(f"{COMMAND} check" in run and "--sarif findings.sarif" in run for run in steps)


@pytest.mark.parametrize(
    ("program", "shown"), [(f"/usr/bin/{COMMAND}", COMMAND), ("compliance/__main__.py", "python -m compliance")]
)
def test_the_usage_names_the_installed_command_or_the_module(
    program: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [program, "check", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith(f"usage: {shown} check")


def test_the_pre_commit_hooks_select_logs_and_descriptions_by_file_name() -> None:
    logs, results = (HOOKS[name]["files"] for name in ("mlperf-bert-logs", "mlperf-bert-results"))
    for pattern, path, taken in (
        (logs, "results/node/bert/result_0.txt", True),
        (logs, "results/node/bert/result_0.txt.bak", False),
        (logs, "no_result_0.txt", False),
        (results, "results/node/bert/result_a.txt", True),
        (results, "results/systems/node.json", True),
        (results, "results/node/bert/scaling.json", False),
    ):
        assert bool(re.search(pattern, path)) is taken


# Lightweight commands do not import modules that only other commands need


START = "import compliance.__main__; "
SUMMARY = f"{START} compliance.__main__.app.run('compliance', ['summary', 'results/cpu_2cores/bert']); "


@pytest.mark.parametrize(
    ("program", "needed", "unneeded"),
    [
        (
            START,
            {"compliance.log.rules"},
            {"compliance.log.reader", "compliance.report.results", "rich", "numpy", "yaml"},
        ),
        (SUMMARY, {"compliance.official.package"}, {"compliance.report.page", "compliance.doctor", "numpy"}),
    ],
    ids=["start", "summary"],
)
def test_commands_do_not_import_modules_of_other_commands(program: str, needed: set[str], unneeded: set[str]) -> None:
    done = python("-c", f"{program}import json, sys; print(json.dumps([*sys.modules]))")
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert needed <= imported
    assert not imported & unneeded
