"""Timeline of one rank's work, without a device or other ranks: operators and collectives by stream.

This module fakes PyTorch's CUDA streams, events and graphs, and ``process_groups.py`` fakes process groups. Tensors need
no values: they may be on the device "meta", where reading a value raises an error. As in PyTorch's allocator, freed
memory returns at once to the stream that allocated it. Other streams must have finished with that memory before this
stream runs its next operator.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert.parallel.reduction import gradients
from tests.bert.process_groups import Collective, Group, TimelineError, exchange_batch

Clock = Counter["Stream"]
"""Vector clock: the number of each stream's operators that are known to precede a point in time."""


@dataclass(frozen=True)
class _Access:
    """Bytes of a storage that an operator reads or writes."""

    storage: int
    start: int
    stop: int
    writes: bool

    def meets(self, other: "_Access") -> bool:
        """Return whether two accesses must be ordered: they overlap, and at least one writes."""
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class _Past:
    access: _Access
    stream: "Stream"
    moment: int
    operator: str


@dataclass(eq=False)
class Stream:
    """Fake CUDA stream, with a clock of all streams' operators that it has waited for."""

    timeline: "Timeline"
    name: str
    clock: Clock = field(default_factory=Counter)
    capture: "Graph | None" = None
    """Graph whose capture the stream is part of."""
    freed: list[tuple[int, "Graph | None"]] = field(default_factory=list)
    """Freed storages, each with the graph captured at the time. The stream's next operator may reuse their memory."""
    priority: int = 0
    device = torch.device("cuda", 0)

    def wait_stream(self, other: "Stream") -> None:
        """Wait for all work that has been queued on the other stream so far."""
        self._wait(other.clock, other.capture, other.name)

    def wait_event(self, event: "Event") -> None:
        """Wait for all work that preceded the event."""
        self._wait(event.clock, event.capture, "an event")

    def record_event(self) -> "Event":
        """Return an event after all work that has been queued so far."""
        event = Event(self.timeline)
        event.record(self)
        return event

    def _wait(self, clock: Clock, capture: "Graph | None", what: str) -> None:
        if self.capture is not capture and self.capture is not None:
            raise TimelineError(f"{self.name} is captured and waits for {what}, which is not")
        if self.capture is None and capture is not None:
            self.capture = capture
            capture.streams.append(self)
        self.clock |= clock


class Event:
    def __init__(self, timeline: "Timeline") -> None:
        self._timeline = timeline
        self.clock: Clock = Counter()
        self.capture: Graph | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work that has been queued so far on ``stream``, by default the current stream."""
        stream = stream or self._timeline.current
        self.clock, self.capture = stream.clock.copy(), stream.capture


class Graph:
    """Fake CUDA graph. A replay counts as one operator with all memory accesses of the capture."""

    def __init__(self, timeline: "Timeline") -> None:
        self._timeline = timeline
        self.streams: list[Stream] = []
        self.accesses: dict[_Access, None] = {}
        self.past: dict[int, list[_Past]] = {}
        """Accesses of captured work. They are separate from the timeline's, because captured work does not run."""
        self.collectives: list[Collective] = []

    def replay(self) -> None:
        """Replay the captured work on the current stream."""
        self._timeline.run("replay", self.accesses)
        self._timeline.collectives += self.collectives

    def reset(self) -> None:
        """Do nothing. Tests of captured runs check elsewhere that graphs are reset."""


class Timeline(TorchDispatchMode):
    """Record of the work that a rank queues on its device, made by fake streams, events, graphs and groups."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.host = Stream(self, "host")
        """Stream of the host's waits for other ranks. All work that the host submits later comes after these waits."""
        self.main = self.current = Stream(self, "main")
        self.streams = [self.main]
        self.collectives: list[Collective] = []
        self.operators: Counter[Stream] = Counter()
        """Number of operators on each stream."""
        self._past: dict[int, list[_Past]] = {}
        self._numbers = itertools.count()
        self._storages: dict[int, int] = {}
        """Number of the current storage at each address, because a later storage may reuse an address."""
        self._recorded: dict[int, set[Stream]] = {}
        """Streams passed to ``record_stream``, by storage. The allocator waits for them before it reuses memory."""

    @contextmanager
    def watching(self, patch: pytest.MonkeyPatch) -> Iterator["Timeline"]:
        """Replace CUDA and process groups by fakes, and record all operators in the block."""
        stream = gradients.CommunicationStream
        patch.setattr(gradients, "CommunicationStream", lambda _: stream(torch.device("cuda", 0)))
        patch.setattr(dist, "new_group", lambda ranks, **_: self._new_group(patch, tuple(ranks)))
        patch.setattr(dist, "batch_isend_irecv", exchange_batch)
        # PyTorch asks the default group for this rank's number.
        patch.setattr(distributed_c10d, "_get_default_group", lambda: SimpleNamespace(rank=lambda: self.rank))
        for name, stand_in in {
            "Stream": self._new_stream,
            "Event": lambda **_: Event(self),
            "current_stream": lambda _=None: self.current,
            "stream": self.on,
            "synchronize": None,  # a call would fail: the host must not wait for the device
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: self.current.capture is not None,
            "graph_pool_handle": lambda: None,
            "CUDAGraph": lambda: Graph(self),
            "graph": self._capturing,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.record(tensor, stream))
        with self:
            yield self

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and record its reads and writes. Creating a view is not an access."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        accesses = {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            accesses |= {self.access(each, writes): None for each in tree_leaves(value) if isinstance(each, Tensor)}
        known = {access.storage for access in accesses}
        made = [self.access(each, True) for each in tree_leaves(result) if isinstance(each, Tensor)]
        accesses |= {each: None for each in made if each.storage not in known}
        self.run(str(func), accesses)
        return result

    def run(self, operator: str, accesses: Mapping[_Access, None]) -> None:
        """Record an operator on the current stream. Raises if it does not wait for an operator that shares its memory."""
        stream = self.current
        stream.clock[stream] += 1
        self.operators[stream] += 1
        pasts = self._past if stream.capture is None else stream.capture.past
        freed, stream.freed = stream.freed, []
        for storage, capture in freed:
            for before in pasts.pop(storage, ()) if capture is stream.capture else ():
                if stream.clock[before.stream] < before.moment and before.stream not in self._recorded.get(storage, ()):
                    raise TimelineError(
                        f"{operator} on {stream.name} may be given memory that {before.operator} on {before.stream.name} "
                        "has, and does not wait for it"
                    )
        for access in accesses:
            past = pasts.setdefault(access.storage, [])
            for before in past:
                if before.access.meets(access) and stream.clock[before.stream] < before.moment:
                    does = "writes" if access.writes else "reads"
                    did = "wrote" if before.access.writes else "read"
                    raise TimelineError(
                        f"{operator} on {stream.name} {does} what {before.operator} on {before.stream.name} {did}, "
                        "and does not wait for it"
                    )
            # Forget accesses to the overwritten memory: checking later accesses against this write is enough.
            past[:] = [each for each in past if not (access.writes and _covers(access, each.access))]
            past.append(_Past(access, stream, stream.clock[stream], operator))
            if stream.capture is not None:
                stream.capture.accesses[access] = None

    def stream_of(self, ranks: tuple[int, ...]) -> Stream:
        """Return a new stream for communication among some ranks."""
        return Stream(self, f"messages {'-'.join(map(str, ranks))}")

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make a stream the current one in the block."""
        return mock.patch.object(self, "current", stream)

    def note(self, name: str, group: tuple[int, ...], dtype: torch.dtype, elements: int) -> None:
        """Record a collective that the current stream has run."""
        stream, graph = self.current, self.current.capture
        after, moment = stream.clock | self.host.clock, stream.clock[stream]
        after[stream] = moment - 1
        made = Collective(name, group, dtype, elements, stream, moment, after)
        (self.collectives if graph is None else graph.collectives).append(made)

    def _new_group(self, patch: pytest.MonkeyPatch, ranks: tuple[int, ...]) -> Group:
        group = Group(self, ranks)
        patch.setitem(distributed_c10d._world.pg_group_ranks, group, {rank: place for place, rank in enumerate(ranks)})
        return group

    def access(self, tensor: Tensor, writes: bool) -> _Access:
        """Return the bytes of a tensor."""
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = int(tensor.storage_offset()) * tensor.element_size()
        length = reach * tensor.element_size() if tensor.numel() else 0
        return _Access(self._number(tensor.untyped_storage()), start, start + length, writes)

    def _number(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        if address not in self._storages:
            self._storages[address] = number = next(self._numbers)
            stream = self.current

            def free(capture: Graph | None = stream.capture) -> None:
                del self._storages[address]
                stream.freed.append((number, capture))

            weakref.finalize(storage, free).atexit = False
        return self._storages[address]

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory until the stream has finished with it."""
        self._recorded.setdefault(self._number(tensor.untyped_storage()), set()).add(stream)

    def _new_stream(self, _: object = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(self, f"side {len(self.streams)}", priority=priority))
        return self.streams[-1]

    @contextmanager
    def _capturing(self, graph: Graph, stream: Stream, **_: object) -> Iterator[None]:
        stream.clock |= self.current.clock  # torch.cuda.graph synchronizes with the device first
        stream.capture = graph
        graph.streams.append(stream)
        with self.on(stream):
            yield
        for each in graph.streams:
            each.capture = None
            if stream.clock[each] < each.clock[each]:
                raise TimelineError(f"{each.name} is not waited for at the end of the capture")


def _covers(access: _Access, other: _Access) -> bool:
    return access.start <= other.start and other.stop <= access.stop
