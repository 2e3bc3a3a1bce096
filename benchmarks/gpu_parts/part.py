"""Run a part of ``benchmarks/gpu.py`` in a separate process.

    python benchmarks/gpu_parts/part.py '{"function": "MODULE:FUNCTION", "file": FILE, "seconds": N, ...}'

The argument is a JSON object with the arguments of ``run``. ``FUNCTION`` gets a ``Context`` and adds rows to its report. A
part that is started again with the same file continues after the existing rows. Exit status: 0 if all rows are correct, 1 if
some failed, ``LOST`` if the device no longer responds.
"""

import gc
import importlib
import json
import math
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LOST = 3
GRACE_S = 30
"""Seconds after its time limit at which a part ends itself. Usually the parent process ends it earlier."""


def main(arguments: str) -> int:
    given = json.loads(arguments)
    # An alarm ends the process even if Python code cannot run, for example inside a hanging kernel launch.
    signal.alarm(math.ceil(given["seconds"]) + GRACE_S)
    try:
        return run(**given)
    finally:
        signal.alarm(0)


def run(
    function: str, file: Path | str, device_type: str, *, tiny: bool, seconds: float = math.inf, **given: Any
) -> int:
    """Run a part, which should end within ``seconds``. The other arguments are fields of ``Context``."""
    end = time.monotonic() + seconds
    import torch  # the import takes seconds, which count towards the part's time

    from benchmarks.conditions import conditions
    from benchmarks.gpu_parts.report import DeviceLostError, PartReport, first_line
    from benchmarks.gpu_parts.scale import FULL, TINY, Context
    from benchmarks.gpu_parts.timing import settle
    from kernels import choose
    from kernels.products import set_product_precision
    from kernels.registry import AUTO

    # Set the precision before any matrix product runs and before implementations are chosen.
    set_product_precision()

    # Device 0 is the first visible device, which the caller may have selected.
    device = torch.device(device_type, 0)
    # The report keeps rows that an earlier process of this part has measured.
    report = PartReport.load(Path(file))
    report.settle = partial(settle, device)
    device_name = torch.cuda.get_device_name(device) if device_type == "cuda" else "cpu"
    context = Context(device, TINY if tiny else FULL, report, end=end, **given)
    about = {"part": report.path.stem, "device": device_name, "cuda": torch.version.cuda, "without": context.without}
    report.about = about | conditions()
    # Write at the start, so that the file exists even if the process dies before the first row.
    report.write()
    module, _, name = function.partition(":")
    try:
        measure = getattr(importlib.import_module(module), name)
        gc.freeze()  # imported objects are never freed, so the collection after each row can skip them
        choose(context.without)
        measure(context)
        report.end(None)
    except DeviceLostError:
        traceback.print_exc()
        # Do not end the report, because another process continues after this row.
        return LOST
    except Exception as error:  # the file names the error as the reason why it is incomplete
        traceback.print_exc()
        report.end(first_line(error))
    finally:
        choose(dict.fromkeys(context.without, AUTO))  # undo, because tests run several parts in one process
        gc.unfreeze()
    return 1 if report.failures or not report.complete else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
