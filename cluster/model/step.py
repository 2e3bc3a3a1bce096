"""Time of a step of this program on ranks whose rates are known, by the parts that a run's own records have; and of a run.

Computing follows the real plan: of some steps each rank's micro-batches are counted. Buckets of the reduction begin when
backward has filled them, and weights of a sharded optimizer come beside the forward pass, on a simulated timeline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from bert.configuration.sections import SHARDED, ModelConfig, ParallelConfig, Precision
from cluster.model.computations import Computation, Count, VectorLayout, layout_of, layouts_of, parts_of
from cluster.model.pipeline import alone_in_stages, hidden_bytes, own_layers, through_stages
from cluster.model.rates import Rates
from cluster.model.recomputation import REPEATED
from cluster.model.strategy import Strategy
from cluster.model.timeline import Ends, Message, Piece, run
from cluster.model.work import MicroBatches, Work
from cluster.published.calibration import calibration
from cluster.published.convergence import log_samples
from cluster.published.cost_model import FORWARD_SHARE, RunTime
from cluster.view import Operation, Scope

# A mean of few: each has a global batch dealt to all micro-batches and counted.
_STEPS = 4
"""Steps of the plan that are counted."""


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of a step by part, as ``metrics_N.jsonl`` has them; they add up to the step.

    Attributes:
        reduce: what is not hidden of the reduction, of gathering weights, and of waiting for other ranks.
        hidden: of the reduction, and in no part.
    """

    data_wait: float
    forward_backward: float
    reduce: float
    update: float
    hidden: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {name: getattr(self, name) for name in ("data_wait", "forward_backward", "reduce", "update")}


def least_step(work: Work, strategy: Strategy, rates: Rates) -> PredictedStep:
    """Predict what a step takes at least: one micro-batch of mean cost, without update, reduction, or waiting.

    Of stages the costliest one counts, and filling and draining them with the number of micro-batches that takes least.
    """
    # All that one copy has to do in a step, whatever the number of micro-batches.
    sequences = strategy.sequences(rates.world_size) * strategy.gradient_accumulation_steps
    parts = _computing(work.model, strategy, rates, work.typical(sequences))
    # Without update and reduction, since no way to run the same computing may take less than this.
    stages = [rates.micro_batch_s + float(each.sum()) for each in _of_stages(parts, work.model, strategy)]
    if strategy.pipeline > 1:
        # In M micro-batches: the work of the costliest stage, M times what each takes whatever its size, and an M-th of
        # the other stages' work at both ends. The root is where that is least.
        # 1e-9: a probe's rates have no constant cost, and the root divides by it.
        seconds, once = max(stages) - rates.micro_batch_s, max(rates.micro_batch_s, 1e-9)
        rest = (sum(stages) - max(stages)) / strategy.virtual_stages
        # At least one micro-batch for each stage, as PyTorch's schedules ask for, and no more than there are sequences.
        many = max(strategy.pipeline, min(math.sqrt(rest / once), sequences))
        through = (seconds + once * many + rest / many) / alone_in_stages(rates.sharing, strategy.pipeline)
        return PredictedStep(0.0, through, 0.0, 0.0, 0.0)
    return PredictedStep(0.0, stages[0], 0.0, 0.0, 0.0)


def predict_step(work: Work, strategy: Strategy, rates: Rates, steps: int = _STEPS) -> PredictedStep:
    """Predict a step, the mean of the first few of the plan.

    Raises:
        ValueError: the global batch does not divide over the ranks, or a rate is missing.
    """
    # Two functions, since with stages nothing overlaps: gradients travel after the last micro-batch of the step.
    predicted = _predicted if strategy.pipeline == 1 else _predicted_in_stages
    found = [predicted(work, strategy, rates, step) for step in range(steps)]
    return PredictedStep(*(sum(seconds) / steps for seconds in zip(*map(astuple, found), strict=True)))


def _predicted(work: Work, strategy: Strategy, rates: Rates, step: int) -> PredictedStep:
    layout, data_rates = layout_of(work.model, strategy.tensor), rates.of_data_groups(strategy.tensor)
    sizes = work.micro_batches(strategy, rates.world_size, step)
    embedding, layer, last = _computing(work.model, strategy, rates, sizes)
    layers = work.model.num_hidden_layers - 1
    # AR: micro-batches of a step by ranks. Means come last, so that the slowest rank of the real plan is still known.
    # What every rank computes, by the plan.
    compute_AR = rates.micro_batch_s + embedding + layers * layer + last
    assembly = float(rates.seconds(Computation("batch", (1.0, float(strategy.global_batch_size)))))
    # Where processors compute, they assemble batches as well; beside devices of their own they have time for it.
    compute_R = compute_AR.sum(0) + (assembly if rates.demand >= 1 else 0.0)
    compute = float(compute_R.mean())
    data_wait = max(0.0, assembly - compute) if rates.demand < 1 else 0.0
    # A mean rank's step beside its messages, in pieces that hold the assembly of batches as well.
    scale = compute / float(compute_AR.sum(0).mean())
    means = [float(part.mean()) * scale for part in (embedding, layer, last)]
    constant = rates.micro_batch_s * scale
    ends, reducing = _timeline(strategy, data_rates, layout, (*means, constant), layers)
    straggling = max(0.0, rates.last_of(compute_R.tolist()) - rates.mean * compute)  # a mean rank waits so long
    # What is left to wait for after the last backward pass, and weights that the forward pass waited for at its start.
    exposed = ends.arrived - ends.computed + ends.waited
    reduce = exposed + (straggling if rates.world_size > 1 else 0.0)
    return PredictedStep(
        data_wait,
        # `rates.mean` is below 1 where ranks share processors: those that end early leave theirs to the others.
        ends.computed - ends.waited - (1 - rates.mean) * compute,
        reduce,
        _update(strategy, rates, layout),
        max(0.0, reducing - exposed),
    )


def _predicted_in_stages(work: Work, strategy: Strategy, rates: Rates, step: int) -> PredictedStep:
    """The same of copies in stages, where gradients are reduced when all micro-batches are through, and nothing is captured.

    So what a micro-batch takes whatever its size counts on each stage. Computing is that of the first stage, as rank 0's
    records have it; what goes on elsewhere meanwhile is waiting.
    """
    # Reductions of all stages begin together: the one with the most elements is the last.
    layouts = layouts_of(work.model, strategy.tensor, strategy.pipeline, strategy.virtual_stages)
    layout = max(layouts, key=lambda each: each.elements)
    data_rates = rates.of_data_groups(strategy.tensor, strategy.pipeline)
    sizes = work.micro_batches(strategy, rates.world_size, step)
    compute_PAR = np.stack(_of_stages(_computing(work.model, strategy, rates, sizes), work.model, strategy))
    # Nothing is captured here: each stage's launches count for every micro-batch.
    compute_PAR += rates.micro_batch_s
    element = hidden_bytes(strategy.precision, on_gpu=rates.demand == 0)
    # Between products each rank of a tensor group has a part of the rows, and sends that part alone.
    rows = float(sizes.tokens_AR.mean()) / strategy.tensor
    message_s = rates.message_seconds(strategy.tensor, strategy.pipeline, rows * work.model.hidden_size * element)
    neighbours_P = np.array(
        [each.neighbours for each in own_layers(work.model, strategy.pipeline, strategy.virtual_stages)]
    )
    through_R = through_stages(compute_PAR, neighbours_P, message_s, strategy, rates.sharing)
    assembly = float(rates.seconds(Computation("batch", (1.0, float(strategy.global_batch_size)))))
    if rates.demand >= 1:
        through_R = through_R + assembly
    through = rates.last_of(through_R.tolist())
    # Rank 0's records count its computing; whatever the pipeline needs beyond that shows as waiting in `reduce`.
    computing = min(rates.mean * float(compute_PAR[0].sum(0).mean()), through)
    # Twice on the way: the gradient of the last stage's word table before the sums, the table itself after the update.
    word_s = rates.message_seconds(strategy.tensor, strategy.pipeline, 4.0 * layouts[-1].copied)
    buckets = layout.buckets(data_rates.world_size, strategy.bucket_bytes)
    sizes_B = [4 * (bucket.stop - bucket.start) for bucket in buckets]
    reducing = sum(_reduce(strategy, data_rates, size)[0] for size in sizes_B)
    return PredictedStep(
        max(0.0, assembly - computing) if rates.demand < 1 else 0.0,
        computing,
        through - computing + word_s + reducing,
        _update(strategy, rates, layout) + word_s,
        # Gradients travel after the last micro-batch: nothing of that is hidden.
        0.0,
    )


def _of_stages(parts: Sequence[np.ndarray], model: ModelConfig, strategy: Strategy) -> list[np.ndarray]:
    """Add up what each rank of a pipeline has of embeddings, layers, and the last one with the heads."""
    embedding, layer, last = parts
    ranks = own_layers(model, strategy.pipeline, strategy.virtual_stages)
    return [each.has_embeddings * embedding + each.inner * layer + each.has_last * last for each in ranks]


def _seconds(computations: list[Computation], rates: Rates, precision: str, sizes: MicroBatches) -> np.ndarray:
    total: Count = np.zeros_like(sizes.tokens_AR)
    for computation in computations:
        total = total + rates.seconds(computation, precision)
    assert isinstance(total, np.ndarray)
    return total


def _computing(model: ModelConfig, strategy: Strategy, rates: Rates, sizes: MicroBatches) -> list[np.ndarray]:
    """Seconds [A, R] of the embeddings, a layer, and the last layer with the heads, and of what they exchange."""
    parts = parts_of(model, sizes, strategy.tensor)
    exchanged = _exchanged(model, strategy.precision, strategy.tensor, rates, sizes)
    found = [
        _seconds(part, rates, strategy.precision, sizes) + seconds
        for part, seconds in zip(parts, exchanged, strict=True)
    ]
    # Recomputation repeats the forward third of these kinds, not their backward pass.
    again = [each for each in parts[1] if each.kind in REPEATED[strategy.recompute]]
    found[1] += FORWARD_SHARE * _seconds(again, rates, strategy.precision, sizes)
    found[1] += exchanged[1] / 2 if strategy.recompute == "full" else 0.0  # those of the forward pass once more
    return found


def _exchanged(
    model: ModelConfig, precision: Precision, tensor: int, rates: Rates, sizes: MicroBatches
) -> tuple[float, float, float]:
    """Seconds of what a tensor group gathers and scatters in the embeddings, a layer, and the last layer with the heads.

    Each all-gather has a reduce-scatter of as many rows in the other direction; micro-batches count with their mean.
    """
    if tensor == 1:
        # Without a tensor group nothing is exchanged, and there may be no node-scope curve to ask.
        return 0.0, 0.0, 0.0

    def both(rows: float, element: int) -> float:
        size = element * model.hidden_size * rows
        # Each all-gather's gradient is a reduce-scatter of the same vector, hence both at the same size. On CPUs ranks
        # send one another what they then add.
        scatter: Operation = "reduce-scatter" if rates.demand == 0 else "all-to-all"
        return sum(rates.tensor_seconds(each, tensor, size) for each in ("all-gather", scatter))

    element = 4 if precision == "fp32" else 2
    # As docs/scaling.md counts them, under "Bytes that ranks send": the embeddings' sum travels in fp32.
    T, M = float(sizes.tokens_AR.mean()), float(sizes.masked_AR.mean())
    # Q: rows of the last layer, which computes only masked tokens and each sequence's [CLS].
    Q = M + sizes.sequences
    return both(T, 4), 4 * both(T, element), both(T, element) + 4 * both(Q, element) + both(M, element)


def _timeline(
    strategy: Strategy, rates: Rates, layout: VectorLayout, means: tuple[float, ...], layers: int
) -> tuple[Ends, float]:
    """Run a mean rank's step: pieces are the parts of the first forward pass, what is between, and of the last backward.

    Returns its ends, and the seconds of all messages with nothing beside them.
    """
    embedding, layer, last, constant = means
    # One piece for each layer: a message of the timeline begins after a whole piece.
    parts = [embedding, *[layer] * layers, last]
    # The constant cost of a micro-batch is spread evenly over the parts.
    forward = [FORWARD_SHARE * (each + constant / len(parts)) for each in parts]
    backward = [(1 - FORWARD_SHARE) * (each + constant / len(parts)) for each in reversed(parts)]
    buckets = layout.buckets(rates.world_size, strategy.bucket_bytes)
    messages: list[Message] = []
    # needs[i]: messages that must have arrived before piece i begins; none where weights are whole on every rank.
    needs = [0] * len(parts)
    # FP8's copies are cast from gathered weights: there the update gathers them, beside nothing.
    if strategy.reduction in SHARDED and rates.world_size > 1 and strategy.precision != "fp8":
        # Backward fills the last layers' buckets first, and forward needs the first layers' weights first.
        gathered = buckets[::-1]
        messages += [_gather(strategy, rates, 4 * (bucket.stop - bucket.start)) for bucket in gathered]
        # A layer's parameters end at `stop` in the flat vector; a bucket that begins before it may hold some of them.
        stops = [*layout.ends[:-1], layout.elements]  # the last layer and the heads wait for all
        needs = [sum(bucket.start < stop for bucket in gathered) for stop in stops]
    pieces = [Piece(seconds, need) for seconds, need in zip(forward, needs, strict=True)]
    if messages:
        pieces.insert(0, Piece(0.0, 1))  # the step waits for the first weights before all else
    # Micro-batches whose gradients stay local are one piece: no message can begin or end inside them.
    pieces.append(Piece((strategy.gradient_accumulation_steps - 1) * (sum(forward) + sum(backward))))
    before = len(pieces)
    pieces += map(Piece, backward)
    for bucket in buckets if rates.world_size > 1 else ():
        # Of the part in which a bucket begins, all gradients are there when its backward pass is done; the first
        # elements are those of the decoder's bias and the embeddings, which are last.
        part = sum(end <= bucket.start for end in layout.ends)
        seconds, share = _reduce(strategy, rates, 4 * (bucket.stop - bucket.start))
        messages.append(Message(seconds, before + len(parts) - min(part, len(parts) - 1), share))
    # The second value is what the messages would take alone: the difference to what shows is what overlap hides.
    return run(pieces, messages, rates.demand), sum(message.seconds for message in messages)


def _gather(strategy: Strategy, rates: Rates, size: int) -> Message:
    scope: Scope = "node" if strategy.reduction == "sharded" else "world"
    seconds, share = rates.collective("all-gather", scope, size)
    return Message(seconds, 0, share)


def _reduce(strategy: Strategy, rates: Rates, size: float) -> tuple[float, float]:
    """Seconds of a bucket's reduction, and the share of processors that it keeps busy."""
    # `shard` is what is left for the rails after the sum in the node: each rank of a host carries its own part.
    whole, shard = size, size / rates.ranks
    if strategy.reduction == "flat":
        calls = _sum(strategy, rates, "all-reduce", "world", whole)
    elif strategy.reduction == "sharded_world":
        calls = _sum(strategy, rates, "reduce-scatter", "world", whole)
    else:
        calls = _sum(strategy, rates, "reduce-scatter", "node", whole)
        calls += _sum(strategy, rates, "all-reduce", "rail", shard)
        if strategy.reduction == "hierarchical":
            calls += _sum(strategy, rates, "all-gather", "node", whole)
    seconds = sum(each for each, _ in calls)
    # Calls follow one another: their shares of the processors are averaged by time.
    return seconds, sum(each * share for each, share in calls) / seconds if seconds else 0.0


def _sum(
    strategy: Strategy, rates: Rates, operation: Operation, scope: Scope, size: float
) -> list[tuple[float, float]]:
    if strategy.reduce_dtype == "fp32":
        return [rates.collective(operation, scope, size)]
    # Contributions travel to where they are added, and sums back, in half of the bytes.
    names: dict[Operation, tuple[Operation, ...]] = {
        "reduce-scatter": ("all-to-all",),
        "all-gather": ("all-gather",),
        "all-reduce": ("all-to-all", "all-gather"),
    }
    return [rates.collective(each, scope, size / 2) for each in names[operation]]


def _update(strategy: Strategy, rates: Rates, layout: VectorLayout) -> float:
    data_rates = rates.of_data_groups(strategy.tensor, strategy.pipeline)
    copies = data_rates.world_size
    # Sharded in a node or over all ranks; otherwise every rank updates every parameter.
    shards = {"sharded": data_rates.ranks, "sharded_world": copies}.get(strategy.reduction, 1)
    elements = layout.padded(copies) / shards
    seconds = rates.seconds(Computation("lamb", (1.0, layout.segments / shards, elements)))
    if shards > 1 and (strategy.precision == "fp8" or strategy.pipeline > 1):  # nothing is gathered beside computing
        buckets = layout.buckets(copies, strategy.bucket_bytes)
        seconds += sum(_gather(strategy, data_rates, 4 * (bucket.stop - bucket.start)).seconds for bucket in buckets)
    if shards > 1:
        scope: Scope = "node" if strategy.reduction == "sharded" else "world"
        # Norms are of whole tensors, which lie across shards; LAMB's trust ratios need them before any weight moves.
        # Two gatherings of squares, the global norm's and the tensors': of these two fp64 numbers a segment and rank.
        seconds += 2 * data_rates.collective_seconds("all-gather", scope, 16.0 * layout.segments * shards)
    if strategy.tensor > 1:  # whose ranks have the gradients of what all of them have together
        seconds += rates.tensor_seconds("all-reduce", strategy.tensor, 4.0 * layout.shared / shards)
    return float(seconds)


def predict_run(
    work: Work, strategy: Strategy, rates: Rates, step: PredictedStep | None = None, samples: float | None = None
) -> RunTime:
    """Predict the time to train: start, steps to the target, such as ``step`` if given, evaluations on their schedule.

    ``samples`` to the target, where they are known of this batch, take the place of the work's own.
    """
    step = step or predict_step(work, strategy, rates)
    batch = strategy.global_batch_size
    samples = samples or work.samples
    # Then the reference's convergence points count, with what published runs differ from them by.
    if samples is None:
        p, gigabytes = calibration().parameters, rates.memory_bytes / 1e9
        samples = math.exp(log_samples(p, batch, rates.world_size, gigabytes, batch / step.total, False))
    # Whole steps: a run ends at a step's end, and evaluates at least once even where the target is below one interval.
    steps = math.ceil(samples / batch)
    evaluations = max(1, math.ceil(samples / work.interval(batch)))
    evaluation = evaluations * evaluation_seconds(work, strategy.precision, strategy.parallel, rates)
    parts = {"start": rates.start_s} | {name: steps * seconds for name, seconds in step.parts.items()}
    return RunTime(samples, steps, evaluations, parts | {"evaluation": evaluation})


@functools.lru_cache(maxsize=256)  # a search asks for a few of them, many times each
def evaluation_seconds(work: Work, precision: Precision, parallel: ParallelConfig, rates: Rates) -> float:
    """Seconds of one evaluation: the forward pass of all sequences, by length over the copies.

    Batches follow one another through stages; ranks that have several come to the next batch when one is through.
    """
    ranks = own_layers(work.model, parallel.pipeline, parallel.virtual_stages)
    total_P = np.zeros(len(ranks))
    batches = work.evaluation(rates.world_size // parallel.copy_ranks)
    for sizes in batches:
        parts = parts_of(work.model, sizes, parallel.tensor)
        exchanged = _exchanged(work.model, precision, parallel.tensor, rates, sizes)
        embedding, layer, last = (
            # Half of what is exchanged: the other half belongs to the backward pass.
            FORWARD_SHARE * float(_seconds(part, rates, precision, sizes).sum()) + seconds / 2
            for part, seconds in zip(parts, exchanged, strict=True)
        )
        for place, own in enumerate(ranks):
            computing = own.has_embeddings * embedding + own.inner * layer + own.has_last * last
            total_P[place] += FORWARD_SHARE * rates.micro_batch_s + computing
    if parallel.virtual_stages > 1:
        # Interleaved stages are run one batch at a time in evaluation, so ranks wait for one another throughout.
        return float(total_P.sum())
    # The costliest stage is busy all the time; the others show once, while the pipeline fills and drains.
    return float(total_P.max() + (total_P.sum() - total_P.max()) / len(batches))
