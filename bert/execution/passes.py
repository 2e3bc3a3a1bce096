"""Ways to run a step's forward and backward passes: operator by operator, as CUDA graphs, through pipeline stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from bert.execution.cuda_graphs import BatchGraphs, CudaCapturer
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.loader import Batch


@dataclass(frozen=True)
class Role:
    """What a micro-batch does in its step besides its forward and backward passes. Each role has CUDA graphs of its own."""

    gathers_weights: bool
    """The first of a step gathers the weights of a sharded optimizer while its forward pass runs."""
    reduces_gradients: bool
    """The last of a step sums buckets of gradients over the ranks while its backward pass fills them."""
    overwrites_gradients: bool
    """In the first of a step, products write gradients of weights over the gradients of the step before."""


def roles_of(count: int, duties: Role) -> list[Role]:
    """Return the roles of ``count`` micro-batches, in their order, in a run that has these duties at all."""
    return [
        Role(
            duties.gathers_weights and place == 0,
            duties.reduces_gradients and place == count - 1,
            duties.overwrites_gradients and place == 0,
        )
        for place in range(count)
    ]


Pass = Callable[[Role, Batch], None]
"""Forward and backward pass of one micro-batch."""


class Eager:
    """Execution operator by operator."""

    def __init__(self, forward_backward: Pass, duties: Role, stopwatch: Stopwatch) -> None:
        self._forward_backward, self._duties, self._stopwatch = forward_backward, duties, stopwatch

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Train on the micro-batches of one step, up to the reduced gradients."""
        with self._stopwatch.time("forward_backward"):
            for role, batch in zip(roles_of(len(micro_batches), self._duties), micro_batches, strict=True):
                self._forward_backward(role, batch)


class Captured:
    """Execution by CUDA graphs, one for each role and shape bucket. Other batches run operator by operator."""

    def __init__(self, forward_backward: Pass, duties: Role, stopwatch: Stopwatch) -> None:
        self._duties, self._stopwatch = duties, stopwatch
        # Roles that are never prepared are never captured.
        self._graphs = {
            role: BatchGraphs(partial(forward_backward, role))
            for role in (Role(*each) for each in product((False, True), repeat=3))
        }
        self.uncaptured_batches = 0
        """Micro-batches that ran without a graph."""

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Train on the micro-batches of one step, up to the reduced gradients."""
        with self._stopwatch.time("forward_backward"):
            for role, batch in zip(roles_of(len(micro_batches), self._duties), micro_batches, strict=True):
                self.uncaptured_batches += not self._graphs[role](batch)

    def prepare(self, micro_batches: int, batches: Sequence[Batch], capturer: CudaCapturer) -> None:
        """Prepare graphs for the shapes of ``batches``, for steps of so many micro-batches."""
        # The last micro-batch first: it takes the most memory.
        for role in dict.fromkeys(reversed(roles_of(micro_batches, self._duties))):
            self._graphs[role].prepare(batches, capturer)


class Pipelined:
    """Execution by PyTorch's pipeline schedule."""

    def __init__(
        self, schedule: Callable[[Sequence[Batch]], None], finish: Callable[[], None], stopwatch: Stopwatch
    ) -> None:
        """``finish`` completes the reduction of the gradients."""
        self._schedule, self._finish, self._stopwatch = schedule, finish, stopwatch

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Train on the micro-batches of one step, up to the reduced gradients."""
        self._schedule(micro_batches)
        with self._stopwatch.time("reduce"):
            self._finish()
