"""Contest among several functions for the fastest: they take turns, and medians count."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

SAME = 0.03
"""Times that differ by less than this share count as equal; of equals the first in the order is taken."""
HOPELESS = 20
"""What is so many times slower than the fastest is not measured further."""
_ROUNDS = (3, 15)
HEAD_START_CYCLES = 2_000_000
"""About a millisecond in which the device waits and the host queues the work, so that the work is not waited for."""


def fastest(seconds: Mapping[str, float]) -> str | None:
    """The first, in order, of those that are as good as the fastest; None of none."""
    best = min(seconds.values(), default=0.0)
    return next((name for name, each in seconds.items() if each <= best * (1 + SAME)), None)


def contest(
    works: Mapping[str, Callable[[], object]], timed: Callable[[Callable[[], object]], float], seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds of each work by name, and the error of each that raised one.

    Every one is called once unmeasured; what is then far slower than the fastest is called once and, if that was short, once
    more. The others take turns, each round begun by another, until the time is up or there are enough.
    """
    samples: dict[str, list[float]] = {}
    errors: dict[str, str] = {}

    def call(name: str) -> None:
        try:
            samples.setdefault(name, []).append(timed(works[name]))
        except Exception as error:  # whatever one implementation raises must not stop the run
            samples.pop(name, None)
            # chr(10): before Python 3.12 no backslash may stand inside an f-string's braces.
            errors[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"

    for name in works:
        call(name)
        if name in samples:
            # A call after compilation is the first of the times.
            samples[name].clear()  # the first call compiles
            call(name)
    best = min((each[0] for each in samples.values()), default=0.0)
    for name in list(samples):
        if HOPELESS * best < samples[name][0] < seconds / 10:  # so short a call may just have been interrupted
            call(name)
    racing = [name for name in samples if min(samples[name]) <= HOPELESS * best]
    least, most = _ROUNDS
    deadline = time.perf_counter() + seconds
    # With one left there is nothing to compare.
    for turn in range(most if len(racing) > 1 else 0):
        if turn >= least and time.perf_counter() > deadline:
            break
        # Begun by another each round, so that nobody always has the first place.
        for index in range(len(racing)):
            name = racing[(index + turn) % len(racing)]
            if name not in errors:
                call(name)
    # In the order of `works`, by which equals are decided.
    return {name: statistics.median(samples[name]) for name in works if name in samples}, errors


def flush_buffer(device: torch.device) -> torch.Tensor:
    """Make a tensor that leaves nothing else in the L2 cache of a GPU once it has been written."""
    cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 128 * 2**20
    return torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)


class Timer:
    """Seconds of a call on a device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._cache = flush_buffer(device)
            self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, work: Callable[[], object]) -> float:
        """Seconds that ``work`` takes."""
        if not self._on_gpu:
            # A CPU has finished when the call returns.
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        # Before the start is recorded: it empties the cache, and belongs to no time. So does the waiting.
        self._cache.zero_()
        # A device that waits lets the host queue all launches, so that their latency does not show.
        torch.cuda._sleep(HEAD_START_CYCLES)
        self._start.record()
        work()
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) / 1e3
