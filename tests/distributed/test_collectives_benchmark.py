"""The reduction benchmark on network namespaces: bytes on the wire, and hosts whose identities differ only in name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import why_not
from tests.conftest import REPOSITORY

MISSING = why_not()


@pytest.mark.measured
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_between_hosts_hierarchical_sends_what_it_must(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/training/collectives.py", "--quick", "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())
    *reduced, in_bf16 = figures["cases"]
    assert [case["order"] for case in reduced] == ["block", "cyclic"]
    assert in_bf16["reduce_dtype"] == "bf16"
    for strategy in ("hierarchical", "sharded"):
        assert 0.49 < in_bf16[strategy]["megabytes_per_host"] / in_bf16["megabytes"] < 0.53, strategy
    for name, ratio in figures["ratios"].items():
        assert f"{name}: {ratio:.2f}" in done.stdout
    for case in reduced:
        for strategy in ("hierarchical", "sharded"):  # the weights take the same links as the gradient sums
            assert 0.99 < case[strategy]["megabytes_per_host"] / case["megabytes"] < 1.03, strategy
        for strategy in ("flat", "sharded_world"):
            assert case[strategy]["megabytes_per_host"] > 1.4 * case["megabytes"], strategy
        assert case["choice"] in ("flat", "hierarchical")
