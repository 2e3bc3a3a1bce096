"""A function captured by ``replay_of`` does not disturb later captures, draws or replays, even if its capture fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bert.execution import cuda_graphs
from bert.execution.cuda_graphs import replay_of

DEVICE = torch.device("cpu")


class Graph:
    def reset(self) -> None:
        pass

    def replay(self) -> None:
        pass


class Stream:
    device = DEVICE

    def wait_stream(self, _: "Stream") -> None:
        pass


class FakeCuda:
    """Stand-ins for ``torch.cuda`` with the state that a failed capture leaves in PyTorch 2.11."""

    def __init__(self) -> None:
        self.streams = 0
        self.default = self.current = Stream()
        self.capturing = self.draws_fail = False
        self.used: list[Stream] = []
        """Streams of the captures, in their order."""

    def new_stream(self, _: torch.device, priority: int = 0) -> Stream:
        assert priority < 0, "streams of the default priority belong to training"
        self.streams += 1
        return Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _: Graph, stream: Stream, **__: object) -> Iterator[None]:
        self.used.append(stream)
        before, self.current = self.current, stream
        self.capturing = self.draws_fail = True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture") from None
        finally:
            self.capturing = False
        self.draws_fail = False
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(cuda_graphs, "_spare_streams", {})
    monkeypatch.setattr(cuda_graphs, "_failed", [])
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.current)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return fake


def nothing() -> None:
    pass


def test_draws_work_after_a_failed_capture(cuda: FakeCuda) -> None:
    def synchronize() -> None:
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error during capture"):
        replay_of(DEVICE, synchronize)
    assert not cuda.draws_fail
    assert cuda.current is cuda.default
    assert len(cuda_graphs._failed) == 1, "PyTorch still refers to the graph"
    replay_of(DEVICE, nothing)
    assert cuda.streams == 1, "the stream is used again"


def test_only_replays_that_are_alive_together_need_several_streams(cuda: FakeCuda) -> None:
    """A stream keeps memory. But PyTorch 2.13 frees the memory of a graph's stream with the graph."""
    for _ in range(3):
        replay_of(DEVICE, nothing)()
    assert cuda.streams == 1
    replays = [replay_of(DEVICE, nothing) for _ in range(2)]
    assert cuda.used[-1] is not cuda.used[-2]
    del replays[0]
    replays.append(replay_of(DEVICE, nothing))
    assert cuda.used[-1] is cuda.used[-3]
    assert cuda.streams == 2
