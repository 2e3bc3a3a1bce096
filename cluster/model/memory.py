"""Part of the model that a rank holds, and the memory that the rank needs for permanent buffers and for activations.

Activations are counted tensor by tensor: on a CPU for PyTorch's own operations, and on a GPU for this program's kernels,
which regenerate dropout masks and store no attention probabilities.

Shape legend: T tokens, Q queries of the last layer, S sequences, M masked tokens, D hidden, F intermediate, H heads.
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bert.configuration.sections import SHARDED, ModelConfig, Precision
from bert.model import parameter_shapes
from bert.optimizer import padded
from bert.parallel.pipeline.stages import stages_of
from bert.parallel.reduction.gradients import bucket_slices
from bert.parallel.tensor.shards import split_of
from cluster.model.work import WORD, MicroBatches, Strategy, Work

_STEPS = 16
"""Number of steps of the batch sampler that are searched for the largest micro-batch."""

USABLE_MEMORY = 0.9
"""Usable share of a device's memory. Driver, communicators and the allocator's fragmentation take the rest."""

_KEYS_A_GROUP = 64
"""Number of keys whose dropout bits attention stores together, as in `kernels.triton.attention.tiles`."""


@dataclass(frozen=True)
class ModelShare:
    """Part of the model that a rank holds: its layers, and the flat vector of its parameters.

    Attributes:
        has_embeddings, has_last: Whether the rank holds the embeddings, and whether it holds the last layer with the heads.
        inner: Number of layers of the rank, excluding the model's last layer.
        neighbours: Number of adjacent stages, with which the rank exchanges hidden states and their gradients.
        elements: Elements of the vector, including the padding after each parameter.
        shared: Elements that are replicated on every rank of a tensor group.
        segments: Number of tensors whose norms LAMB computes.
        copied: Elements of the rank's copy of the word table, which is not part of the vector.
        ends: Offsets in the vector at which the embeddings and each layer end. The vector begins with the decoder's bias
            and ends with the other parameters of the heads.
    """

    has_embeddings: bool
    has_last: bool
    inner: int
    neighbours: int
    elements: int
    shared: int
    segments: int
    copied: int
    ends: tuple[int, ...]

    def padded(self, shards: int) -> int:
        """Return the number of elements of the vector with the padding that lets it divide into equal shards."""
        return padded(self.elements, shards)

    def buckets(self, shards: int, bucket_bytes: int) -> list[slice]:
        """Return the buckets of the vector in the order in which the backward pass fills them."""
        return bucket_slices(self.padded(shards), shards, bucket_bytes)


# Cached, because a search divides the model in the same few ways many times.
@functools.cache
def model_shares(
    model: ModelConfig, tensor: int = 1, pipeline: int = 1, virtual_stages: int = 1
) -> tuple[ModelShare, ...]:
    """Return the share of each pipeline rank. With tensor parallelism, return the largest share in each tensor group."""
    stages = stages_of(model, pipeline * virtual_stages)
    shapes, shares = parameter_shapes(model), []
    for rank in range(pipeline):
        own = stages[rank::pipeline]  # PyTorch's interleaved schedules assign stages round-robin
        first, last = any(stage.is_first for stage in own), any(stage.is_last for stage in own)
        ends = [0] * (model.num_hidden_layers + 1)
        stop = shared = segments = copied = 0
        for name, shape in shapes.items():
            split = split_of(name, shape, tensor)
            size = padded(math.prod(split.shard_shape if split else shape))
            if not any(stage.owns(name) for stage in own):
                copied += size if name == WORD and last else 0
                continue
            stop += size
            shared += 0 if split else size
            segments += 3 if name.endswith("query_key_value.weight") else 1
            if name.startswith("embeddings."):
                ends[0] = stop
            elif name.startswith("layers."):
                ends[1 + int(name.split(".")[1])] = stop
        layers = sum(len(stage.layers) for stage in own) - last
        shares.append(
            ModelShare(first, last, layers, 2 * len(own) - first - last, stop, shared, segments, copied, tuple(ends))
        )
    return tuple(shares)


def hidden_bytes(precision: Precision, on_gpu: bool) -> int:
    """Return the bytes of an activation element that stages send. On CPUs, norms return fp32 (4 bytes) under autocast."""
    return 2 if precision != "fp32" and on_gpu else 4


def micro_batches_in_flight(strategy: Strategy, place: int) -> float:
    """Return the number of micro-batches whose activations a pipeline rank stores at once under PyTorch's schedules."""
    stages, virtual = strategy.pipeline, strategy.virtual_stages
    if virtual == 1:  # with the 1F1B schedule, the first stage stores the most micro-batches
        return min(stages - place, strategy.gradient_accumulation_steps) if stages > 1 else 1
    # ScheduleInterleaved1F1B runs this many forward passes of single stages before the first backward pass.
    passes = (virtual - 1) * stages + 2 * (stages - 1 - place) + 1
    return min(passes / virtual, strategy.gradient_accumulation_steps)


def memory_of_rank(work: Work, strategy: Strategy, nodes: int, ranks: int, on_gpu: bool = False) -> dict[str, float]:
    """Return the bytes of each part of memory on the pipeline rank that needs the most. A node has ``ranks`` ranks.

    Raises ``ValueError`` if the global batch does not divide over the ranks.
    """
    # The reduction does not change the micro-batches. Fix its settings here, so that all reductions share one cache entry.
    computing = replace(strategy, bucket_bytes=1, reduction="flat", reduce_dtype="fp32")
    shares = model_shares(work.model, strategy.tensor, strategy.pipeline, strategy.virtual_stages)
    layers = [each.inner * micro_batches_in_flight(strategy, place) for place, each in enumerate(shares)]
    # Only these pipeline ranks can need the most memory: the first, the last, and the rank that stores the most layers.
    places = [
        fixed_memory(work, strategy, nodes, ranks, place, on_gpu)
        | _largest_micro_batch(work, computing, nodes * ranks, on_gpu, place)
        for place in {0, layers.index(max(layers)), strategy.pipeline - 1}
    ]
    return max(places, key=lambda parts: sum(parts.values()))


@functools.lru_cache(maxsize=1024)
def _largest_micro_batch(work: Work, strategy: Strategy, ranks: int, on_gpu: bool, place: int) -> dict[str, float]:
    share = model_shares(work.model, strategy.tensor, strategy.pipeline, strategy.virtual_stages)[place]
    in_flight = micro_batches_in_flight(strategy, place)
    whole = math.ceil(in_flight)  # with virtual stages, a rank may store a fraction of a micro-batch
    found, rows = [], []
    for step in range(_STEPS):
        sizes = work.micro_batches(strategy, ranks, step)
        kept_AR = saved_activations(work, strategy, sizes, on_gpu, share)
        # On a CPU, the loss casts the logits to fp32, so each of them takes 4 bytes.
        logits_AR = (
            sizes.masked_AR * work.model.vocab_size * (2.0 if on_gpu else 4.0) / strategy.tensor * share.has_last
        )
        worst = np.unravel_index(np.argmax(kept_AR + logits_AR), kept_AR.shape)
        # A layer that recomputes stores all of its activations again during its backward pass.
        keeping_all = saved_activations(work, replace(strategy, recompute="none"), sizes, on_gpu, share)
        recomputed = float(keeping_all[worst] - kept_AR[worst]) / max(1, share.inner)
        # Add the next largest micro-batches of the same rank, which may be in flight at the same time.
        others = np.sort(kept_AR[:, worst[1]])[-whole:-1].sum() if whole > 1 else 0.0
        kept = (float(kept_AR[worst]) + float(others)) * in_flight / whole
        found.append((kept, float(logits_AR[worst]), recomputed))
        rows.append(float(sizes.tokens_AR.max()) / strategy.tensor)
    parts: dict[str, float] = dict(zip(("activations", "logits", "recomputed"), max(found, key=sum), strict=True))
    if strategy.pipeline > 1:  # PyTorch's schedules allocate a buffer for each micro-batch and neighbour
        buffers = strategy.gradient_accumulation_steps * share.neighbours
        row_bytes = work.model.hidden_size * hidden_bytes(strategy.precision, on_gpu)
        parts["stage buffers"] = buffers * max(rows) * row_bytes
    return parts


def fixed_memory(
    work: Work, strategy: Strategy, nodes: int, ranks: int, place: int = 0, on_gpu: bool = False
) -> dict[str, float]:
    """Return the bytes of each part of memory whose size is fixed. ``place`` is the rank's index in its pipeline."""
    share = model_shares(work.model, strategy.tensor, strategy.pipeline, strategy.virtual_stages)[place]
    copies, node_copies = nodes * ranks // strategy.copy_ranks, max(1, ranks // strategy.copy_ranks)
    elements = share.padded(copies)
    shard = elements / strategy.shards(node_copies, copies)
    # Ranks that share a copy of the model use the sharded LAMB even if the reduction shards nothing.
    sharded_lamb = strategy.reduction in SHARDED or strategy.copy_ranks > 1
    bucket = max(each.stop - each.start for each in share.buckets(copies, strategy.bucket_bytes))
    # 16-bit copies of weights: in bf16 on a GPU, unsharded LAMB writes copies of all weights. Otherwise autocast copies
    # only the weights of matrix products. Autocast always copies the weights of the output heads.
    D, F = work.model.hidden_size, work.model.intermediate_size
    lamb_copies = on_gpu and strategy.precision == "bf16" and not sharded_lamb
    cast = elements if lamb_copies else (share.inner + share.has_last) * (4 * D * D + 2 * D * F)
    cast += share.has_last * (2 * D * D + work.model.vocab_size * D + 2 * D)
    return {
        "weights": 4.0 * (elements + share.copied),
        # Sharded gradients pass through two buffers, each as large as a bucket. "update" includes the summed gradients.
        "gradients": 8.0 * bucket if strategy.shard_gradients and copies > 1 else 4.0 * (elements + share.copied),
        "moments": 8.0 * shard,
        # Sharded LAMB also holds contiguous copies of its shard's gradients and weights.
        "update": (12.0 if sharded_lamb else 4.0) * shard,
        # A sum in bf16 needs two 16-bit buffers, each with as many elements as a bucket.
        "reduction buffers": 4.0 * bucket if strategy.reduce_dtype == "bf16" and copies > 1 else 0.0,
        # The exchange needs three vectors: the weights that sites share, the weights that were sent last, and the momentum.
        "site exchange": 12.0 * share.elements if strategy.site_steps > 1 else 0.0,
        "16-bit weights": 0.0 if strategy.precision == "fp32" else 2.0 * cast / strategy.tensor,
    }


def saved_activations(
    work: Work, strategy: Strategy, sizes: MicroBatches, on_gpu: bool, share: ModelShare
) -> NDArray[np.float64]:
    """Return the bytes [A, R] that the forward pass of ``share`` stores for the backward pass, except logits and weights."""
    model, size = work.model, 4 if strategy.precision == "fp32" else 2
    D, F, H = model.hidden_size, model.intermediate_size, model.num_attention_heads
    T, S, M = sizes.tokens_AR, sizes.sequences, sizes.masked_AR
    Q = S + M
    # With dropout on a CPU, PyTorch's attention keeps scores, probabilities and the mask. It also copies the keys and values
    # of sequences that share their length with another sequence.
    cpu_dropout = model.attention_dropout > 0 and not on_gpu
    # A norm stores the fp32 mean and deviation of each row. On a CPU it also stores its input, a sum that autocast computes
    # in fp32, and the dropout mask. On a GPU it stores both terms of the sum instead.
    norm = (2 * size if on_gpu else 4) * D + 8 + (4 * D if model.hidden_dropout and not on_gpu else 0)

    def attention(rows: NDArray[np.float64], pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes of two output-sized tensors and of softmax statistics (with CPU dropout: of three matrices)."""
        return rows * 2 * size * D + (3 * size * pairs * H if cpu_dropout else rows * 4 * H)

    def rest(rows: NDArray[np.float64], norms_kept: int) -> NDArray[np.float64]:
        """Return the bytes of both norms and the feed-forward block. The outputs of ``norms_kept`` norms are stored too."""
        return rows * (2 * norm + norms_kept * size * D + 2 * size * F)

    if on_gpu or strategy.recompute != "none":
        inner = share.inner * T * _saved_by_layer(work, strategy)
        # On a CPU, norms return fp32, so the next layer's input is fp32.
        inner = inner + (0 if on_gpu else max(0, share.inner - 1) * T * (4 - size) * D)
    else:
        copied = sizes.equal_AR * 2 * size * D if cpu_dropout else 0
        inner = share.inner * (T * 3 * size * D + copied + attention(T, sizes.pairs_AR) + rest(T, 2))
    embedding = T * (norm + size * D)
    last = T * 2 * size * D + Q * (16 + size * D + (0 if cpu_dropout else size * D))
    last = last + attention(Q, sizes.last_pairs_AR) + rest(Q, 1)
    heads = Q * size * D + M * (3 * size * D + 8) + S * (size * D + 8)
    # A tensor group divides all activations except the inputs of column-parallel products, which each rank gathers.
    inputs = {"none": 2, "selective": 1, "full": 0}[strategy.recompute] * share.inner * T
    gathered = size * D * (inputs + share.has_last * (T + 2 * Q + M))
    divided = share.has_embeddings * embedding + inner + share.has_last * (last + heads) - gathered
    return gathered + divided / strategy.tensor


def _saved_by_layer(work: Work, strategy: Strategy) -> int:
    """Return the bytes per token that this program's kernels store for an inner layer, including its input."""
    model, size = work.model, 4 if strategy.precision == "fp32" else 2
    D, F, H = model.hidden_size, model.intermediate_size, model.num_attention_heads
    if strategy.recompute == "full":  # stores only the layer's input
        return size * D
    if strategy.recompute == "selective":  # stores the input, and the outputs of the four linear layers
        return size * (6 * D + F)
    # This mode also stores the context of attention, and the outputs of the first norm and of GELU. In FP8, the inputs of
    # products are stored in 8 bits.
    activations = size * (8 * D + F) + (3 * D + F if strategy.precision == "fp8" else size * F)
    longest = int(work.lengths.max())
    mask = H * -(-longest // _KEYS_A_GROUP) * _KEYS_A_GROUP // 8 if model.attention_dropout else 0
    statistics = 4 * H + 2 * 8  # statistics of each head's softmax, and of two norms
    return activations + mask + statistics
