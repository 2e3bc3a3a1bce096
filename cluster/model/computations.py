"""Computations of a step, counted: what each part of the model computes for a micro-batch.

A computation belongs to one of few kinds, includes its forward and backward pass, and has a count for each term of its kind.
`cluster.model.rates` has the seconds of each term. Shape legend: T tokens, Q rows of the last layer, S sequences, M masked
tokens, D hidden, F intermediate, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert.configuration.sections import ModelConfig, Recompute
from bert.parallel.tensor.shards import split_of
from cluster.model.shares import WORD
from cluster.model.work import MicroBatches

Count = float | NDArray[np.float64]

# Few terms a kind: a probe times a handful of shapes, which could not tell more terms apart.
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
"""Terms whose sum is a computation's time, by kind."""

REPEATED: dict[Recompute, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention", "gelu", "norm"),
    "full": ("linear", "attention", "gelu", "norm"),
}
"""Kinds whose forward pass the backward pass of an inner layer repeats."""


@dataclass(frozen=True)
class Computation:
    """A kind of computation with a count for each of its terms; arrays of counts describe many computations.

    Attributes:
        dropout: Whether it applies dropout.
        in_encoder: Whether it belongs to an inner layer, whose products FP8 computes in 8 bits.
    """

    kind: str
    counts: tuple[Count, ...]
    dropout: bool = False
    in_encoder: bool = False


def linear(rows: Count, inputs: int, outputs: int, in_encoder: bool = False) -> Computation:
    """Return a dense layer's three products, its bias, and the accumulation of its gradient."""
    counts = (1.0, rows * inputs * outputs, rows * (inputs + outputs), float(inputs * outputs))
    return Computation("linear", counts, in_encoder=in_encoder)


def parts_of(model: ModelConfig, sizes: MicroBatches, tensor: int = 1) -> tuple[list[Computation], ...]:
    """Return the computations of the embeddings, of an inner layer, and of the last layer with the heads.

    They are those of one of ``tensor`` ranks that share a copy: some heads, columns and words, and some rows between
    products.
    """
    D, F = model.hidden_size, model.intermediate_size
    T, S, M = sizes.tokens_AR, float(sizes.sequences), sizes.masked_AR
    Q = S + M
    # A rank's shard of the word table is padded to a size that multiplies fast.
    words = split_of(WORD, (model.vocab_size, D), tensor) if tensor > 1 else None
    own_D, own_F, own_V = D // tensor, F // tensor, words.length if words else model.vocab_size
    heads = model.num_attention_heads / tensor
    hidden_dropout, attention_dropout = model.hidden_dropout > 0, model.attention_dropout > 0

    def norm(rows: Count) -> Computation:
        return Computation("norm", (1.0, rows * own_D), hidden_dropout)

    def layer(
        rows: Count, projections: list[Computation], calls: Count, pairs: Count, inner: bool
    ) -> list[Computation]:
        # (T + rows) / 2 averages keys and values with queries.
        attention = (calls, (T + rows) / 2 * own_D, pairs * heads, pairs * own_D)
        return [
            *projections,
            Computation("attention", attention, attention_dropout),
            linear(rows, own_D, D, inner),
            norm(rows),
            linear(rows, D, own_F, inner),
            Computation("gelu", (1.0, rows * own_F)),
            linear(rows, own_F, D, inner),
            norm(rows),
        ]

    embedding = [Computation("embedding", (1.0, T * D, float(own_V * D)), hidden_dropout)]
    # On a CPU, PyTorch's attention makes one call for all sequences of a length; in the last layer, where their numbers of
    # queries differ too, one call for each sequence.
    inner = layer(T, [linear(T, D, 3 * own_D, True)], sizes.lengths_AR, sizes.pairs_AR, True)
    last = layer(Q, [linear(T, D, 2 * own_D), linear(Q, D, own_D)], S, sizes.last_pairs_AR, False)
    # Pooler, next-sentence classifier and transform: a tensor group divides their rows, not their weights.
    last += [linear(S / tensor, D, D), linear(S / tensor, D, 2), linear(M / tensor, D, D)]
    last += [Computation("gelu", (1.0, M * own_D)), Computation("norm", (1.0, M * own_D))]
    last += [linear(M, D, own_V), Computation("loss", (1.0, M * own_V))]
    return embedding, inner, last
