"""The benchmark of reductions on network namespaces: bytes on the wire, and host identities that differ by name alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.collectives import why_not
from tests.conftest import REPOSITORY

MISSING = why_not()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_between_hosts_hierarchical_sends_what_it_must(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/collectives.py", "--quick", "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())
    assert [case["order"] for case in figures["cases"]] == ["block", "cyclic"]
    for name, ratio in figures["ratios"].items():
        assert f"{name}: {ratio:.2f}" in done.stdout
    for case in figures["cases"]:
        assert 0.99 < case["hierarchical"]["megabytes_per_host"] / case["megabytes"] < 1.03
        assert case["flat"]["megabytes_per_host"] > 1.4 * case["megabytes"]
        assert case["choice"] in ("flat", "hierarchical")
