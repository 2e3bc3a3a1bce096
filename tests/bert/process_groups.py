"""Fake process groups that record one rank's calls, so that tests can compare the calls of all ranks.

The groups behave like NCCL in PyTorch. A synchronous collective runs on the current stream. A message runs on the stream
of a communicator: a single message on the stream of the pair of ranks, a batch of messages on the group's stream. Waiting
for a message makes the current stream wait for the message's stream. A communicator is created at its first use, for
which the processes of its ranks wait for one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from tests.bert.timeline import Clock, Stream, Timeline


class TimelineError(AssertionError):
    """Missing wait between streams that share data, a wait that a capture forbids, or ranks whose calls differ."""


@dataclass(frozen=True)
class Collective:
    """A call that all members of a group must make in the same order.

    A message is a collective of its sender and receiver.
    """

    name: str
    group: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    """Size of the whole tensor: a gather's output or a scatter's input."""
    stream: "Stream" = field(compare=False, repr=False)
    moment: int = field(compare=False, repr=False)
    """Position on the stream. All messages of a batch share one."""
    after: "Clock" = field(compare=False, repr=False)
    """Number of operators on each stream that precede this call."""

    def comes_after(self, other: "Collective") -> bool:
        """Return whether this call must wait for the end of another call of the same rank."""
        return self.after[other.stream] >= other.moment


def require_same_order(timelines: Sequence["Timeline"]) -> None:
    """Raise ``TimelineError`` unless all members of each group make the same calls in the same order."""
    for group in {each.group for timeline in timelines for each in timeline.collectives}:
        first, *others = ([each for each in timelines[rank].collectives if each.group == group] for rank in group)
        for rank, own in zip(group[1:], others, strict=True):
            for number, (theirs, mine) in enumerate(zip_longest(first, own)):
                if theirs != mine:
                    raise TimelineError(f"call {number} of group {group} is {theirs}, on rank {rank} {mine}")


def require_an_end(timelines: Sequence["Timeline"]) -> None:
    """Raise ``TimelineError`` if the ranks would deadlock: each one's next call waits for another rank's later call."""
    left = [list(timeline.collectives) for timeline in timelines]
    ready = [_ready(own) for own in left]
    while any(left):
        met = next((each for own in ready for each in own if all(each in ready[rank] for rank in each.group)), None)
        if met is None:
            raise TimelineError(f"ranks wait for one another: {[own[:1] for own in ready]}")
        for rank in met.group:
            left[rank].remove(met)
            ready[rank] = _ready(left[rank])


def _ready(calls: list[Collective]) -> list[Collective]:
    return [each for place, each in enumerate(calls) if not any(map(each.comes_after, calls[:place]))]


class Group(dist.ProcessGroup):
    """Fake process group that records calls and leaves tensors unchanged."""

    def __init__(self, timeline: "Timeline", ranks: tuple[int, ...]) -> None:
        super().__init__(ranks.index(timeline.rank), len(ranks))  # pyright: ignore[reportCallIssue]
        self._timeline = timeline
        self.ranks = ranks
        self._communicators: dict[int | None, Stream] = {}
        """Stream for messages with each other rank. The key None has the stream of the whole group's communicator."""

    def allreduce(self, tensors: list[Tensor], *_: Any) -> "Group":
        return self._run("all_reduce", *tensors)

    def broadcast(self, tensors: list[Tensor], *_: Any) -> "Group":
        return self._run("broadcast", *tensors)

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any) -> "Group":
        return self._run("all_gather", output, own)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, *_: Any) -> "Group":
        return self._run("reduce_scatter", own, output)

    def all_to_all_single(self, output: Tensor, own: Tensor, *_: Any) -> "Group":
        return self._run("all_to_all", output, own)

    def send(self, tensors: list[Tensor], receiver: int, *_: Any) -> SimpleNamespace:
        ends = self._timeline.rank, self.ranks[receiver]
        return self._exchange("message", self._communicator(receiver), [(ends, tensor) for tensor in tensors])

    def recv(self, tensors: list[Tensor], sender: int, *_: Any) -> SimpleNamespace:
        ends = self.ranks[sender], self._timeline.rank
        return self._exchange("message", self._communicator(sender), [(ends, tensor) for tensor in tensors])

    def exchange(self, operations: Sequence[dist.P2POp]) -> SimpleNamespace:
        """Start a batch of sends and receives."""
        messages = []
        for each in operations:
            own, other = self._timeline.rank, self.ranks[each.group_peer]
            messages.append(((own, other) if each.op is dist.isend else (other, own), each.tensor))
        return self._exchange("message of a batch", self._communicator(), messages)

    def wait(self, *_: Any) -> None:
        """Do nothing: a collective returns its group in place of a ``Work`` object that has finished."""

    def _run(self, name: str, whole: Tensor, *others: Tensor) -> "Group":
        """Record a collective on the current stream that reads and writes all its tensors."""
        timeline = self._timeline
        self._communicator()
        timeline.run(name, {timeline.access(tensor, True): None for tensor in (whole, *others)})
        timeline.note(name, self.ranks, whole.dtype, whole.numel())
        return self

    def _exchange(self, name: str, stream: "Stream", messages: list[tuple[tuple[int, int], Tensor]]) -> SimpleNamespace:
        """Record messages, each ((sender, receiver), tensor), on a stream that first waits for the current stream.

        Returns a fake ``Work`` object, whose ``wait`` makes the current stream wait, but not the host.
        """
        timeline = self._timeline
        stream.wait_stream(timeline.current)
        with timeline.on(stream):
            accesses = {timeline.access(tensor, receiver == timeline.rank): None for (_, receiver), tensor in messages}
            timeline.run(name, accesses)
            for ends, tensor in messages:
                timeline.record(tensor, stream)  # PyTorch keeps a tensor until it has been sent
                timeline.note(name, ends, tensor.dtype, tensor.numel())
            over = stream.record_event()
        return SimpleNamespace(wait=lambda: timeline.current.wait_event(over))

    def _communicator(self, other: int | None = None) -> "Stream":
        if other not in self._communicators:
            ranks, of = self.ranks, "a group"
            if other is not None:
                ranks, of = tuple(sorted((self._timeline.rank, self.ranks[other]))), "a pair"
            self._communicators[other] = self._timeline.stream_of(ranks)
            with self._timeline.on(self._timeline.host):  # the host waits for the other ranks
                self._timeline.run(f"communicator of {of}", {})
                self._timeline.note(f"communicator of {of}", ranks, torch.uint8, 0)
        return self._communicators[other]


def exchange_batch(operations: list[dist.P2POp]) -> list[SimpleNamespace]:
    """Stand in for ``dist.batch_isend_irecv``."""
    group = operations[0].group
    assert isinstance(group, Group)
    return [group.exchange(operations)]
