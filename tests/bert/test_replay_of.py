"""A function captured by ``replay_of`` does not disturb later captures, draws or replays, even if its capture fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bert.execution import cuda_graphs
from bert.execution.cuda_graphs import replay_of

DEVICE = torch.device("cpu")


def nothing(*_: object) -> None:
    pass


class FakeCuda:
    """Stand-ins for ``torch.cuda`` with the state that a failed capture leaves in PyTorch 2.11."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams = 0
        self.waits: list[tuple[object, object]] = []
        """Streams that have waited, each with the stream that it has waited for."""
        self.resets = 0
        self.default = self.current = self._stream()
        self.draws_fail = False
        self.used: list[object] = []
        """Streams of the captures, in their order."""
        patch.setattr(cuda_graphs, "_spare_streams", {})
        patch.setattr(cuda_graphs, "_failed", [])
        for name, stand_in in {
            "Stream": self.new_stream,
            "current_stream": lambda _: self.current,
            "stream": self.on,
            "graph": self.capture,
            "graph_pool_handle": nothing,
            "CUDAGraph": lambda: SimpleNamespace(reset=self.reset, replay=nothing),
        }.items():
            patch.setattr(torch.cuda, name, stand_in)

    def new_stream(self, _: torch.device = DEVICE, priority: int = 0) -> SimpleNamespace:
        assert priority < 0, "streams of the default priority belong to training"
        self.streams += 1
        return self._stream()

    def _stream(self) -> SimpleNamespace:
        stream = SimpleNamespace(device=DEVICE)
        stream.wait_stream = lambda other: self.waits.append((stream, other))
        return stream

    def reset(self) -> None:
        self.resets += 1

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, _: object, stream: object, **__: object) -> Iterator[None]:
        self.used.append(stream)
        before, self.current, self.draws_fail = self.current, stream, True
        yield  # an error in the block leaves the stream current
        self.current, self.draws_fail = before, False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_draws_work_after_a_failed_capture(cuda: FakeCuda) -> None:
    def synchronize() -> None:
        if cuda.draws_fail:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        replay_of(DEVICE, synchronize)
    assert not cuda.draws_fail
    assert cuda.current is cuda.default
    assert (cuda.resets, len(cuda_graphs._failed)) == (1, 1), "PyTorch still refers to the graph"
    cuda.waits.clear()
    replay_of(DEVICE, nothing)
    assert cuda.streams == 1, "the stream is used again"
    assert cuda.waits == [(cuda.used[0], cuda.default), (cuda.default, cuda.used[0])]


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
