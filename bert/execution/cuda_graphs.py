"""CUDA graphs: steps that are captured once for each shape bucket, and replayed.

A replay costs the host one launch instead of thousands. It reads and writes the memory of the captured run, so batches are
copied into static buffers; everything else that a step changes keeps its place.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

import torch

from dataloading.batches.loader import Batch
from dataloading.batches.shape_buckets import ShapeBucket

Function = Callable[[], None]


class CudaCapturer:
    """CUDA graphs that share one memory pool and are replayed one after another on one stream.

    Prepare the largest function first: later ones fit into its blocks. All functions run before any is captured, so that
    their ordinary memory is freed before the pool is filled. (``torch.cuda.use_mem_pool`` does not reach autograd's thread.)

    Close it before a process group is destroyed, or use it as a context manager: NCCL waits for ever to destroy a
    communicator that a graph has captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._waiting: list[tuple[torch.cuda.CUDAGraph, Function]] = []
        self._graphs = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset all graphs. Their replays raise from then on."""
        self._graphs.close()

    def prepare(self, function: Function) -> Function:
        """Run the function on the side stream, and return the replay of its graph, which ``capture`` will fill.

        The run creates what cannot be created while capturing: compiled kernels, cuBLAS handles and workspaces of this
        stream, NCCL communicators. Autograd gives gradients to the stream that first used the parameters.
        """
        # Streams wait for each other both ways, because both read what the other writes.
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            function()
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.callback(graph.reset)
        self._waiting.append((graph, function))
        return graph.replay

    def capture(self) -> None:
        """Capture all prepared functions in the same order."""
        for graph, function in self._waiting:
            # thread_local: NCCL's watchdog queries events from its own thread, and autograd's thread allocates, which
            # would end a capture in mode "global".
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        self._waiting.clear()


def replay_of(device: torch.device, function: Function) -> Function:
    """Run ``function`` and return the replay of its own CUDA graph. Raises what the capture raises.

    PyTorch (2.13) keeps the memory pool of a failed capture until the process ends.
    """
    # Exiting the block restores the stream: a capture that fails leaves its own stream current.
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        capturer = CudaCapturer(device)
        replay = capturer.prepare(function)
        capturer.capture()
    return replay


class Graph:
    """A function without arguments: replayed once it is captured, otherwise run."""

    def __init__(self, function: Function) -> None:
        self._function, self._replay = function, function

    def prepare(self, capturer: CudaCapturer) -> None:
        """Prepare to capture the function; it can be called again when ``capturer`` has captured."""
        self._replay = capturer.prepare(self._function)

    def __call__(self) -> None:
        """Run the function, or its replay."""
        self._replay()


class BatchGraphs:
    """A function of a batch: replayed if the batch's shape bucket was captured, otherwise run.

    It must return nothing, and change only tensors that keep their place.
    """

    def __init__(self, function: Callable[[Batch], None]) -> None:
        self._function = function
        self._captured: dict[ShapeBucket, tuple[Batch, Function]] = {}

    def prepare(self, batches: Sequence[Batch], capturer: CudaCapturer) -> None:
        """Prepare to capture the function for each batch's shape bucket, the largest first, in shared buffers."""
        largest_first = sorted(batches, key=lambda batch: batch.tokens, reverse=True)
        # Each shape bucket reads the beginning of the same memory.
        buffers = {
            name: torch.zeros_like(max((batch.tensors[name] for batch in batches), key=len))
            for name in largest_first[0].tensors
        }
        for batch in largest_first:
            static = replace(batch, **{name: buffers[name][: len(value)] for name, value in batch.tensors.items()})
            _copy_(static, batch)  # the buffers must hold a valid batch: ids are indices
            self._captured[batch.shape_bucket] = static, capturer.prepare(lambda static=static: self._function(static))

    def __call__(self, batch: Batch) -> bool:
        """Run the function, or its replay, on ``batch``; return whether it was replayed."""
        # Larger than all shape buckets, which is rare.
        if batch.shape_bucket not in self._captured:
            self._function(batch)
            return False
        static, replay = self._captured[batch.shape_bucket]
        _copy_(static, batch)
        replay()
        return True


def _copy_(static: Batch, batch: Batch) -> None:
    for name, buffer in static.tensors.items():
        # On the stream of the replays, so after the previous replay, which may still read the buffer.
        buffer.copy_(batch.tensors[name], non_blocking=True)
