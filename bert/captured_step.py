"""A training step that is captured as CUDA graphs, once for each shape bucket, and then replayed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from bert.configuration.config import Config
from bert.execution.cuda_graphs import BatchGraphs, CudaCapturer
from bert.execution.stopwatch import Stopwatch
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from bert.recomputation import RECOMPUTED_OPS
from bert.step import TrainingStep
from dataloading.batches.loader import Batch, inert_batch
from dataloading.batches.sampler import ShapeBucket
from kernels import only_capturable


class CapturedStep(TrainingStep):
    """``TrainingStep`` that runs each micro-batch and the update as CUDA graphs, after ``capture`` has been called.

    Micro-batches that fit no captured shape bucket run operator by operator.
    """

    def __init__(
        self, initial: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch, capturer: CudaCapturer
    ) -> None:
        super().__init__(initial, config, mesh, stopwatch)
        self._capturer = capturer
        self.uncaptured_batches = 0
        """Number of micro-batches since the warm-up that were larger than every captured shape bucket."""
        self._micro_batches = config.training.gradient_accumulation_steps
        self._recomputed = () if config.training.recompute == "none" else RECOMPUTED_OPS
        self._first_differs = self.gathers_in_forward or self.weight_gradients is not None
        self._last_differs = self.reduction is not None
        run = super().forward_backward
        self._graphs = {
            (is_first, is_last): BatchGraphs(partial(run, is_first=is_first, is_last=is_last))
            for is_first in (False, True)
            for is_last in (False, True)
        }
        """Graphs for each kind of micro-batch. The key tells whether it is the first one and the last one of its step."""
        self._replay_update: Callable[[], None] | None = None

    def forward_backward(self, batch: Batch, is_first: bool, is_last: bool) -> None:
        self.uncaptured_batches += not self._graphs_of(is_first, is_last)(batch)

    def update(self) -> None:
        (self._replay_update or super().update)()

    def warm_up(self, micro_batches: Sequence[Batch], steps: int, shape_buckets: Sequence[ShapeBucket] = ()) -> float:
        seconds = super().warm_up(micro_batches, steps, shape_buckets)
        self.uncaptured_batches = 0
        return seconds

    def capture(self, shape_buckets: Sequence[ShapeBucket]) -> None:
        """Capture a graph for the update, and graphs for each kind of micro-batch."""
        batches = [inert_batch(shape_bucket).to(self.mesh.device) for shape_bucket in shape_buckets]
        last = self._micro_batches - 1
        kinds = [self._graphs_of(index == 0, index == last) for index in range(self._micro_batches)]
        # Prepare the last micro-batch first: it takes the most memory, which the other graphs reuse.
        for graphs in dict.fromkeys(reversed(kinds)):
            graphs.prepare(batches, self._capturer)
        self._replay_update = self._capturer.prepare(super().update)
        self._capturer.capture()

    def restricted_ops(self) -> AbstractContextManager[None]:
        return only_capturable(self._recomputed)

    def _graphs_of(self, is_first: bool, is_last: bool) -> BatchGraphs:
        return self._graphs[is_first and self._first_differs, is_last and self._last_differs]
