"""Timing of functions on a device."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

SAME = 0.03
"""Times that differ by less than this fraction count as equal."""
ROUNDS = 11
HEAD_START_CYCLES = 2_000_000
"""Clock cycles (about a millisecond) that the device waits while the host queues the work, so that launch latency does
not count."""


def fastest(seconds: Mapping[str, float]) -> str:
    """Return the first name, in order, whose time is within ``SAME`` of the best time."""
    best = min(seconds.values())
    return next(name for name, each in seconds.items() if each <= best * (1 + SAME))


def medians(
    works: Mapping[str, Callable[[], object]], timed: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Return the median seconds of each function.

    The functions take turns, so that a change of the device's clock rate affects all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            samples[name].append(timed(work))
    return {name: statistics.median(each) for name, each in samples.items()}


class Timer:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            # A buffer of twice the cache's size evicts everything else from the L2 cache.
            size = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 128 * 2**20
            self._cache = torch.empty(2 * size, dtype=torch.int8, device=device)
            self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes. On a GPU, the L2 cache is cold, and the work is queued in advance."""
        if not self._on_gpu:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        self._cache.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        self._start.record()
        work()
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1e3
