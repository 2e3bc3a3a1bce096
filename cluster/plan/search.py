"""Search for the fastest feasible way to run a recipe on given ranks, by predictions only, and print the result.

A way to run is a `Strategy` with a schedule, which has the batch size and its hyperparameters. A way is skipped if its
computation alone takes longer than the fifth best way in total.
Only the largest micro-batch that fits in memory and the next smaller one are tried. Even smaller ones would add kernel
launches and save nothing. A pipeline gets the number of micro-batches that makes its step fastest. Recomputation is tried
only if it allows larger micro-batches.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice, product

from bert.configuration.config import Config
from bert.configuration.run_plan import RunPlan, settings_of
from bert.configuration.sections import ParallelConfig, Precision, Recompute, ReductionStrategy
from bert.parallel.mesh import are_whole_copies
from cluster.model.memory import USABLE_MEMORY, fixed_memory, memory_of_rank
from cluster.model.rates import Target
from cluster.model.step import PredictedStep, least_step, predict_run, predict_step
from cluster.model.work import REPEATED, Strategy, Work
from cluster.published.fitted import RunTime
from cluster.published.schedules import BatchSchedule, schedules
from console.text import counted, visible

REDUCTIONS: tuple[ReductionStrategy, ...] = ("flat", "hierarchical", "sharded", "sharded_world")
"""Reduction strategies. The last one takes the least memory."""
TENSORS = (1, 2, 4, 8)
PIPELINES = (1, 2, 4, 8, 16, 32, 64)
VIRTUAL_STAGES = (1, 2, 4)
BEST = 5
_REACH = 1.1
"""A way whose time from one step is at most this multiple of the fifth best time is predicted again, from several steps."""
_MICRO_BATCHES = 2
"""Number of micro-batch sizes to try, starting with the largest that fits."""
_MOST_VALUES = 8
"""Maximum number of values of one setting that are printed in a line of their own."""


@dataclass(frozen=True)
class Candidate:
    """A way to run, and its prediction. ``memory`` is in bytes per rank."""

    schedule: BatchSchedule
    strategy: Strategy
    step: PredictedStep
    run: RunTime
    memory: float

    @property
    def seconds(self) -> float:
        return self.run.total

    @property
    def least_seconds(self) -> float:
        """Predicted time to train if the reduction took no time."""
        return self.seconds - self.run.parts["reduce"]


@dataclass(frozen=True)
class Refusal:
    setting: str
    value: object
    reason: str


@dataclass(frozen=True)
class Found:
    """Result of a search: the best candidates, all candidates with the fastest first, and the infeasible settings."""

    best: tuple[Candidate, ...]
    ranked: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]


def search(config: Config, work: Work, target: Target) -> Found:
    """Search for the fastest way to run a recipe on a target. Raises ``ValueError`` if nothing is feasible."""
    search = _Search(config, work, target)
    first = search.ways_to_compute()
    if not first:
        reasons = dict.fromkeys(f"{each.setting} {each.value}: {each.reason}" for each in search.refusals)
        raise ValueError(f"nothing is feasible on {target.world_size:,} x {target.device}: {'; '.join(reasons)}")
    ranked = list(first)
    for each in sorted(first, key=lambda candidate: candidate.least_seconds):
        if _may_be_among_best(each.least_seconds, ranked):
            ranked += search.other_reductions(each)
    ranked.sort(key=lambda candidate: candidate.seconds)
    # So far, times come from one step of the sampler, which is enough to find slow ways. Average several for fast ways.
    limit = _REACH * max(each.seconds for each in ranked[:BEST])
    ranked = [search.refine(each) if each.seconds <= limit else each for each in ranked]
    ranked.sort(key=lambda candidate: candidate.seconds)
    return Found(tuple(ranked[:BEST]), tuple(ranked), tuple(dict.fromkeys(search.refusals)))


def _may_be_among_best(least_seconds: float, found: Sequence[Candidate]) -> bool:
    return len(found) < BEST or least_seconds < max(nsmallest(BEST, (each.seconds for each in found)))


class _Search:
    def __init__(self, config: Config, work: Work, target: Target) -> None:
        self._config, self._work, self._target = config, work, target
        self.refusals = [Refusal("precision", *missing) for missing in target.missing.items()]
        # With one node, or one rank per node, the other reductions do the same as these two, so they need not be tried.
        has_levels = target.nodes > 1 and target.ranks_per_node > 1
        self._reductions = REDUCTIONS if has_levels else ("flat", "sharded_world")
        self._schedules = schedules(config)
        self._tensors = [each for each in TENSORS if target.ranks_per_node % each == 0 and self._is_divisible(each)]
        self._too_many: dict[tuple[Precision, Recompute, ParallelConfig], int] = {}
        """Number of sequences of the smallest micro-batch that did not fit with these settings."""

    def _is_divisible(self, tensor: int) -> bool:
        try:
            replace(self._config, parallel=ParallelConfig(tensor))
        except ValueError as error:
            self.refusals.append(Refusal("tensor", tensor, str(error)))
            return False
        return True

    def ways_to_compute(self) -> list[Candidate]:
        """Return candidates for all ways that may be among the best, each with the reduction that takes the least memory.

        Sharing a copy of the model among ranks only saves memory and reduction time. If a number of ranks per copy is too
        slow even with a free reduction, only one way with this number is predicted, so that the output can show why it
        loses.
        """
        found: list[Candidate] = []
        pipelines = [each for each in PIPELINES[1:] if each <= self._config.model.num_hidden_layers]
        groups = [([tensor], 1) for tensor in self._tensors] + [(self._tensors, each) for each in pipelines]
        for tensors, pipeline in groups:
            for place, (least, schedule, way) in enumerate(self._by_least_seconds(tensors, pipeline)):
                may_be = way.copy_ranks == 1 or _may_be_among_best(least, found)
                if place and not may_be:  # later ways take even longer
                    break
                for virtual_stages in self._virtual_stages(pipeline) if may_be else [1]:
                    found += self._with_micro_batches(schedule, replace(way, virtual_stages=virtual_stages))
        return found

    def _by_least_seconds(self, tensors: Sequence[int], pipeline: int) -> list[tuple[float, BatchSchedule, Strategy]]:
        """Return (lower bound of the time to train, schedule, strategy) of all ways with these group sizes, sorted."""
        virtual_stages = self._virtual_stages(pipeline)[-1]  # with the most stages per rank, ranks wait the least
        timed = []
        for tensor in tensors:
            for schedule, way in self._ways(tensor, pipeline):
                best = replace(way, virtual_stages=virtual_stages)
                step = least_step(self._work, best, self._target.rates[best.precision])
                timed.append((self._run(schedule, best, step).total, schedule, way))
        return sorted(timed, key=lambda each: each[0])

    def _virtual_stages(self, pipeline: int) -> list[int]:
        if pipeline == 1:
            return [1]
        return [each for each in VIRTUAL_STAGES if pipeline * each <= self._config.model.num_hidden_layers]

    def _ways(self, tensor: int, pipeline: int) -> Iterator[tuple[BatchSchedule, Strategy]]:
        """Yield all batch sizes and precisions for a tensor group size and a pipeline size, without accumulation."""
        target = self._target
        # Skip copies that do not fill hosts evenly, because the ranks of a data group would be on different rails.
        if not are_whole_copies(ParallelConfig(tensor, pipeline), target.nodes, target.ranks_per_node):
            return
        copies = target.world_size // (tensor * pipeline)
        for schedule in self._schedules:
            batch = schedule.global_batch_size
            if batch % copies == 0 and batch >= copies * pipeline:  # at least a micro-batch per stage
                for precision in target.rates:
                    # FP8 scales span the whole model, so a pipeline cannot use FP8.
                    if precision != "fp8" or pipeline == 1:
                        reduction = self._reductions[-1]
                        yield schedule, Strategy(batch, 1, precision, reduction, tensor=tensor, pipeline=pipeline)
            # The largest tensor groups make the fewest copies. A batch that does not divide over so few copies does not
            # divide over more copies either.
            elif pipeline == 1 and tensor == self._tensors[-1]:
                reason = "is no multiple of" if batch > copies else "is less than"
                self.refusals.append(Refusal("batch", batch, f"{reason} {counted(self._target.world_size, 'rank')}"))

    def _with_micro_batches(self, schedule: BatchSchedule, way: Strategy) -> Iterator[Candidate]:
        """Yield candidates with the largest micro-batches that fit, without and with recomputation."""
        target, usable = self._target, USABLE_MEMORY * self._target.rates[way.precision].memory_bytes
        held = sum(fixed_memory(self._work, way, target.nodes, target.ranks_per_node, on_gpu=target.on_gpu).values())
        setting = ("tensor", way.tensor) if way.pipeline == 1 else ("pipeline", f"{way.stages} x tensor {way.tensor}")
        if held > usable:
            gigabytes = f"{held / 1e9:,.1f} of {usable / 1e9:,.1f} GB"
            self.refusals.append(Refusal(*setting, f"weights do not fit in {way.precision}: {gigabytes}"))
            return
        most = way.sequences(target.world_size)
        enough = most + 1
        # Try recomputation from fast to slow. More recomputation pays off only if it reduces the accumulation.
        for recompute in REPEATED:
            fitting = self._fitting(schedule, replace(way, recompute=recompute), enough)
            found = list(islice(fitting, _MICRO_BATCHES) if way.pipeline == 1 else _while_faster(fitting))
            yield from found
            if found:
                enough = found[0].strategy.gradient_accumulation_steps
        is_too_large = any((key[0], key[2]) == (way.precision, way.parallel) for key in self._too_many)
        if enough > most and way.pipeline > 1 and is_too_large:
            self.refusals.append(Refusal(*setting, f"no micro-batch fits in {way.precision}"))

    def _fitting(self, schedule: BatchSchedule, like: Strategy, enough: int) -> Iterator[Candidate]:
        """Yield candidates that fit and accumulate fewer than ``enough`` micro-batches, largest micro-batches first."""
        sequences = like.sequences(self._target.world_size)
        for accumulation in range(1, enough):
            # PyTorch's interleaved schedule needs rounds with a micro-batch for every stage.
            rounds = accumulation // like.pipeline
            if sequences % accumulation or rounds == 0 or (like.virtual_stages > 1 and accumulation % rounds):
                continue
            if candidate := self._candidate(schedule, replace(like, gradient_accumulation_steps=accumulation)):
                yield candidate

    def other_reductions(self, like: Candidate) -> Iterator[Candidate]:
        """Yield candidates with the same computation and a different gradient reduction."""
        if like.strategy.copy_ranks == self._target.world_size:  # a single copy has nothing to sum
            return
        for reduction, reduce_dtype in product(self._reductions, ("fp32", "bf16")):
            strategy = replace(like.strategy, reduction=reduction, reduce_dtype=reduce_dtype)
            if strategy != like.strategy and (candidate := self._candidate(like.schedule, strategy)):
                yield candidate

    def _candidate(self, schedule: BatchSchedule, strategy: Strategy) -> Candidate | None:
        """Return the prediction of a strategy, or None if the strategy is not feasible."""
        target, work, precision = self._target, self._work, strategy.precision
        sequences, usable = strategy.sequences(target.world_size), USABLE_MEMORY * target.rates[precision].memory_bytes
        memory_by = precision, strategy.recompute, strategy.parallel
        if sequences >= self._too_many.get(memory_by, sequences + 1):
            return None
        try:
            configured(self._config, schedule, strategy)
        except ValueError as error:
            self.refusals.append(Refusal("precision", precision, str(error)))
            return None
        try:
            memory = sum(memory_of_rank(work, strategy, target.nodes, target.ranks_per_node, target.on_gpu).values())
            if memory > usable:
                if strategy.pipeline == 1 and strategy.reduce_dtype == "fp32":
                    way = f"{precision}, {strategy.reduction}, recompute {strategy.recompute}, tensor {strategy.tensor}"
                    gigabytes = f"{memory / 1e9:,.1f} of {usable / 1e9:,.1f} GB"
                    self.refusals.append(Refusal("micro-batch", sequences, f"does not fit in {way}: {gigabytes}"))
                if strategy.reduction == self._reductions[-1]:
                    self._too_many[memory_by] = sequences
                return None
            step = predict_step(work, strategy, target.rates[precision], steps=1)
        # The prediction fails if a rate is missing, because the probe has not measured a collective.
        except ValueError as error:
            self.refusals.append(
                Refusal("way", f"{precision} with {strategy.reduction} in {strategy.reduce_dtype}", str(error))
            )
            return None
        return Candidate(schedule, strategy, step, self._run(schedule, strategy, step), memory)

    def refine(self, each: Candidate) -> Candidate:
        """Predict a candidate's times again, from several steps instead of one."""
        step = predict_step(self._work, each.strategy, self._target.rates[each.strategy.precision])
        return replace(each, step=step, run=self._run(each.schedule, each.strategy, step))

    def _run(self, schedule: BatchSchedule, strategy: Strategy, step: PredictedStep) -> RunTime:
        return predict_run(self._work, strategy, self._target.rates[strategy.precision], step, schedule.samples)


def _while_faster(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    """Yield candidates up to and including the first that is slower than its predecessor."""
    seconds = math.inf
    for each in candidates:
        yield each
        if each.seconds > seconds:
            return
        seconds = each.seconds


def configured(config: Config, schedule: BatchSchedule, strategy: Strategy) -> Config:
    """Return the configuration with a strategy and the hyperparameters of its batch.

    Raises ``ValueError`` if settings contradict each other.
    """
    training = replace(
        config.training,
        global_batch_size=strategy.global_batch_size,
        gradient_accumulation_steps=strategy.gradient_accumulation_steps,
        max_samples=schedule.max_samples,
        precision=strategy.precision,
        reduction=strategy.reduction,
        reduce_dtype=strategy.reduce_dtype,
        bucket_bytes=strategy.bucket_bytes,
        recompute=strategy.recompute,
        site_steps=strategy.site_steps,
        cuda_graphs=strategy.pipeline == 1,  # CUDA graphs cannot capture messages between stages
    )
    return replace(config, training=training, optimizer=schedule.optimizer, parallel=strategy.parallel)


def run_plan(config: Config, target: Target, chosen: Candidate) -> RunPlan:
    """Return the content of a candidate's plan file."""
    return RunPlan(
        recipe=config.recipe,
        device=target.device,
        nodes=target.nodes,
        ranks_per_node=target.ranks_per_node,
        settings=settings_of(configured(config, chosen.schedule, chosen.strategy)),
        hyperparameters=chosen.schedule.source,
        step_seconds={**chosen.step.parts, "other": 0.0},
        train_seconds=chosen.seconds,
    )


def as_lines(found: Found, world_size: int) -> Iterator[str]:
    """Yield a table of the best plans, lines about values that the first plan does not use, and the infeasible settings."""
    table = [_row(place, each, world_size) for place, each in enumerate(found.best, 1)]
    rows = [tuple(table[0]), *(tuple(row.values()) for row in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    yield ""
    yield f"time to train compared with the first plan ({_steps(found.best[0])}), at best with"
    yield from _rivals(found, world_size)
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for each in found.refusals:
        value = f"{each.value:,}" if isinstance(each.value, int) else str(each.value)
        reasons.setdefault((each.setting, each.reason), {})[value] = None
    if reasons:
        yield "not feasible"
    for (setting, reason), values in reasons.items():
        yield f"  {setting} {', '.join(values)}: {visible(reason)}"


def summary(candidate: Candidate) -> str:
    """Describe a plan and the source of its hyperparameters in one line."""
    optimizer, run = candidate.schedule.optimizer, candidate.run
    note = f" ({visible(candidate.schedule.note)})" if candidate.schedule.note else ""
    return (
        f"batch {candidate.schedule.global_batch_size:,}: learning rate {optimizer.base_learning_rate:g}, betas "
        f"{optimizer.beta_1:g} and {optimizer.beta_2:g}, decay {optimizer.weight_decay_rate:g}, "
        f"{counted(optimizer.learning_rate_training_steps, 'step')}; {_samples(run)}{note}; "
        f"{visible(candidate.schedule.source)}"
    )


def _row(place: int, each: Candidate, world_size: int) -> dict[str, str]:
    step = each.step
    # Use enough digits to tell the best plans apart.
    minutes = f"{each.seconds / 60:.3f}" if each.seconds < 600 else f"{each.seconds / 60:,.1f}"
    times = {"step ms": step.total, "fwd+bwd": step.forward_backward, "reduce": step.reduce, "update": step.update}
    return {
        "": str(place),
        "minutes": minutes,
        **table_settings(each, world_size),
        **{column: f"{1000 * seconds:.2f}" for column, seconds in times.items()},
        "GB": f"{each.memory / 1e9:.1f}",
    }


def table_settings(each: Candidate, world_size: int) -> dict[str, str]:
    """Return the settings of a candidate as the columns of the table show them."""
    strategy = each.strategy
    return {
        "batch": f"{strategy.global_batch_size:,}",
        "pipeline": strategy.stages,
        "tensor": str(strategy.tensor),
        "micro-batches": f"{strategy.gradient_accumulation_steps} x {strategy.sequences(world_size)}",
        "precision": strategy.precision,
        "reduction": strategy.reduction,
        "sums": strategy.reduce_dtype,
        "recompute": strategy.recompute,
    }


def _rivals(found: Found, world_size: int) -> Iterator[str]:
    """Yield a line about the fastest candidate with each value of each setting, except the best plan's values.

    Numbers of micro-batches can be compared only between plans with the same batch size and number of model copies.
    """
    best = found.best[0]
    own = table_settings(best, world_size)
    rivals: dict[str, dict[str, Candidate]] = {setting: {} for setting in own}
    for each in found.ranked:  # sorted from fast to slow
        values = table_settings(each, world_size)
        is_comparable = all(values[name] == own[name] for name in ("batch", "pipeline", "tensor"))
        for setting, value in values.items():
            if value != own[setting] and (is_comparable or setting != "micro-batches"):
                rivals[setting].setdefault(value, each)
    for setting, losing in rivals.items():
        for value, rival in [*losing.items()][:_MOST_VALUES]:
            yield f"  {f'{setting} {value}:':<28}{rival.seconds / best.seconds - 1:+7.1%}  {_cause(best, rival)}"
        if rest := [*losing][_MOST_VALUES:]:
            yield f"  {setting} {', '.join(rest)}: slower still"


def _cause(best: Candidate, rival: Candidate) -> str:
    # Steps of different batch sizes cannot be compared part by part.
    if rival.strategy.global_batch_size != best.strategy.global_batch_size:
        return _steps(rival)
    longer = {part: rival.step.parts[part] - seconds for part, seconds in best.step.parts.items()}
    part = max(longer, key=lambda part: longer[part])
    before, after = 1000 * best.step.parts[part], 1000 * rival.step.parts[part]
    return f"{part.replace('_', ' ')} {after:.2f} ms a step, not {before:.2f}"


def _steps(each: Candidate) -> str:
    return f"{_samples(each.run)} in {each.run.steps:,.0f} steps of {1000 * each.step.total:.2f} ms"


def _samples(run: RunTime) -> str:
    return f"{run.samples / 1e6:.2f} million samples" if run.samples >= 1e6 else f"{run.samples:,.0f} samples"
