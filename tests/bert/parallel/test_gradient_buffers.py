"""Gradients of a backward pass in buffers that buckets use in turn, on one rank that others are said to be beside."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bert.optimizer import ALIGNMENT, FlatParameters
from bert.parallel.reduction.gradients import Communicators
from bert.parallel.reduction.sharded_gradients import BUFFERS, ShardedReduction
from kernels import LambSegments

SIZES = (8, 4, 6, 30, 2)
"""Of parameters, by vectors of 16: longer and shorter than a bucket of 5."""


class Model(nn.Module):
    """Parameters that give the loss the gradients which they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(size * ALIGNMENT)) for size in SIZES)

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        products = [
            each @ gradient for each, gradient in zip(self.each, gradients, strict=True) if gradient is not None
        ]
        return torch.stack(products).sum()


def reduction_of(model: Model) -> ShardedReduction:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    places = {
        each: slice((end - size) * ALIGNMENT, end * ALIGNMENT)
        for each, end, size in zip(model.each, ends, SIZES, strict=True)
    }
    weights, none = torch.zeros(sum(SIZES) * ALIGNMENT), torch.zeros(0)
    flat = FlatParameters(weights, none, LambSegments((len(weights),), (True,)), weights, none, places)
    several = Communicators(cast(dist.ProcessGroup, object()), None, None, 1)
    return ShardedReduction(flat, several, "sharded", bucket_bytes=5 * 4 * ALIGNMENT)


def random_gradients() -> list[torch.Tensor]:
    return [torch.randn(size * ALIGNMENT) for size in SIZES]


def test_micro_batches_add_up_and_nothing_is_left() -> None:
    torch.manual_seed(0)
    model = Model()
    reduction = reduction_of(model)
    first, second = random_gradients(), random_gradients()
    with reduction.overlapped(False):
        model(list(first)).backward()
    without = [None if number == 1 else gradient for number, gradient in enumerate(second)]  # of which none comes
    with reduction.overlapped(True):
        model(without).backward()
    reduction.finish()
    expected = torch.cat([one + (0 if other is None else other) for one, other in zip(first, without, strict=True)])
    own = torch.cat([expected[bucket] for bucket in reduction.buckets])
    assert torch.equal(reduction.own_sums, own)
    assert all(each.grad is None for each in model.each)


def test_a_pass_sends_the_buckets_of_its_parameters_alone() -> None:
    """As a stage of a pipeline gives gradients to its own layers, and one parameter gets its gradient from elsewhere."""
    model = Model()
    reduction = reduction_of(model)
    gradients = random_gradients()
    with reduction.overlapped(False, list(model.each)[3:]):
        model([None] * 3 + gradients[3:]).backward()
    assert reduction._packed == 7
    with reduction.overlapped(False, [model.each[0]]):
        model.each[0].grad = gradients[0].clone()
    assert reduction._packed == 9
    reduction.finish()
    expected = torch.cat([*gradients[:1], torch.zeros(10 * ALIGNMENT), *gradients[3:]])
    assert torch.equal(reduction.own_sums, torch.cat([expected[bucket] for bucket in reduction.buckets]))


def test_buckets_wait_for_their_buffer_and_not_for_the_pass_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    reduction = reduction_of(model)
    passes, waits = 0, []

    def run(work: Callable[[], None]) -> Callable[[], None]:
        work()
        number, sent = passes, reduction._packed
        return lambda: waits.append((number == passes, reduction._packed - sent))

    monkeypatch.setattr(reduction.stream, "run", run)
    for passes in range(2):  # noqa: B007  read by what waits
        with reduction.overlapped(False):
            model(list(random_gradients())).backward()
    assert len(waits) == 2 * (len(reduction.buckets) - BUFFERS)
    assert all(same_pass for same_pass, _ in waits)
    assert {since for _, since in waits} == {BUFFERS}
