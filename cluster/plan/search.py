"""Search for the fastest feasible way to run a recipe on given ranks: each way is predicted, none is tried.

All are gone through, but for those that compute longer than the best ones take in all. Micro-batches are as large as memory
allows, or the next smaller ones: accumulating more often costs launches and saves nothing else. Layers recompute only where
that makes room for larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from bert.configuration.config import Config, ParallelConfig, Recompute
from cluster.model.computations import layout_of
from cluster.model.memory import held_by_rank, memory_of_rank
from cluster.model.step import PredictedStep, least_step, predict_run, predict_step
from cluster.model.strategy import Precision, Reduction, Strategy
from cluster.model.work import Work
from cluster.plan.schedules import Schedule, schedules
from cluster.plan.target import Target
from cluster.published.cost_model import RunTime

REDUCTIONS: tuple[Reduction, ...] = ("flat", "hierarchical", "sharded", "sharded_world")
TENSORS = (1, 2, 4, 8)
"""Ranks of a host that share a copy of the model."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""From the most memory to the least, and from the least time to the most."""
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

    schedule: Schedule
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
        best: the few that are fastest, predicted by several steps of their plans, the first one first.
        ranked: all that fit, predicted by one step, the fastest first.
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
    ranked = list(first)
    for each in sorted(first, key=lambda candidate: candidate.least_seconds):
        best = _best(ranked)
        if len(best) < BEST or each.least_seconds < best[-1].seconds:
            ranked += search.other_ways(each)
    ranked.sort(key=lambda candidate: candidate.seconds)
    best = [search.looked_at(each) for each in _best(ranked)]
    best.sort(key=lambda candidate: candidate.seconds)
    return Found(tuple(best), tuple(ranked), tuple(search.refusals))


def _best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The few that are fastest, each with its best size of buckets."""
    distinct: dict[Strategy, Candidate] = {}
    for each in sorted(candidates, key=lambda candidate: candidate.seconds):
        distinct.setdefault(replace(each.strategy, bucket_bytes=1), each)
        if len(distinct) == BEST:
            break
    return list(distinct.values())


class _Search:
    """Predictions of one recipe on one target, each made once."""

    def __init__(self, config: Config, work: Work, target: Target) -> None:
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
        self._too_many: dict[tuple[Precision, Recompute, int], int] = {}
        """Sequences of the smallest micro-batch that does not fit; larger ones are not looked at."""

    def computing(self) -> list[Candidate]:
        """Candidates for all ways to compute that may be among the best, summing gradients as takes the least memory.

        Sharing copies of the model saves memory and reduction alone: of what takes longer even without any reduction, one
        way for each number of ranks shows it.
        """
        found: list[Candidate] = []
        for tensor in self._tensors:
            ways = [(self._least_seconds(way[1]), way) for way in self._ways(tensor)]
            for place, (least, way) in enumerate(sorted(ways, key=lambda each: each[0])):
                best = _best(found)
                if tensor == 1 or place == 0 or len(best) < BEST or least < best[-1].seconds:
                    found += self._with_micro_batches(*way)
        return found

    def _is_divisible(self, tensor: int) -> bool:
        """Whether so many ranks can share a copy of the model."""
        try:
            replace(self._config, parallel=replace(self._config.parallel, tensor=tensor))
        except ValueError as error:
            self.refusals.append(Refusal("tensor", tensor, str(error)))
            return False
        return True

    def _ways(self, tensor: int) -> Iterator[tuple[Schedule, Strategy]]:
        """Batches in each precision on copies of so many ranks, in one micro-batch."""
        copies = self._target.world_size // tensor
        for schedule in self._schedules:
            batch = schedule.global_batch_size
            if batch % copies == 0:
                self._samples[batch] = schedule.samples or self._work.samples
                for precision in self._target.rates:
                    yield schedule, Strategy(batch, 1, precision, self._reductions[-1], tensor=tensor)
            elif tensor == self._tensors[-1] and batch not in self._samples:
                reason = "is no multiple of" if batch > copies else "is less than"
                self.refusals.append(Refusal("batch", batch, f"{reason} {self._target.world_size:,} ranks"))

    def _least_seconds(self, strategy: Strategy) -> float:
        """Time to train without any reduction or update."""
        least = least_step(self._work, strategy, self._target.rates[strategy.precision])
        return self._run(strategy, least).total

    def _with_micro_batches(self, schedule: Schedule, way: Strategy) -> Iterator[Candidate]:
        """Candidates with the largest micro-batches that fit, and with those that recomputing makes room for."""
        target, rates = self._target, self._target.rates[way.precision]
        held = sum(held_by_rank(self._work, way, target.nodes, target.ranks_per_node).values())
        if held > USABLE_MEMORY * rates.memory_bytes:
            gigabytes = f"{held / 1e9:,.1f} of {USABLE_MEMORY * rates.memory_bytes / 1e9:,.1f} GB"
            self.refusals.append(Refusal("tensor", way.tensor, f"weights do not fit in {way.precision}: {gigabytes}"))
            return
        enough = way.sequences(target.world_size) + 1
        for recompute in RECOMPUTES:
            found = list(islice(self._fitting(schedule, replace(way, recompute=recompute), enough), _MICRO_BATCHES))
            yield from found
            if found:
                enough = found[0].strategy.gradient_accumulation_steps

    def _fitting(self, schedule: Schedule, like: Strategy, enough: int) -> Iterator[Candidate]:
        """Candidates with less accumulation than ``enough``, with which what recomputes less fits, the least one first."""
        sequences = like.sequences(self._target.world_size)
        for accumulation in takewhile(lambda each: each < enough, _divisors(sequences)):
            if candidate := self.candidate(schedule, replace(like, gradient_accumulation_steps=accumulation)):
                yield candidate

    def other_ways(self, like: Candidate) -> Iterator[Candidate]:
        """Candidates that compute the same, and sum gradients in any other way."""
        if self._target.world_size == 1:
            return
        vector = 4 * layout_of(self._work.model, like.strategy.tensor).elements
        buckets = [size for size in BUCKETS if size == like.strategy.bucket_bytes or size < vector]
        for reduction in self._reductions:
            for reduce_dtype in ("fp32", "bf16"):
                for bucket_bytes in buckets:
                    strategy = replace(
                        like.strategy, reduction=reduction, reduce_dtype=reduce_dtype, bucket_bytes=bucket_bytes
                    )
                    if strategy != like.strategy and (candidate := self.candidate(like.schedule, strategy)):
                        yield candidate

    def candidate(self, schedule: Schedule, strategy: Strategy) -> Candidate | None:
        """Predict a strategy; None where it is not feasible."""
        target, work, precision = self._target, self._work, strategy.precision
        rates, sequences = target.rates[precision], strategy.sequences(target.world_size)
        memory_by = precision, strategy.recompute, strategy.tensor
        if sequences >= self._too_many.get(memory_by, sequences + 1):
            return None
        try:
            configured(self._config, schedule, strategy)
        except ValueError as error:
            self.refusals.append(Refusal("precision", precision, str(error)))
            return None
        try:
            memory = sum(memory_of_rank(work, strategy, target.nodes, target.ranks_per_node, target.on_gpu).values())
            if memory > USABLE_MEMORY * rates.memory_bytes:
                gigabytes = f"{memory / 1e9:,.1f} of {USABLE_MEMORY * rates.memory_bytes / 1e9:,.1f} GB"
                way = f"{precision}, {strategy.reduction}, recompute {strategy.recompute}, tensor {strategy.tensor}"
                self.refusals.append(Refusal("micro-batch", sequences, f"does not fit in {way}: {gigabytes}"))
                if strategy.reduction == self._reductions[-1]:
                    self._too_many[memory_by] = sequences
                return None
            step = predict_step(work, strategy, rates, steps=1)
            run = self._run(strategy, step)
        except ValueError as error:
            way = f"{precision} with {strategy.reduction} in {strategy.reduce_dtype}"
            self.refusals.append(Refusal("way", way, str(error)))
            return None
        return Candidate(schedule, strategy, step, run, memory)

    def looked_at(self, each: Candidate) -> Candidate:
        """Predict a candidate again, by several steps of its plan."""
        step = predict_step(self._work, each.strategy, self._target.rates[each.strategy.precision])
        return replace(each, step=step, run=self._run(each.strategy, step))

    def _run(self, strategy: Strategy, step: PredictedStep) -> RunTime:
        rates, samples = self._target.rates[strategy.precision], self._samples[strategy.global_batch_size]
        return predict_run(self._work, strategy, rates, step, samples)


def configured(config: Config, schedule: Schedule, strategy: Strategy) -> Config:
    """Return the configuration with a strategy and the hyperparameters of its batch.

    Switches are left to the run, which measures whether they add up faster: no rate of theirs is known before. Raises
    ``ValueError`` where settings do not go together.
    """
    training = replace(
        config.training,
        global_batch_size=strategy.global_batch_size,
        gradient_accumulation_steps=strategy.gradient_accumulation_steps,
        max_samples=schedule.max_samples,
        precision=strategy.precision,
        reduction=strategy.reduction,
        in_network="auto",
        reduce_dtype=strategy.reduce_dtype,
        bucket_bytes=strategy.bucket_bytes,
        recompute=strategy.recompute,
    )
    parallel = ParallelConfig(tensor=strategy.tensor)  # as it is predicted: no stages
    return replace(config, training=training, optimizer=schedule.optimizer, parallel=parallel)


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)
