# pyright: reportPrivateImportUsage=false
"""Measure BERT-Large's training step: its rate, phases and kernels, its losses in FP8, and the largest step that fits."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.report import Figure, NotUsableError, first_line
from benchmarks.gpu_parts.scale import Context, clipped_lengths, micro_batches, samples_of, training_flop
from benchmarks.gpu_parts.timing import Ceilings, measured, timed_row
from bert.captured_step import CapturedStep
from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import Precision
from bert.execution.cuda_graphs import replay_of
from bert.execution.stopwatch import DeviceStopwatch, Stopwatch
from bert.step import TrainingStep
from dataloading.batches.loader import Batch, batch_of, shape_bucket_of
from dataloading.batches.sampler import ShapeBucket, choose_shape_buckets, draw_sizes
from kernels.reference.fp8 import capability_reasons
from kernels.tuning import autotune

_MOST_ROWS = 24
"""Maximum number of kernels that get a row of their own."""
_FITS, _DOES_NOT_FIT = "fits", "does not fit"
_SHAPE_BUCKETS = 4
"""Number of shape buckets. Training uses 16. Fewer save time, and only the largest bucket determines the memory."""


def step(context: Context) -> None:
    """Measure captured steps of one-GPU and eight-GPU recipes on one GPU, and profile a step in bf16 and in FP8."""
    ceilings, report = Ceilings.of(context), context.report
    for index, (config, micro) in enumerate(_sizes(context)):
        name = rate_name(config, micro)
        # Phases are measured only for the first step, so that a failing stopwatch does not affect the other rates.
        report.attempt(name, partial(rate, context, name, config, micro, ceilings, phases=index == 0))
    for precision in ("bf16", "fp8"):
        name = f"split, {precision}"
        report.attempt(name, partial(_profile_step, context, name, precision))


def rate_name(config: Config, micro: int) -> str:
    count = config.training.gradient_accumulation_steps
    return f"{micro * count} sequences as {count} x {micro}, {config.recipe}, {config.training.precision}"


def _sizes(context: Context) -> list[tuple[Config, int]]:
    """Return recipes, each with the number of sequences in its micro-batches."""
    configs = (
        (recipe("h100_1x1"), 1),
        (recipe("h100_1x1", precision="fp8"), 1),
        (recipe("h100_1x1", global_batch_size=context.scale.sequences, gradient_accumulation_steps=1), 1),
        (recipe("h100_1x8"), 8),
        (recipe("dgxa100_1x8"), 8),
    )
    return [(config, micro_batch_size(context, config, gpus)) for config, gpus in configs]


def micro_batch_size(context: Context, config: Config, gpus: int = 1) -> int:
    training = config.training
    return 2 if context.tiny else training.global_batch_size // (training.gradient_accumulation_steps * gpus)


def _profile_step(context: Context, name: str, precision: Precision) -> None:
    """Check whether the host waits in a captured step of one micro-batch, and split the step's time by kernel."""
    sequences = context.scale.sequences
    # Captured steps are padded to a shape bucket.
    batches = micro_batches(context, sequences, 1, padded=True)
    trained = training_step(context, recipe("h100_1x1", gradient_accumulation_steps=1, precision=precision))
    prepare(context, trained, batches)
    run = partial(take_step, trained, batches)
    # Check this before profiling, because profiling fails in a container without the necessary permissions.
    context.report.add(_synchronisations(context, f"host synchronisations in a step, {precision}", run))
    _split(context, name, run, sequences)


def _split(context: Context, name: str, run: Callable[[], None], sequences: int) -> None:
    """Add rows for the kernels that take the most time in a step, and a row for the time when the device is idle."""
    on_gpu = context.on_gpu
    # Measure the step's time before the profiler starts, because profiling slows launches down.
    seconds = statistics.median(measured(run, context.device, context.scale.repeats, cold=False))
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in recorded.key_averages():
        # Self time excludes nested events, so nothing counts twice. On a GPU, only the device's events count, because the
        # host runs concurrently.
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        of_the_host = on_gpu and event.device_type != DeviceType.CUDA
        if not (of_the_host or event.is_user_annotation) and microseconds:
            spent[event.key] = microseconds
    if not spent:
        raise NotUsableError("the profiler recorded no kernels; it may lack the permission to do so")
    whole = seconds * 1e6
    idle = "idle: launches, host", max(0.0, whole - sum(spent.values()))
    for key, microseconds in [*sorted(spent.items(), key=lambda item: -item[1])[:_MOST_ROWS], idle]:
        title, share, a_sequence = f"{name}: {key[:100]}", microseconds / whole, microseconds / sequences
        figures = microseconds / 1e3, a_sequence, "us a sequence", share
        context.report.add(Figure(title, *figures, note="of the step", page=share > 0.01))


def _synchronisations(context: Context, name: str, run: Callable[[], None]) -> Figure:
    """Return a row that says whether PyTorch detects that the host waits for the device during a step."""
    if not context.captures:
        return Figure(name, note="steps are not captured, so the host may wait")
    torch.cuda.synchronize()  # finish queued work first, so that only the step itself can make the host wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return Figure(name, note=f"WRONG: {first_line(error)}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Figure(name, note="none", page=True)


def fp8(context: Context) -> None:
    """Measure the step in FP8. Then compare losses between precisions, with equal weights and samples and no dropout."""
    report, sequences = context.report, context.scale.sequences
    config = recipe("h100_1x1", gradient_accumulation_steps=1, precision="fp8")
    report.attempt("step in FP8", partial(rate, context, "step in FP8", config, sequences, Ceilings.of(context)))
    for precision in ("bf16", "fp8", "fp32"):
        name = _name_of_losses(precision)
        report.attempt(name, partial(_loss_row, context, name, precision))
    sides: list[tuple[Precision, Precision]] = [("fp8", "bf16"), ("bf16", "fp32"), ("fp8", "fp32")]
    for low, high in sides:
        name = f"losses in {low} against {high}"
        report.attempt(name, partial(_parity_row, context, name, low, high))


def _name_of_losses(precision: Precision) -> str:
    return f"loss in {precision} after the last step"


def _loss_row(context: Context, name: str, precision: Precision) -> Figure:
    losses = _losses(context, precision)
    finite = all(map(math.isfinite, losses))
    note = f"{'' if finite else 'WRONG, not finite: '}from {losses[0]:.4f} in {len(losses)} steps"
    return Figure(name, figure=losses[-1], note=note, page=True, losses=losses)


def _parity_row(context: Context, name: str, low: Precision, high: Precision) -> Figure:
    rows = [context.report.row(_name_of_losses(precision)) for precision in (low, high)]
    if not all(row and row.losses and not row.failed for row in rows):
        raise NotUsableError(f"the losses in {low} or {high} are missing or wrong")
    differences = [
        abs(ours - theirs) / theirs for ours, theirs in zip(*(row.losses for row in rows if row), strict=True)
    ]
    note = f"largest relative difference over {len(differences)} steps; {differences[-1]:.2e} at the last"
    return Figure(name, figure=max(differences), note=note, page=True)


def recipe(name: str, **training: Any) -> Config:
    config = RECIPES[name]()
    return replace(config, training=replace(config.training, **training))


def training_step(
    context: Context, config: Config, *, dropout: bool = True, stopwatch: Stopwatch | None = None
) -> TrainingStep:
    """Return a recipe's training step on the context's model. A recipe in bf16 uses the context's low precision.

    Raises ``NotUsableError`` if the recipe uses FP8 and the device lacks it.
    """
    precision = config.training.precision
    if precision == "fp8" and (reasons := capability_reasons(context.device)):
        raise NotUsableError("; ".join(reasons))
    if precision == "bf16" and context.low_precision == torch.float32:
        config = replace(config, training=replace(config.training, precision="fp32"))
    model = context.scale.model if dropout else replace(context.scale.model, hidden_dropout=0.0, attention_dropout=0.0)
    config = replace(config, log=replace(config.log, division="open"), model=model)
    parts = context.model(model), config, context.mesh, stopwatch or Stopwatch()
    capturer = context.capturer()
    return TrainingStep(*parts) if capturer is None else CapturedStep(*parts, capturer)


def prepare(context: Context, trained: TrainingStep, batches: list[Batch]) -> None:
    """Warm up a step for these batches and, on a GPU, capture it, as training does before its clock starts."""
    shape_buckets = sorted({batch.shape_bucket for batch in batches}, key=lambda size: size.tokens)
    if context.on_gpu:
        _choose_implementations(context, trained, batches)
    trained.warm_up(batches, 1, shape_buckets)


def _choose_implementations(context: Context, trained: TrainingStep, batches: list[Batch]) -> None:
    """Choose the implementations that are fastest for the calls of a step, as training does."""
    repeatable = partial(replay_of, context.device) if context.captures else autotune.run_once
    with trained.rehearsal():
        with autotune.observed() as requests:
            trained(batches)
        choices = autotune.tune(requests, repeatable)
        autotune.apply(choices)
    print(*choices, sep="\n", flush=True)


def take_step(trained: TrainingStep, batches: list[Batch]) -> None:
    """Run a step. Raise ``RuntimeError`` if a micro-batch ran without its CUDA graph, which would distort the time."""
    trained(batches)
    if isinstance(trained, CapturedStep) and trained.uncaptured_batches:
        raise RuntimeError(f"{trained.uncaptured_batches} micro-batches ran without their CUDA graph")


def rate(
    context: Context, name: str, config: Config, micro: int, ceilings: Ceilings, *, phases: bool = False
) -> Figure:
    """Return the row with a captured step's rate. With ``phases``, also add a row for each phase of the step."""
    # On a GPU the stopwatch records events; on a CPU it reads the clock.
    stopwatch = DeviceStopwatch() if phases and context.on_gpu else Stopwatch()
    trained = training_step(context, config, stopwatch=stopwatch)
    count = config.training.gradient_accumulation_steps
    # Model FLOP counts only real tokens, without the padding to a shape bucket.
    real = micro_batches(context, micro, count)
    flop = sum(training_flop(context.scale.model, batch) for batch in real)
    batches = micro_batches(context, micro, count, padded=True)
    prepare(context, trained, batches)
    repeats = context.scale.repeats if count == 1 else max(1, context.scale.repeats // 3)
    seconds = measured(partial(take_step, trained, batches), context.device, repeats, cold=False)
    median = statistics.median(seconds)
    if phases:
        _add_phases(context, trained, batches, stopwatch, median)
    tokens = sum(batch.tokens for batch in real) / (micro * count)
    work = f"{flop / median / 1e12:.0f} TFLOP/s of model work"
    floor, ceiling = ceilings.floor(flop)
    note = f"{trained.precision}: {work}, {ceiling}; {tokens:.1f} tokens a sequence"
    return timed_row(name, seconds, micro * count, "sequences/s", floor, note, page=True)


def _add_phases(
    context: Context, trained: TrainingStep, batches: list[Batch], stopwatch: Stopwatch, step_seconds: float
) -> None:
    """Add a row for each phase that training's stopwatch measures. Together, the phases should take the time of the step."""
    repeats = max(1, context.scale.repeats // 3)
    # Discard the times of the warm-up.
    stopwatch.reset()
    for _ in range(repeats):
        take_step(trained, batches)
    for phase, seconds in stopwatch.take().items():
        if seconds:
            a_step = seconds / repeats
            row = Figure(
                f"stopwatch: {phase}", 1e3 * a_step, share=a_step / step_seconds, note="of the step", page=True
            )
            context.report.add(row)


def _losses(context: Context, precision: Precision) -> list[float]:
    """Train without dropout and return the masked-LM loss of every step."""
    config = recipe("h100_1x1", gradient_accumulation_steps=1, precision=precision)
    trained = training_step(context, config, dropout=False)
    sequences = context.scale.parity_sequences
    prepare(context, trained, micro_batches(context, sequences, 1, padded=True))
    losses = []
    for index in range(context.scale.parity_steps):
        # The samples differ from step to step, but all precisions get the same ones.
        take_step(trained, micro_batches(context, sequences, 1, seed=index, padded=True))
        losses.append(trained.statistics.fetch()[0]["masked_lm_loss"])
    return losses


def memory(context: Context) -> None:
    """Double the micro-batch size until it does not fit, then bisect."""
    for precision in ("bf16", "fp8"):
        _search(context, precision)


def _search(context: Context, precision: Precision) -> None:
    report = context.report

    # Start with a quarter of the usual size.
    most, failing, size = 0, None, max(1, context.scale.sequences // 4)
    limit = context.scale.sequences * (1 if context.tiny else 16)
    # Stop when the bounds differ by at most 8 sequences, or by at most a sixteenth of the lower bound.
    while size <= limit and (failing is None or failing - most > max(8, most // 16)):
        name = f"{precision}, {size} sequences"
        row = report.attempt(name, partial(_peak, context, name, precision, size))
        if row is None or row.failed:  # an error other than lack of memory
            return
        most, failing = (size, failing) if row.note.startswith(_FITS) else (most, size)
        size = 2 * size if failing is None else (most + failing) // 2
    bound = f"{failing} do not" if failing else "more were not tried"
    report.add(Figure(f"{precision}, most sequences that fit", figure=most, unit="sequences", note=bound, page=True))


def _peak(context: Context, name: str, precision: Precision, sequences: int) -> Figure:
    """Return the row with the peak memory of start-up, capture and one replay for a micro-batch size."""
    if context.on_gpu:
        # A higher peak of an earlier size would hide the peak of this size.
        torch.cuda.reset_peak_memory_stats()
    try:
        _train(context, precision, sequences)
    except RuntimeError as error:
        # Running out of memory is a result. Any other error is a failure.
        if _is_lack_of_memory(error):
            return Figure(name, note=_DOES_NOT_FIT)
        raise
    if not context.on_gpu:
        return Figure(name, note=f"{_FITS}; a CPU keeps no count")
    free, total = torch.cuda.mem_get_info()
    # Reserved memory is the relevant figure, because other programs cannot use what the allocator holds.
    reserved, allocated = (
        2**-30 * read() for read in (torch.cuda.max_memory_reserved, torch.cuda.max_memory_allocated)
    )
    note = f"{_FITS}; share of the device's {total / 2**30:.0f}; {allocated:.1f} of them allocated, {free / 2**30:.1f} free"
    return Figure(name, figure=reserved, unit="GiB", share=reserved * 2**30 / total, note=note)


def _train(context: Context, precision: Precision, sequences: int) -> None:
    """Start up as a training run does, and take one step."""
    shape_buckets = _shape_buckets(context, sequences)
    samples = samples_of(context.scale, sequences)
    batch = batch_of(samples, shape_bucket=shape_bucket_of(samples, shape_buckets)).to(context.device)
    trained = training_step(context, recipe("h100_1x1", precision=precision))
    # Capture graphs for all shape buckets, which share one memory pool, as in training.
    trained.warm_up([batch], 1, shape_buckets)
    take_step(trained, [batch])
    if context.on_gpu:
        torch.cuda.synchronize()


def _shape_buckets(context: Context, sequences: int) -> list[ShapeBucket]:
    """Choose the shape buckets that the one-GPU recipe would use for micro-batches of this size."""
    longest = context.scale.model.max_position_embeddings
    count = RECIPES["h100_1x1"]().training.gradient_accumulation_steps
    lengths = clipped_lengths(20_000, longest, seed=0)
    masked = np.maximum(1, np.rint(0.15 * lengths).astype(np.int64))
    # Draw the sizes at random, because the choice of shape buckets depends on the spread of the sizes.
    tokens, masked_tokens = draw_sizes(lengths, masked, count * sequences, count)
    return choose_shape_buckets(tokens, masked_tokens, sequences, longest, _SHAPE_BUCKETS)


def _is_lack_of_memory(error: BaseException | None) -> bool:
    """Tell whether lack of memory caused an error. A capture that runs out of memory can raise another error."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
