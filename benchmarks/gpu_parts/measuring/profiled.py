# pyright: reportPrivateImportUsage=false
"""Split the time of a training step by kernel, and check whether the host waits for the device in a step."""

import statistics
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.measuring.report import Figure, NotUsableError, first_line
from benchmarks.gpu_parts.measuring.scale import Context
from benchmarks.gpu_parts.measuring.timing import measured

_MOST_ROWS = 24


def split(context: Context, name: str, run: Callable[[], None], sequences: int) -> None:
    """Add a row for each kernel that takes the most time in one step, and one for the time when the device is idle."""
    on_gpu = context.on_gpu
    # Measure the step's time without the profiler, which slows launches down.
    seconds = statistics.median(measured(run, context.device, context.scale.repeats, cold=False))
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in recorded.key_averages():
        # Self time counts nothing twice. On a GPU, only the device's events count, because the host runs concurrently.
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        of_the_host = on_gpu and event.device_type != DeviceType.CUDA
        if not (of_the_host or event.is_user_annotation) and microseconds:
            spent[event.key] = microseconds
    if not spent:
        raise NotUsableError("the profiler saw nothing on the device")
    whole = seconds * 1e6
    idle = "idle: launches, host", max(0.0, whole - sum(spent.values()))
    for key, microseconds in [*sorted(spent.items(), key=lambda item: -item[1])[:_MOST_ROWS], idle]:
        share = microseconds / whole
        row = Figure(
            f"{name}: {key[:100]}",
            microseconds / 1e3,
            microseconds / sequences,
            "us a sequence",
            share,
            page=share > 0.01,
        )
        context.report.add(row)


def synchronisations(context: Context, name: str, run: Callable[[], None]) -> Figure:
    """Return a row that says whether PyTorch detects that the host waits for the device in a step."""
    if not context.on_gpu:
        return Figure(name, note="nothing to see on a CPU")
    torch.cuda.synchronize()  # the host must not wait for work that was queued before
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return Figure(name, note=f"WRONG: {first_line(error)}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Figure(name, note="none", page=True)
