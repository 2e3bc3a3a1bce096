"""Training of a pipeline on the micro-batches of a step, in the order of PyTorch's schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from bert.execution.stopwatch import Stopwatch
from bert.model import PretrainingOutput
from bert.parallel.pipeline.stages import PipelineModel, Stage
from dataloading.batches.loader import Batch
from dataloading.batches.sampler import TOKENS_MULTIPLE


class PipelineSchedule:
    """Forward and backward passes of a step's micro-batches through the stages of all ranks.

    A rank's own computation counts as the phase ``forward_backward``. Time that a rank waits for its neighbours counts as
    ``reduce``, the phase of the caller. So the watchdog can see which rank of a copy the other ranks are waiting for.
    """

    def __init__(
        self,
        pipeline: PipelineModel,
        micro_batches: int,
        autocast: Callable[[], AbstractContextManager[object]],
        mean_loss: Callable[[PretrainingOutput, Batch], Tensor],
        stopwatch: Stopwatch,
    ) -> None:
        """``mean_loss`` returns the loss from which the last stage's backward pass starts. It may record its arguments."""
        self.pipeline = pipeline
        self.autocast = autocast
        self.mean_loss = mean_loss
        self.batches: Sequence[Batch] = ()
        self.dropout_states: Sequence[Tensor | None] = ()
        """Dropout state of each micro-batch, so that masks do not depend on the order in which stages run micro-batches."""
        self.rows = 0
        """Number of rows W of the tensors that stages send: the largest number in any micro-batch so far, rounded up."""
        self._stopwatch = stopwatch
        # PyTorch splits a step's input along the first dimension. This input consists of the numbers of the micro-batches,
        # by which a stage finds the batch that its rank has loaded. It is on the host, so nothing waits for the device.
        self._micro_batches = torch.arange(micro_batches)
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B | None = None

    def __call__(self, micro_batches: Sequence[Batch]) -> None:
        """Run all micro-batches forward and backward through this rank's stages. Every rank must call it."""
        self.batches = micro_batches
        self.dropout_states = [self.pipeline.next_dropout_state() for _ in micro_batches]
        rows = max(map(self.pipeline.rows, micro_batches))
        # PyTorch's stages have buffers of one shape. All ranks of a copy have the same micro-batches and so enlarge their
        # buffers in the same step. The host then waits until all stages have confirmed their shapes.
        if self._schedule is None or rows > self.rows:
            self.rows = -(-rows // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
            self._schedule = self._torch_schedule()
        numbers = self._micro_batches  # passed as target too, because PyTorch computes no loss without a target
        self._schedule.step(target=numbers, return_outputs=False, micro_batch=numbers)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block's time as this rank's own computation."""
        with self._stopwatch.time("forward_backward"):
            yield
        self._stopwatch.tracker.enter("reduce")

    def _torch_schedule(self) -> Schedule1F1B | ScheduleInterleaved1F1B:
        stages: list[Any] = [_TimedStage(self, stage) for stage in self.pipeline.stages]
        # The last stage's loss is already divided by the counts of the global batch. PyTorch must not divide it again by the
        # number of micro-batches.
        settings: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if len(stages) == 1:
            return Schedule1F1B(stages[0], len(self._micro_batches), **settings)
        return ScheduleInterleaved1F1B(stages, len(self._micro_batches), **settings)


class _TimedStage(PipelineStage):
    """PyTorch's stage, which also records when it computes."""

    def __init__(self, schedule: PipelineSchedule, stage: Stage) -> None:
        pipeline = schedule.pipeline
        weight = next(pipeline.parameters())
        with schedule.autocast():
            dtype = pipeline.hidden_dtype()
        shape = schedule.rows, pipeline.config.hidden_size
        # If these shapes were not given, PyTorch would infer them with an extra pass through the stages.
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
    """Module that PyTorch's schedules call with a micro-batch's number and, except on the first stage, hidden states."""

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
            output = pipeline.through(self._stage, hidden_WD, batch, schedule.dropout_states[number])
        if isinstance(output, PretrainingOutput):
            return schedule.mean_loss(output, batch)
        # Pad the rows to the size of the next stage's buffer. That stage removes the padding.
        return F.pad(output, (0, 0, 0, schedule.rows - rows))
