"""Choice of a loader for ``data.loader``. All loaders return the same batches, so each rank can choose independently.

Loaders are timed on synthetic samples with the lengths of the run's batches, because training data may not be read before
the clock starts.
"""

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from console.program import reason
from dataloading.batches.loader import PREFETCHED_STEPS, Loader, NumpyLoader, RankBatches, SampleSource
from dataloading.batches.sampler import MicroBatch, ShapeBucket
from dataloading.shards.samples import Samples, synthetic_samples

MakeLoader = Callable[[SampleSource, RankBatches, torch.device, Sequence[ShapeBucket]], Loader]
"""Class of a loader."""

_TURNS, _STEPS = 3, 8
_CLEARLY = 0.97
"""DALI is chosen if it takes less than this fraction of NumPy's time. A smaller gain would not be worth the GPU memory and
the threads that DALI occupies."""


@dataclass(frozen=True)
class LoaderChoice:
    make: MakeLoader
    name: str
    reason: str
    is_fallback: bool = False
    """Whether NumPy was chosen because DALI is installed but cannot start."""

    def __str__(self) -> str:
        return f"loader: {self.name} ({self.reason})"


def check_loader(kind: str) -> None:
    """Raise ``ValueError`` if ``data.loader`` names a package that is not installed."""
    if kind == "dali" and not _is_dali_installed():
        raise ValueError(
            "data.loader is dali, but nvidia-dali is not installed: install it, or set data.loader to numpy"
        )


def choose_loader(
    kind: str,
    device: torch.device,
    rank_batches: RankBatches,
    lengths_N: NDArray[np.integer],
    shape_buckets: Sequence[ShapeBucket] = (),
) -> LoaderChoice:
    """Choose a loader: "numpy", "dali", or "auto", which on a GPU chooses the faster of the two.

    ``lengths_N`` are the lengths of all samples. Raises ``ValueError`` if ``kind`` is "dali", but DALI is not installed
    or cannot load a synthetic step.
    """
    check_loader(kind)
    if kind == "numpy":
        return LoaderChoice(NumpyLoader, kind, "as set")
    if kind == "auto" and (device.type != "cuda" or not _is_dali_installed()):
        return LoaderChoice(NumpyLoader, "numpy", "no GPU" if device.type != "cuda" else "nvidia-dali is not installed")
    samples, micro_batches = _synthetic_step(rank_batches(0), lengths_N)

    def build(make: MakeLoader) -> Loader:
        return make(samples, lambda _: micro_batches, device, shape_buckets)

    try:
        from dataloading.batches.dali import DaliLoader

        with closing(build(DaliLoader)) as loader:
            next(loader)
    except Exception as error:  # DALI's import, driver and pipeline can raise any error
        why = f"{type(error).__name__}: {next(iter(reason(error).splitlines()), '')[:300]}"
        if kind == "auto":
            return LoaderChoice(NumpyLoader, "numpy", f"DALI is installed but cannot start: {why}", is_fallback=True)
        raise ValueError(
            f"data.loader is dali, but DALI cannot start here ({why}): repair its installation, or set data.loader to numpy"
        ) from error
    if kind == "dali":
        return LoaderChoice(DaliLoader, kind, "as set")
    numpy_s, dali_s = fastest_turns([build(NumpyLoader), build(DaliLoader)], device)
    shown = f"numpy {1000 * numpy_s:.2f} ms a step, dali {1000 * dali_s:.2f} ms"
    if dali_s < _CLEARLY * numpy_s:
        return LoaderChoice(DaliLoader, "dali", shown)
    return LoaderChoice(NumpyLoader, "numpy", shown)


def fastest_turns(loaders: Sequence[Loader], device: torch.device) -> list[float]:
    """Time each loader several times, and return the seconds per step in each loader's fastest turn. Closes the loaders."""
    best = [math.inf] * len(loaders)
    try:
        # Loaders take turns, so that a temporary slowdown of the machine affects all of them.
        for _ in range(_TURNS):
            for place, loader in enumerate(loaders):
                for _ in range(PREFETCHED_STEPS + 4):  # not timed: the loader may have prefetched these steps
                    next(loader)
                begin = time.perf_counter()
                for _ in range(_STEPS):
                    next(loader)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # wait for the copies, because next() does not
                best[place] = min(best[place], (time.perf_counter() - begin) / _STEPS)
    finally:
        for loader in loaders:
            loader.close()
    return best


def _is_dali_installed() -> bool:
    # Check nvidia first: find_spec("nvidia.dali") imports it, and raises ModuleNotFoundError if it is missing.
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def _synthetic_step(
    micro_batches: Sequence[MicroBatch], lengths_N: NDArray[np.integer]
) -> tuple[Samples, list[MicroBatch]]:
    """Return synthetic samples with the lengths of a step's micro-batches, and micro-batches that index these samples."""
    samples = synthetic_samples(lengths_N[np.concatenate([micro.indices for micro in micro_batches])], vocab_size=2**15)
    ends = np.cumsum([len(micro.indices) for micro in micro_batches])
    return samples, [
        replace(micro, indices=np.arange(end - len(micro.indices), end))
        for micro, end in zip(micro_batches, ends.tolist(), strict=True)
    ]
