"""Schedule of the evaluations of a run (TR 24.4)."""

import math
from dataclasses import dataclass


def evaluation_interval(global_batch_size: int) -> int:
    """Return the number of samples between two evaluations of a closed run.

    The rule is 5 % of (230.23 x global batch size + 3,000,000), rounded down to a multiple of 25,000. Raises
    ``ValueError`` if the batch size is not positive.
    """
    if global_batch_size <= 0:
        raise ValueError(f"global_batch_size is {global_batch_size}, expected a positive integer")
    # 0.05 x 230.23 = 11.5115 has no exact float, so compute with integers in units of 1/10,000.
    ten_thousandths = 115_115 * global_batch_size + 1_500_000_000
    return ten_thousandths // (10_000 * 25_000) * 25_000


@dataclass(frozen=True)
class EvaluationSchedule:
    """Schedule with an evaluation every `interval` samples, each rounded up to a whole batch."""

    interval: int
    global_batch_size: int

    def samples(self, index: int) -> int:
        """Return the samples trained at the `index`-th evaluation, from 1."""
        return -(-index * self.interval // self.global_batch_size) * self.global_batch_size

    def index_after(self, samples: float) -> int:
        """Return the index of the first evaluation at `samples` or later."""
        # The tolerance 1e-9 absorbs rounding errors. Return the previous index if that evaluation is already at `samples`
        # or later, because it was rounded up to a whole batch.
        index = max(1, math.ceil(samples / self.interval - 1e-9))
        return index - 1 if index > 1 and self.samples(index - 1) >= samples else index

    def allows(self, index: int, samples: int, previous: int) -> bool:
        """Tell whether the `index`-th evaluation (from 1) may be at `samples` if the previous one was at `previous`.

        The rule "rounded up to a whole batch" has two readings, and both are accepted. Rounding each multiple of the
        interval gives errors below one batch. Rounding the interval once gives errors that add up. Packed runs count
        real sequences, which differ from the nominal batch size, so each of the two counts may be off by a batch.
        """
        batch = self.global_batch_size
        return abs(samples - index * self.interval) < batch or abs(samples - previous - self.interval) < 2 * batch
