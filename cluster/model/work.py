"""Work of a run: its model, data and stopping point, and the strategy that divides the work over ranks.

This module also counts the computations of a micro-batch. A computation has a kind and a count for each cost term of that
kind, and includes the forward and the backward pass. `cluster.model.rates` holds the seconds per unit of each term.

Shape legend: N sequences of the data set, A micro-batches of a rank in a step, R copies of the model, S sequences of a
micro-batch, T tokens, Q queries of the last layer, M masked tokens, D hidden, F intermediate, V vocabulary.
"""

import functools
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import (
    ModelConfig,
    ParallelConfig,
    Precision,
    Recompute,
    ReduceDtype,
    ReductionStrategy,
    TrainingConfig,
)
from bert.parallel.tensor.shards import split_of
from cluster.model.histogram import drawn_lengths
from cluster.published.fitted import EVALUATION_SEQUENCES
from console.text import counted
from dataloading.batches.sampler import BatchSampler, deal
from dataloading.dataset.folder import open_dataset

_DRAWN = 200_000
_MASKED_SHARE, _MOST_MASKED = 0.15, 76
"""Masked tokens in the benchmark's data: their share of a sequence's tokens, and their maximum per sequence."""

# Use the default of training.bucket_bytes, so that predictions and runs without this setting use the same size.
BUCKET_BYTES = TrainingConfig.bucket_bytes

WORD = "embeddings.word"
"""Name of the word table, which the first stage owns and the last stage copies."""


@dataclass(frozen=True)
class Strategy:
    """The settings of a run that decide its time and memory, named as in `TrainingConfig` and `ParallelConfig`."""

    global_batch_size: int
    gradient_accumulation_steps: int = 1
    precision: Precision = "fp32"
    reduction: ReductionStrategy = "flat"
    reduce_dtype: ReduceDtype = "fp32"
    bucket_bytes: int = BUCKET_BYTES
    recompute: Recompute = "none"
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    site_steps: int = 1
    shard_gradients: bool = False
    """This affects only the predicted memory. The predicted time of a step ignores the reduction after every micro-batch."""

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(self.tensor, self.pipeline, self.virtual_stages)

    @property
    def stages(self) -> str:
        """Number of pipeline ranks, followed by the virtual stages per rank if there are several, such as "4 x 2"."""
        return str(self.pipeline) + (f" x {self.virtual_stages}" if self.virtual_stages > 1 else "")

    @property
    def copy_ranks(self) -> int:
        return self.tensor * self.pipeline

    def shards(self, node_copies: int, copies: int) -> int:
        """Return the number of optimizer-state shards, given the numbers of model copies per node and in total."""
        return {"sharded": node_copies, "sharded_world": copies}.get(self.reduction, 1)

    def sequences(self, ranks: int) -> int:
        """Return the sequences of a micro-batch. Raises ``ValueError`` if the ranks cannot share the global batch evenly."""
        micro_batches = ranks // self.copy_ranks * self.gradient_accumulation_steps
        if self.global_batch_size % micro_batches:
            copies = f"{counted(ranks // self.copy_ranks, 'copy')} of the model ({counted(ranks, 'rank')})"
            raise ValueError(
                f"training.global_batch_size is {self.global_batch_size}, which {copies} x "
                f"{self.gradient_accumulation_steps} micro-batches cannot share evenly. Use a multiple of {micro_batches}."
            )
        return self.global_batch_size // micro_batches


def strategy_of(config: Config) -> Strategy:
    """Return the strategy of a configuration, with the reduction "flat" if ``training.reduction`` is "auto"."""
    settings = vars(config.training) | vars(config.parallel)
    strategy = Strategy(**{field.name: settings[field.name] for field in fields(Strategy)})
    return replace(strategy, reduction="flat") if config.training.reduction == "auto" else strategy


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Sizes of a step's micro-batches. Each array has shape [A, R].

    Attributes:
        sequences: Number of sequences of each micro-batch.
        tokens_AR, masked_AR: Number of tokens and of masked tokens.
        pairs_AR: Pairs of tokens that attend to each other: the sum of squared lengths.
        last_pairs_AR: Pairs in the last layer, where only the masked tokens and [CLS] are queries.
        lengths_AR: Number of distinct sequence lengths.
        equal_AR: Tokens in sequences that share their length with another sequence.
    """

    sequences: float
    tokens_AR: NDArray[np.float64]
    masked_AR: NDArray[np.float64]
    pairs_AR: NDArray[np.float64]
    last_pairs_AR: NDArray[np.float64]
    lengths_AR: NDArray[np.float64]
    equal_AR: NDArray[np.float64]


# eq=False makes the caches below compare instances by identity, because arrays cannot be hashed.
@dataclass(frozen=True, eq=False)
class Work:
    """The model that a run trains, the data, and the stopping point.

    Attributes:
        lengths, masked_counts: Number of tokens and of masked tokens of each sequence [N], from the length index.
        evaluation_batch_size: Sequences in a rank's evaluation batch.
        samples: Samples to the target; None to assume the convergence of the reference and of published runs.
        interval_samples: Training samples between evaluations; None for the formula of the benchmark's rules.
        seed: Seed of the sample order.
    """

    model: ModelConfig
    lengths: NDArray[np.integer]
    masked_counts: NDArray[np.integer]
    evaluation_sequences: int = EVALUATION_SEQUENCES
    evaluation_batch_size: int = 64
    samples: float | None = None
    interval_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.lengths) == 0 or self.evaluation_sequences == 0:
            raise ValueError("the training or the evaluation set is empty: expected at least one sequence in each")
        if self.lengths.max() > self.model.max_position_embeddings:
            raise ValueError(
                f"model.max_position_embeddings is {self.model.max_position_embeddings}, but the data have a sequence of "
                f"{self.lengths.max()} tokens. Raise it, or use data with shorter sequences"
            )

    def typical(self, sequences: float, lengths: float = 1.0) -> MicroBatches:
        """Return a micro-batch [1, 1] of ``sequences`` sequences, all of mean cost, with ``lengths`` distinct lengths."""
        tokens, masked, pairs, last_pairs = (np.full((1, 1), sequences * each) for each in self._means)
        return MicroBatches(sequences, tokens, masked, pairs, last_pairs, np.full((1, 1), lengths), np.zeros((1, 1)))

    @functools.cached_property
    def _means(self) -> list[float]:
        lengths, masked = self.lengths.astype(np.float64), self.masked_counts.astype(np.float64)
        return [float(each.mean()) for each in (lengths, masked, lengths**2, (1 + masked) * lengths)]

    @functools.cached_property
    def distinct_lengths(self) -> int:
        return int(np.count_nonzero(np.bincount(self.lengths)))

    def micro_batches(self, strategy: Strategy, ranks: int, step: int) -> MicroBatches:
        """Return the micro-batches that the batch sampler gives to each copy of the model in one step.

        Raises ``ValueError`` if the ranks cannot share the global batch evenly.
        """
        sequences, copies = strategy.sequences(ranks), ranks // strategy.copy_ranks
        sizes = self._dealt(strategy.global_batch_size, copies * strategy.gradient_accumulation_steps, step)
        # The batch sampler balances micro-batches, so it does not matter which of them a copy of the model gets.
        return MicroBatches(sequences, *(size.reshape(-1, copies) for size in sizes))

    @functools.lru_cache(maxsize=4096)  # noqa: B019  a program makes few instances and keeps them to its end
    def _dealt(self, global_batch_size: int, micro_batches: int, step: int) -> tuple[NDArray[np.float64], ...]:
        batch = self._global_batch(global_batch_size, step)
        dealt_AS = batch[deal(self.lengths[batch], micro_batches)]
        lengths_AS = np.sort(self.lengths[dealt_AS].astype(np.float64), axis=-1)
        masked_AS = self.masked_counts[dealt_AS].astype(np.float64)
        is_new = np.diff(lengths_AS, axis=-1) > 0
        edge = np.ones((micro_batches, 1), dtype=bool)
        is_single = np.hstack([edge, is_new]) & np.hstack([is_new, edge])
        return (
            lengths_AS.sum(-1),
            masked_AS.sum(-1),
            (lengths_AS**2).sum(-1),
            ((1 + masked_AS) * self.lengths[dealt_AS]).sum(-1),
            1.0 + is_new.sum(-1),
            np.where(is_single, 0.0, lengths_AS).sum(-1),
        )

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def _global_batch(self, size: int, step: int) -> NDArray[np.int64]:
        return BatchSampler(self.lengths, self.masked_counts, size, 1, 1, self.seed).global_batch(step)


def work_of(config: Config) -> Work:
    """Return the work of a configuration, from the length indices of its data sets."""
    train, evaluation = (open_dataset(folder) for folder in (config.data.train, config.data.evaluation))
    # A closed run ends when it converges like the reference. Any other run ends at its own sample limit.
    closed = config.log.division == "closed"
    return Work(
        config.model,
        train.lengths,
        train.masked_counts,
        len(evaluation.lengths),
        config.evaluation.batch_size,
        None if closed else float(config.training.sample_limit),
        config.evaluation.interval_samples,
        # A run without a seed draws a random seed. A prediction must be repeatable, so it assumes seed 0.
        config.training.seed or 0,
    )


def work_to_plan(config: Config) -> Work:
    """Return a configuration's work. If the benchmark data is absent, the lengths come from Wikipedia's histogram."""
    if config.data.train.is_dir() or config.data.train != RECIPES["h100_1x1"]().data.train:
        return work_of(config)
    work = wikipedia_work(config.model)
    if config.log.division == "closed":
        return work
    return replace(work, samples=float(config.training.sample_limit))


@functools.cache
def wikipedia_work(model: ModelConfig | None = None) -> Work:
    """Return the benchmark's work, with lengths drawn from the shipped histogram of Wikipedia."""
    # The seed is fixed so that the prediction is repeatable. uint16 is the data type of the length index on disk.
    lengths = drawn_lengths(np.random.default_rng(0), _DRAWN + EVALUATION_SEQUENCES).astype(np.uint16)[:_DRAWN]
    masked = np.clip(np.rint(_MASKED_SHARE * lengths), 1, _MOST_MASKED).astype(np.uint16)
    return Work(model or ModelConfig(), lengths, masked)


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
"""Cost terms of each kind of computation. The time of a computation is the sum of count times cost over the terms."""

REPEATED: dict[Recompute, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention", "gelu", "norm"),
    "full": ("linear", "attention", "gelu", "norm"),
}
"""Kinds of computation that an inner layer's backward pass repeats, for each recomputation mode.

The modes are in order of decreasing memory and increasing time."""


@dataclass(frozen=True)
class Computation:
    """A computation: its kind, and a count for each cost term of that kind. Arrays of counts describe many computations.

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

    The counts are for one of ``tensor`` ranks that share a copy of the model. The rank computes its part of the attention
    heads, of the products' columns and of the vocabulary. Between the products, it computes its part of the rows.
    """
    D, F = model.hidden_size, model.intermediate_size
    T, S, M = sizes.tokens_AR, float(sizes.sequences), sizes.masked_AR
    Q = S + M
    # A rank's shard of the word table is padded to a size for which matrix products are fast.
    words = split_of(WORD, (model.vocab_size, D), tensor) if tensor > 1 else None
    own_D, own_F, own_V = D // tensor, F // tensor, words.length if words else model.vocab_size
    heads = model.num_attention_heads / tensor
    hidden_dropout, attention_dropout = model.hidden_dropout > 0, model.attention_dropout > 0

    def norm(rows: Count) -> Computation:
        return Computation("norm", (1.0, rows * own_D), hidden_dropout)

    def layer(
        rows: Count, projections: list[Computation], calls: Count, pairs: Count, inner: bool
    ) -> list[Computation]:
        # Keys and values have T rows, and queries and outputs have `rows` rows, so (T + rows) / 2 is their average number.
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
    # A tensor group divides the rows of pooler, next-sentence classifier and transform, and replicates the weights.
    last += [linear(S / tensor, D, D), linear(S / tensor, D, 2), linear(M / tensor, D, D)]
    last += [Computation("gelu", (1.0, M * own_D)), Computation("norm", (1.0, M * own_D))]
    last += [linear(M, D, own_V), Computation("loss", (1.0, M * own_V))]
    return embedding, inner, last
