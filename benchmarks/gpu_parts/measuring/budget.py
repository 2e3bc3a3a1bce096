# pyright: reportPrivateImportUsage=false
"""Split the time of a training step by the rows of the budget, and check whether the host ever waits in a step."""

import statistics
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.measuring.report import Figure, NotUsableError, first_line
from benchmarks.gpu_parts.measuring.scale import Context
from benchmarks.gpu_parts.measuring.timing import measured

BUDGET = {
    "loss": ("nll", "cross_entropy", "logsoftmax", "log_softmax", "argmax"),
    "attention": ("attention", "flash", "fmha", "softmax"),
    "matrix products, encoder and heads": (
        "gemm",
        "matmul",
        "cutlass",
        "nvjet",
        "xmma",
        "::mm",
        "addmm",
        "bmm",
        "linear",
    ),
    "LAMB": ("lamb", "foreach", "multi_tensor", "_norm_out", "vector_norm", "lerp", "addcmul"),
    "dropout, residual, norm, embeddings": ("layer_norm", "layernorm", "dropout", "embedding", "random_", "bernoulli"),
    "GELU": ("gelu",),
    "copies, casts, fills": ("copy", "memcpy", "memset", "fill", "cat", "zero_", "index"),
}
"""Rows of the split, by what the names of device kernels contain; the first that fits takes it.

Attention stands before matrix products, because names of its kernels contain those of a matrix product's library.
"""

# Kernels of Triton have the names of their functions, which the rows above could not tell.
_TRITON_ROWS = {
    "attention": "attention",
    "lamb": "LAMB",
    "norms": "dropout, residual, norm, embeddings",
    "dense": "GELU",
    "fp8": "FP8 casts, some with GELU",
    "loss": "loss",
}
"""By the room or file of ``kernels/triton/`` that a kernel is in."""

_ON_PAGE = 0.01
"""Share of the step from which a row of the split is on the page."""


def split(context: Context, name: str, run: Callable[[], None], sequences: int) -> None:
    """Add a row for each part of the budget: time on the device in one step, and what is left idle."""
    on_gpu = context.on_gpu
    # Timed without the profiler, which slows launches down; its own record gives the parts.
    seconds = measured(run, context.device, context.scale.repeats, cold=False)
    # One step: the profiler's record of many would be large, and their parts are alike.
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    own_rows = _rows_of_own_kernels()
    spent: dict[str, float] = {}
    kernels: dict[str, float] = {}
    # Sums by kernel; self time, so that nothing counts twice.
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # On a GPU the host's events run beside those of the device.
        of_the_host = on_gpu and event.device_type != DeviceType.CUDA
        if of_the_host or event.is_user_annotation or not microseconds:
            continue
        row = own_rows.get(event.key) or _budget_row(event.key)
        spent[row] = spent.get(row, 0.0) + microseconds
        kernels[f"{row}: {event.key}"] = microseconds
    if not spent:
        raise NotUsableError("the profiler saw nothing on the device")
    whole = statistics.median(seconds) * 1e6
    # What no kernel accounts for: gaps between launches, and the host.
    spent["idle: launches, host"] = max(0.0, whole - sum(spent.values()))
    for row, microseconds in sorted(spent.items(), key=lambda item: -item[1]):
        figure, share = microseconds / sequences, microseconds / whole
        context.report.add(
            Figure(
                f"{name}: {row}",
                microseconds / 1e3,
                figure,
                "us a sequence",
                share,
                note="of the step",
                page=share >= _ON_PAGE,
            )
        )
    # The dozen that take the most, by name, for whoever wants to know what a row consists of.
    for key, microseconds in sorted(kernels.items(), key=lambda item: -item[1])[:12]:
        context.report.add(
            Figure(f"kernel, {name}: {key[:100]}", microseconds / 1e3, share=microseconds / whole, note="of the step")
        )


def synchronisations(context: Context, name: str, run: Callable[[], None]) -> Figure:
    """Return a row that says whether PyTorch sees the host wait for the device in a step."""
    if not context.on_gpu:
        return Figure(name, note="nothing to see on a CPU")
    # Work that is queued already must not be what makes the host wait.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return Figure(name, note=f"WRONG: {first_line(error)}")
    # Back to the default: other parts synchronize on purpose.
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Figure(name, note="none", page=True)


def _rows_of_own_kernels() -> dict[str, str]:
    """Return the budget row of each Triton kernel of this package by the kernel's name."""
    try:
        from kernels.ahead_of_time import all_configurations

        found = all_configurations()
    except (ValueError, AttributeError):  # no Triton, or one that interprets: no such kernels either
        return {}
    return {
        configuration.kernel.__name__: _TRITON_ROWS[place]
        for module, configurations in found.items()
        if (place := module.partition(".")[0]) in _TRITON_ROWS
        for configuration in configurations
    }


def _budget_row(kernel: str) -> str:
    for row, parts in BUDGET.items():
        if any(part in kernel.lower() for part in parts):
            return row
    return "everything else"
