"""Clocks that advance at every reading."""

import itertools
from types import SimpleNamespace


def clock(step: float) -> SimpleNamespace:
    """Return a fake ``time`` whose ``perf_counter`` advances by ``step`` a reading, and ``process_time`` by ``8 * step``."""
    wall, processor = itertools.count(), itertools.count()
    return SimpleNamespace(perf_counter=lambda: step * next(wall), process_time=lambda: 8 * step * next(processor))
