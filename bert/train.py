"""The timed run, from configuration to result file: ``python -m bert.train RECIPE [--section.field value ...]``.

Under torchrun it is one rank of many, and by itself a run of one process. It exits with 0 when the target was reached, 1
when the run ended without, 2 when an input or a setting is wrong, 128 + n after signal n. Under torchrun every orderly end
is 0, because torchrun takes anything else for a crash and says so at length; the log tells how the run ended.
"""

import contextlib
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import tyro
from rich.console import Console

from bert.checkpoint import load_weights, require_weights, save_weights
from bert.clock import DataGuard
from bert.config import Config
from bert.evaluate import Evaluator
from bert.graphs import CudaRecorder
from bert.interruption import Interrupted, Interruption
from bert.metrics import (
    EndRecord,
    EvaluationRecord,
    JsonLines,
    LivePanel,
    PlainLines,
    Progress,
    Reporter,
    Sink,
    StepRecord,
    Stopwatch,
)
from bert.mllog import MLLog, evaluation_interval, evaluation_samples
from bert.optimizer import learning_rate
from bert.parallel.collectives import agreed_integer, agreed_text, barrier, broadcast_
from bert.parallel.mesh import Mesh, join_mesh, launched_world_size, leave_mesh
from bert.provenance import commit, provenance
from bert.recipes import RECIPES
from bert.step import TrainingStep, build_model
from dataloading.capacity import Capacity, choose_capacities, draw_sizes
from dataloading.dataset import Dataset, open_dataset
from dataloading.loader import Batch, Loader, NumpyLoader, batch_of, capacity_of, choose_loader
from dataloading.sampler import Plan
from dataloading.synthetic import synthetic_samples
from dataloading.tokenization import Vocabulary
from kernels import autotune, choose


@dataclass(frozen=True)
class Inputs:
    """What a run reads, opened as far as metadata go, and where it writes."""

    train: Dataset
    evaluation: Dataset
    result: Path
    metrics: Path
    interval: int
    """Training samples between evaluations."""


def main(arguments: Sequence[str]) -> int:
    """Parse, check, run; returns the exit status."""
    try:
        config = parse(arguments)
        guard = DataGuard([config.data.train, config.data.evaluation])
        interruption = Interruption()
        inputs = check(config, launched_world_size())
        if config.dry_run:
            print(f"{config.recipe}: ready, results would go to {inputs.result}")
            return 0
        mesh = join_mesh(config.training.device)
    except Interrupted as interrupted:
        return _stopped(interrupted)
    except (ValueError, OSError) as error:
        return _refused(error)
    try:
        return run(config, inputs, mesh, guard, interruption)
    except Interrupted as interrupted:
        return _stopped(interrupted)
    except (ValueError, OSError) as error:
        return _refused(error)
    finally:
        leave_mesh()


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that the command line asks for. Raises ``ValueError`` at an unknown recipe or a wrong value."""
    known = ", ".join(RECIPES)
    if not arguments or arguments[0] not in RECIPES:
        if arguments and arguments[0] in ("-h", "--help"):
            print(f"{__doc__}\nRecipes: {known}\n\nThe settings of a recipe: python -m bert.train RECIPE --help")
            raise SystemExit(0)
        found = f"unknown recipe {arguments[0]!r}" if arguments else "no recipe given"
        raise ValueError(f"{found}: expected one of {known}")
    program = f"python -m bert.train {arguments[0]}"
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(Config, prog=program, args=list(arguments[1:]), default=RECIPES[arguments[0]]())
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_unboxed(complaint.getvalue())) from None


def check(config: Config, world_size: int) -> Inputs:
    """Open what the run will read and look for everything that would stop it later. Raises ``ValueError``."""
    train, evaluation = open_dataset(config.data.train), open_dataset(config.data.evaluation)
    vocabulary = Vocabulary.from_file(config.data.vocab)
    if vocabulary.size != config.model.vocab_size:
        raise ValueError(
            f"{config.data.vocab} has {vocabulary.size} entries, but model.vocab_size is {config.model.vocab_size}: "
            "set data.vocab or model.vocab_size"
        )
    for dataset in (train, evaluation):
        dataset.check_files()
        dataset.check_vocabulary(vocabulary)
        if dataset.info.max_seq_length > config.model.max_position_embeddings:
            raise ValueError(
                f"{dataset.folder} holds sequences of up to {dataset.info.max_seq_length} tokens, but "
                f"model.max_position_embeddings is {config.model.max_position_embeddings}"
            )
    if config.data.initial_checkpoint is not None:
        require_weights(config.data.initial_checkpoint)
    _plan(config, train, world_size, seed=0)
    try:
        choose(config.training.implementations)
    except ValueError as error:
        raise ValueError(f"training.implementations: {error}") from None
    choose_loader(config.data.loader, torch.device(config.training.device))
    folder = config.log.results / config.log.system / "bert"
    number = _first_free(folder) if config.log.run is None else config.log.run
    result, metrics = folder / f"result_{number}.txt", folder / f"metrics_{number}.jsonl"
    for path in (result, metrics):
        if path.exists():
            raise ValueError(f"{path} exists already: move it away, or set log.run to another number")
    interval = config.evaluation.interval_samples or evaluation_interval(config.training.global_batch_size)
    return Inputs(train, evaluation, result, metrics, interval)


def run(config: Config, inputs: Inputs, mesh: Mesh, guard: DataGuard, interruption: Interruption) -> int:
    """Initialise, start the clock, train to the target, stop the clock. Returns the exit status."""
    seed = agreed_integer(_seed(config), mesh)
    barrier()  # no rank creates files before all have passed their checks
    with MLLog(inputs.result if mesh.is_main else None) as log:
        log.header(provenance(config, mesh, seed))
        log.cache_clear(config.log.cache_cleared)
        log.init_start()
        _log_settings(log, config, inputs, mesh, seed)
        stopwatch = Stopwatch()
        capacities = _capacities(config, inputs.train, mesh)
        step = initialise(config, inputs, mesh, seed, stopwatch, capacities, log)
        log.weights_initialization(config.model.num_hidden_layers)
        plan = _plan(config, inputs.train, mesh.world_size, seed)
        loader = _loader(config, inputs.train, plan, mesh, capacities)
        evaluator = Evaluator(inputs.evaluation, mesh, config.evaluation.batch_size)
        with _reporter(config, inputs, mesh, log, step) as reporter:
            timed = TimedRun(config, inputs, mesh, log, reporter, stopwatch, step, loader, evaluator, interruption)
            log.init_stop()
            barrier()
            log.run_start()
            guard.release()
            status = timed.train()
        loader.close()
        if config.save_checkpoint and mesh.is_main:
            save_weights(step.model, config.save_checkpoint, {"recipe": config.recipe, "commit": commit()})
        if mesh.is_main:
            print(f"{status}: {inputs.result}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    if interruption.number is not None:
        return 128 + interruption.number
    return 0 if status == "success" else 1


def initialise(
    config: Config,
    inputs: Inputs,
    mesh: Mesh,
    seed: int,
    stopwatch: Stopwatch,
    capacities: Sequence[Capacity],
    log: MLLog,
) -> TrainingStep:
    """Build the model from the initial checkpoint and warm it up on synthetic batches, without a look at the data.

    Where there are ``capacities``, the step is recorded for each.
    """
    model = build_model(config, mesh, seed)
    if config.data.initial_checkpoint is not None:
        load_weights(model, config.data.initial_checkpoint)
    step = TrainingStep(model, config, mesh, stopwatch)
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
    return step


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


@dataclass
class TimedRun:
    """Everything between ``run_start`` and ``run_stop``."""

    config: Config
    inputs: Inputs
    mesh: Mesh
    log: MLLog
    reporter: Reporter
    stopwatch: Stopwatch
    step: TrainingStep
    loader: Loader
    evaluator: Evaluator
    interruption: Interruption
    steps: int = 0
    samples: int = 0

    def train(self) -> str:
        """Train and evaluate in turn until the target is reached, the samples are used up or a signal comes."""
        self.started = self.recorded = time.perf_counter()
        self.recorded_steps = 0
        self.interruption.deferred = True
        status, accuracy, evaluations = None, None, 0
        while status is None:
            evaluations += 1
            due = evaluation_samples(evaluations, self.inputs.interval, self.config.training.global_batch_size)
            stopping = self._block(due)
            if stopping or self.samples < due:
                status = "aborted"
            else:
                accuracy = self._evaluate()
                status = "success" if accuracy >= self.config.evaluation.target else None
        self.log.run_stop(status, samples=self.samples, eval_samples=self.evaluator.samples)
        self.reporter.write(EndRecord(status, time.perf_counter() - self.started, self.samples, accuracy))
        return status

    def _block(self, due: int) -> bool:
        """Train up to ``due`` samples; returns whether to stop at once."""
        training = self.config.training
        stopping = False
        self.log.block_start(self.samples)
        while not stopping and self.samples < due and self.samples < training.max_samples:
            with self.stopwatch.time("data_wait"):
                micro_batches = next(self.loader)
            self.step(micro_batches)
            self.steps += 1
            self.samples += training.global_batch_size
            if self.steps % self.config.log.interval_steps == 0 or self.samples >= due:
                stopping = self._record()
        self.log.block_stop(self.samples)
        return stopping

    def _record(self) -> bool:
        """Fetch the statistics and report them; returns whether some rank was told to stop."""
        means, stopping = self.step.statistics.fetch(stop=self.interruption.number is not None)
        now = time.perf_counter()
        steps, seconds = self.steps - self.recorded_steps, now - self.recorded
        phases = {f"{name}_ms": 1000 * spent / steps for name, spent in self.stopwatch.take().items()}
        self.reporter.write(
            StepRecord(
                step=self.steps,
                samples=self.samples,
                time_s=now - self.started,
                step_ms=1000 * seconds / steps,
                **phases,
                loss=means["masked_lm_loss"] + means["next_sentence_loss"],
                masked_lm_loss=means["masked_lm_loss"],
                next_sentence_loss=means["next_sentence_loss"],
                learning_rate=learning_rate(self.config.optimizer, self.steps - 1),
                gradient_norm=means["gradient_norm"],
                tokens_per_s=means["tokens"] * steps / seconds,
                sequences_per_s=self.config.training.global_batch_size * steps / seconds,
            )
        )
        self.recorded, self.recorded_steps = now, self.steps
        return stopping

    def _evaluate(self) -> float:
        begin = time.perf_counter()
        self.log.eval_start(self.samples)
        accuracy = self.evaluator(self.step.model, self.step.autocast())
        self.log.eval_accuracy(accuracy.value, self.samples)
        self.log.eval_stop(self.samples)
        now = self.recorded = time.perf_counter()
        self.reporter.write(
            EvaluationRecord(
                step=self.steps,
                samples=self.samples,
                time_s=now - self.started,
                eval_s=now - begin,
                masked_lm_accuracy=accuracy.value,
                correct=accuracy.correct,
                count=accuracy.count,
            )
        )
        return accuracy.value


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


def _plan(config: Config, train: Dataset, world_size: int, seed: int) -> Plan:
    training = config.training
    return Plan(
        train.lengths,
        train.masked_counts,
        global_batch_size=training.global_batch_size,
        world_size=world_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        seed=seed,
    )


def _capacities(config: Config, train: Dataset, mesh: Mesh) -> list[Capacity]:
    """What micro-batches are padded to so that the step can be recorded; none where it is not, as on a CPU."""
    training = config.training
    if mesh.device.type != "cuda" or not training.cuda_graphs:
        return []
    lanes = mesh.world_size * training.gradient_accumulation_steps
    tokens, masked = draw_sizes(train.lengths, train.masked_counts, training.global_batch_size, lanes)
    return choose_capacities(tokens, masked, training.global_batch_size // lanes, train.info.max_seq_length)


def _loader(config: Config, train: Dataset, plan: Plan, mesh: Mesh, capacities: Sequence[Capacity]) -> Loader:
    if choose_loader(config.data.loader, mesh.device) == "dali":
        from dataloading.dali import DaliLoader as Chosen  # an optional dependency
    else:
        Chosen = NumpyLoader
    prefetch = config.data.prefetch
    return Chosen(train, lambda step: plan.rank_batches(step, mesh.rank), mesh.device, prefetch, capacities)


def _synthetic_batches(config: Config, train: Dataset, mesh: Mesh, capacities: Sequence[Capacity]) -> list[Batch]:
    """Random tokens in the lengths of a drawn global batch: sizes are metadata."""
    micro_batches = _plan(config, train, mesh.world_size, seed=0).rank_batches(0, mesh.rank)
    batches = []
    for micro in micro_batches:
        samples = synthetic_samples(train.lengths[micro.indices], config.model.vocab_size)
        batches.append(batch_of(samples, micro, capacity_of(samples, capacities)).to(mesh.device))
    return batches


def _reporter(config: Config, inputs: Inputs, mesh: Mesh, log: MLLog, step: TrainingStep) -> Reporter:
    progress = Progress(config.evaluation.target, config.training.max_samples)
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
                "parameters": step.flat.weights_P.numel(),
                "commit": commit(),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
    ]
    if console.is_terminal:
        sinks += [LivePanel(progress, console), PlainLines(progress, log.line)]
    else:
        sinks += [PlainLines(progress, log.line, lambda text: print(text, flush=True))]
    return Reporter(progress, sinks)


def _unboxed(complaint: str) -> str:
    """The first paragraph of tyro's framed message, on one line."""
    framed = [line.strip("│ ") for line in complaint.splitlines() if line.startswith("│")]
    paragraph = itertools.takewhile(lambda line: not line.startswith("─"), framed)
    return " ".join(paragraph).strip() or complaint.strip()


def _seed(config: Config) -> int:
    if config.training.seed is not None:
        return config.training.seed
    return int.from_bytes(os.urandom(4), "little") >> 1


def _first_free(folder: Path) -> int:
    taken = {path.stem.partition("_")[2] for path in folder.glob("result_*.txt")}
    return next(number for number in range(len(taken) + 1) if str(number) not in taken)


def _stopped(interrupted: Interrupted) -> int:
    _complain(interrupted)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + interrupted.number


def _refused(error: ValueError | OSError) -> int:
    _complain(error)
    return 2


def _complain(error: Exception) -> None:
    """One line, from every rank that has one: what is wrong may be wrong on a single machine."""
    rank = os.environ.get("RANK", "0")
    print(f"error: {error}" if rank == "0" else f"error: rank {rank}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
