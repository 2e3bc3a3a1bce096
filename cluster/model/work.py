"""Work of a run: the model, the lengths of its sequences, and when it evaluates; and what each rank gets of a step.

Shape legend: N sequences of the data set, A micro-batches of a rank's step, R ranks, or copies of the model that ranks
share, S sequences of a micro-batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig
from cluster.model.histogram import drawn_lengths
from cluster.model.strategy import Strategy
from cluster.published.cost_model import EVALUATION_SEQUENCES
from compliance.log.schedule import evaluation_interval
from dataloading.batches.sampler import BatchPlan, deal
from dataloading.dataset.folder import open_dataset

_DRAWN = 200_000
# Masking rules of the benchmark's data: 15 % of the tokens, at least one.
_MASKED_SHARE = 0.15
_MOST_MASKED = 76
"""Masked tokens of a sequence of the benchmark."""


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Sizes of a step's micro-batches, each [A, R]: by micro-batch and rank."""

    sequences: int
    """Of every one."""
    tokens_AR: NDArray[np.float64]
    masked_AR: NDArray[np.float64]
    pairs_AR: NDArray[np.float64]
    """Of tokens that attend to each other: the sum of squared lengths."""
    last_pairs_AR: NDArray[np.float64]
    """The same in the last layer, whose queries are the masked tokens and [CLS]."""
    lengths_AR: NDArray[np.float64]
    """Number of different lengths."""
    equal_AR: NDArray[np.float64]
    """Tokens of sequences that have their length in common with another."""

    def of_ranks(self, ranks: int) -> MicroBatches:
        """Return the same micro-batches, in their order, with so many ranks at work on them."""
        # Which rank computes a micro-batch is a matter of shape alone: dealing balances micro-batches, not ranks.
        each = {name: value.reshape(-1, ranks) for name, value in vars(self).items() if name != "sequences"}
        return replace(self, **each)


# eq=False: arrays have no single truth value, and identity is what the caches below need.
@dataclass(frozen=True, eq=False)
class Work:
    """Work of a run: what it trains, and until when.

    Attributes:
        lengths, masked_counts: [N] tokens, and masked ones, of every sequence of the data set: the length index.
        evaluation_lengths, evaluation_masked: of the evaluation set.
        evaluation_batch_size: sequences that a rank evaluates at once.
        target: masked-LM accuracy at which the run ends.
        samples: to that target, where they are known; None: as the reference and published runs converge.
        interval_samples: training samples between evaluations; None: by the rules' formula.
    """

    model: ModelConfig
    lengths: NDArray[np.integer]
    masked_counts: NDArray[np.integer]
    evaluation_lengths: NDArray[np.integer]
    evaluation_masked: NDArray[np.integer]
    evaluation_batch_size: int = 64
    target: float = 0.720
    samples: float | None = None
    interval_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.lengths) == 0 or len(self.evaluation_lengths) == 0:
            raise ValueError("no sequences to train on, or none to evaluate: expected at least one of each")
        # Here, since an index beyond the position table would only show at the first long sequence of a run.
        longest = max(int(self.lengths.max()), int(self.evaluation_lengths.max()))
        if longest > self.model.max_position_embeddings:
            raise ValueError(
                f"a sequence of {longest} tokens, but model.max_position_embeddings is "
                f"{self.model.max_position_embeddings}"
            )

    def interval(self, global_batch_size: int) -> int:
        """Training samples between evaluations."""
        return self.interval_samples or evaluation_interval(global_batch_size)

    def typical(self, sequences: int) -> MicroBatches:
        """Return a micro-batch of so many sequences of mean cost, [1, 1]."""
        tokens, marked, pairs, last_pairs = (np.full((1, 1), sequences * each) for each in self._means)
        return MicroBatches(sequences, tokens, marked, pairs, last_pairs, np.ones((1, 1)), np.zeros((1, 1)))

    @functools.cached_property
    def _means(self) -> list[float]:
        """Means of a sequence: tokens, masked ones, pairs, and those of the last layer."""
        lengths, masked = self.lengths.astype(np.float64), self.masked_counts.astype(np.float64)
        # Mean of squares, not square of the mean: attention's work is dominated by long sequences.
        return [float(each.mean()) for each in (lengths, masked, lengths**2, (1 + masked) * lengths)]

    def micro_batches(self, strategy: Strategy, ranks: int, step: int) -> MicroBatches:
        """Return what the plan gives each copy of the model in a step, R of them.

        Raises ``ValueError`` where the global batch does not divide.
        """
        strategy.sequences(ranks)  # a run may share out an uneven batch after it lost hosts; nobody plans that
        copies = ranks // strategy.copy_ranks
        # Copies times accumulation, since both are dealt from the same global batch.
        dealt = self._dealt(strategy.global_batch_size, copies * strategy.gradient_accumulation_steps, step)
        return dealt.of_ranks(copies)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  a program makes few of them, and keeps them to its end
    def _dealt(self, global_batch_size: int, micro_batches: int, step: int) -> MicroBatches:
        """Micro-batches of a step, [A, 1]: the same ones whichever ranks compute them, and whichever comes first."""
        batch = self._global_batch(global_batch_size, step)
        # Positions in the global batch are looked up in it: `deal` knows lengths only.
        dealt = batch[deal(self.lengths[batch], micro_batches)][:, None]
        return _sizes(self.lengths[dealt].astype(np.float64), self.masked_counts[dealt].astype(np.float64))

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def _global_batch(self, size: int, step: int) -> NDArray[np.int64]:
        return BatchPlan(self.lengths, self.masked_counts, size, 1, 1, self.seed).global_batch(step)

    def evaluation(self, ranks: int) -> list[MicroBatches]:
        """Return the batches of an evaluation, one after another, of ranks with the longest: every R-th by length."""
        order = np.argsort(-self.evaluation_lengths.astype(np.int64), kind="stable")[::ranks]
        size = self.evaluation_batch_size
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        return [
            _sizes(
                self.evaluation_lengths[part][None, None].astype(np.float64),
                self.evaluation_masked[part][None, None].astype(np.float64),
            )
            for part in parts
        ]


def _sizes(lengths_ARS: NDArray[np.float64], masked_ARS: NDArray[np.float64]) -> MicroBatches:
    # In order, a length is one sequence's alone where it differs from both neighbours.
    # Sorted, so that equal lengths are neighbours; order within a micro-batch has no cost.
    ordered_ARS = np.sort(lengths_ARS, axis=-1)
    is_new = np.diff(ordered_ARS, axis=-1) > 0
    edge = np.ones_like(is_new, shape=(*is_new.shape[:-1], 1))
    is_single = np.concatenate([edge, is_new], axis=-1) & np.concatenate([is_new, edge], axis=-1)
    # In the order of the fields of `MicroBatches`.
    return MicroBatches(
        lengths_ARS.shape[-1],
        lengths_ARS.sum(-1),
        masked_ARS.sum(-1),
        (lengths_ARS**2).sum(-1),
        ((1 + masked_ARS) * lengths_ARS).sum(-1),
        1.0 + is_new.sum(-1),
        np.where(is_single, 0.0, ordered_ARS).sum(-1),
    )


def work_of(config: Config) -> Work:
    """Return the work of a configuration, by the length indices of its data sets, which must be there."""
    train, evaluation = (open_dataset(folder) for folder in (config.data.train, config.data.evaluation))
    # In the closed division the reference's convergence decides; any other run ends at its own sample limit.
    closed = config.log.division == "closed"
    return Work(
        config.model,
        train.lengths,
        train.masked_counts,
        evaluation.lengths,
        evaluation.masked_counts,
        config.evaluation.batch_size,
        config.evaluation.target,
        None if closed else float(config.training.sample_limit),
        config.evaluation.interval_samples,
        # Seed None draws a new one at each run; a prediction must not change from call to call.
        config.training.seed or 0,
    )


@functools.cache
def wikipedia_work(model: ModelConfig | None = None) -> Work:
    """Return the benchmark's work, its lengths drawn from the shipped histogram of Wikipedia."""
    # uint16 as the length index on disk has it; a seed of its own, so that a prediction is repeatable.
    lengths = drawn_lengths(np.random.default_rng(0), _DRAWN + EVALUATION_SEQUENCES).astype(np.uint16)
    # At least one masked token a sequence, as the data preparation makes it.
    masked = np.clip(np.rint(_MASKED_SHARE * lengths), 1, _MOST_MASKED).astype(np.uint16)
    train, evaluation = slice(_DRAWN), slice(_DRAWN, None)
    return Work(model or ModelConfig(), lengths[train], masked[train], lengths[evaluation], masked[evaluation])
