"""Computations of a step, counted: what each part of the model computes for a micro-batch, and what an update moves.

A computation is one of few kinds, forward and backward together, and has a count for each of its terms, for which
`cluster.model.rates` has seconds. Shape legend: T tokens, Q rows of the last layer, S sequences, M masked tokens, D hidden,
F intermediate, V vocabulary, H heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from bert.optimizer import lamb_segments, padded
from bert.parallel.pipeline.division import Stage, stages_of
from bert.parallel.reduction.gradients import bucket_slices
from bert.parallel.tensor.shards import split_of
from cluster.model.work import MicroBatches

Count = float | NDArray[np.float64]

WORD = "embeddings.word"
"""Name of the word table, which the first stage of a copy has, and the last one copies."""

# Few terms for each kind: a probe times a handful of shapes, and more terms than shapes could not be told apart.
TERMS = {
    "linear": ("calls", "rows x inputs x outputs", "rows x (inputs + outputs)", "inputs x outputs"),
    "attention": ("calls", "tokens x hidden", "pairs x heads", "pairs x hidden"),
    "norm": ("calls", "elements"),
    "gelu": ("calls", "elements"),
    "embedding": ("calls", "tokens x hidden", "vocabulary x hidden"),
    "loss": ("calls", "masked tokens x vocabulary"),
    "lamb": ("calls", "segments", "parameters"),
    "batch": ("calls", "sequences of all ranks"),
}
"""What a computation's time is a sum of."""


@dataclass(frozen=True)
class Computation:
    """A kind of computation with its counts, one for each of its terms; arrays of counts are of as many computations.

    Attributes:
        dropout: it drops what it makes, or its probabilities.
        in_encoder: of a layer but the last, whose products FP8 leaves in 16 bits like those of the heads.
    """

    kind: str
    counts: tuple[Count, ...]
    dropout: bool = False
    in_encoder: bool = False


def linear(rows: Count, inputs: int, outputs: int, in_encoder: bool = False) -> Computation:
    """Return a dense layer's three products, its bias, and the addition of its gradient to the others'."""
    # One call, multiply-adds, activations read and written, and the weight with its gradient: the order of `TERMS`.
    counts = (1.0, rows * inputs * outputs, rows * (inputs + outputs), float(inputs * outputs))
    return Computation("linear", counts, in_encoder=in_encoder)


def parts_of(
    model: ModelConfig, sizes: MicroBatches, tensor: int = 1
) -> tuple[list[Computation], list[Computation], list[Computation]]:
    """Return the computations of the embeddings, of a layer, and of the last layer with the heads, in their order.

    They are those of one rank of ``tensor`` that share a copy: of some heads, columns and words, and between products of
    some rows.
    """
    D, F, V = model.hidden_size, model.intermediate_size, model.vocab_size
    # Counts are arrays over micro-batches and ranks where they depend on lengths, plain numbers elsewhere.
    T, S, M = sizes.tokens_AR, float(sizes.sequences), sizes.masked_AR
    hidden, attention = model.hidden_dropout > 0, model.attention_dropout > 0
    heads = model.num_attention_heads / tensor
    own_D, own_F, own_V = D // tensor, F // tensor, words_of_rank(V, D, tensor)

    def layer(rows: Count, query: list[Computation], calls: Count, pairs: Count, inner: bool) -> list[Computation]:
        return [
            *query,
            # Rows differ only in the last layer: (T + rows) / 2 averages keys and values with queries.
            Computation("attention", (calls, (T + rows) / 2 * own_D, pairs * heads, pairs * own_D), attention),
            linear(rows, own_D, D, inner),
            # With tensor parallelism norms take the rank's own rows, products columns of all rows.
            Computation("norm", (1.0, rows * own_D), hidden),
            linear(rows, D, own_F, inner),
            Computation("gelu", (1.0, rows * own_F)),
            linear(rows, own_F, D, inner),
            Computation("norm", (1.0, rows * own_D), hidden),
        ]

    Q = S + M
    # Every rank of a group has its part of the words, but all tokens look theirs up in it.
    embedding = [Computation("embedding", (1.0, T * D, float(own_V * D)), hidden)]
    # PyTorch's attention on a CPU makes one call of neighbours of one length. In the last layer their numbers of
    # queries differ, too: there each sequence counts as a call.
    each = layer(T, [linear(T, D, 3 * own_D, True)], sizes.lengths_AR, sizes.pairs_AR, True)
    # Keys and values, queries.
    last = layer(Q, [linear(T, D, 2 * own_D), linear(Q, D, own_D)], S, sizes.last_pairs_AR, False)
    # Pooler, next sentence, transform.
    # Heads work on rows that a group shares out, with whole weights: hence divided by ranks, not by columns.
    last += [linear(S / tensor, D, D), linear(S / tensor, D, 2), linear(M / tensor, D, D)]
    last += [Computation("gelu", (1.0, M * own_D)), Computation("norm", (1.0, M * own_D))]
    last += [linear(M, D, own_V), Computation("loss", (1.0, M * own_V))]
    return embedding, each, last


def words_of_rank(vocabulary: int, hidden: int, tensor: int) -> int:
    """Return rows that a rank has of the word table, of which shards are filled up to equal sizes that multiply fast."""
    split = split_of(WORD, (vocabulary, hidden), tensor) if tensor > 1 else None
    return vocabulary if split is None else split.length


@dataclass(frozen=True)
class VectorLayout:
    """The flat vector of a model's parameters, or of what a rank has of them.

    Attributes:
        elements: with the padding after each parameter.
        shared: of parameters that all ranks of a tensor group have.
        segments: tensors that LAMB takes norms of.
        copied: elements of the word table, where the last stage has a copy, which the vector is without.
        ends: element at which the embeddings end, and each layer; the heads follow, but for the decoder's bias, which is
            first.
    """

    elements: int
    shared: int
    segments: int
    ends: tuple[int, ...]
    copied: int = 0

    def padded(self, shards: int) -> int:
        """Elements with those after the last that make shards equal."""
        return padded(self.elements, shards)

    def buckets(self, shards: int, bucket_bytes: int) -> list[slice]:
        """The buckets of the reduction, in the order in which backward fills them."""
        return bucket_slices(self.padded(shards), shards, bucket_bytes)


def layout_of(model: ModelConfig, tensor: int = 1) -> VectorLayout:
    """Return the layout of a model's parameters, or of the largest shard of ``tensor``, without memory for any of them."""
    return layouts_of(model, tensor)[0]


# Building the module takes time even without memory, and a search asks for the same shapes over and over.
@functools.cache
def layouts_of(
    model: ModelConfig, tensor: int = 1, pipeline: int = 1, virtual_stages: int = 1
) -> tuple[VectorLayout, ...]:
    """Return the layout of what each rank of a pipeline has, or the largest of those at its place."""
    stages = stages_of(model, pipeline * virtual_stages)
    return tuple(_layout(model, tensor, [*stages[rank::pipeline]]) for rank in range(pipeline))


def _layout(model: ModelConfig, tensor: int, own_stages: list[Stage]) -> VectorLayout:
    # The meta device has shapes and no storage, so names, order and sizes come from the real model.
    with torch.device("meta"):
        made = BertForPreTraining(model)
    ends = [0] * (model.num_hidden_layers + 1)
    stop = shared = copied = 0
    # A list, since parameters are taken out of the module below while it is walked.
    for name, parameter in list(made.named_parameters()):
        split = split_of(name, tuple(parameter.shape), tensor)
        # Each parameter is padded for alignment in the flat vector, as `FlatParameters` lays it out.
        own = padded(parameter.numel() if split is None else math.prod(split.shard_shape))
        if not any(stage.owns(name) for stage in own_stages):
            module, _, last = name.rpartition(".")
            setattr(made.get_submodule(module), last, None)  # not among the segments that are counted below
            # The last stage multiplies by the first one's word table, of which it has a copy outside the vector.
            copied += own if name == WORD and own_stages[-1].is_last else 0
            continue
        stop += own
        shared += own if split is None else 0
        if name.startswith("embeddings."):
            # `ends` grows with the parameters in their order, so that buckets can be assigned to layers by position.
            ends[0] = stop
        elif name.startswith("layers."):
            ends[1 + int(name.split(".")[1])] = stop
    return VectorLayout(stop, shared, len(lamb_segments(made).sizes), tuple(ends), copied)
