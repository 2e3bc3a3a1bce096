"""The training step of several ranks, traced without a device: the order of collectives, and waits between streams."""

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

from bert.execution.cuda_graphs import CudaCapturer
from bert.parallel.mesh import Mesh
from bert.parallel.reduction.gradients import CommunicationStream
from bert.reporting.statistics import Statistics
from dataloading.batches.loader import inert_batch
from tests.bert.process_groups import TimelineError, require_an_end, require_same_order
from tests.bert.timeline import Timeline
from tests.kernels.triton.traced.traced_steps import META, SHAPE_BUCKET, TracedStep, shared_step, watched

RANKS = 4


@dataclass(frozen=True)
class Shape:
    """Configuration of four ranks on two hosts."""

    reduction: str
    tensor: int = 1
    precision: str = "fp32"
    reduce_dtype: str = "fp32"

    def __str__(self) -> str:
        return f"{self.reduction}-tensor {self.tensor}-{self.precision}-{self.reduce_dtype}"


SHAPES = [
    Shape("hierarchical", reduce_dtype="bf16"),
    Shape("sharded", reduce_dtype="bf16"),
    Shape("flat", tensor=2, precision="fp8"),
    Shape("sharded_world", tensor=2),
]


def step_on(rank: int, shape: Shape, capturer: CudaCapturer | None) -> TracedStep:
    training = {name: value for name, value in vars(shape).items() if name != "tensor"}
    mesh = Mesh(rank, RANKS, rank % 2, META, ((0, 1), (2, 3)), shape.tensor)
    return shared_step(mesh, layers=2, capturer=capturer, gradient_accumulation_steps=2, **training)


def two_steps(rank: int, shape: Shape, captured: bool = False) -> Timeline:
    """Trace two steps of two micro-batches each, with or without CUDA graphs."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Statistics, "fetch", lambda _: None)  # the host reads only at evaluations and after the warm-up
        timeline = watched(rank, stack, patch)
        batch = inert_batch(SHAPE_BUCKET).to(META)
        step = step_on(rank, shape, CudaCapturer(torch.device("cuda")) if captured else None)
        if captured:
            step.warm_up([batch] * 2, 0, [SHAPE_BUCKET])
            timeline.collectives.clear()
        for _ in range(2):
            step([batch] * 2)
    return timeline


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_call_the_same_collectives_and_streams_wait(shape: Shape):
    """The timeline raises if a stream does not wait for data that it reads or overwrites, or if the host waits."""
    timelines = [two_steps(rank, shape) for rank in range(RANKS)]
    require_same_order(timelines)
    require_an_end(timelines)
    own = timelines[-1]
    data, tensor = ((1, 3), (2, 3)) if shape.tensor == 2 else ((0, 1, 2, 3), None)
    groups = {each.group for each in own.collectives}
    assert (data in groups) == (shape.reduction in ("flat", "sharded_world"))
    assert (tensor in groups) == (shape.tensor == 2)
    reduced = [each.dtype for each in own.collectives if each.stream is not own.main]
    assert len(reduced) >= 20, "beside the backward pass"
    assert (torch.bfloat16 in reduced) == (shape.reduce_dtype == "bf16")
    captured = two_steps(RANKS - 1, shape, captured=True)
    # The warm-up has created the communicators.
    made = [each for each in own.collectives if not each.name.startswith("communicator")]
    assert captured.collectives == made[-len(captured.collectives) :]
    assert len(captured.collectives) > 30
    assert captured.operators[captured.main] < 0.7 * own.operators[own.main]


def test_a_capture_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CommunicationStream, "join", lambda _: None)
    with pytest.raises(TimelineError, match=r"on side \d writes what all_reduce on side \d wrote"):
        two_steps(0, Shape("flat"), captured=True)
