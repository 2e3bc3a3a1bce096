"""Counts of the computations in a step: what each part of the model computes for a micro-batch.

A computation has a kind and a count for each cost term of that kind, and includes the forward and the backward pass.
`cluster.model.rates` holds the seconds per unit of each term.

Shape legend: T tokens, Q queries of the last layer, S sequences, M masked tokens, D hidden, F intermediate, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert.configuration.sections import ModelConfig, Recompute
from bert.parallel.tensor.shards import split_of
from cluster.model.shares import WORD
from cluster.model.work import MicroBatches

Count = float | NDArray[np.float64]

# A probe times only a handful of shapes of each kind, which is too few to fit the costs of more terms.
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
"""Cost terms of each kind. A computation's time is the sum of count times cost over the terms."""

REPEATED: dict[Recompute, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention", "gelu", "norm"),
    "full": ("linear", "attention", "gelu", "norm"),
}
"""For each recomputation mode, the kinds of computation whose forward pass an inner layer's backward pass repeats."""


@dataclass(frozen=True)
class Computation:
    """A kind of computation with a count for each of its terms. Counts that are arrays describe many computations.

    ``in_encoder`` marks computations of inner layers, which are all layers but the last. FP8 computes the products of inner
    layers in 8 bits.
    """

    kind: str
    counts: tuple[Count, ...]
    dropout: bool = False
    in_encoder: bool = False


def linear(rows: Count, inputs: int, outputs: int, in_encoder: bool = False) -> Computation:
    """Return the computation of a dense layer: three products, the bias, and the accumulation of the weight gradient."""
    counts = (1.0, rows * inputs * outputs, rows * (inputs + outputs), float(inputs * outputs))
    return Computation("linear", counts, in_encoder=in_encoder)


def parts_of(model: ModelConfig, sizes: MicroBatches, tensor: int = 1) -> tuple[list[Computation], ...]:
    """Return the computations of the embeddings, of an inner layer, and of the last layer with the output heads.

    The counts are for one of ``tensor`` ranks that share a copy of the model. The rank computes part of the attention heads,
    columns and words, and part of the rows between products.
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
        # Keys and values have T rows, queries and outputs have `rows` rows. (T + rows) / 2 is the average.
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
    # On a CPU, PyTorch's attention makes one call for all sequences of equal length. The last layer needs one call for
    # each sequence, because the number of queries differs as well.
    inner = layer(T, [linear(T, D, 3 * own_D, True)], sizes.lengths_AR, sizes.pairs_AR, True)
    last = layer(Q, [linear(T, D, 2 * own_D), linear(Q, D, own_D)], S, sizes.last_pairs_AR, False)
    # A tensor group divides the rows of pooler, next-sentence classifier and transform, but not their weights.
    last += [linear(S / tensor, D, D), linear(S / tensor, D, 2), linear(M / tensor, D, D)]
    last += [Computation("gelu", (1.0, M * own_D)), Computation("norm", (1.0, M * own_D))]
    last += [linear(M, D, own_V), Computation("loss", (1.0, M * own_V))]
    return embedding, inner, last
