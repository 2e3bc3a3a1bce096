"""Work of a run: the model, the sequence lengths and the evaluation schedule, and from these the micro-batches of a step.

Shape legend: N sequences of the data set, A micro-batches of a rank in a step, R copies of the model, S sequences of a
micro-batch.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig
from cluster.model.histogram import drawn_lengths
from cluster.model.strategy import Strategy
from cluster.published.cost_model import EVALUATION_SEQUENCES
from compliance.log.schedule import evaluation_interval
from dataloading.batches.plan import BatchPlan, deal
from dataloading.dataset.folder import open_dataset

_DRAWN = 200_000
_MASKED_SHARE, _MOST_MASKED = 0.15, 76
"""Masked tokens in the benchmark's data: their share of a sequence's tokens, and their maximum per sequence."""


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
                f"{self.lengths.max()} tokens"
            )

    def interval(self, global_batch_size: int) -> int:
        """Return the training samples between evaluations."""
        return self.interval_samples or evaluation_interval(global_batch_size)

    def typical(self, sequences: float, lengths: float = 1.0) -> MicroBatches:
        """Return one micro-batch [1, 1] of ``sequences`` sequences of mean cost, with ``lengths`` distinct lengths."""
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
        """Return the micro-batches that the plan of a step gives to each copy of the model.

        Raises ``ValueError`` if the ranks cannot share the global batch evenly.
        """
        strategy.sequences(ranks)
        copies = ranks // strategy.copy_ranks
        count = copies * strategy.gradient_accumulation_steps
        # The plan balances the micro-batches, so it does not matter which copy of the model computes which micro-batch.
        sequences, *sizes = self._dealt(strategy.global_batch_size, count, step)
        return MicroBatches(sequences, *(size.reshape(-1, copies) for size in sizes))

    @functools.lru_cache(maxsize=4096)  # noqa: B019  a program makes few instances and keeps them to its end
    def _dealt(self, global_batch_size: int, micro_batches: int, step: int) -> tuple:
        batch = self._global_batch(global_batch_size, step)
        dealt_AS = batch[deal(self.lengths[batch], micro_batches)]
        lengths_AS = np.sort(self.lengths[dealt_AS].astype(np.float64), axis=-1)
        masked_AS = self.masked_counts[dealt_AS].astype(np.float64)
        is_new = np.diff(lengths_AS, axis=-1) > 0
        edge = np.ones((micro_batches, 1), dtype=bool)
        is_single = np.hstack([edge, is_new]) & np.hstack([is_new, edge])
        return (
            lengths_AS.shape[-1],
            lengths_AS.sum(-1),
            masked_AS.sum(-1),
            (lengths_AS**2).sum(-1),
            ((1 + masked_AS) * self.lengths[dealt_AS]).sum(-1),
            1.0 + is_new.sum(-1),
            np.where(is_single, 0.0, lengths_AS).sum(-1),
        )

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def _global_batch(self, size: int, step: int) -> NDArray[np.int64]:
        return BatchPlan(self.lengths, self.masked_counts, size, 1, 1, self.seed).global_batch(step)


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
        # A run without a seed draws a random seed, but a prediction must be repeatable.
        config.training.seed or 0,
    )


@functools.cache
def wikipedia_work(model: ModelConfig | None = None) -> Work:
    """Return the benchmark's work, with lengths drawn from the shipped histogram of Wikipedia."""
    # The seed is fixed so that the prediction is repeatable. uint16 is the data type of the length index on disk.
    lengths = drawn_lengths(np.random.default_rng(0), _DRAWN + EVALUATION_SEQUENCES).astype(np.uint16)[:_DRAWN]
    masked = np.clip(np.rint(_MASKED_SHARE * lengths), 1, _MOST_MASKED).astype(np.uint16)
    return Work(model or ModelConfig(), lengths, masked)
