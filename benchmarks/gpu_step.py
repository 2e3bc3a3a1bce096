# pyright: reportPrivateImportUsage=false
"""The training step of BERT-Large: its rate, where the time goes, how much memory it takes, how it learns."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_scale import Ceilings, Context, micro_batches, training_flop
from benchmarks.gpu_timing import Row, first_line, measured, release, timed_row
from bert.config import Config
from bert.graphs import CudaRecorder
from bert.metrics import Stopwatch
from bert.parallel.mesh import Mesh
from bert.recipes import dgxa100_1x8, h100_1x1, h100_1x8
from bert.step import TrainingStep, build_model
from dataloading.loader import Batch

Precision = Literal["fp32", "bf16", "fp8"]

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

_TRITON_ROWS = {
    "triton_attention": "attention",
    "triton_lamb": "LAMB",
    "triton_layer_norm": "dropout, residual, norm, embeddings",
    "triton_dense": "GELU",
    "triton_fp8": "FP8 casts, some with GELU",
    "triton_loss": "loss",
}


def step(context: Context) -> None:
    """One micro-batch, then the whole global batches of two recipes of eight GPUs on this one; recorded, as in training."""
    ceilings, report, sequences = Ceilings.of(context), context.report, context.scale.sequences
    sizes: list[tuple[Callable[[], Config], int, int]] = [
        (h100_1x1, sequences, 1),
        (h100_1x8, sequences, 8),
        (dgxa100_1x8, max(2, sequences * 56 // 96), 8),
    ]
    for recipe, micro, count in sizes:
        name = f"{micro * count} sequences as {count} x {micro}, optimizer of {recipe.__name__}"
        report.attempt(name, partial(_rate, context, name, recipe(), micro, count, ceilings))
    for precision in ("bf16", "fp8"):
        _look_into(context, precision)
    name = f"{sequences} sequences, operator by operator"
    report.attempt(name, partial(_rate, context, name, h100_1x1(), sequences, 1, ceilings, recorded=False))


def _look_into(context: Context, precision: Precision) -> None:
    """Where the time of a recorded step goes, and whether the host waits in one."""
    batches = micro_batches(context, context.scale.sequences, 1, padded=True)
    name = f"host synchronisations in a step, {precision}"
    trained = training_step(context, precision=precision)

    def look() -> Row:
        prepare(context, trained, batches)
        split(context, lambda: trained(batches), context.scale.sequences, precision)
        return _synchronisations(context, name, lambda: trained(batches))

    context.report.attempt(name, look)


def memory(context: Context) -> None:
    """Peak memory of a step against the size of the micro-batch, up to the largest that fits."""
    trained = training_step(context)
    fits, failing = 0, None
    size = context.scale.sequences // 4
    largest = context.scale.sequences * (1 if context.tiny else 16)
    while size <= largest and failing is None:
        fits, failing = (size, None) if _peak(context, trained, size) else (fits, size)
        size *= 2
    while failing is not None and failing - fits > max(16, fits // 8):
        middle = (fits + failing) // 2
        fits, failing = (middle, failing) if _peak(context, trained, middle) else (fits, middle)
    bound = f"{failing} does not" if failing else "more was not tried"
    context.report.add(Row("largest micro-batch that fits", figure=fits, unit="sequences", note=bound))


def fp8(context: Context) -> None:
    """The step in FP8, and losses of some steps in low precision against fp32: same weights and samples, no dropout."""
    ceilings, sequences = Ceilings.of(context), context.scale.sequences
    config = with_precision(h100_1x1(), "fp8")
    for name, recorded in (("step in FP8", True), ("step in FP8, operator by operator", False)):
        context.report.attempt(name, partial(_rate, context, name, config, sequences, 1, ceilings, recorded=recorded))
    reference = _losses(context, "fp32")
    context.report.add(Row("loss in fp32 after the last step", figure=reference[-1]))

    def against_reference(name: str, precision: Precision) -> Row:
        losses = _losses(context, precision)
        worst = max(abs(low - high) / high for low, high in zip(losses, reference, strict=True))
        note = f"largest relative difference over {len(losses)} steps; {losses[-1]:.4f} after the last"
        return Row(name, figure=worst, note=note)

    for precision in ("bf16", "fp8"):
        name = f"losses in {precision} against fp32"
        context.report.attempt(name, partial(against_reference, name, precision))


def with_precision(config: Config, precision: Precision) -> Config:
    """The same recipe with other matrix products."""
    return replace(config, training=replace(config.training, precision=precision))


def training_step(
    context: Context, config: Config | None = None, *, precision: Precision | None = None, dropout: bool = True
) -> TrainingStep:
    """The step of a recipe, by default that of one H100, on the model of the context; where that is tiny, fp32 for bf16."""
    config = config or h100_1x1()
    model = context.scale.model if dropout else replace(context.scale.model, hidden_dropout=0.0, attention_dropout=0.0)
    precision = precision or config.training.precision
    config = replace(config, log=replace(config.log, division="open"), model=model)
    config = with_precision(config, "fp32" if context.tiny and precision == "bf16" else precision)
    mesh = Mesh(0, 1, 0, context.device)
    return TrainingStep(build_model(config, mesh, seed=0), config, mesh, Stopwatch())


def prepare(context: Context, trained: TrainingStep, batches: list[Batch], *, recorded: bool = True) -> None:
    """Warm a step up for these batches, and record it where there is a GPU, as training does before its clock starts."""
    recorder = CudaRecorder(context.device) if recorded and context.device.type == "cuda" else None
    trained.warm_up(batches, 1, recorder, sorted({batch.capacity for batch in batches}, key=lambda size: size.tokens))


def split(context: Context, run: Callable[[], None], sequences: int, precision: Precision) -> None:
    """A row for each part of the budget: time on the device in one step, and what is left idle."""
    on_gpu = context.device.type == "cuda"
    seconds = measured(run, context.device, context.scale.repeats, cold=False)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    own_rows = _rows_of_own_kernels()
    spent: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        of_the_host = on_gpu and event.device_type != DeviceType.CUDA
        if of_the_host or event.is_user_annotation or not microseconds:
            continue
        row = own_rows.get(event.key) or _budget_row(event.key)
        spent[row] = spent.get(row, 0.0) + microseconds
        kernels[f"{row}: {event.key}"] = microseconds
    whole = statistics.median(seconds) * 1e6
    spent["idle: launches, host"] = max(0.0, whole - sum(spent.values()))
    for row, microseconds in sorted(spent.items(), key=lambda item: -item[1]):
        figure, share = microseconds / sequences, microseconds / whole
        context.report.add(
            Row(f"split, {precision}: {row}", microseconds / 1e3, figure, "us a sequence", share, "of the step")
        )
    for key, microseconds in sorted(kernels.items(), key=lambda item: -item[1])[:12]:
        context.report.add(
            Row(f"kernel, {precision}: {key[:100]}", microseconds / 1e3, share=microseconds / whole, note="of the step")
        )


def _rate(
    context: Context, name: str, config: Config, micro: int, count: int, ceilings: Ceilings, *, recorded: bool = True
) -> Row:
    trained = training_step(context, config)
    real = micro_batches(context, micro, count)
    flop = sum(training_flop(context.scale.model, batch) for batch in real)
    batches = micro_batches(context, micro, count, padded=True) if recorded else real
    prepare(context, trained, batches, recorded=recorded)
    repeats = context.scale.repeats if count == 1 else max(1, context.scale.repeats // 3)
    seconds = measured(lambda: trained(batches), context.device, repeats, cold=False)
    median = statistics.median(seconds)
    tokens = sum(batch.tokens for batch in real) / (micro * count)
    work = f"{flop / median / 1e12:.0f} TFLOP/s of model work, of the large bf16 product"
    note = f"{trained.precision}: {work}; {tokens:.1f} tokens a sequence"
    return timed_row(name, seconds, micro * count, "sequences/s", flop / ceilings.flop_per_s, note)


def _synchronisations(context: Context, name: str, run: Callable[[], None]) -> Row:
    """Whether anything makes the host wait, by PyTorch's own watch; on a CPU there is nothing to wait for."""
    if context.device.type == "cpu":
        return Row(name, note="nothing to see on a CPU")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return Row(name, note=f"WRONG: {first_line(error)}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Row(name, note="none")


def _peak(context: Context, trained: TrainingStep, sequences: int) -> bool:
    """Add the row of one size; whether it fits."""
    on_gpu = context.device.type == "cuda"
    release(context.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        trained(micro_batches(context, sequences, 1))
        if on_gpu:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        trained.flat.gradients_P.zero_()
        context.report.add(Row(f"{sequences} sequences", note="does not fit"))
        return False
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    note = "peak of a step" if on_gpu else "a CPU keeps no count"
    context.report.add(Row(f"{sequences} sequences", figure=peak, unit="GiB", note=note))
    return True


def _losses(context: Context, precision: Precision) -> list[float]:
    """The masked-LM loss of every step, without dropout."""
    trained = training_step(context, precision=precision, dropout=False)
    prepare(context, trained, micro_batches(context, context.scale.parity_sequences, 1), recorded=False)
    losses = []
    for index in range(context.scale.parity_steps):
        trained(micro_batches(context, context.scale.parity_sequences, 1, seed=index))
        losses.append(trained.statistics.fetch()[0]["masked_lm_loss"])
    return losses


def _rows_of_own_kernels() -> dict[str, str]:
    """Names of this package's Triton kernels, which say little by themselves, with their row of the budget."""
    try:
        from kernels.ahead_of_time import all_configurations

        found = all_configurations()
    except (ValueError, AttributeError):  # no Triton, or one that interprets: no such kernels either
        return {}
    return {
        configuration.kernel.__name__: _TRITON_ROWS[module]
        for module, configurations in found.items()
        if module in _TRITON_ROWS
        for configuration in configurations
    }


def _budget_row(kernel: str) -> str:
    for row, parts in BUDGET.items():
        if any(part in kernel.lower() for part in parts):
            return row
    return "everything else"
