"""The sampler, which assigns the samples of each global batch to ranks, and the shape buckets of their micro-batches.

The sampler depends only on (seed, length index, batch sizes, world size), so every rank computes the same assignment.
Each epoch has a new random order. Within a global batch, samples are dealt to the ranks by length, to balance the cost
(training_rules 6.6 allows sorting within a drawn batch). The time for one step depends on the global batch size and
not on the size of the data set.

Shape buckets are the few sizes to which micro-batches are padded so that a step of each size can be captured and replayed.
They are computed from the length index, which may be read before the clock starts: random global batches are drawn and
dealt as the sampler does, and the bucket sizes are chosen to minimize padding on the resulting micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataloading.batches.permutation import shuffled

Size = TypeVar("Size", int, NDArray[np.int64])

_LINEAR_COST = 6144
"""Number of pairs of tokens that cost as much as one token: a layer of hidden size h takes 24 h^2 operations for each token
and 4 h for each pair, so the number is 6 h. BERT-Large has h = 1024."""

_FEW = 16
"""If micro-batches have at most this number of sequences, `deal` uses smaller rounds and then `_match`, because rounds with
a sequence for each micro-batch would leave unequal costs. With more sequences, such rounds leave a difference of at most
0.1 %."""

_MATCHINGS = 2
"""Number of `_match` calls. Each brings the highest cost closer to the mean, in half the time of the rounds in `deal`."""

TOKENS_MULTIPLE = 64
"""The number of token slots is a multiple of a kernel's tile size. (FP8 products need only a multiple of 16.)"""
MASKED_MULTIPLE = 16
_MICRO_BATCHES = 2048
_GLOBAL_BATCHES = 64


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward pass on one rank, and the sizes of the global batch."""

    indices: NDArray[np.int64]
    """[S] sample numbers, longest sample first."""
    global_sequences: int
    """Number of sequences by which the next-sentence loss is divided: those of all ranks and accumulation steps, or of the
    ranks in the argument ``together`` of `rank_batches`."""
    global_masked: int
    """Number of masked tokens in the sequences that ``global_sequences`` counts. The masked-LM loss is divided by it."""
    largest_tokens: int = 0
    """Largest number of tokens in the micro-batches that all ranks run at the same time; 0 without a sampler."""
    largest_masked: int = 0
    """Largest number of masked tokens in the micro-batches that all ranks run at once; 0 without a sampler."""


@dataclass(frozen=True)
class BatchSampler:
    """Sampler of balanced micro-batches from an endless stream of shuffled epochs.

    Global batch b holds the positions ``[b * global_batch_size, (b + 1) * global_batch_size)`` of the stream, so each
    sample occurs exactly once per epoch, even if the batch size does not divide the number of samples.
    """

    lengths: NDArray[np.integer]
    """[N] number of tokens in each sample."""
    masked_counts: NDArray[np.integer]
    """[N] number of masked tokens in each sample."""
    global_batch_size: int
    world_size: int
    gradient_accumulation_steps: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.lengths) == 0:
            raise ValueError("the length index holds no samples: check data.train")
        require_sequences(self.global_batch_size, self.world_size, self.gradient_accumulation_steps)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a global batch, over all ranks."""
        return self.world_size * self.gradient_accumulation_steps

    def global_batch(self, step: int) -> NDArray[np.int64]:
        """Return the samples [global_batch_size] of optimizer step ``step`` (from 0), in stream order."""
        samples = len(self.lengths)
        positions = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        epochs = positions // samples
        # A batch may span two epochs, or more if the data set is small.
        return np.concatenate(
            [
                shuffled(positions[epochs == epoch] % samples, samples, self.seed, epoch)
                for epoch in range(epochs[0], epochs[-1] + 1)
            ]
        )

    def rank_batches(self, step: int, rank: int, together: Sequence[int] | None = None) -> list[MicroBatch]:
        """Return the micro-batches of ``rank`` in step ``step``.

        The costs of the step's micro-batches are as equal as possible. No micro-batch is empty. If the global batch can be
        divided evenly, all have the same number of sequences. The losses are divided by the numbers of sequences and masked
        tokens of the ranks ``together``, by default of all ranks.
        """
        batch = self.global_batch(step)
        micro_batches = deal(self.lengths[batch], self.micro_batches)
        # Count with the length index, so that the ranks need no all-reduce of their counts.
        by_rank = micro_batches.reshape(-1, self.world_size, micro_batches.shape[1])
        counted = by_rank if together is None else by_rank[:, list(together)]
        counted = batch[counted[counted >= 0]]
        masked = int(self.masked_counts[counted].sum())
        mine = micro_batches[rank :: self.world_size]
        # Largest numbers of tokens and of masked tokens in the micro-batches that the ranks run at the same time.
        largest = (
            sums_of(sizes[batch], micro_batches).reshape(-1, self.world_size).max(axis=1).tolist()
            for sizes in (self.lengths, self.masked_counts)
        )
        # Drop the positions -1, which stand for no sequence.
        return [
            MicroBatch(batch[rows[rows >= 0]], len(counted), masked, *both)
            for rows, *both in zip(mine, *largest, strict=True)
        ]


def require_sequences(global_batch_size: int, world_size: int, gradient_accumulation_steps: int) -> None:
    """Raise ``ValueError`` if some micro-batch of a global batch would be empty."""
    if global_batch_size < world_size * gradient_accumulation_steps:
        raise ValueError(
            f"training.global_batch_size {global_batch_size} leaves some of {world_size} ranks x "
            f"{gradient_accumulation_steps} accumulation steps without a sequence: use fewer ranks or steps"
        )


def sums_of(sizes: NDArray[np.integer], dealt: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of ``sizes`` over each micro-batch in ``dealt``, which `deal` returned."""
    return np.append(sizes, 0)[dealt].sum(axis=1, dtype=np.int64)  # -1 stands for no sequence, and reads the appended 0


def cost(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the cost s * (6 h + s) of training on sequences of length s. The unit is 12 h operations of a layer."""
    tokens = lengths.astype(np.int64)
    return tokens * (_LINEAR_COST + tokens)


def deal(lengths: NDArray[np.integer], micro_batches: int) -> NDArray[np.int64]:
    """Deal n sequences with ``lengths`` below 65,536 to micro-batches, and return the positions of each micro-batch's
    sequences [micro_batches, n / micro_batches rounded up], longest first.

    In each round, the longest remaining sequences go to the cheapest micro-batches that have room. With few sequences per
    micro-batch, a round serves only half of the micro-batches, because some need a second long sequence before others
    get a short one. Then `_match` makes the costs more equal. All micro-batches get the same number of sequences, which
    keeps the number of captured shapes small. For this, up to ``micro_batches - 1`` empty sequences are added, whose
    positions are returned as -1. Exact integers and stable sorts give the same result on every machine.
    """
    empty = -len(lengths) % micro_batches
    if empty:
        dealt = deal(np.append(lengths, np.zeros(empty, lengths.dtype)), micro_batches)
        return np.where(dealt < len(lengths), dealt, -1)
    # Subtraction from 0xFFFF reverses the order and stays in uint16, for which NumPy uses fast radix sort. The stable sort
    # keeps samples of equal length in batch order.
    longest_first = np.argsort(0xFFFF - lengths.astype(np.uint16), kind="stable")
    cost_N = cost(lengths)
    sequences = len(lengths) // micro_batches
    at_once = max(1, micro_batches // 2) if sequences <= _FEW else micro_batches
    dealt = np.empty((micro_batches, sequences), np.int64)
    sums, filled = np.zeros(micro_batches, np.int64), np.zeros(micro_batches, np.int64)
    start = 0
    while start < len(lengths):
        with_room = np.flatnonzero(filled < sequences)
        # The longest sequence of a round goes to the cheapest micro-batch.
        least = with_room[np.argsort(sums[with_room], kind="stable")[:at_once]]
        given = longest_first[start : start + at_once][: len(least)]
        least = least[: len(given)]
        dealt[least, filled[least]] = given
        sums[least] += cost_N[given]
        filled[least] += 1
        start += len(given)
    if sequences <= _FEW and micro_batches > 1:
        for number in range(_MATCHINGS):
            dealt = _match(dealt, cost_N, number)
        # Restore the order within each micro-batch, longest first.
        dealt = np.take_along_axis(dealt, np.argsort(-cost_N[dealt], axis=1, kind="stable"), axis=1)
    return dealt


def _match(dealt_BS: NDArray[np.int64], cost_N: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """Split every micro-batch into two halves, and join the halves of different micro-batches so that costs become equal.

    The costliest left half joins the cheapest right half, the second costliest joins the second cheapest, and so on. No
    other way to join the halves gives a lower maximum or a higher minimum cost. If a, b, c, d are
    a micro-batch's sequences in order of cost, the left half is a and c if ``number`` is even, and a and d if it is odd.
    """
    dealt_BS = np.take_along_axis(dealt_BS, np.argsort(-cost_N[dealt_BS], axis=1, kind="stable"), axis=1)
    place_S = np.arange(dealt_BS.shape[1])
    is_left_S = np.isin(place_S % 4, (0, 3) if number % 2 else (0, 2))
    left_BS, right_BS = dealt_BS[:, is_left_S], dealt_BS[:, ~is_left_S]
    costliest_left = np.argsort(-cost_N[left_BS].sum(axis=1), kind="stable")
    cheapest_right = np.argsort(cost_N[right_BS].sum(axis=1), kind="stable")
    return np.hstack([left_BS[costliest_left], right_BS[cheapest_right]])


@dataclass(frozen=True)
class ShapeBucket:
    """Numbers of slots in the tensors of a padded ``Batch``. Slots after the real tokens are inert."""

    tokens: int
    """Number of token slots, a multiple of 64. At least one slot holds no real token: empty masked slots point to it."""
    sequences: int
    masked: int
    """Number of slots for masked tokens, a multiple of 16."""
    max_seqlen: int
    """Longest sequence that a batch of this shape bucket may hold."""

    @classmethod
    def around(cls, tokens: int, sequences: int, masked: int, max_seqlen: int) -> "ShapeBucket":
        """Return the smallest shape bucket for a batch of this size."""
        return cls(
            _rounded_up(tokens + 1, TOKENS_MULTIPLE),
            sequences,
            _rounded_up(max(1, masked), MASKED_MULTIPLE),
            max_seqlen,
        )

    def holds(self, other: "ShapeBucket") -> bool:
        return (
            self.tokens >= other.tokens
            and self.sequences >= other.sequences
            and self.masked >= other.masked
            and self.max_seqlen >= other.max_seqlen
        )


def fitting(needed: ShapeBucket, shape_buckets: Sequence[ShapeBucket]) -> ShapeBucket:
    """Return the first of the ascending ``shape_buckets`` that ``needed`` fits, or ``needed`` if it fits none."""
    return next((shape_bucket for shape_bucket in shape_buckets if shape_bucket.holds(needed)), needed)


def choose_shape_buckets(
    tokens_N: NDArray[np.integer], masked_N: NDArray[np.integer], sequences: int, max_seqlen: int, most: int = 16
) -> list[ShapeBucket]:
    """Choose at most ``most`` ascending shape buckets into which N randomly drawn micro-batches fit.

    Dynamic programming over the rounded sizes minimizes the number of padded token slots. The size of the last shape
    bucket exceeds the largest drawn size by a quarter of that size's distance from the mean, so that about one
    micro-batch in 10^5 does not fit. The number of masked slots follows from the largest drawn share of masked tokens.
    """
    largest, mean = int(tokens_N.max()), float(tokens_N.mean())
    # Limit the margin, because a micro-batch cannot be larger than all of its sequences at full length.
    top = min(largest + int((largest - mean) / 4), sequences * max_seqlen)
    needed_N = _rounded_up(tokens_N.astype(np.int64) + 1, TOKENS_MULTIPLE)
    sizes_U, counts_U = np.unique(np.append(needed_N, _rounded_up(top + 1, TOKENS_MULTIPLE)), return_counts=True)
    counts_U[-1] -= 1  # do not count the size that was appended
    ratio = float((masked_N / tokens_N).max())
    return [
        # Subtract 1, because these sizes already include the unused row that around() adds.
        ShapeBucket.around(tokens - 1, sequences, int(np.ceil(ratio * tokens)), max_seqlen)
        for tokens in _boundaries(sizes_U, counts_U, most).tolist()
    ]


def draw_sizes(
    lengths: NDArray[np.integer], masked_counts: NDArray[np.integer], global_batch_size: int, micro_batches: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw random global batches, deal them as the sampler does, and return each micro-batch's tokens and masked tokens [N].

    ``micro_batches`` is the number of micro-batches in a global batch, over all ranks. Equal arguments give equal results
    on all ranks. At least 2,048 micro-batches of at least 64 global batches are drawn, which takes 0.1 s.
    """
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(max(_GLOBAL_BATCHES, -(-_MICRO_BATCHES // micro_batches))):
        batch = generator.integers(0, len(lengths), global_batch_size)  # may repeat samples: only lengths matter
        dealt = deal(lengths[batch], micro_batches)
        drawn.append([sums_of(sizes[batch], dealt) for sizes in (lengths, masked_counts)])
    tokens_N, masked_N = np.concatenate(drawn, axis=1)
    return tokens_N, masked_N


def _boundaries(sizes_U: NDArray[np.int64], counts_U: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Choose at most ``most`` of the ascending ``sizes_U``, including the last, that minimize the total number of slots.

    ``counts_U`` is the number of drawn micro-batches of each size.
    """
    below = np.concatenate([[0], np.cumsum(counts_U)])
    # slots_UU[i, j]: number of slots if all micro-batches of sizes i to j are padded to size j.
    slots_UU = (sizes_U * (below[1:] - below[:-1, None])).astype(np.float64)
    slots_UU[np.tril_indices(len(sizes_U), -1)] = np.inf
    # best_U[j]: fewest slots for sizes up to j if the largest bucket has size j. Each round allows one more bucket.
    # firsts holds, for each round and each j, the first size in the last bucket. Backtracking needs it.
    best_U, firsts = slots_UU[0], [np.zeros(len(sizes_U), np.int64)]
    for _ in range(min(most, len(sizes_U)) - 1):
        totals_UU = np.concatenate([[0.0], best_U[:-1]])[:, None] + slots_UU
        firsts.append(totals_UU.argmin(axis=0))
        best_U = totals_UU.min(axis=0)
    chosen, last = [], len(sizes_U) - 1
    for first_U in reversed(firsts):
        if last < 0:
            break  # fewer sizes than `most` are enough
        chosen.append(last)
        last = int(first_U[last]) - 1
    return sizes_U[chosen[::-1]]


def _rounded_up(value: Size, multiple: int) -> Size:
    return -(-value // multiple) * multiple
