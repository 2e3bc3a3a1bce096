"""Check every kernel under NVIDIA's compute-sanitizer, which sees accesses out of bounds and races in shared memory."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.gpu_parts import part
from benchmarks.gpu_parts.report import Figure, NotUsableError, PartReport
from benchmarks.gpu_parts.scale import Context

_CHECKED = "benchmarks.gpu_parts.ops:correctness"
_OPTIONS = (
    "--error-exitcode=9",
    # After an error in one kernel, check the remaining kernels too.
    "--destroy-on-device-error=kernel",
    # Ignore failing API calls, because PyTorch handles them. Ignore the exit status, because a wrong row also makes it 1.
    "--report-api-errors=no",
    "--check-exit-code=no",
    # Do not check Triton's compilers. Set no timeout, because importing PyTorch can take longer than the default.
    "--target-processes=application-only",
    "--launch-timeout=0",
    # Omit warnings: they concern threads of one warp, which compilers keep synchronized.
    "--racecheck-detect-level=error",
)


def memcheck(context: Context) -> None:
    """Run the part ``correctness`` at the tiny scale under each tool."""
    for tool in ("memcheck", "racecheck"):
        context.report.attempt(tool, partial(_row, context, tool))


def _row(context: Context, tool: str) -> Figure:
    if not context.on_gpu:
        raise NotUsableError("needs a CUDA device")
    # The toolkit's folder is often not in PATH.
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if program is None:
        raise NotUsableError("compute-sanitizer is not installed")
    # gpu.py ends a row at half of the part's time. The checked process ends before that, at ``seconds`` plus GRACE_S.
    seconds = max(0.0, 0.45 * (context.end - time.monotonic()) - part.GRACE_S)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checked.json")
        given = {"function": _CHECKED, "file": str(file), "device_type": context.device.type, "tiny": True}
        arguments = json.dumps(given | {"seconds": seconds, "without": dict(context.without)})
        command = [program, "--tool", tool, *_OPTIONS, sys.executable, part.__file__, arguments]
        # Without PyTorch's cache, every tensor is an allocation of its own, whose bounds the tool knows.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(
            command, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
        )
        return verdict(tool, done.stdout, PartReport.load(file))


def verdict(tool: str, output: str, report: PartReport) -> Figure:
    """Return a tool's row, from its output and from the report of the part that ran under it."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    said = [line for line in lines if line not in ("", "COMPUTE-SANITIZER")]
    # The first or second line of an error in a kernel names the place. An error without a place concerns the process.
    places = (re.search(r"(?:^|access )at (\S.*)", line) for line in said)
    found = next(((at, place[1]) for at, place in enumerate(places) if place), None)
    summary = next((line for line in said if "SUMMARY: " in line), None)
    checked = [row for row in report.rows if row.note.startswith(("right", "WRONG"))]
    if found:
        at, place = found
        first = said[at - 1] if said[at].startswith("at ") else said[at]
        note = f"WRONG: {place}: {first}; {summary}"
    elif not report.complete or summary is None or not re.search("SUMMARY: 0 ", summary):
        place = f" while measuring {report.measuring}" if report.measuring else ""
        why = "; ".join(said) or output.strip() or "the tool said nothing"
        note = f"failed: no verdict, {report.error or 'complete'}{place}: {why[:300]}"
    elif not checked:
        note = "failed: no verdict, because no row was checked"
    else:
        note = f"right, {summary}"
    return Figure(tool, figure=len(checked), unit="rows checked", note=note, page=True)
