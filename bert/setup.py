"""Construction of a run's objects before the clock starts. Only the metadata of the data sets are read."""

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from shutil import get_terminal_size

import torch

from bert.captured_step import CapturedStep
from bert.checkpoints.initial_model import first_model
from bert.checkpoints.trained import TrainedWeights
from bert.checkpoints.training_state import Allocation, RunState, restore
from bert.checkpoints.weights import text_metadata
from bert.checkpoints.writer import Checkpoints
from bert.configuration.config import Config
from bert.derived_settings import EVALUATION_COST
from bert.evaluation import Evaluator
from bert.execution.cuda_graphs import CudaCapturer, replay_of
from bert.execution.stopwatch import DeviceStopwatch, Stopwatch
from bert.guards.interruption import Interruption
from bert.guards.preflight import Inputs, batch_sampler
from bert.log.mllog import MLLog
from bert.loop import Run
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh, agreed_text, broadcast_
from bert.reporting.intervals import Intervals
from bert.reporting.reporter import Position, Reporter, Sink, StepLines, TensorBoard
from bert.step import TrainingStep
from compliance.log.metrics import NAN, MetricsWriter, RunRecord
from console.program import complain, say
from console.text import clock, counted
from console.version import commit
from dataloading.batches.loader import Batch, Loader, batch_of, shape_bucket_of
from dataloading.batches.loader_choice import choose_loader
from dataloading.batches.sampler import MicroBatch, ShapeBucket, choose_shape_buckets, draw_sizes
from dataloading.dataset.folder import Dataset
from dataloading.shards.samples import synthetic_samples
from kernels.tuning import autotune

_WARM_UP_STEPS = 2
"""Number of steps on synthetic batches before the clock starts. The first one compiles kernels, and the second is timed."""


def build_run(
    config: Config,
    inputs: Inputs,
    mesh: Mesh,
    log: MLLog,
    interruption: Interruption,
    allocation: Allocation,
    seed: int,
    resumed: RunState | None,
    capturer: CudaCapturer | None,
) -> Run:
    """Build and warm up everything that the training loop needs, and restore the state ``resumed``, if any.

    Checkpoints store ``allocation``. All ranks must call this at the same time. The caller must close the run's reporter and
    loader.
    """
    shape_buckets = choose_shapes(config, inputs.train, mesh)
    evaluator = Evaluator(inputs.evaluation, mesh, config.evaluation.batch_size, inputs.ignored_id)
    step = _initial_step(config, mesh, seed, log, capturer)
    batches = synthetic_batches(config, inputs.train, mesh, shape_buckets)
    if config.training.autotune and mesh.device.type == "cuda":
        _choose_implementations(step, batches, log, is_captured=capturer is not None)
    step_seconds = step.warm_up(batches, _WARM_UP_STEPS, shape_buckets)
    # Warm up the evaluator after the step, because the graphs that share a memory pool must be captured largest first.
    evaluator.warm_up(step.model, step.autocast(), capturer)
    start, skipped = Position(), 0
    if resumed:
        # Restore after the warm-up, because the warm-up ends by restoring the initial state.
        restore(step, resumed)
        start, skipped = Position(resumed.step, resumed.samples), resumed.step - resumed.optimizer_steps
    # Announce the time only on a CPU. On a GPU, ``step_seconds`` contains only the time in which the host launches a step.
    if mesh.is_main and mesh.device.type == "cpu" and step_seconds:
        say(_announcement(config, inputs, start.samples, step_seconds))
    log.weights_initialization(config.model.num_hidden_layers)
    loader = build_loader(config, inputs.train, mesh, seed, shape_buckets, start.steps, log)
    # Create the reporter late, because nobody would close it if an earlier statement raised an error.
    reporter = _reporter(config, inputs, log, step, start.samples)
    of_text = text_metadata(inputs.vocabulary_sha256, inputs.normalization)
    return Run(
        config=config,
        schedule=inputs.schedule,
        start=start,
        log=log,
        reporter=reporter,
        intervals=Intervals(config, step, reporter, start, skipped),
        loader=loader,
        step=step,
        evaluator=evaluator,
        checkpoints=Checkpoints(config, inputs.train, seed, step, reporter, allocation),
        trained=TrainedWeights(config, of_text, step, is_resumed=resumed is not None),
        interruption=interruption,
    )


def _announcement(config: Config, inputs: Inputs, done: int, step_seconds: float) -> str:
    """Describe the remaining steps, evaluations and time of a run that has trained on ``done`` samples."""
    batch, held_out, schedule = config.training.global_batch_size, len(inputs.evaluation), inputs.schedule
    steps = -(-(config.training.sample_limit - done) // batch)
    evaluations = (done + steps * batch) // schedule.interval - schedule.index_after(done + 1) + 1
    seconds = step_seconds * (steps + EVALUATION_COST * evaluations * held_out / batch)
    most = "" if config.evaluation.target is None else "at most "
    work = f"{counted(steps, 'step')} of {batch} sequences, {counted(evaluations, 'evaluation')} of {held_out:,}"
    return f"{most}{work}: about {clock(seconds)}"


def captures(config: Config, mesh: Mesh) -> bool:
    return mesh.device.type == "cuda" and config.training.cuda_graphs


def choose_shapes(config: Config, train: Dataset, mesh: Mesh) -> list[ShapeBucket]:
    """Choose the shape buckets to which micro-batches are padded.

    The list is empty if neither CUDA graphs nor oneDNN need fixed shapes.
    """
    training = config.training
    # oneDNN compiles a 16-bit matrix product for each number of rows and caches about a thousand of them. Without
    # padding, nearly every micro-batch would wait for a compilation.
    compiled = mesh.device.type == "cpu" and training.precision != "fp32"
    if not compiled and not captures(config, mesh):
        return []
    micro_batches = mesh.data_size * training.gradient_accumulation_steps
    tokens, masked = draw_sizes(train.lengths, train.masked_counts, training.global_batch_size, micro_batches)
    # Round up: if the shares are uneven, the buckets must fit the largest share.
    sequences = -(-training.global_batch_size // micro_batches)
    return choose_shape_buckets(tokens, masked, sequences, train.info.max_seq_length)


def synthetic_batches(config: Config, train: Dataset, mesh: Mesh, shape_buckets: Sequence[ShapeBucket]) -> list[Batch]:
    """Return micro-batches of random tokens with the lengths of a real global batch.

    Sequence lengths may be read before the clock starts (training_rules, section 6.4), but tokens may not.
    """
    batches = []
    for micro in batch_sampler(config, train, mesh.data_size, seed=0).rank_batches(0, mesh.data_rank):
        samples = synthetic_samples(train.lengths[micro.indices], config.model.vocab_size)
        batches.append(batch_of(samples, micro, shape_bucket_of(samples, shape_buckets, micro)).to(mesh.device))
    return batches


def build_loader(
    config: Config,
    train: Dataset,
    mesh: Mesh,
    seed: int,
    shape_buckets: Sequence[ShapeBucket],
    first_step: int,
    log: MLLog,
) -> Loader:
    """Build the loader of this rank's micro-batches, starting at ``first_step``.

    The loader reads no data until its first batch is requested.
    """
    sampler = batch_sampler(config, train, mesh.data_size, seed)
    # A site that takes steps by itself divides its losses by the counts of its own ranks, which are ``together``.
    apart = config.training.site_steps > 1
    together = [mesh.coordinates[rank][0] for rank in mesh.own_site.data_ranks] if apart else None

    def rank_batches(step: int) -> list[MicroBatch]:
        # Loaders count steps from 0 even in a resumed run, so add the steps before it.
        return sampler.rank_batches(first_step + step, mesh.data_rank, together)

    choice = choose_loader(config.data.loader, mesh.device, rank_batches, train.lengths, shape_buckets)
    log.line(f"# {choice}")
    # Each rank chooses its own loader, but only rank 0 writes the log. One rank per host therefore warns on the
    # console if DALI cannot start there.
    if choice.is_fallback and mesh.local_rank == 0:
        complain(choice, "warning")
    return choice.make(train, rank_batches, mesh.device, shape_buckets)


def log_settings(log: MLLog, config: Config, inputs: Inputs, mesh: Mesh, seed: int) -> None:
    optimizer, training = config.optimizer, config.training
    settings = {
        "submission_benchmark": "bert",
        "submission_division": config.log.division,
        "submission_org": config.log.organization,
        "submission_platform": config.log.platform or config.log.system,
        "submission_status": config.log.status,
        "seed": seed,  # logged once for all ranks (TR 5.1)
        "global_batch_size": training.global_batch_size,
        # Round up: if the shares are uneven, log the largest share.
        "d_batch_size": -(-training.global_batch_size // (mesh.data_size * training.gradient_accumulation_steps)),
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "max_sequence_length": inputs.train.info.max_seq_length,
        "max_predictions_per_seq": inputs.train.info.max_predictions_per_seq,
        "opt_name": "lamb",
        "opt_base_learning_rate": optimizer.base_learning_rate,
        "opt_lamb_epsilon": optimizer.epsilon,
        "opt_epsilon": optimizer.epsilon,  # ruleset 2.0.0 requires the older name as well
        "opt_lamb_beta_1": optimizer.beta_1,
        "opt_lamb_beta_2": optimizer.beta_2,
        "opt_lamb_weight_decay_rate": optimizer.weight_decay_rate,
        "opt_lamb_learning_rate_decay_poly_power": 1.0,  # linear decay, as the rules require
        "opt_gradient_clip_norm": optimizer.max_grad_norm,
        "opt_learning_rate_training_steps": optimizer.learning_rate_training_steps,
        # The rule files require the number of warm-up steps under both names.
        "opt_learning_rate_warmup_steps": optimizer.num_warmup_steps,
        "num_warmup_steps": optimizer.num_warmup_steps,
        "start_warmup_step": optimizer.start_warmup_step,
        "eval_interval_samples": inputs.schedule.interval,
    }
    if config.evaluation.target is not None:
        settings["quality_target"] = config.evaluation.target
    for key, value in settings.items():
        log.event(key, value)


def _initial_step(config: Config, mesh: Mesh, seed: int, log: MLLog, capturer: CudaCapturer | None) -> TrainingStep:
    """Build the step from the initial model. All ranks must call this at the same time."""
    # Every rank makes the whole model, and the step copies this rank's part of it.
    initial = first_model(config, mesh, seed)
    for parameter in initial.parameters():
        # All ranks start from rank 0's weights.
        broadcast_(parameter.data)
    # On a GPU, the host's clock would measure only how long the host takes to launch kernels.
    stopwatch = DeviceStopwatch() if mesh.device.type == "cuda" else Stopwatch()
    step = build_step(initial, config, mesh, stopwatch, capturer)
    if mesh.world_size > 1:
        shape = f"{mesh}, " if mesh.tensor * mesh.pipeline > 1 else ""
        reduction = f"{shape}reduction: {step.reduction_choice}"
        log.line(f"# {reduction}")
        if mesh.is_main:
            say(reduction)
    if mesh.sites:
        ranks = ", ".join(f"{name} ({counted(count, 'rank')})" for name, count in Counter(mesh.sites).items())
        training = config.training
        apart = f", each by itself for {training.site_steps} steps, then {training.site_dtype}" if step.sites else ""
        log.line(f"# sites: {ranks}{apart}")
        if mesh.is_main:
            say(f"sites: {ranks}{apart}")
    # Each rank must draw different dropout masks. The stages of one model copy share a dropout seed, because each layer
    # has its own random stream.
    torch.manual_seed(seed * mesh.world_size + mesh.rank)
    step.model.seed_dropout(seed * (mesh.world_size // mesh.pipeline) + mesh.dropout_stream)
    return step


def build_step(
    initial: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch, capturer: CudaCapturer | None
) -> TrainingStep:
    """Build the kind of step that the run needs. All ranks must call this at the same time."""
    if mesh.pipeline > 1:
        # Import PyTorch's pipelining only if needed, because it takes seconds and imports Triton.
        from bert.pipeline_step import PipelineStep

        return PipelineStep(initial, config, mesh, stopwatch)
    if capturer is not None:
        return CapturedStep(initial, config, mesh, stopwatch, capturer)
    return TrainingStep(initial, config, mesh, stopwatch)


def _choose_implementations(step: TrainingStep, batches: Sequence[Batch], log: MLLog, *, is_captured: bool) -> None:
    """Choose, on all ranks, the implementations that are fastest on rank 0 for the op calls of ``step``."""
    mesh = step.mesh
    # Measure ops in the way in which the step runs them: as CUDA graph replays if the step is captured.
    repeatable = partial(replay_of, mesh.device) if is_captured else autotune.run_once
    with step.rehearsal():
        with autotune.observed() as requests:
            step(batches)
        # Only rank 0 measures, because other ranks might find other implementations to be fastest.
        choices = autotune.to_json(autotune.tune(requests, repeatable)) if mesh.is_main else ""
        choices = autotune.from_json(agreed_text(choices, mesh))
        autotune.apply(choices)
    for choice in choices:
        log.line(f"# kernels: {choice}")


def _reporter(config: Config, inputs: Inputs, log: MLLog, step: TrainingStep, resumed_samples: int) -> Reporter:
    # The other ranks report nothing, but need a reporter to measure the time for training.max_minutes.
    if not step.mesh.is_main:
        return Reporter([])
    run = RunRecord(
        recipe=config.recipe,
        system=config.log.system,
        target=NAN if config.evaluation.target is None else config.evaluation.target,
        global_batch_size=config.training.global_batch_size,
        world_size=step.mesh.world_size,
        parameters=step.vectors.parameters,
        commit=commit(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    facts = config.evaluation.target, config.training.sample_limit, inputs.schedule, resumed_samples
    sinks: list[Sink] = [
        MetricsWriter(inputs.metrics, run),
        StepLines(log.line, *facts),
        StepLines(say, *facts, width=get_terminal_size().columns if sys.stdout.isatty() else None),
    ]
    if config.log.tensorboard is not None:
        sinks.append(TensorBoard(config.log.tensorboard / config.log.system / inputs.result.stem))
    return Reporter(sinks, (inputs.run_plan, config.plan) if inputs.run_plan and config.plan else None)
