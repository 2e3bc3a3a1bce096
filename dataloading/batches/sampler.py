"""The plan: which samples make up each global batch, and which rank takes which of them.

Everything follows from (seed, length index, batch sizes, world size), so every rank computes the same plan and none asks
another. The order is a fresh random permutation every epoch; inside a global batch the samples are dealt by length, which
balances the cost and changes nothing else (sorting inside a drawn batch is accepted practice: training_rules 6.6). A step
costs what its global batch does, however many samples there are, and nothing is held but the length index, which may be a
memory map.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.permutation import shuffled

_LINEAR_COST = 6144
"""6 h of BERT-Large: a layer takes 24 h^2 operations a token and 4 h a pair of tokens, so a token weighs 6 h pairs."""

_FEW = 16
"""Sequences a micro-batch up to which whole rounds would not balance; with more they are within 0.1 % of it."""

_MATCHINGS = 2
"""Rounds of matching: each brings the highest cost closer to the mean, by less and less, for half the time of the deal."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples that one rank runs forward and backward at once, and what the whole global batch holds."""

    indices: NDArray[np.int64]
    """[S] samples, longest first."""
    global_sequences: int
    """Sequences in the global batch: what the next-sentence loss is divided by."""
    global_masked: int
    """Masked tokens in the global batch: what the masked-LM loss is divided by."""
    largest_tokens: int = 0
    """The most tokens in any of the micro-batches that the ranks run at the same time, if there is a plan."""
    largest_masked: int = 0
    """The most masked tokens in any of these micro-batches."""


@dataclass(frozen=True)
class BatchPlan:
    """A balanced plan over an endless stream of shuffled epochs.

    Global batch b holds the positions ``[b * global_batch_size, (b + 1) * global_batch_size)`` of the stream, so that each
    sample comes exactly once an epoch even when the batch size does not divide the number of samples.
    """

    lengths: NDArray[np.integer]
    """[N] tokens of every sample."""
    masked_counts: NDArray[np.integer]
    """[N] masked tokens of every sample."""
    global_batch_size: int
    world_size: int
    gradient_accumulation_steps: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.lengths) == 0:
            raise ValueError("the length index holds no samples: check data.train")
        if len(self.lengths) != len(self.masked_counts):
            raise ValueError(f"{len(self.lengths)} lengths but {len(self.masked_counts)} masked counts in the index")
        if self.world_size < 1 or self.gradient_accumulation_steps < 1 or self.global_batch_size < 1:
            raise ValueError(
                f"world size {self.world_size}, training.gradient_accumulation_steps {self.gradient_accumulation_steps} "
                f"and training.global_batch_size {self.global_batch_size} must all be at least 1"
            )
        if self.global_batch_size < self.micro_batches:
            raise ValueError(
                f"training.global_batch_size {self.global_batch_size} leaves some of {self.world_size} ranks x "
                f"{self.gradient_accumulation_steps} accumulation steps without a sequence: take fewer of either"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a global batch, over all ranks."""
        return self.world_size * self.gradient_accumulation_steps

    def global_batch(self, step: int) -> NDArray[np.int64]:
        """[global_batch_size] samples of optimizer step ``step`` (from 0), in stream order."""
        samples = len(self.lengths)
        positions = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        epochs = positions // samples
        # A batch may reach over the end of an epoch, and of a set smaller than itself over several.
        return np.concatenate(
            [
                shuffled(positions[epochs == epoch] % samples, samples, self.seed, epoch)
                for epoch in range(epochs[0], epochs[-1] + 1)
            ]
        )

    def rank_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """The micro-batches of ``rank`` in step ``step``, of cost as equal as may be.

        All have equal numbers of sequences, or some have fewer where the global batch does not divide; none is empty.
        """
        batch = self.global_batch(step)
        micro_batches = deal(self.lengths[batch], self.micro_batches)
        # Of the whole batch, from the index: the step need not add up counts over the ranks before it divides by them.
        masked = int(self.masked_counts[batch].sum())
        mine = micro_batches[rank :: self.world_size]
        largest = (self._largest(sizes[batch], micro_batches) for sizes in (self.lengths, self.masked_counts))
        # Places that stayed empty, where the batch does not divide, are -1.
        return [
            MicroBatch(batch[rows[rows >= 0]], len(batch), masked, *both)
            for rows, *both in zip(mine, *largest, strict=True)
        ]

    def _largest(self, sizes: NDArray[np.integer], micro_batches: NDArray[np.int64]) -> list[int]:
        """Return the largest sum of ``sizes`` over a micro-batch, for each turn in which every rank runs one."""
        sums = np.append(sizes, 0)[micro_batches].sum(axis=1, dtype=np.int64)  # an empty place, -1, takes the last
        return sums.reshape(-1, self.world_size).max(axis=1).tolist()


def cost(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the cost of training on ``lengths``: s * (6 h + s) each, operations of the encoder in units of 12 h."""
    tokens = lengths.astype(np.int64)
    return tokens * (_LINEAR_COST + tokens)


def deal(lengths: NDArray[np.integer], micro_batches: int) -> NDArray[np.int64]:
    """[micro_batches, n / micro_batches rounded up] positions of n ``lengths`` < 65,536, each micro-batch's longest first.

    Longest first, each to the micro-batch with the least cost so far among those with room, in rounds of one for each.
    Where a micro-batch has few sequences, a round is for half of the micro-batches, since some need a second long sequence
    before others have a short one, and rounds of `_match` follow. Each gets the same number of sequences, which keeps the
    shapes of a captured step few. Where n does not divide, empty places, position -1, are dealt as sequences of length 0,
    last of all; as long as n is no less than ``micro_batches``, none gets nothing else. Exact integers and stable sorts:
    equal on every machine.
    """
    empty = -len(lengths) % micro_batches
    if empty:
        dealt = deal(np.append(lengths, np.zeros(empty, lengths.dtype)), micro_batches)
        return np.where(dealt < len(lengths), dealt, -1)
    # Subtracted, as the negative of 16 bits needs more; stable, so that equal lengths keep the order of the batch.
    longest_first = np.argsort(0xFFFF - lengths.astype(np.uint16), kind="stable")  # 16 bits are sorted by radix
    cost_N = cost(lengths)
    sequences = len(lengths) // micro_batches
    at_once = max(1, micro_batches // 2) if sequences <= _FEW else micro_batches
    dealt = np.empty((micro_batches, sequences), np.int64)
    sums, filled = np.zeros(micro_batches, np.int64), np.zeros(micro_batches, np.int64)
    start = 0
    while start < len(lengths):
        with_room = np.flatnonzero(filled < sequences)
        # Cheapest first, as sequences are longest first: the longest of a round goes where there is the least.
        least = with_room[np.argsort(sums[with_room], kind="stable")[:at_once]]
        given = longest_first[start : start + at_once][: len(least)]
        least = least[: len(given)]
        dealt[least, filled[least]] = given
        sums[least] += cost_N[given]
        filled[least] += 1
        start += len(given)
    if 1 < sequences <= _FEW and micro_batches > 1:
        for number in range(_MATCHINGS):
            dealt = _match(dealt, cost_N, number)
        # Matching has mixed them: longest first again.
        dealt = np.take_along_axis(dealt, np.argsort(-cost_N[dealt], axis=1, kind="stable"), axis=1)
    return dealt


def _match(dealt_BS: NDArray[np.int64], cost_N: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """Halve every micro-batch, and join the costliest left half with the cheapest right one, the second with the second, and
    so on: of all ways to join them, none has a lower highest cost, nor a higher lowest.

    Of sequences a, b, c, d by cost, the left half has a and c in one round, a and d in the next.
    """
    dealt_BS = np.take_along_axis(dealt_BS, np.argsort(-cost_N[dealt_BS], axis=1, kind="stable"), axis=1)
    place_S = np.arange(dealt_BS.shape[1])
    is_left_S = np.isin(place_S % 4, (0, 3) if number % 2 else (0, 2))
    left_BS, right_BS = dealt_BS[:, is_left_S], dealt_BS[:, ~is_left_S]
    costliest_left = np.argsort(-cost_N[left_BS].sum(axis=1), kind="stable")
    cheapest_right = np.argsort(cost_N[right_BS].sum(axis=1), kind="stable")
    return np.hstack([left_BS[costliest_left], right_BS[cheapest_right]])
