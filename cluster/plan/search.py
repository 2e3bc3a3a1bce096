"""Search for the fastest feasible way to run a recipe on given ranks: each way is predicted, none is tried.

All are gone through, but for those that compute longer than the best ones take in all. Micro-batches are as large as memory
allows, or the next smaller ones: accumulating more often costs launches and saves nothing else. Through stages go as many as
make a step fastest: the more, the shorter those wait for one another. Ranks keep gradients of a shard alone, and layers
recompute, only where that makes room for larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product, takewhile

from bert.configuration.config import Config
from bert.configuration.sections import ParallelConfig, Precision, Recompute, ReductionStrategy
from bert.parallel.mesh import are_whole_copies
from cluster.model.memory import held_by_rank, memory_of_rank
from cluster.model.shares import model_shares
from cluster.model.step import PredictedStep, least_step, predict_run, predict_step
from cluster.model.strategy import Strategy
from cluster.model.work import Work
from cluster.plan.schedules import BatchSchedule, schedules
from cluster.plan.target import Target
from cluster.published.cost_model import RunTime

# The last one takes the least memory, which `_ways` and `candidate` rely on.
REDUCTIONS: tuple[ReductionStrategy, ...] = ("flat", "hierarchical", "sharded", "sharded_world")
# A tensor group stays in a host.
TENSORS = (1, 2, 4, 8)
"""Ranks of a host that share a copy of the model, or a stage of one."""
PIPELINES = (1, 2, 4, 8, 16, 32, 64)
VIRTUAL_STAGES = (1, 2, 4)
"""Of each rank of a pipeline."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""From the most memory to the least, and from the least time to the most."""
# 25 MiB is the default of training; the others are a factor of four or five apart.
BUCKETS = tuple(mebibytes * 2**20 for mebibytes in (5, 25, 100, 400))
BEST = 5
_MICRO_BATCHES = 2
"""Sizes of micro-batches tried, from the largest that fits."""

USABLE_MEMORY = 0.9
"""Share of a device's memory that what is counted may take: the driver, communicators, and what the allocator cannot use of
its blocks take the rest."""


@dataclass(frozen=True)
class Candidate:
    """A way to run; ``memory`` is in bytes of a rank."""

    schedule: BatchSchedule
    strategy: Strategy
    step: PredictedStep
    run: RunTime
    memory: float

    @property
    def seconds(self) -> float:
        """Predicted time to train."""
        return self.run.total

    @property
    def least_seconds(self) -> float:
        """Return the time to train if nothing of the reduction showed."""
        return self.seconds - self.run.parts["reduce"]


@dataclass(frozen=True)
class Refusal:
    """A value of a setting that is not feasible, where the settings around it are as said, and why."""

    setting: str
    value: object
    reason: str


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        best: the few that are fastest, the first one first.
        ranked: all that fit, the fastest first.
        refusals: what was not predicted, in the order in which it was found.
    """

    best: tuple[Candidate, ...]
    ranked: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]


def search(config: Config, work: Work, target: Target) -> Found:
    """Search for the fastest way to run a recipe on a target. Raises ``ValueError`` where nothing is feasible."""
    search = _Search(config, work, target)
    first = search.computing()
    if not first:
        reasons = dict.fromkeys(f"{each.setting} {each.value}: {each.reason}" for each in search.refusals)
        raise ValueError(f"nothing is feasible on {target.world_size:,} x {target.device}: {'; '.join(reasons)}")
    # `first` has one way to sum for each way to compute; the loop tries the others where they may still win.
    ranked = list(first)
    # No way to sum makes a step faster than one without any reduction: where that is too slow, none is looked at.
    for each in sorted(first, key=lambda candidate: candidate.least_seconds):
        best = _best(ranked)
        # Until there are enough to compare with, every candidate is worth a look.
        if len(best) < BEST or each.least_seconds < best[-1].seconds:
            ranked += search.other_ways(each)
    # Again by several steps, and all of them, so that their times compare: one step of the plan is enough to prune by.
    ranked = sorted(map(search.refined, ranked), key=lambda candidate: candidate.seconds)
    return Found(tuple(_best(ranked)), tuple(ranked), tuple(search.refusals))


def _best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The few that are fastest, each with its best size of buckets."""
    distinct: dict[Strategy, Candidate] = {}
    for each in sorted(candidates, key=lambda candidate: candidate.seconds):
        # Sizes of buckets differ by little: a list of the best five would be one way five times.
        distinct.setdefault(replace(each.strategy, bucket_bytes=1), each)
        if len(distinct) == BEST:
            break
    return list(distinct.values())


class _Search:
    """Predictions of one recipe on one target, each made once."""

    def __init__(self, config: Config, work: Work, target: Target) -> None:
        # Reasons are collected instead of logged: the command prints those of values that lost everywhere.
        self.refusals: list[Refusal] = []
        self._config, self._work, self._target = config, work, target
        self._reductions = REDUCTIONS
        if target.nodes == 1 or target.ranks_per_node == 1:
            self._reductions = ("flat", "sharded_world")  # the others are the same here
        self._schedules = schedules(config)
        self._tensors = [each for each in TENSORS if target.ranks_per_node % each == 0 and self._is_divisible(each)]
        self.refusals += [Refusal("precision", *missing) for missing in target.missing.items()]
        self._samples: dict[int, float | None] = {}
        """To the target, by global batch size; None as `Work.samples` has it."""
        self._too_many: dict[tuple[Precision, Recompute, ParallelConfig], int] = {}
        """Sequences of the smallest micro-batch that does not fit; larger ones are not looked at."""
        self._said: set[tuple[int, Strategy]] = set()
        """Of what does not fit, whatever the buckets are."""

    def computing(self) -> list[Candidate]:
        """Candidates for all ways to compute that may be among the best, summing gradients as takes the least memory.

        Sharing copies of the model saves memory and reduction alone: of what takes longer even without any reduction, one
        way for each number of ranks, and of stages, shows it.
        """
        found: list[Candidate] = []
        for tensor in self._tensors:
            for place, (least, way) in enumerate(self._by_least_seconds([tensor], 1)):
                # Without tensor groups all are tried; with them the first of each number shows what sharing costs.
                if tensor == 1 or place == 0 or self._may_be_among_best(least, found):
                    found += self._with_micro_batches(*way)
        for pipeline in PIPELINES[1:]:
            # Of each number of stages at least one way is predicted, so that the lines can say why it loses.
            shown = False
            for least, (schedule, way) in self._by_least_seconds(self._tensors, pipeline):
                if may_be := self._may_be_among_best(least, found):
                    for virtual_stages in self._virtual_stages(pipeline):
                        found += self._with_micro_batches(schedule, replace(way, virtual_stages=virtual_stages))
                elif not shown:
                    found += self._with_micro_batches(schedule, way)
                shown = True
                # Sorted by their bound: the first that cannot win ends the search of this number of stages.
                if not may_be:  # nor may any that takes longer at the least
                    break
        return found

    def _by_least_seconds(
        self, tensors: Sequence[int], pipeline: int
    ) -> list[tuple[float, tuple[BatchSchedule, Strategy]]]:
        """Ways with so many stages, each after the least that it takes with any number of them a rank."""
        if pipeline > self._config.model.num_hidden_layers:
            return []
        most = self._virtual_stages(pipeline)[-1]  # with which a rank waits least
        ways = [way for tensor in tensors for way in self._ways(tensor, pipeline)]
        timed = [(self._least_seconds(replace(way, virtual_stages=most)), (schedule, way)) for schedule, way in ways]
        return sorted(timed, key=lambda each: each[0])

    def _virtual_stages(self, pipeline: int) -> list[int]:
        layers = self._config.model.num_hidden_layers
        fitting = [each for each in VIRTUAL_STAGES if pipeline * each <= layers]
        return fitting if pipeline > 1 else [1]

    @staticmethod
    def _may_be_among_best(least: float, found: Sequence[Candidate]) -> bool:
        best = _best(found)
        # Fewer than the best few: nothing can be excluded yet.
        return len(best) < BEST or least < best[-1].seconds

    def _is_divisible(self, tensor: int) -> bool:
        """Tell whether so many ranks can share a copy of the model."""
        try:
            # The configuration itself knows which sizes divide; its message is the reason.
            replace(self._config, parallel=ParallelConfig(tensor))
        except ValueError as error:
            self.refusals.append(Refusal("tensor", tensor, str(error)))
            return False
        return True

    def _ways(self, tensor: int, pipeline: int) -> Iterator[tuple[BatchSchedule, Strategy]]:
        """Batches in each precision on copies of so many ranks, in one micro-batch."""
        target = self._target
        # Hosts hold whole copies, or copies take whole hosts: else a data group would leave its rail.
        if not are_whole_copies(ParallelConfig(tensor, pipeline), target.nodes, target.ranks_per_node):
            return
        copies = target.world_size // (tensor * pipeline)
        for schedule in self._schedules:
            batch = schedule.global_batch_size
            if batch % copies == 0 and batch >= copies * pipeline:  # a micro-batch for each stage
                self._samples[batch] = schedule.samples or self._work.samples
                for precision in target.rates:
                    if precision != "fp8" or pipeline == 1:  # whose scales are of the whole model
                        # By the reduction that takes the least memory: what does not fit with it fits with none.
                        reduction = self._reductions[-1]
                        yield schedule, Strategy(batch, 1, precision, reduction, tensor=tensor, pipeline=pipeline)
            # Said once, with the last size of tensor groups: with none of them do copies divide the batch.
            elif pipeline == 1 and tensor == self._tensors[-1] and batch not in self._samples:
                reason = "is no multiple of" if batch > copies else "is less than"
                self.refusals.append(Refusal("batch", batch, f"{reason} {self._target.world_size:,} ranks"))

    def _least_seconds(self, strategy: Strategy) -> float:
        """Time to train without any reduction or update."""
        least = least_step(self._work, strategy, self._target.rates[strategy.precision])
        return self._run(strategy, least).total

    def _with_micro_batches(self, schedule: BatchSchedule, way: Strategy) -> Iterator[Candidate]:
        """Candidates with the largest micro-batches that fit, and with those that recomputing makes room for."""
        target, usable = self._target, USABLE_MEMORY * self._target.rates[way.precision].memory_bytes
        held = sum(held_by_rank(self._work, way, target.nodes, target.ranks_per_node, on_gpu=target.on_gpu).values())
        # Before any micro-batch: weights that do not fit need no search of accumulation.
        if held > usable:
            gigabytes = f"{held / 1e9:,.1f} of {usable / 1e9:,.1f} GB"
            self.refusals.append(Refusal(*_shape(way), f"weights do not fit in {way.precision}: {gigabytes}"))
            return
        # One more than the largest accumulation there can be, so that all divisors are tried at first.
        enough = way.sequences(target.world_size) + 1
        # From the fastest on: what recomputes more is worth it only with less accumulation than those before.
        for recompute in RECOMPUTES:
            fitting = self._fitting(schedule, replace(way, recompute=recompute), enough)
            found = list(islice(fitting, _MICRO_BATCHES) if way.pipeline == 1 else _while_faster(fitting))
            yield from found
            if found:
                # What recomputes more has to do with less accumulation than this to be worth trying.
                enough = found[0].strategy.gradient_accumulation_steps
        too_large = any((key[0], key[2]) == (way.precision, way.parallel) for key in self._too_many)
        if enough > way.sequences(target.world_size) and way.pipeline > 1 and too_large:
            self.refusals.append(Refusal(*_shape(way), f"no micro-batch fits in {way.precision}"))

    def _fitting(self, schedule: BatchSchedule, like: Strategy, enough: int) -> Iterator[Candidate]:
        """Candidates with less accumulation than ``enough``, with which what recomputes less fits, the least one first."""
        # From the largest micro-batch down: accumulation divides a copy's sequences.
        sequences = like.sequences(self._target.world_size)
        for accumulation in takewhile(lambda each: each < enough, _divisors(sequences)):
            # At least one micro-batch for each stage; interleaved 1F1B wants them in rounds of equal size.
            rounds = accumulation // like.pipeline
            if rounds == 0 or (like.virtual_stages > 1 and accumulation % rounds):
                continue  # as schedules of PyTorch need
            if candidate := self.candidate(schedule, replace(like, gradient_accumulation_steps=accumulation)):
                yield candidate

    def other_ways(self, like: Candidate) -> Iterator[Candidate]:
        """Candidates that compute the same, and sum gradients in any other way."""
        if self._target.world_size == 1:
            return
        shape = like.strategy.tensor, like.strategy.pipeline, like.strategy.virtual_stages
        vector = 4 * max(share.elements for share in model_shares(self._work.model, *shape))
        # Larger ones would be one as well.
        buckets = [size for size in BUCKETS if size == like.strategy.bucket_bytes or size < vector]
        for reduction, reduce_dtype, bucket_bytes in product(self._reductions, ("fp32", "bf16"), buckets):
            strategy = replace(like.strategy, reduction=reduction, reduce_dtype=reduce_dtype, bucket_bytes=bucket_bytes)
            if strategy != like.strategy and (candidate := self.candidate(like.schedule, strategy)):
                yield candidate

    def candidate(self, schedule: BatchSchedule, strategy: Strategy) -> Candidate | None:
        """Predict a strategy; None where it is not feasible."""
        target, work, precision = self._target, self._work, strategy.precision
        rates, sequences = target.rates[precision], strategy.sequences(target.world_size)
        memory_by = precision, strategy.recompute, strategy.parallel
        # Memory only grows with the micro-batch: what failed once rules out all larger ones of its kind.
        if sequences >= self._too_many.get(memory_by, sequences + 1):
            return None
        try:
            # The configuration refuses what the program cannot run, before anything is predicted of it.
            configured(self._config, schedule, strategy)
        except ValueError as error:
            self.refusals.append(Refusal("precision", precision, str(error)))
            return None
        try:
            memory = sum(memory_of_rank(work, strategy, target.nodes, target.ranks_per_node, target.on_gpu).values())
            if memory > USABLE_MEMORY * rates.memory_bytes:
                # One refusal stands for all sizes of buckets and types of sums.
                alike = sequences, replace(strategy, bucket_bytes=1, reduce_dtype="fp32")
                if strategy.pipeline == 1 and alike not in self._said:  # of stages it is said where none fits
                    self._said.add(alike)
                    gigabytes = f"{memory / 1e9:,.1f} of {USABLE_MEMORY * rates.memory_bytes / 1e9:,.1f} GB"
                    way = f"{precision}, {strategy.reduction}, recompute {strategy.recompute}, tensor {strategy.tensor}"
                    self.refusals.append(Refusal("micro-batch", sequences, f"does not fit in {way}: {gigabytes}"))
                if strategy.reduction == self._reductions[-1]:  # which takes the least memory of all
                    self._too_many[memory_by] = sequences
                return None
            # One step of the plan is enough to prune by (see `refined`).
            step = predict_step(work, strategy, rates, steps=1)
            run = self._run(strategy, step)
        # Rates may lack a collective in that scope.
        except ValueError as error:
            way = f"{precision} with {strategy.reduction} in {strategy.reduce_dtype}"
            self.refusals.append(Refusal("way", way, str(error)))
            return None
        return Candidate(schedule, strategy, step, run, memory)

    def refined(self, each: Candidate) -> Candidate:
        """Predict a candidate again, by several steps of its plan."""
        step = predict_step(self._work, each.strategy, self._target.rates[each.strategy.precision])
        return replace(each, step=step, run=self._run(each.strategy, step))

    def _run(self, strategy: Strategy, step: PredictedStep) -> RunTime:
        rates, samples = self._target.rates[strategy.precision], self._samples[strategy.global_batch_size]
        return predict_run(self._work, strategy, rates, step, samples)


def configured(config: Config, schedule: BatchSchedule, strategy: Strategy) -> Config:
    """Return the configuration with a strategy and the hyperparameters of its batch.

    Raises ``ValueError`` where settings do not go together.
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
        cuda_graphs=strategy.pipeline == 1,  # what stages send one another is not captured
    )
    return replace(config, training=training, optimizer=schedule.optimizer, parallel=strategy.parallel)


def _shape(strategy: Strategy) -> tuple[str, str]:
    """The setting that says how ranks share copies, and its value, as a refusal has them."""
    if strategy.pipeline == 1:
        return "tensor", str(strategy.tensor)
    return "pipeline", f"{strategy.stages} x tensor {strategy.tensor}"


def _while_faster(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    """The first ones, up to one that is slower than the one before."""
    seconds = math.inf
    for each in candidates:
        yield each
        if each.seconds > seconds:
            return
        seconds = each.seconds


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)
