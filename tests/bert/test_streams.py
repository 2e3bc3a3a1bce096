"""Separate streams copy batches to the GPU and exchange gradients while a step computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert.parallel.reduction import gradients
from dataloading.batches.loader import Uploads, inert_batch
from dataloading.batches.sampler import ShapeBucket
from tests.bert.process_groups import TimelineError
from tests.bert.timeline import Stream, Timeline

META = torch.device("meta")


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Timeline in place of a GPU. Host memory counts as page-locked, and GPU tensors have no values."""
    empty = torch.empty

    def stand_in(*sizes: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        return empty(*sizes, **settings | ({"device": META} if pin_memory else {}))

    monkeypatch.setattr(torch, "empty", stand_in)
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with Timeline(0).watching(monkeypatch) as timeline:
        yield timeline


def three_steps() -> None:
    """Run three steps. While each one runs, the next step's batches are copied."""
    uploads, batch = Uploads(META), inert_batch(ShapeBucket(192, 5, 32, 48))
    ahead = uploads.start([batch])
    for _ in range(3):
        step, ahead = ahead, uploads.start([batch])
        for copy in uploads.finish(step):
            copy.input_ids.add_(1)


def test_batches_are_copied_on_a_separate_stream_that_does_not_wait_for_steps(timeline: Timeline):
    three_steps()
    main, side = timeline.streams
    assert timeline.operators[side] > timeline.operators[main] == 3
    assert side.clock[main] == 0, "copies wait for no step"


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (Stream, "wait_event", "add_.* on main writes what .*_to_copy.* on side 1 wrote"),
        (Tensor, "record_stream", "on side 1 may be given memory that .*add_.* on main has"),
    ],
    ids=["arrival", "memory"],
)
@pytest.mark.usefixtures("timeline")
def test_the_timeline_detects_batches_that_are_read_or_freed_too_early(
    owner: type, name: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(owner, name, lambda *_: None)
    with pytest.raises(TimelineError, match=message):
        three_steps()


def test_gradient_sums_wait_for_gradients_and_a_step_waits_for_sums_that_it_reads(timeline: Timeline):
    stream = gradients.CommunicationStream(META)
    one, other = torch.empty(4, device=META), torch.empty(4, device=META)

    def sum_up(tensor: Tensor) -> None:
        tensor.add_(1)

    first = stream.run(lambda: sum_up(one))
    stream.run(lambda: sum_up(other))
    side = timeline.streams[1]
    assert (side.priority, timeline.operators[side]) == (-1, 2)
    first()
    one.mul_(2)
    with pytest.raises(TimelineError, match=r"mul_.* on main writes what .*add_.* on side 1 wrote"):
        other.mul_(2)
    stream.join()
    other.mul_(2)
