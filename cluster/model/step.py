"""Predicted time of this program's step, by the parts that a run records, and predicted time of a run.

The computation is counted for the micro-batches that the real batch sampler gives to each rank in some steps. A simulated
timeline overlaps the reduction's buckets with the backward pass, and the all-gather of sharded weights with the forward
pass. A rank's computations run in a fixed order, and so do its messages. Computations and messages may wait for each other.
On CPUs, both need processors. If there are too few processors, messages get as many as they need, up to a limit. The limit
is half of all processors, or the processors that computation leaves idle if those are more. Computation gets the rest.

Shape legend: A micro-batches of a step, R copies of the model, P ranks of a pipeline.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from bert.configuration.sections import SHARDED, ModelConfig, ParallelConfig, Precision
from cluster.model.memory import ModelShare, hidden_bytes, model_shares
from cluster.model.rates import Rates
from cluster.model.work import REPEATED, Computation, Count, MicroBatches, Strategy, Work, parts_of
from cluster.published.calibration import calibration
from cluster.published.fitted import FORWARD_SHARE, RunTime, log_samples
from cluster.view import Operation, Scope
from compliance.log.schedule import evaluation_interval

_STEPS = 4
"""Number of steps of the batch sampler that are counted and averaged."""


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of each part of a step, for the parts in ``metrics_N.jsonl``. ``reduce`` includes waiting for other ranks."""

    data_wait: float
    forward_backward: float
    reduce: float
    update: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        return asdict(self)


def predict_step(work: Work, strategy: Strategy, rates: Rates, steps: int = _STEPS) -> PredictedStep:
    """Predict the time of a step, averaged over the first steps of the batch sampler.

    Raises ``ValueError`` if the global batch does not divide over the ranks, or if a rate is missing.
    """
    predict = _predict_without_pipeline if strategy.pipeline == 1 else _predict_pipeline
    found = [predict(work, strategy, rates, step) for step in range(steps)]
    return PredictedStep(*(sum(seconds) / steps for seconds in zip(*map(astuple, found), strict=True)))


def least_step(work: Work, strategy: Strategy, rates: Rates) -> PredictedStep:
    """Return a lower bound of a step's time: only the computation of the costliest stage, for a batch of mean cost."""
    sequences = strategy.sequences(rates.world_size) * strategy.gradient_accumulation_steps
    parts = _computation(work.model, strategy, rates, work.typical(sequences))
    stages = [float(each.sum()) for each in _of_stages(parts, work.model, strategy.parallel)]
    # A pipeline has at least one micro-batch per stage, so the constant cost of a micro-batch counts once per stage. Filling
    # and draining may take little time, so the bound omits them.
    through = (max(stages) + rates.micro_batch_s * strategy.pipeline) / min(rates.sharing, strategy.pipeline)
    return PredictedStep(0.0, through, 0.0, 0.0)


def _predict_without_pipeline(work: Work, strategy: Strategy, rates: Rates, step: int) -> PredictedStep:
    [share], data_rates = model_shares(work.model, strategy.tensor), rates.of_data_groups(strategy.tensor)
    sizes = work.micro_batches(strategy, rates.world_size, step)
    embedding, layer, last = _computation(work.model, strategy, rates, sizes)
    compute_AR = rates.micro_batch_s + embedding + share.inner * layer + last
    assembly = _assembly(strategy, rates)
    # If the ranks keep all processors busy, assembling batches delays their computation.
    compute_R = compute_AR.sum(0) + (assembly if rates.demand >= 1 else 0.0)
    compute = float(compute_R.mean())
    # Simulate the step of an average rank, including the assembly of batches.
    scale = compute / float(compute_AR.sum(0).mean())
    means = [float(part.mean()) * scale for part in (embedding, layer, last)]
    computed, arrived, waited = _timeline(strategy, data_rates, share, means, rates.micro_batch_s * scale)
    # The average rank waits for the slowest rank.
    straggling = max(0.0, rates.last_of(compute_R.tolist()) - rates.mean * compute) if rates.world_size > 1 else 0.0
    return PredictedStep(
        max(0.0, assembly - compute) if rates.demand < 1 else 0.0,
        # Ranks that finish early free their processors for the other ranks, so the average rank computes for a shorter time.
        computed - waited - (1 - rates.mean) * compute,
        arrived - computed + waited + straggling,
        _update(strategy, rates, share),
    )


def _predict_pipeline(work: Work, strategy: Strategy, rates: Rates, step: int) -> PredictedStep:
    """Predict a step of a pipeline. Such a step has no CUDA graphs and reduces gradients after its last micro-batch.

    As in the records of rank 0, the computation is that of the first stage. Any other time counts as waiting.
    """
    shares = model_shares(work.model, strategy.tensor, strategy.pipeline, strategy.virtual_stages)
    # All stages reduce at once, and the stage with the most elements is the last to finish.
    largest = max(shares, key=lambda share: share.elements)
    data_rates = rates.of_data_groups(strategy.tensor, strategy.pipeline)
    sizes = work.micro_batches(strategy, rates.world_size, step)
    parts = _computation(work.model, strategy, rates, sizes)
    compute_PAR = np.stack(_of_stages(parts, work.model, strategy.parallel)) + rates.micro_batch_s
    # Each rank of a tensor group sends its part of the rows.
    hidden = work.model.hidden_size * hidden_bytes(strategy.precision, on_gpu=rates.demand == 0)
    rows = float(sizes.tokens_AR.mean()) / strategy.tensor
    message_s = rates.message_seconds(strategy.tensor, strategy.pipeline, rows * hidden)
    neighbours_P = np.array([share.neighbours for share in shares])
    through_R = pipeline_seconds(compute_PAR, neighbours_P, message_s, strategy, rates.sharing)
    assembly = _assembly(strategy, rates)
    through = rates.last_of((through_R + (assembly if rates.demand >= 1 else 0.0)).tolist())
    computing = min(rates.mean * float(compute_PAR[0].sum(0).mean()), through)
    # The copied word table's gradient is sent before the reduction, and the table itself after the update.
    word_s = rates.message_seconds(strategy.tensor, strategy.pipeline, 4.0 * shares[-1].copied)
    buckets = largest.buckets(data_rates.world_size, strategy.bucket_bytes)
    reducing = sum(_reduce(strategy, data_rates, bucket)[0] for bucket in buckets)
    return PredictedStep(
        max(0.0, assembly - computing) if rates.demand < 1 else 0.0,
        computing,
        through - computing + word_s + reducing,
        _update(strategy, rates, largest) + word_s,
    )


def pipeline_seconds(
    compute_PAR: NDArray[np.float64],
    neighbours_P: NDArray[np.float64],
    message_s: float,
    strategy: Strategy,
    sharing: float,
) -> NDArray[np.float64]:
    """Return the seconds [R] from the first forward pass to the last backward pass of a 1F1B or interleaved schedule.

    The costliest rank computes all the time, except while the other ranks fill and drain the pipeline. Each micro-batch
    waits for its messages. Ranks that share processors take at least the time of their mean work.
    """
    # A stage computes faster while other stages wait, because it can use their processors.
    compute_s = compute_PAR / min(sharing, strategy.pipeline)
    busy_PR = (compute_s + message_s * neighbours_P[:, None, None]).sum(1)
    costliest_R = busy_PR.max(0)
    # Filling and draining the pipeline take as long as one micro-batch needs in all stages of the other ranks. An
    # interleaved schedule counts only one stage of each of these ranks.
    ends_R = (busy_PR.sum(0) - costliest_R) / compute_PAR.shape[1] / strategy.virtual_stages
    return np.maximum(costliest_R + ends_R, compute_PAR.sum(1).mean(0))


def _of_stages(parts: Sequence[Count], model: ModelConfig, parallel: ParallelConfig) -> list[NDArray[np.float64]]:
    """Return the seconds of each pipeline rank, summed over the embeddings, inner layers and last layer that it holds."""
    embedding, layer, last = parts
    shares = model_shares(model, 1, parallel.pipeline, parallel.virtual_stages)
    return [np.asarray(each.has_embeddings * embedding + each.inner * layer + each.has_last * last) for each in shares]


def _assembly(strategy: Strategy, rates: Rates) -> float:
    return float(np.sum(rates.seconds(Computation("batch", (1.0, float(strategy.global_batch_size))))))


def _seconds(computations: Sequence[Computation], rates: Rates, precision: str) -> Count:
    return sum((rates.seconds(each, precision) for each in computations), 0.0)


def _computation(
    model: ModelConfig, strategy: Strategy, rates: Rates, sizes: MicroBatches
) -> list[NDArray[np.float64]]:
    """Return the seconds [A, R] of the embeddings, an inner layer, and the last layer with the heads."""
    parts = parts_of(model, sizes, strategy.tensor)
    exchanged = _exchanged(model, strategy, rates, sizes)
    found = [
        np.broadcast_to(_seconds(part, rates, strategy.precision), sizes.tokens_AR.shape) + seconds
        for part, seconds in zip(parts, exchanged, strict=True)
    ]
    repeated = [each for each in parts[1] if each.kind in REPEATED[strategy.recompute]]
    found[1] = found[1] + FORWARD_SHARE * _seconds(repeated, rates, strategy.precision)
    found[1] = found[1] + (exchanged[1] / 2 if strategy.recompute == "full" else 0.0)
    return found


def _exchanged(model: ModelConfig, strategy: Strategy, rates: Rates, sizes: MicroBatches) -> tuple[float, float, float]:
    """Return the seconds of a tensor group's collectives in each part that `parts_of` returns, averaged over micro-batches.

    For each all-gather in one pass, the other pass (forward or backward) has a reduce-scatter of as many rows.
    """
    if strategy.tensor == 1:
        return 0.0, 0.0, 0.0
    # On CPUs, the ranks implement reduce-scatter as an all-to-all followed by a local sum.
    scatter: Operation = "reduce-scatter" if rates.demand == 0 else "all-to-all"

    def both(rows: float, element: int) -> float:
        size = element * model.hidden_size * rows
        return sum(rates.tensor_seconds(each, strategy.tensor, size) for each in ("all-gather", scatter))

    # This is the size of an exchanged element. Only the embeddings are always summed in fp32, with 4 bytes an element.
    element = 4 if strategy.precision == "fp32" else 2
    T, M = float(sizes.tokens_AR.mean()), float(sizes.masked_AR.mean())
    Q = M + sizes.sequences
    return both(T, 4), 4 * both(T, element), both(T, element) + 4 * both(Q, element) + both(M, element)


@dataclass(frozen=True)
class Activity:
    """A computation or a message, with its seconds.

    Attributes:
        needs: for a computation, number of messages that must have arrived before it begins; for a message, number of
            computations that must have ended before it begins. A computation of 0 seconds only waits for messages.
        share: share of the processors that a message keeps busy.
    """

    seconds: float
    needs: int = 0
    share: float = 0.0


def _timeline(
    strategy: Strategy, rates: Rates, share: ModelShare, means: Sequence[float], constant: float
) -> tuple[float, float, float]:
    """Simulate an average rank's step, given the seconds of each part of the model. Return what `simulate` returns.

    The first forward pass and the last backward pass have one computation for each part of the model, because messages
    begin between computations and not within one.
    """
    embedding, layer, last = means
    parts = [each + constant / (share.inner + 2) for each in (embedding, *[layer] * share.inner, last)]
    forward = [FORWARD_SHARE * each for each in parts]
    backward = [(1 - FORWARD_SHARE) * each for each in reversed(parts)]
    buckets = share.buckets(rates.world_size, strategy.bucket_bytes)
    messages: list[Activity] = []
    computations = [Activity(seconds) for seconds in forward]
    # In FP8 the update itself gathers the weights and makes their 8-bit copies. Other precisions gather the weights here.
    if strategy.reduction in SHARDED and rates.world_size > 1 and strategy.precision != "fp8":
        messages += [_gather(strategy, rates, _bytes(bucket)) for bucket in buckets[::-1]]
        # Each part of the model waits for the buckets that begin before its parameters end. The last part waits for all.
        needs = [sum(bucket.start < stop for bucket in buckets) for stop in (*share.ends[:-1], share.elements)]
        computations = [Activity(0.0, 1), *map(Activity, forward, needs)]
    # All passes between the first and the last one form one computation, because no message begins or ends there.
    computations.append(Activity((strategy.gradient_accumulation_steps - 1) * (sum(forward) + sum(backward))))
    before = len(computations)
    computations += map(Activity, backward)
    for bucket in buckets if rates.world_size > 1 else ():
        # A bucket is complete after the backward pass of the part in which it begins. The embeddings' pass is the last.
        part = sum(end <= bucket.start for end in share.ends)
        seconds, busy = _reduce(strategy, rates, bucket)
        messages.append(Activity(seconds, before + len(parts) - min(part, len(parts) - 1), busy))
    return simulate(computations, messages, rates.demand)


def simulate(
    computations: Sequence[Activity], messages: Sequence[Activity], demand: float
) -> tuple[float, float, float]:
    """Return the seconds until all computations end, the seconds until messages end as well, and the seconds of waiting.

    ``demand`` is the share of processors that computation alone keeps busy. Only computations of 0 seconds count as waiting.
    """
    now = computed = waited = 0.0
    computation = message = 0
    left_computations, left_messages = ([each.seconds for each in every] for every in (computations, messages))
    while computation < len(computations) or message < len(messages):
        computing = computation < len(computations) and computations[computation].needs <= message
        sending = message < len(messages) and messages[message].needs <= computation
        assert computing or sending, "computations and messages wait for each other"
        share = messages[message].share if computing and sending else 0.0
        speed_computation, speed_message = _speeds(demand, share)
        # Advance to the next end of a computation or a message. The speeds are constant until then.
        until_computation = left_computations[computation] / speed_computation if computing else math.inf
        until_message = left_messages[message] / speed_message if sending else math.inf
        step = min(until_computation, until_message)
        now += step
        if not computing and computation < len(computations) and computations[computation].seconds == 0:
            waited += step
        if computing:
            left_computations[computation] -= step * speed_computation
        if sending:
            left_messages[message] -= step * speed_message
        # A computation and a message may end at the same instant.
        if computing and until_computation <= until_message:
            computation, computed = computation + 1, now
        if sending and until_message <= until_computation:
            message += 1
    return computed, now, waited


def _speeds(demand: float, share: float) -> tuple[float, float]:
    """Return the speeds of a computation and of a message that run at the same time, each relative to running alone."""
    if demand + share <= 1 or share == 0:
        return 1.0, 1.0
    given = min(share, max(0.5, 1 - demand))
    return (1 - given) / demand, given / share


def _bytes(bucket: slice) -> int:
    return 4 * (bucket.stop - bucket.start)


def _gather(strategy: Strategy, rates: Rates, size: float) -> Activity:
    """Return the all-gather of ``size`` bytes among the ranks that share an optimizer state."""
    scope: Scope = "node" if strategy.reduction == "sharded" else "world"
    seconds, busy = rates.collective("all-gather", scope, size)
    return Activity(seconds, 0, busy)


def _reduce(strategy: Strategy, rates: Rates, bucket: slice) -> tuple[float, float]:
    """Return the seconds of a bucket's reduction and the share of processors it keeps busy."""
    size = _bytes(bucket)
    collectives: list[tuple[Operation, Scope, float]]
    if strategy.reduction == "flat":
        collectives = [("all-reduce", "world", size)]
    elif strategy.reduction == "sharded_world":
        collectives = [("reduce-scatter", "world", size)]
    else:
        collectives = [("reduce-scatter", "node", size), ("all-reduce", "rail", size / rates.ranks)]
        if strategy.reduction == "hierarchical":
            collectives.append(("all-gather", "node", size))
    if strategy.reduce_dtype == "bf16":
        # Ranks send bf16, half of the bytes, to the rank that sums in fp32. In an all-reduce, that rank returns bf16 sums.
        halves: dict[Operation, list[Operation]] = {
            "reduce-scatter": ["all-to-all"],
            "all-gather": ["all-gather"],
            "all-reduce": ["all-to-all", "all-gather"],
        }
        collectives = [(half, scope, each / 2) for whole, scope, each in collectives for half in halves[whole]]
    calls = [rates.collective(*each) for each in collectives]
    seconds = sum(each for each, _ in calls)
    return seconds, sum(each * busy for each, busy in calls) / seconds if seconds else 0.0


def _update(strategy: Strategy, rates: Rates, share: ModelShare) -> float:
    data_rates = rates.of_data_groups(strategy.tensor, strategy.pipeline)
    copies = data_rates.world_size
    shards = strategy.shards(data_rates.ranks, copies)
    elements = share.padded(copies) / shards
    seconds = float(np.sum(rates.seconds(Computation("lamb", (1.0, share.segments / shards, elements)))))
    if shards > 1:
        if strategy.precision == "fp8" or strategy.pipeline > 1:  # the weights' all-gather does not overlap
            buckets = share.buckets(copies, strategy.bucket_bytes)
            seconds += sum(_gather(strategy, data_rates, _bytes(bucket)).seconds for bucket in buckets)
        # Tensors span shards, so their norms need two all-gathers of two fp64 numbers per segment and rank.
        seconds += 2 * _gather(strategy, data_rates, 16.0 * share.segments * shards).seconds
    if strategy.tensor > 1:  # sum the gradients of parameters that are replicated in a tensor group
        seconds += rates.tensor_seconds("all-reduce", strategy.tensor, 4.0 * share.shared / shards)
    return seconds


def predict_run(
    work: Work, strategy: Strategy, rates: Rates, step: PredictedStep, samples: float | None = None
) -> RunTime:
    """Predict the time to train, given the predicted ``step`` and, if known, the number of ``samples`` to the target."""
    batch = strategy.global_batch_size
    samples = samples or work.samples
    if samples is None:
        p, gigabytes = calibration().parameters, rates.memory_bytes / 1e9
        samples = math.exp(log_samples(p, batch, rates.world_size, gigabytes, batch / step.total, False))
    evaluations = math.ceil(samples / (work.interval_samples or evaluation_interval(batch)))
    evaluation = evaluations * _evaluation(work, strategy.precision, strategy.parallel, rates)
    once = {"evaluation": evaluation, "start": rates.start_s}
    return RunTime.of(samples, math.ceil(samples / batch), step.parts, **once)


@functools.lru_cache(maxsize=256)  # a search predicts the same few evaluations many times
def _evaluation(work: Work, precision: Precision, parallel: ParallelConfig, rates: Rates) -> float:
    """Return the seconds of an evaluation: the forward pass of its sequences, divided evenly among the model's copies."""
    sequences = math.ceil(work.evaluation_sequences * parallel.copy_ranks / rates.world_size)
    batches = math.ceil(sequences / work.evaluation_batch_size)
    # Sequences are sorted by length before they are cut into batches, so each length occurs in about one batch.
    lengths = max(1.0, min(work.distinct_lengths, sequences) / batches)
    sizes = work.typical(sequences / batches, lengths)
    strategy = Strategy(1, precision=precision, tensor=parallel.tensor)
    stages = _of_stages(_computation(work.model, strategy, rates, sizes), work.model, parallel)
    seconds = [FORWARD_SHARE * batches * (rates.micro_batch_s + float(each.sum())) for each in stages]
    if parallel.virtual_stages > 1:  # virtual stages evaluate one batch at a time, so they never work at once
        return sum(seconds)
    # The costliest stage is always busy. The other stages add time while the pipeline fills and drains.
    return max(seconds) + (sum(seconds) - max(seconds)) / batches
