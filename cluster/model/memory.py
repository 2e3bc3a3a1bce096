"""Memory of a rank by part, in bytes: what it holds all the time, and what its largest micro-batch adds.

What the forward pass keeps is counted tensor by tensor, as PyTorch's own operations keep it on a CPU; Triton's on a GPU
draw dropout again and keep no probabilities, and what they keep is counted so where ``on_gpu`` is set. What a layer keeps
that recomputes is in ``cluster.model.recomputation``.

Shape legend: T tokens, Q rows of the last layer, S sequences, M masked tokens, D hidden, F intermediate, V vocabulary,
H heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bert.configuration.sections import SHARDED
from cluster.model.computations import layouts_of
from cluster.model.pipeline import OwnLayers, hidden_bytes, own_layers, under_way
from cluster.model.recomputation import kept_bytes
from cluster.model.strategy import Strategy
from cluster.model.work import MicroBatches, Work

# More than for times: a peak is one bad micro-batch, which a mean of few steps would miss.
_STEPS = 16
"""Steps of the plan among which the largest micro-batch is looked for."""
_Bytes = NDArray[np.float64]


def memory_of_rank(work: Work, strategy: Strategy, nodes: int, ranks: int, on_gpu: bool = False) -> dict[str, float]:
    """Return the bytes of each part; ``ranks`` are those of a node.

    Activations and logits are those of the micro-batch that needs the most; one after another, others use the same memory.
    Of the stages of a copy the rank counts that needs the most: the first ones keep several micro-batches, the last one the
    logits.

    Raises:
        ValueError: the global batch does not divide over the ranks.
    """
    # One value for all that micro-batches do not depend on, so that the cache below serves every way to sum gradients.
    summed = {"reduction": "flat", "reduce_dtype": "fp32"}
    computing = replace(strategy, bucket_bytes=1, **summed)
    places = [
        held_by_rank(work, strategy, nodes, ranks, place, on_gpu)
        | _largest_micro_batch(work, computing, nodes * ranks, on_gpu, place)
        for place in _largest_places(work, strategy)
    ]
    # The sum decides, not each part: a rank's peak is all of its parts at one moment.
    return max(places, key=lambda parts: sum(parts.values()))


def _largest_places(work: Work, strategy: Strategy) -> set[int]:
    """Places of a pipeline of which one needs the most memory: both ends, and where the most layers are under way."""
    ranks = own_layers(work.model, strategy.pipeline, strategy.virtual_stages)
    layers = [each.inner * under_way(strategy, place) for place, each in enumerate(ranks)]
    return {0, layers.index(max(layers)), strategy.pipeline - 1}


@functools.lru_cache(maxsize=1024)  # the same for all ways to sum gradients
def _largest_micro_batch(work: Work, strategy: Strategy, ranks: int, on_gpu: bool, place: int) -> dict[str, float]:
    """Bytes of activations, of logits, of what one layer recomputes, and of what stages send, where they are the most."""
    layers = own_layers(work.model, strategy.pipeline, strategy.virtual_stages)[place]
    kept_at_once = under_way(strategy, place)
    # A fraction of a micro-batch is possible with virtual stages, whose forward passes are of a part of its layers.
    whole = math.ceil(kept_at_once)
    largest = (0.0, 0.0, 0.0)
    rows = 0.0
    # What recomputation saves of a layer is there again while that layer's backward pass runs.
    keeping_all = replace(strategy, recompute="none")
    for step in range(_STEPS):
        sizes = work.micro_batches(strategy, ranks, step)
        kept_AR = kept_by_forward(work, strategy, sizes, on_gpu, layers)
        logits_AR = (
            # On a CPU the loss casts logits to fp32 first.
            sizes.masked_AR * work.model.vocab_size * (2.0 if on_gpu else 4.0) / strategy.tensor * layers.has_last
        )
        # The worst is chosen by both together: logits and activations are alive at the same time.
        worst = np.unravel_index(np.argmax(kept_AR + logits_AR), kept_AR.shape)
        whole_AR = kept_by_forward(work, keeping_all, sizes, on_gpu, layers)
        layer = float(whole_AR[worst] - kept_AR[worst]) / max(1, layers.inner)
        # The largest that may be under way with it.
        # Of the same rank, without the one already counted: those that would be largest at once with it.
        others = np.sort(kept_AR[:, worst[1]])[-whole:-1].sum() if whole > 1 else 0.0
        kept = (float(kept_AR[worst]) + float(others)) * kept_at_once / whole
        largest = max(largest, (kept, float(logits_AR[worst]), layer), key=sum)
        rows = max(rows, float(sizes.tokens_AR.max()) / strategy.tensor)
    found: dict[str, float] = dict(zip(("activations", "logits", "recomputed"), largest, strict=True))
    # `recomputed` is what one layer has again while its backward pass runs; logits have been freed by then.
    if strategy.pipeline > 1:  # PyTorch's schedules have a buffer for each micro-batch of a step and neighbour
        buffers = strategy.gradient_accumulation_steps * layers.neighbours
        found["stage buffers"] = buffers * rows * work.model.hidden_size * hidden_bytes(strategy.precision, on_gpu)
    return found


def held_by_rank(
    work: Work, strategy: Strategy, nodes: int, ranks: int, place: int = 0, on_gpu: bool = False
) -> dict[str, float]:
    """Return the bytes of the parts that a rank holds whatever its micro-batches are; ``place``: in its pipeline."""
    layout = layouts_of(work.model, strategy.tensor, strategy.pipeline, strategy.virtual_stages)[place]
    layers = own_layers(work.model, strategy.pipeline, strategy.virtual_stages)[place]
    # A data group has one rank of each copy; `here` is how many of them share a node.
    copies = nodes * ranks // strategy.copy_ranks
    here = max(1, ranks // strategy.copy_ranks)
    elements = layout.padded(copies)
    # LAMB of a shard is also that of ranks that have parts of a copy: see TrainingStep.
    on_shards = strategy.reduction in SHARDED or strategy.copy_ranks > 1
    # Only these two reductions shard the optimizer; the others keep whole moments on every rank.
    shard = elements / {"sharded": here, "sharded_world": copies}.get(strategy.reduction, 1)
    bucket = max(each.stop - each.start for each in layout.buckets(copies, strategy.bucket_bytes))
    # There LAMB on whole vectors leaves copies of all weights, and autocast casts those of the heads alone.
    leaves_copies = on_gpu and strategy.precision == "bf16" and not on_shards
    cast = _cast_weights(work, layers, elements if leaves_copies else None)
    return {
        "weights": 4.0 * (elements + layout.copied),
        "gradients": 4.0 * (elements + layout.copied),
        "moments": 8.0 * shard,  # Two fp32 moments.
        # The shard's own gradients and weights lie without gaps beside the update.
        "update": (12.0 if on_shards else 4.0) * shard,
        # Two buffers of a bucket in 16 bits, which all buckets use in turn.
        "reduction buffers": 4.0 * bucket if strategy.reduce_dtype == "bf16" and copies > 1 else 0.0,
        "16-bit weights": 0.0 if strategy.precision == "fp32" else cast / strategy.tensor,
    }


def kept_by_forward(
    work: Work, strategy: Strategy, sizes: MicroBatches, on_gpu: bool = False, own: OwnLayers | None = None
) -> _Bytes:
    """Bytes [A, R] that the forward pass of each micro-batch keeps for its backward pass, but for logits and weights.

    Ranks that share a copy have equal parts of all but the inputs of products by columns, which each of them gathers.
    ``own``: what the rank has of the layers, all of them unless given.
    """
    own = own or own_layers(work.model)[0]
    model, size = work.model, 4 if strategy.precision == "fp32" else 2
    D, F, H = model.hidden_size, model.intermediate_size, model.num_attention_heads
    T, S, M = sizes.tokens_AR, sizes.sequences, sizes.masked_AR
    Q = S + M
    # On a CPU what dropout multiplies by is kept; the GPU's kernels draw it again.
    mask = 4 * D if model.hidden_dropout and not on_gpu else 0
    summed = (2 * size if on_gpu else 4) * D
    """A norm keeps the sum that it normalizes, in fp32 as autocast has it; Triton's the terms."""

    def attended(rows: _Bytes, pairs: _Bytes) -> _Bytes:
        """Count what attention keeps besides query, key and value: its output or scaled query, and the output once more."""
        # PyTorch's fused CPU attention has no dropout, so scores, probabilities and mask are kept for every pair.
        if model.attention_dropout and not on_gpu:
            return rows * 2 * size * D + 3 * size * pairs * H
        return rows * (2 * size * D + 4 * H)

    def rest(rows: _Bytes, norms_kept: int) -> _Bytes:
        """Count both norms of a layer, of whose outputs products keep some, and the feed-forward half."""
        # 8: fp32 mean and reciprocal deviation of each row.
        return rows * (2 * (summed + 8 + mask) + norms_kept * size * D + 2 * size * F)

    embedding = own.has_embeddings * T * (summed + 8 + mask + size * D)
    # Sequences of one length are one call, for which PyTorch's products copy keys and values.
    copied = sizes.equal_AR * 2 * size * D if model.attention_dropout and not on_gpu else 0
    layer = T * 3 * size * D + copied + attended(T, sizes.pairs_AR) + rest(T, 2)
    layers = own.inner
    inner = layers * layer
    if on_gpu or strategy.recompute != "none":
        # The count of what the GPU's kernels keep has one place; on a CPU recomputing modes keep as much.
        inner = layers * T * kept_bytes(model, strategy.recompute, strategy.precision, int(work.lengths.max()))
        # On a CPU norms give fp32, which the layers between get; the first one's input is cast, and the last casts its own.
        inner = inner + (0 if on_gpu else max(0, layers - 1) * T * (4 - size) * D)
    query = 0 if model.attention_dropout and not on_gpu else size * D
    last = T * 2 * size * D + Q * (16 + size * D + query) + attended(Q, sizes.last_pairs_AR) + rest(Q, 1)
    heads = Q * size * D + M * (3 * size * D + 8) + S * (size * D + 8)
    # Inputs of products by columns are gathered in full on each rank, so tensor parallelism does not divide them.
    gathered = {"none": 2, "selective": 1, "full": 0}[strategy.recompute] * layers * T + own.has_last * (T + 2 * Q + M)
    whole = gathered * size * D
    return whole + (embedding + inner + own.has_last * (last + heads) - whole) / strategy.tensor


def _cast_weights(work: Work, own: OwnLayers, copied: int | None) -> float:
    """Copies in 16 bits of the weights of products, which autocast keeps from the forward to the backward pass.

    ``copied``: elements of the optimizer's own copies, if those serve the layers.
    """
    model = work.model
    D, F = model.hidden_size, model.intermediate_size
    # FC1, FC2 and attention of each layer; heads are cast by autocast whatever the optimizer keeps.
    layers = (own.inner + own.has_last) * (4 * D * D + 2 * D * F) if copied is None else copied
    return 2.0 * (layers + own.has_last * (2 * D * D + model.vocab_size * D + 2 * D))
