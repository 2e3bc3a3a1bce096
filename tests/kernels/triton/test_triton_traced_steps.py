"""The training step on the device "meta", whose tensors have no values, so that reading a value is an error.

Forward and backward passes, LAMB and statistics run through Triton's operators, whose fake functions replace the kernels.
The device is "meta", because PyTorch without CUDA cannot fake gradients on a CUDA device. Transfers from the host are
detected as well, as they mix CPU and meta tensors. With several ranks, the collectives and messages of all ranks must
match, and a stream must wait for data of another stream.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig, ParallelConfig
from bert.execution.cuda_graphs import CudaCapturer
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.reduction.gradients import CommunicationStream
from bert.step import Statistics, TrainingStep
from dataloading.batches.loader import inert_batch
from dataloading.batches.sampler import ShapeBucket
from kernels import OPS, choose
from tests.bert import small_models
from tests.bert.operators import Operators
from tests.bert.process_groups import TimelineError, require_an_end, require_same_order
from tests.bert.small_models import step_config
from tests.bert.timeline import Timeline

META = torch.device("meta")
SHAPE_BUCKET = ShapeBucket(192, 5, 32, 48)
BATCH = inert_batch(SHAPE_BUCKET).to(META)
MODEL = ModelConfig(2, 32, 2, 64, 50, 48)


def traced_step(mesh: Mesh, config: Config, capturer: CudaCapturer | None = None) -> TrainingStep:
    model = BertForPreTraining(config.model).to(mesh.device).train()
    return small_models.step_on(model, config, mesh, capturer)


def choose_triton() -> None:
    choose({name: "triton" if "triton" in op.implementations else "reference" for name, op in OPS.items()})


class Watch(Operators):
    """Record of all operators, and of operators that have tensors on both the CPU and the device."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.crossings.append(str(func))
        return result


@pytest.mark.oldest_torch
def test_a_step_copies_no_values_between_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device=None: False)  # "meta" has no autocast
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    step = traced_step(Mesh(0, 1, 0, META), step_config(MODEL))
    choose_triton()
    step([BATCH])  # not watched, because the first step creates cached tables
    with Watch() as watch:
        step([BATCH, BATCH])
    assert len(watch.names) > 200
    assert sum("lamb_apply" in name for name in watch.names) == 1
    assert sum("attention" in name for name in watch.names) >= 8  # 2 layers x 2 passes x 2 batches
    assert watch.crossings == []


@dataclass(frozen=True)
class Shape:
    """Parallelism and reduction of a traced run, with ``local_size`` ranks on each host."""

    reduction: str = "flat"
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    micro_batches: int = 2
    ranks: int = 4
    local_size: int = 4
    precision: str = "fp32"
    reduce_dtype: str = "fp32"

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values()))


SHARED = [
    Shape("hierarchical", local_size=2, reduce_dtype="bf16"),
    Shape("sharded", local_size=2, reduce_dtype="bf16"),
    Shape(tensor=2, local_size=2, precision="fp8"),
    Shape("sharded_world", tensor=2, local_size=2),
]
TWO_STAGES = Shape(pipeline=2, ranks=2, local_size=2)
PIPELINES = [
    TWO_STAGES,
    Shape(pipeline=4, virtual_stages=2, micro_batches=8),
    Shape("sharded_world", tensor=2, pipeline=2, ranks=8, local_size=8),
]
Fault = Callable[[int, pytest.MonkeyPatch], object]
"""Function that breaks the library on one rank or on all ranks."""


@contextmanager
def watched(rank: int) -> Iterator[tuple[Timeline, pytest.MonkeyPatch]]:
    """Use Triton's implementations, and yield the rank's timeline, which is recorded in the block."""
    choose_triton()
    with pytest.MonkeyPatch.context() as patch:
        # PyTorch raises an error if autocast is used on "meta" or queried for it.
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        patch.setattr(torch, "is_autocast_enabled", lambda _device=None: False)
        patch.setattr(Statistics, "fetch", lambda _: None)  # the warm-up reads statistics on the host
        with Timeline(rank).watching(patch) as timeline:
            yield timeline, patch


def step_on(rank: int, shape: Shape, capturer: CudaCapturer | None) -> TrainingStep:
    nodes = tuple(tuple(range(first, first + shape.local_size)) for first in range(0, shape.ranks, shape.local_size))
    mesh = Mesh(rank, shape.ranks, rank % shape.local_size, META, nodes, shape.tensor, shape.pipeline)
    layers = 8 if shape.pipeline > 1 else 2
    config = step_config(
        replace(MODEL, num_hidden_layers=layers, hidden_size=64, intermediate_size=128),
        bucket_bytes=20_000,
        gradient_accumulation_steps=shape.micro_batches,
        reduction=shape.reduction,
        precision=shape.precision,
        reduce_dtype=shape.reduce_dtype,
    )
    parallel = ParallelConfig(shape.tensor, shape.pipeline, shape.virtual_stages)
    return traced_step(mesh, replace(config, parallel=parallel), capturer)


@contextmanager
def first_step_of_stages() -> Iterator[None]:
    """Allow the host to read in the first step of PyTorch's schedule, which asks whether all stages know their shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "item", lambda _: 1)
        # "meta" has no random state to restore.
        patch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
        yield


def two_steps(rank: int, shape: Shape, captured: bool = False, fault: Fault = lambda *_: None) -> Timeline:
    """Trace two steps, with or without CUDA graphs."""
    with watched(rank) as (timeline, patch):
        fault(rank, patch)
        batches = [BATCH] * shape.micro_batches
        step = step_on(rank, shape, CudaCapturer(torch.device("cuda")) if captured else None)
        if captured:
            step.warm_up(batches, 0, [SHAPE_BUCKET])
            timeline.collectives.clear()
        try:
            with first_step_of_stages() if shape.pipeline > 1 else nullcontext():
                step(batches)
            step(batches)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # unwrap, because PyTorch's pipeline stages wrap errors
    return timeline


def all_ranks(shape: Shape, captured: bool = False, fault: Fault = lambda *_: None) -> list[Timeline]:
    """Trace two steps of each rank, and check that the ranks' collectives match and complete.

    The timeline raises if a stream does not wait for data that it reads or overwrites, or if the host waits.
    """
    timelines = [two_steps(rank, shape, captured, fault) for rank in range(shape.ranks)]
    require_same_order(timelines)
    require_an_end(timelines)
    return timelines


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_collectives_match_between_ranks_and_streams_wait_for_data(shape: Shape):
    own = all_ranks(shape)[-1]
    data, tensor = ((1, 3), (2, 3)) if shape.tensor == 2 else ((0, 1, 2, 3), None)
    groups = {each.group for each in own.collectives}
    assert (data in groups) == (shape.reduction in ("flat", "sharded_world"))
    assert (tensor in groups) == (shape.tensor == 2)
    reduced = [each.dtype for each in own.collectives if each.stream is not own.main]
    assert len(reduced) >= 20, "beside the backward pass"
    assert (torch.bfloat16 in reduced) == (shape.reduce_dtype == "bf16")
    captured = two_steps(shape.ranks - 1, shape, captured=True)
    # The captured run created its communicators during the warm-up, so ignore those of the eager run.
    made = [each for each in own.collectives if not each.name.startswith("communicator")]
    assert captured.collectives == made[-len(captured.collectives) :]
    assert len(captured.collectives) > 30
    assert captured.operators[captured.main] < 0.7 * own.operators[own.main]


@pytest.mark.parametrize("shape", PIPELINES, ids=str)
def test_pipeline_stages_exchange_the_expected_number_of_messages(shape: Shape):
    timelines = all_ranks(shape)
    last = shape.pipeline * shape.virtual_stages - 1
    for timeline in timelines[: shape.pipeline * shape.tensor]:  # the ranks that share one copy of the model
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


def another_dtype_on_rank_0(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank == 0:
        patch.setattr(PipelineModel, "hidden_dtype", lambda _: torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "fault", "message"),
    [
        (
            Shape(local_size=2),
            lambda _, patch: patch.setattr(CommunicationStream, "join", lambda _: None),
            r"on side \d writes what all_reduce on side \d wrote",
        ),
        (TWO_STAGES, another_dtype_on_rank_0, r"is .*bfloat16.*, on rank 1 .*32"),
        (
            TWO_STAGES,
            lambda _, patch: patch.setattr(dist, "batch_isend_irecv", unbatched),
            "ranks wait for one another",
        ),
    ],
    ids=["sums", "types", "messages"],
)
def test_missing_waits_mismatched_types_and_deadlocks_raise(shape: Shape, fault: Fault, message: str):
    with pytest.raises(TimelineError, match=message):
        all_ranks(shape, shape.pipeline == 1, fault)
