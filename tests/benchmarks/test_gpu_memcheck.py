"""The GPU benchmark's part ``memcheck``, with a stand-in for compute-sanitizer that prints what the real tool prints."""

import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts import memcheck
from benchmarks.gpu_parts.report import Figure, PartReport
from benchmarks.gpu_parts.scale import TINY, Context

STAND_IN = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
tool=$2
[ -n "$PYTORCH_NO_CUDA_MEMORY_CACHING" ] || exit 1
shift 2
while case $1 in --*) ;; *) false ;; esac; do shift; done
"$@"
cat "$(dirname "$0")/$tool"
"""
CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
checked: bias_gelu, triton, bfloat16  0.5 of allowed error  right
========= Invalid __global__ write of size 16 bytes
=========     at _gelu_forward+0xec0 in dense.py:43
=========     by thread (18,0,0) in block (0,0,0)
=========     Access to 0x74505bcccca0 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: at::native::copy [0x16a3] in libtorch_cuda.so
========= ERROR SUMMARY: 3 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _norm+0xa70 in layer_norm.py:98
=========     and Read access at _norm+0xb80 in layer_norm.py:99 [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NOT_ATTACHED = """========= COMPUTE-SANITIZER
========= Error: process didn't terminate successfully
=========     The application may have hit an error when dereferencing Unified Memory from the host.
========= Error: Target application terminated before first instrumented API call
"""


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Return a context in which the CPU passes for a GPU. PATH has only the system's folders."""
    monkeypatch.setattr(Context, "on_gpu", True)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    report = PartReport(tmp_path / "out/memcheck.json", {})
    return Context(torch.device("cpu"), TINY, report, end=time.monotonic() + 6000)


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(("part", "rows"), [("right", 1), ("missing", 0)])
def test_each_sanitizer_tool_gets_a_row_with_its_summary(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, rows: int
) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "compute-sanitizer").write_text(STAND_IN)
    (folder / "compute-sanitizer").chmod(0o755)
    for tool, text in CLEAN.items():
        (folder / tool).write_text(text)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(memcheck, "_CHECKED", f"tests.benchmarks.gpu_parts:{part}")
    memcheck.memcheck(context)
    assert [(row.name, row.figure, row.failed) for row in context.report.rows] == [
        (tool, rows, not rows) for tool in ("memcheck", "racecheck")
    ]
    why = "no verdict, AttributeError: module 'tests.benchmarks.gpu_parts' has no attribute 'missing'"
    summary = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert context.report.rows[1].note == (f"right, {summary}" if rows else f"failed: {why}: {summary}")
    assert [path.name for path in context.report.path.parent.iterdir()] == ["memcheck.json"]


@pytest.mark.skipif(Path("/usr/local/cuda/bin/compute-sanitizer").exists(), reason="compute-sanitizer is installed")
def test_rows_say_that_compute_sanitizer_is_not_installed(context: Context) -> None:
    memcheck.memcheck(context)
    assert {row.note for row in context.report.rows} == {"not usable here: compute-sanitizer is not installed"}


def test_a_verdict_names_the_faulty_kernel_and_is_right_only_if_the_summary_has_no_errors(tmp_path: Path) -> None:
    def note(output: str, error: str | None = None) -> str:
        rows = [Figure("bias_gelu", figure=0.5, note="right"), Figure("largest error", figure=0.5, note="1 checked")]
        report = PartReport(tmp_path / "x.json", {}, rows=rows, measuring="lamb_step", error=error)
        return memcheck.verdict("x", output, report).note

    expected = (
        "WRONG: _gelu_forward+0xec0 in dense.py:43: Invalid __global__ write of size 16 bytes; ERROR SUMMARY: 3 errors"
    )
    assert note(OUT_OF_BOUNDS) == note(OUT_OF_BOUNDS, "cut off") == expected
    assert note(RACE).startswith("WRONG: _norm+0xa70 in layer_norm.py:98: Error: Race reported between Write access")
    ended = "Error: process didn't terminate successfully; The application may have hit an error when "
    assert note(NOT_ATTACHED, "cut off").startswith(f"failed: no verdict, cut off while measuring lamb_step: {ended}")
    assert note(CLEAN["memcheck"], "cut off").startswith("failed: no verdict, cut off while measuring lamb_step: ")
    assert note("sh: cannot execute").endswith(": sh: cannot execute")
    assert note(CLEAN["memcheck"]) == "right, ERROR SUMMARY: 0 errors"
    none = memcheck.verdict("x", CLEAN["memcheck"], PartReport(tmp_path / "x.json", {}, error=None))
    assert none.note == "failed: no verdict, because no row was checked"
