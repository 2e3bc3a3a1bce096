"""The timed run, from configuration to result file: ``python -m bert.train RECIPE [--section.field value ...]``.

``--config FILE`` takes settings from a TOML file, or those of an earlier run from its result file, recipe included; what
stands on the command line counts more.

Under torchrun it is one rank of many, and by itself a run of one process. It exits with 0 when the target was reached, 1
when the run ended without, 2 when an input or a setting is wrong, 3 after a fault (``bert.parallel.watchdog``), and 128 + n
after signal n. Under torchrun every orderly end is 0, because torchrun takes anything else for a crash and says so at
length; the log tells how the run ended.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import tyro
from rich.console import Console

from bert.checkpoints.initial import load_initial_weights
from bert.checkpoints.training_state import Checkpoints, RunState, checkpoint_folders, find, lock, restore
from bert.checkpoints.weights import VOCABULARY, save_weights
from bert.config import Config
from bert.config_file import arguments_of, did_you_mean, setting_names
from bert.cuda_graphs import CudaRecorder
from bert.evaluator import Evaluator
from bert.guards.data_guard import DataGuard
from bert.guards.interruption import Interrupted, Interruption
from bert.guards.preflight import check, plan_of, refuse_others, result_folder
from bert.guards.triton_cache import require_private_cache
from bert.loop import Inputs, TimedRun
from bert.mllog import MLLog
from bert.model import BertForPreTraining
from bert.own_text import FOLLOWING
from bert.parallel.collectives import agreed_integer, agreed_text, all_reduce_sum_, barrier, broadcast_
from bert.parallel.mesh import Launch, Mesh, join_mesh, launched_world_size, leave_mesh
from bert.parallel.stragglers import SlowRanks
from bert.parallel.watchdog import Watchdog
from bert.recipes import RECIPES
from bert.reporting.displays import LivePanel, PlainLines
from bert.reporting.metrics import (
    DeviceStopwatch,
    JsonLines,
    Progress,
    Reporter,
    Sink,
    Stopwatch,
)
from bert.reporting.provenance import commit, provenance
from bert.reporting.result_files import claim, create_log
from bert.reporting.tensorboard import tensorboard_sinks
from bert.step import TrainingStep, build_model, empty_model
from compliance.log.forecast import Schedule
from console.program import accept_any_text, answer_version, complain, parsed, reason, say, say_document
from dataloading.batches.capacity import Capacity, choose_capacities, draw_sizes
from dataloading.batches.loader import Batch, Loader, NumpyLoader, batch_of, capacity_of, choose_loader
from dataloading.batches.sampler import MicroBatch, Plan
from dataloading.batches.synthetic import synthetic_samples
from dataloading.dataset.folder import Dataset
from kernels.tuning import autotune

OLDEST_TORCH = (2, 11)
"""PyTorch's oldest release that this is tested with, of the images of NGC from 26.02 on. Installing asks for it too."""


def main(arguments: Sequence[str]) -> int:
    """Parse, check, run; returns the exit status."""
    accept_any_text()
    answer_version(arguments)
    try:
        _require_torch()
        config = parse(arguments)
        guard = DataGuard([config.data.train, config.data.evaluation])
        interruption = Interruption()
        inputs = check(config, launched_world_size())
        if config.dry_run:
            if config.training.device == "cuda" and not torch.cuda.is_available():
                complain(
                    "training.device is cuda, but PyTorch sees no GPU here: this machine could not run it", "warning"
                )
            say(f"{config.recipe}: ready, results would go to {inputs.result}")
            return 0
        mesh = join_mesh(config.training.device)
        if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
            say(f"warning: {warning}")
    except Interrupted as interrupted:
        return _stopped(interrupted)
    except (ValueError, OSError) as error:
        return refused(error)
    try:
        status = run(config, inputs, mesh, guard, interruption)
        if interruption.number is not None and mesh.is_main:
            _say_how_to_go_on(config, arguments)
        return status
    except Interrupted as interrupted:
        return _stopped(interrupted)
    except (ValueError, OSError) as error:
        return refused(error)
    finally:
        leave_mesh()


def _say_how_to_go_on(config: Config, arguments: Sequence[str]) -> None:
    """Of a run that a signal has ended with a checkpoint, the settings with which another goes on, last of all."""
    folder = config.checkpoint.folder
    if folder is not None and config.log.division == "open" and checkpoint_folders(folder):
        settings = [*arguments, "--resume", str(folder)]  # of a setting that is given twice, the latter counts
        say(f"to go on: python -m bert.train {shlex.join(settings)}")


def _require_torch() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ValueError(
            f"PyTorch is {torch.__version__} here, expected {oldest} or newer: install it, or take a newer image"
        )


def parse(arguments: Sequence[str], module: str = "bert.train") -> Config:
    """The configuration that the command line of ``module`` asks for, after ``--config FILE`` if it is given.

    Raises ``ValueError`` at an unknown recipe or a wrong value.
    """
    known = ", ".join(RECIPES)
    if arguments and arguments[0] in ("-h", "--help"):
        say_document(f"{__doc__}\nRecipes: {known}\n\nThe settings of a recipe: python -m bert.train RECIPE --help")
        raise SystemExit(0)
    named, *rest = arguments if arguments and not arguments[0].startswith("-") else (None, *arguments)
    if named is not None and named not in RECIPES:
        raise ValueError(f"unknown recipe {named!r}: expected one of {known}{did_you_mean(named, list(RECIPES))}")
    file, rest = _config_file(rest)
    recipe, settings = (named, []) if file is None else arguments_of(file, named)
    if recipe is None:
        raise ValueError(f"no recipe given: expected one of {known}, or --config FILE")
    program = f"python -m {module} {recipe}"
    read = partial(tyro.cli, Config, prog=program, args=[*settings, *rest])
    try:
        config = parsed(partial(read, default=RECIPES[recipe]()))
        for follow in FOLLOWING.get(recipe, ()):  # what is given counts more than what would follow
            default = follow(config)  # without ops: what tyro finds of them there would become settings of their own
            default = replace(default, training=replace(default.training, implementations={}))
            config = parsed(partial(read, default=default))
        return config
    except ValueError as error:
        unknown = re.match(r"Unrecognized options: --([^\s,=]+)", str(error))
        if unknown is None:
            raise
        name = unknown[1].replace("-", "_")
        raise ValueError(f"there is no setting --{unknown[1]}{did_you_mean(name, setting_names(recipe))}") from None


def _config_file(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of ``--config FILE``, which may stand anywhere, and the other arguments."""
    rest = list(arguments)
    for place, argument in enumerate(rest):
        option, equals, value = argument.partition("=")
        if option == "--config":
            if not equals and place + 1 == len(rest):
                raise ValueError("--config: expected a file behind it")
            del rest[place : place + (1 if equals else 2)]
            return Path(value if equals else arguments[place + 1]), rest
    return None, rest


def run(config: Config, inputs: Inputs, mesh: Mesh, guard: DataGuard, interruption: Interruption) -> int:
    """Initialise, start the clock, train to the target, stop the clock. Returns the exit status."""
    if config.checkpoint.folder is not None:
        lock(config.checkpoint.folder, mesh)
    resumed = _resumed(config, inputs, mesh)
    seed = resumed.seed if resumed else agreed_integer(_seed(config), mesh)
    barrier()  # no rank creates files before all have passed their checks
    log = MLLog(None)
    if mesh.is_main:
        log, files = create_log(result_folder(config), config.log.run)
        inputs = replace(inputs, **files._asdict())
    with log, _together(config, mesh, log) as watchdog:
        if mesh.is_main:
            claim(inputs.result)
            say(f"log in {inputs.result}")
        log.header(provenance(config, mesh, seed))
        if resumed:
            log.resumed(resumed.path, resumed.samples)
        log.cache_clear(config.log.cache_cleared)
        log.init_start()
        _log_settings(log, config, inputs, mesh, seed)
        stopwatch = DeviceStopwatch() if mesh.device.type == "cuda" else Stopwatch()
        capacities = _capacities(config, inputs.train, mesh)
        evaluator = Evaluator(inputs.evaluation, mesh, config.evaluation.batch_size)
        step = initialise(config, inputs, mesh, seed, stopwatch, capacities, log, evaluator)
        if resumed:
            restore(step, resumed, mesh)
        log.weights_initialization(config.model.num_hidden_layers)
        plan = plan_of(config, inputs.train, mesh.world_size, seed)
        loader = _loader(config, inputs.train, plan, mesh, capacities, resumed.step if resumed else 0)
        with _reporter(config, inputs, mesh, log, step, resumed.samples if resumed else 0) as reporter:
            timed = TimedRun(config, inputs, mesh, log, reporter, stopwatch, step, loader, evaluator, interruption)
            # Weights that are saved must be those that were evaluated; a step that is not recorded takes the host long.
            timed.overlapping = bool(capacities) and config.save_checkpoint is None
            timed.slow_ranks = SlowRanks(watchdog.hosts) if mesh.is_main and mesh.world_size > 1 else None
            if config.checkpoint.folder is not None:
                timed.checkpoints = Checkpoints(config, inputs.train, mesh, seed, step)
            if resumed:
                timed.steps, timed.samples = resumed.step, resumed.samples
                timed.skipped = resumed.step - resumed.optimizer_steps
            log.init_stop()
            guard.require_untouched()
            barrier()
            log.run_start()
            guard.release()
            with watchdog.getting_on(stopwatch.stage):
                status = timed.train()
        loader.close()
        model = step.whole_model()
        if config.save_checkpoint and mesh.is_main:
            metadata = {"recipe": config.recipe, "commit": commit(), VOCABULARY: inputs.vocabulary_sha256}
            save_weights(model, config.save_checkpoint, metadata)
        if mesh.is_main:
            say(f"{status}: {inputs.result}" + (" (resumed: no timed result)" if resumed else ""))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    if interruption.number is not None:
        return 128 + interruption.number
    return 0 if status == "success" else 1


@contextlib.contextmanager
def _together(config: Config, mesh: Mesh, log: MLLog) -> Iterator[Watchdog]:
    """Whatever ends this rank before its time ends the run on all of them, and the log says why."""
    watchdog = Watchdog(mesh, config.training.fault_seconds)

    def close_log(reason: str) -> None:
        line = f"# ended by a fault: {' '.join(reason.split())}"
        for act in (lambda: log.line(line), log.abort, log.close):
            with contextlib.suppress(OSError):  # the fault may be a full disk
                act()

    watchdog.on_fault = close_log
    try:
        yield watchdog
    except Interrupted as interrupted:
        watchdog.failed(str(interrupted), _status(interrupted))
        raise
    except (ValueError, OSError) as error:
        watchdog.failed(reason(error), 2)
        raise
    except Exception as error:
        watchdog.failed(f"{type(error).__name__}: {error}", error=error)
        raise
    finally:
        watchdog.close()


def initialise(
    config: Config,
    inputs: Inputs,
    mesh: Mesh,
    seed: int,
    stopwatch: Stopwatch,
    capacities: Sequence[Capacity],
    log: MLLog,
    evaluator: Evaluator,
) -> TrainingStep:
    """Build the model from the initial checkpoint and warm it up on synthetic batches, without a look at the data.

    Where there are ``capacities``, the step is recorded for each, and so is the evaluation for its own.
    """
    model = first_model(config, mesh, seed)
    step = TrainingStep(model, config, mesh, stopwatch)
    if mesh.world_size > 1:
        log.line(f"# {step.choice}")
        if mesh.is_main:
            say(step.choice)
    broadcast_(step.flat.weights_P)
    torch.manual_seed(seed * mesh.world_size + mesh.rank)
    model.seed_dropout(seed * mesh.world_size + mesh.rank)
    batches = _synthetic_batches(config, inputs.train, mesh, capacities)
    recorder = CudaRecorder(mesh.device) if capacities else None
    measured = config.training.autotune and mesh.device.type == "cuda"
    step.warm_up(
        batches,
        config.training.warmup_steps,
        recorder,
        capacities,
        lambda run: _choose_implementations(run if measured else None, mesh, log),
    )
    evaluator.warm_up(model, step.autocast(), recorder)
    return step


def first_model(config: Config, mesh: Mesh, seed: int) -> BertForPreTraining:
    """The model that training starts from: the initial checkpoint's weights if there is one, else random ones."""
    start = config.data.initial_checkpoint
    if start is not None and not start.is_dir():
        model = empty_model(config, mesh)
        load_initial_weights(model, start)  # all of them, or it raises
        return model
    model = build_model(config, mesh, seed)
    missing = [] if start is None else load_initial_weights(model, start)
    if missing and mesh.is_main:
        say(f"{start} lacks {', '.join(missing)}: random at the start")
    return model


def _choose_implementations(step: Callable[[], None] | None, mesh: Mesh, log: MLLog) -> None:
    """The same on every rank: what is pinned on rank 0's machine, else what is fastest there for what ``step`` calls."""
    with autotune.observed() as requests:
        if step is not None:
            step()
    choices = autotune.tune(requests).to_json() if mesh.is_main else ""
    choices = autotune.Choices.from_json(agreed_text(choices, mesh))
    autotune.apply(choices)
    for line in choices.text().splitlines():
        log.line(f"# kernels: {line}")


def _log_settings(log: MLLog, config: Config, inputs: Inputs, mesh: Mesh, seed: int) -> None:
    optimizer, training = config.optimizer, config.training
    log.submission(
        division=config.log.division,
        org=config.log.organization,
        platform=config.log.platform or config.log.system,
        status=config.log.status,
    )
    log.seed(seed)
    log.hyperparameters(
        {
            "global_batch_size": training.global_batch_size,
            "d_batch_size": training.global_batch_size // (mesh.world_size * training.gradient_accumulation_steps),
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "max_sequence_length": inputs.train.info.max_seq_length,
            "max_predictions_per_seq": inputs.train.info.max_predictions_per_seq,
            "opt_name": "lamb",
            "opt_base_learning_rate": optimizer.base_learning_rate,
            "opt_lamb_epsilon": optimizer.epsilon,
            "opt_lamb_beta_1": optimizer.beta_1,
            "opt_lamb_beta_2": optimizer.beta_2,
            "opt_lamb_weight_decay_rate": optimizer.weight_decay_rate,
            "opt_lamb_learning_rate_decay_poly_power": 1.0,
            "opt_gradient_clip_norm": optimizer.max_grad_norm,
            "opt_learning_rate_training_steps": optimizer.learning_rate_training_steps,
            "opt_learning_rate_warmup_steps": optimizer.num_warmup_steps,
            "num_warmup_steps": optimizer.num_warmup_steps,
            "start_warmup_step": optimizer.start_warmup_step,
            "quality_target": config.evaluation.target,
            "eval_interval_samples": inputs.interval,
        }
    )


def _capacities(config: Config, train: Dataset, mesh: Mesh) -> list[Capacity]:
    """What micro-batches are padded to so that the step can be recorded; none where it is not, as on a CPU."""
    training = config.training
    if mesh.device.type != "cuda" or not training.cuda_graphs:
        return []
    lanes = mesh.world_size * training.gradient_accumulation_steps
    tokens, masked = draw_sizes(train.lengths, train.masked_counts, training.global_batch_size, lanes)
    return choose_capacities(tokens, masked, training.global_batch_size // lanes, train.info.max_seq_length)


def _resumed(config: Config, inputs: Inputs, mesh: Mesh) -> RunState | None:
    """Where the run goes on, if it does: asked to, or started again by torchrun after a fault.

    An agent of torchrun that only starts its ranks again because another one does so has not counted that.
    """
    folder = config.resume
    restarts = torch.tensor([int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))], device=mesh.device)
    if not all_reduce_sum_(restarts).item():
        refuse_others(config)
    elif folder is None and config.checkpoint.folder and checkpoint_folders(config.checkpoint.folder):
        if config.log.division == "closed":
            raise ValueError(
                "a run of the closed division is timed in one piece and does not go on after a fault: start it anew"
            )
        folder = config.checkpoint.folder
    return None if folder is None else find(folder, config, inputs.train, mesh)


def _loader(
    config: Config, train: Dataset, plan: Plan, mesh: Mesh, capacities: Sequence[Capacity], first_step: int
) -> Loader:
    if choose_loader(config.data.loader, mesh.device) == "dali":
        from dataloading.batches.dali import DaliLoader as Chosen  # an optional dependency
    else:
        Chosen = NumpyLoader
    prefetch = config.data.prefetch

    def rank_batches(step: int) -> list[MicroBatch]:
        return plan.rank_batches(first_step + step, mesh.rank)

    return Chosen(train, rank_batches, mesh.device, prefetch, capacities)


def _synthetic_batches(config: Config, train: Dataset, mesh: Mesh, capacities: Sequence[Capacity]) -> list[Batch]:
    """Random tokens in the lengths of a drawn global batch: sizes are metadata."""
    micro_batches = plan_of(config, train, mesh.world_size, seed=0).rank_batches(0, mesh.rank)
    batches = []
    for micro in micro_batches:
        samples = synthetic_samples(train.lengths[micro.indices], config.model.vocab_size)
        batches.append(batch_of(samples, micro, capacity_of(samples, capacities)).to(mesh.device))
    return batches


def _reporter(
    config: Config, inputs: Inputs, mesh: Mesh, log: MLLog, step: TrainingStep, resumed_samples: int
) -> Reporter:
    schedule = Schedule(inputs.interval, config.training.global_batch_size)
    progress = Progress(config.evaluation.target, config.training.sample_limit, schedule, resumed_samples)
    if not mesh.is_main:
        return Reporter(progress, [])
    console = Console()
    sinks: list[Sink] = [
        JsonLines(
            inputs.metrics,
            {
                "recipe": config.recipe,
                "system": config.log.system,
                "target": config.evaluation.target,
                "global_batch_size": config.training.global_batch_size,
                "world_size": mesh.world_size,
                "parameters": sum(parameter.numel() for parameter in step.model.parameters()),
                "commit": commit(),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
    ]
    sinks += tensorboard_sinks(config, inputs.result)
    if console.is_terminal:
        sinks += [LivePanel(progress, console), PlainLines(progress, log.line)]
    else:
        sinks += [PlainLines(progress, log.line, say)]
    return Reporter(progress, sinks)


def _seed(config: Config) -> int:
    if config.training.seed is not None:
        return config.training.seed
    return int.from_bytes(os.urandom(4), "little") >> 1


def _stopped(interrupted: Interrupted) -> int:
    _complain(interrupted)
    return _status(interrupted)


def _status(interrupted: Interrupted) -> int:
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + interrupted.number


def refused(error: ValueError | OSError) -> int:
    """Say what is wrong with the input; returns the exit status."""
    _complain(error)
    return 2


def _complain(error: Exception) -> None:
    """One line, from every rank that has one: what is wrong may be wrong on a single machine."""
    try:
        rank = Launch.from_environment().rank
    except ValueError:  # the environment is what is wrong
        rank = 0
    complain(error, f"error: rank {rank}" if rank else "error")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
