"""Training on the micro-batches of a step in PyTorch's schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from bert.layers import DropoutSites
from bert.model import PretrainingOutput
from bert.parallel.pipeline.division import Stage
from bert.parallel.pipeline.stages import PipelineModel
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.loader import Batch
from dataloading.batches.shape_buckets import TOKENS_MULTIPLE


class PipelineSchedule:
    """Forward and backward passes of a step's micro-batches through the stages of all ranks.

    A rank's own computing counts as ``forward_backward``, waiting for its neighbours as ``reduce``: so the watchdog sees
    which rank of a copy it is that the others wait for.
    """

    def __init__(
        self,
        pipeline: PipelineModel,
        micro_batches: int,
        autocast: Callable[[], AbstractContextManager[object]],
        mean_loss: Callable[[PretrainingOutput, Batch], Tensor],
        stopwatch: Stopwatch,
    ) -> None:
        """``mean_loss`` gives what the last stage's backward pass begins with, and may note what it sees."""
        self.pipeline = pipeline
        self.autocast = autocast
        self.mean_loss = mean_loss
        self.batches: Sequence[Batch] = ()
        self.sites: Sequence[DropoutSites] = ()
        """Of each micro-batch: as on one rank, whatever the order in which stages come to them."""
        self.rows = 0
        """W of what is sent: no micro-batch so far has more."""
        self._stopwatch = stopwatch
        # PyTorch splits the inputs of a step by their first dimension: what each micro-batch gets of these is its
        # number, by which a stage finds the batch that its rank has loaded. On the host, so that reading it waits for
        # nothing.
        self._micro_batches = torch.arange(micro_batches)
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B | None = None

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Add the gradients of all micro-batches to those of this rank's stages. Every rank must call it."""
        self.batches = micro_batches
        self.sites = [self.pipeline.next_sites() for _ in micro_batches]
        rows = max(map(self.pipeline.rows, micro_batches))
        # PyTorch's stages have buffers of one shape. The ranks of a copy have the same micro-batches, and so grow at
        # once. The host then waits until all stages have said that they know their shapes.
        if self._schedule is None or rows > self.rows:
            self.rows = -(-rows // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
            self._schedule = self._torch_schedule()
        with self._stopwatch.time("reduce"):
            numbers = self._micro_batches  # as the target too: PyTorch computes no loss without one
            self._schedule.step(target=numbers, return_outputs=False, micro_batch=numbers)
            self.pipeline.add_word_gradient_()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the body as this rank's own computing."""
        with self._stopwatch.time("forward_backward"):
            yield
        self._stopwatch.tracker.enter("reduce")

    def _torch_schedule(self) -> Schedule1F1B | ScheduleInterleaved1F1B:
        stages: list[Any] = [_TimedStage(self, stage) for stage in self.pipeline.stages]
        # The last stage returns its loss already, divided by the counts of the global batch: not by micro-batches once
        # more.
        settings: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if len(stages) == 1:
            return Schedule1F1B(stages[0], len(self._micro_batches), **settings)
        return ScheduleInterleaved1F1B(stages, len(self._micro_batches), **settings)


class _TimedStage(PipelineStage):
    """PyTorch's stage, which says when it computes."""

    def __init__(self, schedule: PipelineSchedule, stage: Stage) -> None:
        pipeline = schedule.pipeline
        weight = next(pipeline.parameters())
        with schedule.autocast():
            dtype = pipeline.hidden_dtype()
        shape = schedule.rows, pipeline.config.hidden_size
        # Shapes that are given spare PyTorch a pass through the stages to find them.
        hidden_WD = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=weight.dtype, device="meta")
        super().__init__(
            _StageModule(schedule, stage),
            stage.index,
            stage.count,
            weight.device,
            input_args=() if stage.is_first else (hidden_WD,),
            output_args=(loss,) if stage.is_last else (hidden_WD,),
            group=pipeline.group,
        )
        self._schedule = schedule

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._schedule.computing():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._schedule.computing():
            return super().backward_one_chunk(*args, **kwargs)


class _StageModule(nn.Module):
    """A stage as PyTorch's schedules call it: for a micro-batch by number, and but for the first with hidden states."""

    def __init__(self, schedule: PipelineSchedule, stage: Stage) -> None:
        super().__init__()
        self._schedule = schedule
        self._stage = stage

    def forward(self, *lengthened: Tensor, micro_batch: Tensor) -> Tensor:
        schedule, number = self._schedule, int(micro_batch)
        batch, pipeline = schedule.batches[number], schedule.pipeline
        rows = pipeline.rows(batch)
        with schedule.autocast():
            hidden_WD = lengthened[0][:rows] if lengthened else None
            output = pipeline.through(self._stage, hidden_WD, batch, schedule.sites[number])
        if isinstance(output, PretrainingOutput):
            return schedule.mean_loss(output, batch)
        return F.pad(output, (0, 0, 0, schedule.rows - rows))  # to the shape that is sent; the next stage cuts it off
