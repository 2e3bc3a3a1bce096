"""A step's forward and backward passes, as CUDA graphs or operator by operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from bert.execution.cuda_graphs import BatchGraphs, CudaCapturer
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.loader import Batch


@dataclass(frozen=True)
class Role:
    """Extra work of a micro-batch besides its forward and backward passes. Each role has its own CUDA graphs."""

    gathers_weights: bool
    """The first micro-batch of a step all-gathers the sharded optimizer's weights during its forward pass."""
    reduces_gradients: bool
    """The last micro-batch of a step reduces gradient buckets over the ranks while its backward pass fills them."""
    overwrites_gradients: bool
    """The first micro-batch of a step overwrites the previous step's weight gradients instead of adding to them."""


class Passes:
    """Execution of a step's passes as CUDA graphs, one for each role and shape bucket.

    Batches that fit no captured shape bucket, and all batches if nothing was captured, run operator by operator.
    """

    def __init__(self, forward_backward: Callable[[Role, Batch], None], duties: Role, stopwatch: Stopwatch) -> None:
        """``duties`` marks the kinds of extra work that any micro-batch of this run does."""
        self.duties, self._stopwatch = duties, stopwatch
        # This has an entry for every role, but only roles that are prepared are captured.
        self._graphs = {
            role: BatchGraphs(partial(forward_backward, role))
            for role in (Role(*each) for each in product((False, True), repeat=3))
        }
        self.uncaptured_batches = 0

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Run the passes of one step's micro-batches and reduce the gradients."""
        with self._stopwatch.time("forward_backward"):
            for role, batch in zip(self._roles(len(micro_batches)), micro_batches, strict=True):
                self.uncaptured_batches += not self._graphs[role](batch)

    def prepare(self, micro_batches: int, batches: Sequence[Batch], capturer: CudaCapturer) -> None:
        """Prepare graphs for the shape buckets of ``batches`` and for steps with ``micro_batches`` micro-batches."""
        # Start with the role of the last micro-batch, which takes the most memory.
        for role in dict.fromkeys(reversed(self._roles(micro_batches))):
            self._graphs[role].prepare(batches, capturer)

    def _roles(self, count: int) -> list[Role]:
        return [
            Role(
                self.duties.gathers_weights and place == 0,
                self.duties.reduces_gradients and place == count - 1,
                self.duties.overwrites_gradients and place == 0,
            )
            for place in range(count)
        ]
