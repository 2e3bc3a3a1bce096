"""The training step of BERT-Large: its rate, where the time goes, how it learns in FP8."""

import statistics
from dataclasses import replace
from functools import partial

from benchmarks.gpu_parts.ceilings import Ceilings
from benchmarks.gpu_parts.measuring.budget import split, synchronisations
from benchmarks.gpu_parts.measuring.report import Figure, NotUsableError
from benchmarks.gpu_parts.measuring.scale import Context, micro_batches, training_flop
from benchmarks.gpu_parts.measuring.timing import measured, timed_row
from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import Precision
from bert.reporting.stopwatch import DeviceStopwatch, Stopwatch
from bert.step import TrainingStep
from dataloading.batches.loader import Batch
from kernels.reference.fp8 import capability_reasons


def step(context: Context) -> None:
    """Global batches of the recipe of one GPU and of two of eight, and one micro-batch; captured, as in training."""
    ceilings, report, sequences = Ceilings.of(context), context.report, context.scale.sequences
    for index, (config, micro, count) in enumerate(_sizes(context)):
        name = f"{micro * count} sequences as {count} x {micro}, {config.recipe}, {config.training.precision}"
        # Phases of the first alone: should the stopwatch fail, the others' rates are there.
        report.attempt(name, partial(rate, context, name, config, micro, count, ceilings, phases=index == 0))
    for precision in ("bf16", "fp8"):
        name = f"host synchronisations in a step, {precision}"
        report.attempt(name, partial(_look_into, context, name, precision))
    name = f"{sequences} sequences, operator by operator"
    report.attempt(name, partial(rate, context, name, RECIPES["h100_1x1"](), sequences, 1, ceilings, captured=False))


def _sizes(context: Context) -> list[tuple[Config, int, int]]:
    """Recipe, size and number of micro-batches; what is eight GPUs' there is taken one after another here."""
    one, sequences = RECIPES["h100_1x1"](), context.scale.sequences
    count = one.training.gradient_accumulation_steps
    micro, gpus = (2, 2) if context.tiny else (one.training.global_batch_size // count, 8)
    return [
        (one, micro, count),
        (with_precision(one, "fp8"), micro, count),
        (one, sequences, 1),
        (RECIPES["h100_1x8"](), sequences, gpus),
        (RECIPES["dgxa100_1x8"](), max(2, sequences * 56 // 96), gpus),  # the recipes have 56 and 96 of them
    ]


def _look_into(context: Context, name: str, precision: Precision) -> Figure:
    """Split the time of a captured step, and check whether the host waits in one."""
    # Padded to a shape bucket, as captured steps are.
    batches = micro_batches(context, context.scale.sequences, 1, padded=True)
    trained = training_step(context, precision=precision)
    prepare(context, trained, batches)
    split(context, lambda: trained(batches), context.scale.sequences, precision)
    return synchronisations(context, name, lambda: trained(batches))


def fp8(context: Context) -> None:
    """The step in FP8, and the losses of many steps in low precision: same weights, same samples, no dropout."""
    ceilings, report, sequences = Ceilings.of(context), context.report, context.scale.sequences
    config = with_precision(RECIPES["h100_1x1"](), "fp8")
    for name, captured in (("step in FP8", True), ("step in FP8, operator by operator", False)):
        report.attempt(name, partial(rate, context, name, config, sequences, 1, ceilings, captured=captured))
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
    note = f"from {losses[0]:.4f} in {len(losses)} steps"
    return Figure(name, figure=losses[-1], note=note, page=True, losses=losses)


def _parity_row(context: Context, name: str, low: Precision, high: Precision) -> Figure:
    rows = [context.report.row(_name_of_losses(precision)) for precision in (low, high)]
    if not all(row and row.losses for row in rows):
        raise NotUsableError("a side was not measured")
    differences = [
        abs(ours - theirs) / theirs for ours, theirs in zip(*(row.losses for row in rows if row), strict=True)
    ]
    note = f"largest relative difference over {len(differences)} steps; {differences[-1]:.2e} at the last"
    return Figure(name, figure=max(differences), note=note, page=True)


def with_precision(config: Config, precision: Precision) -> Config:
    """The same recipe with other matrix products."""
    return replace(config, training=replace(config.training, precision=precision))


def training_step(
    context: Context,
    config: Config | None = None,
    *,
    precision: Precision | None = None,
    dropout: bool = True,
    stopwatch: Stopwatch | None = None,
) -> TrainingStep:
    """The step of a recipe, by default that of one H100, on the model of the context; where that is tiny, fp32 for bf16."""
    config = config or RECIPES["h100_1x1"]()
    model = context.scale.model if dropout else replace(context.scale.model, hidden_dropout=0.0, attention_dropout=0.0)
    precision = precision or config.training.precision
    if precision == "fp8" and (reasons := capability_reasons(context.device)):
        raise NotUsableError("; ".join(reasons))
    config = replace(config, log=replace(config.log, division="open"), model=model)
    # Tiny models run on CPUs, whose tests are of fp32.
    config = with_precision(config, "fp32" if context.tiny and precision == "bf16" else precision)
    return TrainingStep(context.model(model), config, context.mesh, stopwatch or Stopwatch())


def prepare(context: Context, trained: TrainingStep, batches: list[Batch], *, captured: bool = True) -> None:
    """Warm a step up for these batches, and capture it where there is a GPU, as training does before its clock starts."""
    capturer = context.capturer() if captured else None
    shape_buckets = sorted({batch.shape_bucket for batch in batches}, key=lambda size: size.tokens)
    trained.warm_up(batches, 1, capturer, shape_buckets)


def rate(
    context: Context,
    name: str,
    config: Config,
    micro: int,
    count: int,
    ceilings: Ceilings,
    *,
    captured: bool = True,
    phases: bool = False,
) -> Figure:
    """Row of a step's rate; with ``phases`` rows for those, by the stopwatch of training: should it fail, others do not."""
    # The stopwatch of a GPU records events, the host's reads the clock.
    stopwatch = DeviceStopwatch() if phases and context.device.type == "cuda" else Stopwatch()
    trained = training_step(context, config, stopwatch=stopwatch)
    # Model work counts real tokens alone: padding to a bucket is no work.
    real = micro_batches(context, micro, count)
    flop = sum(training_flop(context.scale.model, batch) for batch in real)
    batches = micro_batches(context, micro, count, padded=True) if captured else real
    prepare(context, trained, batches, captured=captured)
    repeats = context.scale.repeats if count == 1 else max(1, context.scale.repeats // 3)
    seconds = measured(lambda: trained(batches), context.device, repeats, cold=False)
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
    """A step by the stopwatch of training: its phases add up to the step, or it measures something else."""
    repeats = max(1, context.scale.repeats // 3)
    # What warming up took is no phase of a step.
    stopwatch.reset()
    for _ in range(repeats):
        trained(batches)
    for phase, seconds in stopwatch.take().items():
        if seconds:
            a_step = seconds / repeats
            row = Figure(
                f"stopwatch: {phase}", 1e3 * a_step, share=a_step / step_seconds, note="of the step", page=True
            )
            context.report.add(row)


def _losses(context: Context, precision: Precision) -> list[float]:
    """The masked-LM loss of every step, without dropout."""
    trained = training_step(context, precision=precision, dropout=False)
    sequences = context.scale.parity_sequences
    prepare(context, trained, micro_batches(context, sequences, 1, padded=True))
    losses = []
    for index in range(context.scale.parity_steps):
        # Other samples at each step, the same on all sides by their seed.
        trained(micro_batches(context, sequences, 1, seed=index, padded=True))
        losses.append(trained.statistics.fetch()[0]["masked_lm_loss"])
    return losses
