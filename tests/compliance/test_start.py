"""Lightweight commands start fast: they do not import modules that only other commands need."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import REPOSITORY

MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"
COMMAND = "import sys; from compliance.__main__ import app; app.run('compliance', sys.argv[1:]); "


def modules_after(program: str, *arguments: object) -> set[str]:
    """Run a program and return the names of all modules it imported, which its last output line lists."""
    command = [sys.executable, "-c", program + MODULES, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_command_line_is_understood_without_the_commands() -> None:
    held = modules_after("import compliance.__main__; ")
    own = {name for name in held if name.startswith("compliance.")}
    assert own <= {f"compliance.{name}" for name in ("__main__", "log", "log.rules", "report")}
    assert not held & {"rich", "numpy", "yaml"}


def test_the_logs_are_judged_without_charts_doctor_and_packages() -> None:
    held = modules_after(COMMAND, "summary", REPOSITORY / "results" / "cpu_2cores" / "bert")
    assert "compliance.official.package" in held
    assert not held & {"compliance.report.page", "console.html.charts", "compliance.doctor.system", "numpy"}
