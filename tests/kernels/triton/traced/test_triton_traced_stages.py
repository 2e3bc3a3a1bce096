"""The training step of several pipeline stages, traced without a device: matching messages, and waits of streams."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bert.parallel.mesh import Mesh
from bert.parallel.pipeline.stages import PipelineModel
from dataloading.batches.loader import inert_batch
from tests.bert.process_groups import TimelineError, require_an_end, require_same_order
from tests.bert.timeline import Timeline
from tests.kernels.triton.traced.traced_steps import META, SHAPE_BUCKET, TracedStep, shared_step, watched


@dataclass(frozen=True)
class Shape:
    """Configuration of ``copies`` copies of the model, all on one host."""

    pipeline: int
    virtual_stages: int = 1
    tensor: int = 1
    copies: int = 1
    reduction: str = "flat"
    micro_batches: int = 4

    def __str__(self) -> str:
        ranks = f"{self.copies} x {self.pipeline} ({self.virtual_stages}) x {self.tensor}"
        return f"{ranks}-{self.reduction}-{self.micro_batches}"

    @property
    def ranks(self) -> int:
        return self.copies * self.pipeline * self.tensor


TWO = Shape(2, micro_batches=2)
SHAPES = [
    TWO,
    Shape(4, virtual_stages=2, micro_batches=8),
    Shape(2, tensor=2, copies=2, reduction="sharded_world", micro_batches=2),
]
Fault = Callable[[int, pytest.MonkeyPatch], None]
"""Function that changes the library on one rank or on all ranks."""


def step_on(rank: int, shape: Shape) -> TracedStep:
    mesh = Mesh(rank, shape.ranks, rank, META, (tuple(range(shape.ranks)),), shape.tensor, shape.pipeline)
    return shared_step(
        mesh,
        8,
        shape.virtual_stages,
        reduction=shape.reduction,
        gradient_accumulation_steps=shape.micro_batches,
    )


@contextmanager
def first_step() -> Iterator[None]:
    """Allow one read by the host: a PyTorch schedule's first step asks whether all stages know their shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "item", lambda _: 1)
        # "meta" has no random state to restore.
        patch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
        yield


def two_steps(rank: int, shape: Shape, fault: Fault = lambda *_: None) -> Timeline:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        timeline = watched(rank, stack, patch)
        fault(rank, patch)
        step, batch = step_on(rank, shape), inert_batch(SHAPE_BUCKET).to(META)
        try:
            with first_step():
                step([batch] * shape.micro_batches)
            step([batch] * shape.micro_batches)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # PyTorch's stages wrap errors of a pass in their own error
    return timeline


def all_ranks(shape: Shape, fault: Fault = lambda *_: None) -> list[Timeline]:
    """Trace two steps of each rank and compare the ranks' calls."""
    timelines = [two_steps(rank, shape, fault) for rank in range(shape.ranks)]
    require_same_order(timelines)
    require_an_end(timelines)
    return timelines


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_messages_meet_and_streams_wait(shape: Shape):
    """The timeline raises if a stream does not wait for data that it reads or overwrites, or if the host waits."""
    timelines = all_ranks(shape)
    last = shape.pipeline * shape.virtual_stages - 1
    for timeline in timelines[: shape.pipeline * shape.tensor]:  # the ranks of one copy
        messages = Counter(each.group for each in timeline.collectives if each.name.startswith("message"))
        assert all(timeline.rank in ends for ends in messages)
        place = timeline.rank // shape.tensor
        # Each step sends hidden states, gradients and the word table. The first one also exchanges shapes.
        own = range(place, last + 1, shape.pipeline)
        ways = sum((stage > 0) + (stage < last) for stage in own)
        word = 4 if place in (0, shape.pipeline - 1) else 0
        assert messages.total() == 2 * (2 * shape.micro_batches * ways) + 2 * ways + word
    groups = {each.group for each in timelines[0].collectives if each.name == "all_reduce"}
    assert ((0, 1) in groups) == (shape.tensor == 2)


def unbatched(operations: list[dist.P2POp]) -> list[Any]:
    return [
        each.op(
            each.tensor, group=each.group, **{"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
        )
        for each in operations
    ]


def a_batch_one_by_one(_: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dist, "batch_isend_irecv", unbatched)


def another_dtype_on_rank_0(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank == 0:
        patch.setattr(PipelineModel, "hidden_dtype", lambda _: torch.bfloat16)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (another_dtype_on_rank_0, r"is .*bfloat16.*, on rank 1 .*32"),
        (a_batch_one_by_one, "ranks wait for one another"),
    ],
)
def test_what_does_not_fit_is_noticed(fault: Fault, message: str):
    with pytest.raises(TimelineError, match=message):
        all_ranks(TWO, fault)
