"""Steps that are captured once for each shape bucket, and replayed: on a GPU as CUDA graphs.

A replay costs the host one launch where the step itself is some thousands. It reads and writes the memory that the
captured run saw, so batches are copied into buffers that stay, and everything else that a step changes (weights,
gradients, moments, counters, sums) keeps its place anyway. How a device captures is behind ``CudaCapturer``; the rest
of this file runs on any device.
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
    """CUDA graphs that share one pool of memory, since nothing that one leaves there is read after its replay.

    They must be replayed one after another on one stream. Prepare what takes the most memory first: what follows fits into
    the blocks that it has made. All functions run before any is captured: what a run takes from the ordinary memory is
    given back when the first capture begins, so that there is never need for both at a time.
    (``torch.cuda.use_mem_pool`` would not let a run take the graphs' memory: it does not reach the thread of autograd.)

    Close it before a process group is destroyed, or use it as a context manager: NCCL destroys a communicator only after
    every graph that captured it, and waits for ever.
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
        """Reset all graphs. Their replays raise from then on, whoever still refers to them."""
        self._graphs.close()

    def prepare(self, function: Function) -> Function:
        """Run it on a side stream, and return the replay of its capture there, which is to come.

        The run makes what cannot be made while capturing: compiled kernels, handles and workspaces of cuBLAS for this
        stream, communicators of NCCL, tables of the optimizer. It is on the stream of the capture because autograd gives
        the gradients of a backward pass to the stream that first used the parameters.
        """
        # Streams wait for each other both ways: the run reads what is still being computed, and what comes next on the
        # first stream may read what the run writes.
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            function()
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.callback(graph.reset)
        self._waiting.append((graph, function))
        # The graph is empty until `capture`; who gets this must not call it before.
        return graph.replay

    def capture(self) -> None:
        """Capture, in the same order. ``torch.cuda.graph`` waits for the device and gives back unused memory first."""
        for graph, function in self._waiting:
            # thread_local: NCCL's watchdog asks for events from its own thread at any time, autograd's thread launches the
            # backward pass and allocates; in the mode "global" what such a thread may not do would end this capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        self._waiting.clear()


def replay_of(device: torch.device, function: Function) -> Function:
    """Run ``function`` and return the replay of its own CUDA graph.

    Raises what the capture raises, and leaves no trace of it.

    PyTorch (2.13) keeps the pool of a failed capture reserved: the memory of this function, until the process ends.
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
    """A function of a batch, callable like it: replayed where its shape bucket was captured, otherwise run.

    It returns nothing; what it changes are tensors that keep their place.
    """

    def __init__(self, function: Callable[[Batch], None]) -> None:
        self._function = function
        self._captured: dict[ShapeBucket, tuple[Batch, Function]] = {}

    def prepare(self, batches: Sequence[Batch], capturer: CudaCapturer) -> None:
        """Prepare to capture the function for each batch's shape bucket, the largest first, in buffers that all share.

        Batches of these shape buckets can be given to it again when ``capturer`` has captured.
        """
        # The first capture makes the blocks of the pool, into which those of smaller batches fit.
        largest_first = sorted(batches, key=lambda batch: batch.tokens, reverse=True)
        # Graphs hold addresses, not tensors: each shape bucket reads the beginning of the same memory.
        buffers = {
            name: torch.zeros_like(max((batch.tensors[name] for batch in batches), key=len))
            for name in largest_first[0].tensors
        }
        for batch in largest_first:
            static = replace(batch, **{name: buffers[name][: len(value)] for name, value in batch.tensors.items()})
            _copy_(static, batch)  # what lies in the buffers must be a batch: ids are indices
            self._captured[batch.shape_bucket] = static, capturer.prepare(lambda static=static: self._function(static))

    def __call__(self, batch: Batch) -> bool:
        """Run the function, or its replay, on ``batch``; returns whether it was replayed."""
        # Larger than all that were drawn beforehand, and so rare: the same result, operator by operator.
        if batch.shape_bucket not in self._captured:
            self._function(batch)
            return False
        static, replay = self._captured[batch.shape_bucket]
        _copy_(static, batch)
        replay()
        return True


def _copy_(static: Batch, batch: Batch) -> None:
    for name, buffer in static.tensors.items():
        # On the stream of the replays, and so after the one before, which may still be reading the buffer.
        buffer.copy_(batch.tensors[name], non_blocking=True)
