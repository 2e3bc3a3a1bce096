"""Choice of the loader that makes a run's batches: the one that is set, or where both can, the faster one here.

Loaders give the same batches, so every process may choose for itself. What they load to be measured is made up, in the
lengths of the run's own batches: training data is not touched before the clock starts.
"""

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from console.program import reason
from dataloading.batches.loader import Loader, NumpyLoader, RankBatches, SampleSource
from dataloading.batches.sampler import MicroBatch
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.batches.synthetic import synthetic_samples
from dataloading.shards.samples import Samples

_TURNS = 3
"""Of each loader, in alternation; the best one counts."""
_STEPS = 8
"""Steps of a turn, after those that were loaded ahead."""
_CLEARLY = 0.97
"""DALI is taken where it needs less than this share of NumPy's time: it holds memory of the GPU, and threads of its own."""


MakeLoader = Callable[[SampleSource, RankBatches, torch.device, int, Sequence[ShapeBucket]], Loader]
"""Class of a loader; the number is that of the steps to read ahead."""


@dataclass(frozen=True)
class LoaderChoice:
    """A loader, and why it is taken."""

    make: MakeLoader
    name: str
    reason: str
    is_fallback: bool = False
    """Whether another loader was preferred and could not start."""

    def __str__(self) -> str:
        """Say the choice in one line."""
        return f"loader: {self.name} ({self.reason})"


def check_loader(kind: str) -> None:
    """Raise ``ValueError`` where ``data.loader`` asks for what is not installed."""
    if kind == "dali" and not _is_dali_installed():
        raise ValueError(
            "data.loader is dali, but nvidia-dali is not installed: install it, or set data.loader to numpy"
        )


def choose_loader(
    kind: str,
    device: torch.device,
    rank_batches: RankBatches,
    lengths_N: NDArray[np.integer],
    prefetch: int,
    shape_buckets: Sequence[ShapeBucket] = (),
) -> LoaderChoice:
    """Choose what ``data.loader`` stands for on this machine: "numpy", "dali", or for "auto" what is faster on a GPU's host.

    ``rank_batches(step)`` gives this rank's micro-batches of samples that have ``lengths_N``. DALI loads a synthetic step
    before it is chosen: if that fails, "auto" falls back to NumPy, and "dali" raises ``ValueError``.
    """
    check_loader(kind)
    if kind == "numpy":
        return LoaderChoice(NumpyLoader, kind, "as set")
    if kind == "auto" and device.type != "cuda":
        return LoaderChoice(NumpyLoader, "numpy", "no GPU")
    if kind == "auto" and not _is_dali_installed():
        return LoaderChoice(NumpyLoader, "numpy", "nvidia-dali is not installed")
    try:
        dali = _dali()
        samples, micro_batches = _synthetic_step(rank_batches(0), lengths_N)
        loader = dali(samples, lambda _: micro_batches, device, prefetch, shape_buckets)
        try:
            next(loader)
        finally:
            loader.close()
    except Exception as error:  # whatever an import, a driver or a pipeline raises
        why = f"{type(error).__name__}: {next(iter(reason(error).splitlines()), '')[:300]}"
        if kind == "dali":
            raise ValueError(
                f"data.loader is dali, but DALI cannot start here ({why}): repair its installation, or set data.loader to "
                "numpy"
            ) from error
        return LoaderChoice(NumpyLoader, "numpy", f"DALI is installed but cannot start: {why}", is_fallback=True)
    if kind == "dali":
        return LoaderChoice(dali, kind, "as set")
    return faster_loader(dali, device, rank_batches, lengths_N, prefetch, shape_buckets)


def faster_loader(
    dali: MakeLoader,
    device: torch.device,
    rank_batches: RankBatches,
    lengths_N: NDArray[np.integer],
    prefetch: int,
    shape_buckets: Sequence[ShapeBucket] = (),
) -> LoaderChoice:
    """Measure both loaders on synthetic samples, and choose ``dali`` where it is clearly faster than NumPy's."""
    samples, micro_batches = _synthetic_step(rank_batches(0), lengths_N)
    loaders = [make(samples, lambda _: micro_batches, device, prefetch, shape_buckets) for make in (NumpyLoader, dali)]
    best = [math.inf, math.inf]
    try:
        # In turns, so that what else the machine does meets both.
        for _ in range(_TURNS):
            best = [min(before, _turn(loader, device, prefetch)) for before, loader in zip(best, loaders, strict=True)]
    finally:
        for loader in loaders:
            loader.close()
    shown = f"numpy {1000 * best[0]:.2f} ms a step, dali {1000 * best[1]:.2f} ms"
    if best[1] < _CLEARLY * best[0]:
        return LoaderChoice(dali, "dali", shown)
    return LoaderChoice(NumpyLoader, "numpy", shown)


def _synthetic_step(
    micro_batches: Sequence[MicroBatch], lengths_N: NDArray[np.integer]
) -> tuple[Samples, list[MicroBatch]]:
    """Return synthetic samples in the lengths of a step's micro-batches, and the micro-batches that index them."""
    # Which ids they are makes no difference to a loader, how long they are does.
    samples = synthetic_samples(lengths_N[np.concatenate([micro.indices for micro in micro_batches])], vocab_size=2**15)
    ends = np.cumsum([len(micro.indices) for micro in micro_batches])
    return samples, [
        replace(micro, indices=np.arange(end - len(micro.indices), end))
        for micro, end in zip(micro_batches, ends.tolist(), strict=True)
    ]


def _turn(loader: Loader, device: torch.device, prefetch: int) -> float:
    """Seconds a step of a loader that is asked as fast as it can."""
    for _ in range(prefetch + 4):  # these were made in the other loader's turn: as many as each keeps ready
        next(loader)
    begin = time.perf_counter()
    for _ in range(_STEPS):
        next(loader)
    # Copies to the GPU are only begun when next() returns.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / _STEPS


def _is_dali_installed() -> bool:
    # In two steps: find_spec() imports the parent, and raises where that is missing.
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def _dali() -> MakeLoader:
    from dataloading.batches.dali import DaliLoader  # an optional dependency

    return DaliLoader
