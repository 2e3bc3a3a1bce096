"""A loader that runs a DALI pipeline, which copies arrays of narrow integers to the device and widens them there.

One DALI sample is one micro-batch. DALI's threads convert the types and copy to the GPU while the model runs.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.pipeline import pipeline_def
from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray
from torch import Tensor

from dataloading.batches.loader import (
    PREFETCHED_STEPS,
    Batch,
    Prefetcher,
    RankBatches,
    SampleSource,
    flat_arrays,
    max_seqlen,
    shape_bucket_of,
)
from dataloading.batches.sampler import MicroBatch, ShapeBucket
from dataloading.shards.samples import Samples

TENSORS = [field.name for field in fields(Batch) if field.name != "max_seqlen"]
"""Names of a batch's tensors, in the order in which they pass through the pipeline."""


class DaliLoader:
    """Loader with the same batches as ``NumpyLoader``, element by element. Without a GPU, DALI runs on the CPU."""

    def __init__(
        self,
        source: SampleSource,
        rank_batches: RankBatches,
        device: torch.device,
        shape_buckets: Sequence[ShapeBucket] = (),
    ) -> None:
        self.shape_buckets = shape_buckets
        self._device = device
        self._rank_batches = rank_batches
        self._source = source
        # DALI calls its source in the training thread, so a separate thread reads ahead.
        self._micro_batches = Prefetcher(self._read(), PREFETCHED_STEPS)
        self._in_flight: deque[int] = deque()
        """``max_seqlen`` of each batch that is in the pipeline."""
        self._steps = itertools.count()
        device_id = (device.index or 0) if device.type == "cuda" else None
        self._pipeline = _pipeline(
            self._feed,
            on_gpu=device_id is not None,
            batch_size=1,
            num_threads=1,
            device_id=device_id,
            prefetch_queue_depth=2,
        )

    def __next__(self) -> list[Batch]:
        # The prefetching thread already reads the samples, so only the number of micro-batches is needed here.
        return [self._next_batch() for _ in self._rank_batches(next(self._steps))]

    def close(self) -> None:
        self._micro_batches.close()

    def _read(self) -> Iterator[tuple[Samples, MicroBatch]]:
        for step in itertools.count():
            for micro_batch in self._rank_batches(step):
                yield self._source.take(micro_batch.indices), micro_batch

    def _feed(self) -> tuple[NDArray[np.generic], ...]:
        samples, micro_batch = next(self._micro_batches)
        shape_bucket = shape_bucket_of(samples, self.shape_buckets, micro_batch)
        # A queue is enough, because the pipeline returns batches in the order in which it received them.
        self._in_flight.append(max_seqlen(samples, shape_bucket))
        arrays = flat_arrays(samples, micro_batch, shape_bucket)
        return tuple(arrays[name] for name in TENSORS)

    def _next_batch(self) -> Batch:
        outputs = self._pipeline.run()
        tensors = {name: self._copied(output[0]) for name, output in zip(TENSORS, outputs, strict=True)}
        return Batch(**tensors, max_seqlen=self._in_flight.popleft())

    def _copied(self, dali_tensor: Any) -> Tensor:
        """Copy a buffer, because DALI reuses it. The copy runs on PyTorch's current stream without blocking the host."""
        shape, dtype = dali_tensor.shape(), dali_tensor.dtype
        torch_dtype = torch.int32 if dtype == types.DALIDataType.INT32 else torch.int64
        tensor = torch.empty(shape, dtype=torch_dtype, device=self._device)
        feed_ndarray(dali_tensor, tensor, torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None)
        return tensor


@pipeline_def
def _pipeline(feed: Callable[[], tuple[NDArray[np.generic], ...]], on_gpu: bool) -> Any:
    narrow = fn.external_source(source=feed, num_outputs=len(TENSORS), batch=False)
    # Copy to the GPU before the conversion, because narrow token ids have a quarter of the final size.
    placed = [output.gpu() if on_gpu else output for output in narrow]
    return tuple(
        output if name == "cu_seqlens" else fn.cast(output, dtype=types.DALIDataType.INT64)  # cu_seqlens stays int32
        for name, output in zip(TENSORS, placed, strict=True)
    )
