"""CUDA graphs of functions without arguments, and of functions of a batch, which have one graph for each shape bucket.

A replay costs the host one launch instead of thousands. It reads and writes the same memory addresses as the captured
run, so batches are copied into static buffers, and all other tensors that a step changes must stay at their addresses.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import finalize

import torch

from dataloading.batches.loader import Batch
from dataloading.batches.sampler import ShapeBucket

Function = Callable[[], None]

_spare_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Streams that ``replay_of`` may use again, because every graph that was captured on them has been deleted."""
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs of failed captures. They are kept because PyTorch's allocator refers to them until the process ends."""


class CudaCapturer:
    """CUDA graphs that share one memory pool and are replayed one after another on one stream.

    Prepare the function that needs the most memory first, so that later functions reuse its memory blocks. All functions
    run once before any is captured, so that the memory of these first runs is freed before the pool is filled.
    ``torch.cuda.use_mem_pool`` cannot replace the shared pool, because it does not affect allocations in autograd's thread.

    Close the capturer before its process groups are destroyed: NCCL hangs when it destroys a communicator that a graph
    still refers to.

    Use different streams for graphs that are reset at different times: in PyTorch 2.13, resetting a graph frees the cuBLAS
    workspaces of its stream, although other graphs that were captured on the stream still write to them.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream or torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._waiting: list[tuple[torch.cuda.CUDAGraph, Function]] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def close(self) -> None:
        """Reset all graphs. Replaying them afterwards raises an error."""
        for graph in self._graphs:
            graph.reset()

    def prepare(self, function: Function) -> Function:
        """Run the function on the side stream and return a callable that replays its graph, once ``capture`` has run.

        This first run creates everything that cannot be created during a capture: compiled kernels, this stream's
        cuBLAS handles and workspaces, and NCCL communicators. It also makes autograd accumulate gradients on this
        stream, because autograd uses the stream that first used the parameters.
        """
        # Each stream waits for the other, because each reads data that the other writes.
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            function()
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        self._waiting.append((graph, function))
        # The bound method keeps the capturer alive as long as the caller has the replay. Only after the capturer is deleted
        # does ``replay_of`` reuse its stream.
        return partial(self._replay, graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def capture(self) -> None:
        for graph, function in self._waiting:
            # In the mode "global", calls from other threads would invalidate the capture: NCCL's watchdog queries
            # events, and autograd's thread allocates memory.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        self._waiting.clear()


def replay_of(device: torch.device, function: Function) -> Function:
    """Run ``function``, capture it as a CUDA graph and return a callable that replays the graph.

    Errors of the capture are raised. PyTorch (2.13) keeps the memory pool of a failed capture until the process ends.
    """
    # In PyTorch 2.11, each stream keeps a cuBLAS workspace of 32 MiB until the process ends, so streams are reused.
    # Use a high priority. With the default one, PyTorch could return the stream on which training's graphs are captured.
    spare = _spare_streams.setdefault(device, [])
    stream = spare.pop() if spare else torch.cuda.Stream(device, priority=-1)
    capturer = CudaCapturer(device, stream)
    finalize(capturer, spare.append, stream)  # runs when the caller drops the replay, which refers to the capturer
    # A failed capture leaves its own stream current; leaving this block restores the previous stream.
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        replay = capturer.prepare(function)
        try:
            capturer.capture()
        except Exception:
            capturer.close()
            _failed.extend(capturer._graphs)
            # In PyTorch 2.11, all random draws fail after a failed capture until a capture succeeds, so make one.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                torch.zeros((), device=device)
            raise
    return replay


class BatchGraphs:
    """A function of a batch, with a CUDA graph for each captured shape bucket.

    The function must return nothing, and the tensors that it changes must stay at their addresses.
    """

    def __init__(self, function: Callable[[Batch], None]) -> None:
        self._function = function
        self._captured: dict[ShapeBucket, tuple[Batch, Function]] = {}

    def prepare(self, batches: Sequence[Batch], capturer: CudaCapturer) -> None:
        """Prepare one graph of the function for the shape bucket of each batch, beginning with the largest bucket."""
        largest_first = sorted(batches, key=lambda batch: batch.tokens, reverse=True)
        # All shape buckets share one buffer per tensor; smaller buckets use only its beginning.
        buffers = {
            name: torch.zeros_like(max((batch.tensors[name] for batch in batches), key=len))
            for name in largest_first[0].tensors
        }
        for batch in largest_first:
            static = replace(batch, **{name: buffers[name][: len(value)] for name, value in batch.tensors.items()})
            _copy_(static, batch)  # the buffers must hold a valid batch, because ids are used as indices
            self._captured[batch.shape_bucket] = static, capturer.prepare(lambda static=static: self._function(static))

    def __call__(self, batch: Batch) -> bool:
        """Run the function on ``batch``, by a replay if there is a graph for it. Return whether a graph was replayed."""
        # A few batches are larger than every captured shape bucket, so they run without a graph.
        if batch.shape_bucket not in self._captured:
            self._function(batch)
            return False
        static, replay = self._captured[batch.shape_bucket]
        _copy_(static, batch)
        replay()
        return True


def _copy_(static: Batch, batch: Batch) -> None:
    for name, buffer in static.tensors.items():
        # The copy is queued on the stream of the replays, so it waits for the previous replay to finish with the buffer.
        buffer.copy_(batch.tensors[name], non_blocking=True)
