"""The loader that ``data.loader`` names. All loaders give the same batches."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from console.program import reason
from dataloading.batches.loader import Loader, NumpyLoader, RankBatches, SampleSource
from dataloading.batches.sampler import MicroBatch
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.batches.synthetic import synthetic_samples
from dataloading.shards.samples import Samples

MakeLoader = Callable[[SampleSource, RankBatches, torch.device, int, Sequence[ShapeBucket]], Loader]
"""Class of a loader; the number is the number of steps to read ahead."""


def check_loader(kind: str) -> None:
    """Raise ``ValueError`` if ``data.loader`` names a package that is not installed."""
    # find_spec() imports the parent package, and raises if it is missing.
    if kind == "dali" and not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")):
        raise ValueError(
            "data.loader is dali, but nvidia-dali is not installed: install it, or set data.loader to numpy"
        )


def loader_of(
    kind: str,
    device: torch.device,
    rank_batches: RankBatches,
    lengths_N: NDArray[np.integer],
    prefetch: int,
    shape_buckets: Sequence[ShapeBucket] = (),
) -> MakeLoader:
    """Return the class of the loader ``kind``. DALI loads a synthetic step first, so that it cannot fail after the
    start.

    ``rank_batches(step)`` gives this rank's micro-batches of samples that have ``lengths_N``.

    Raises:
        ValueError: DALI is not installed or cannot start.
    """
    check_loader(kind)
    if kind == "numpy":
        return NumpyLoader
    try:
        from dataloading.batches.dali import DaliLoader

        samples, micro_batches = _synthetic_step(rank_batches(0), lengths_N)
        loader = DaliLoader(samples, lambda _: micro_batches, device, prefetch, shape_buckets)
        try:
            next(loader)
        finally:
            loader.close()
    except Exception as error:  # imports, drivers and pipelines raise all kinds of errors
        why = f"{type(error).__name__}: {next(iter(reason(error).splitlines()), '')[:300]}"
        raise ValueError(
            f"data.loader is dali, but DALI cannot start here ({why}): repair its installation, or set data.loader to numpy"
        ) from error
    return DaliLoader


def _synthetic_step(
    micro_batches: Sequence[MicroBatch], lengths_N: NDArray[np.integer]
) -> tuple[Samples, list[MicroBatch]]:
    """Return synthetic samples in the lengths of a step's micro-batches, and the micro-batches that index them."""
    samples = synthetic_samples(lengths_N[np.concatenate([micro.indices for micro in micro_batches])], vocab_size=2**15)
    ends = np.cumsum([len(micro.indices) for micro in micro_batches])
    return samples, [
        replace(micro, indices=np.arange(end - len(micro.indices), end))
        for micro, end in zip(micro_batches, ends.tolist(), strict=True)
    ]
