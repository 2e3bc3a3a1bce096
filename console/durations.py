"""Format durations, one function for each purpose."""

from __future__ import annotations

import math


def clock(seconds: float) -> str:
    """Format a time as minutes and seconds, with hours if there are any: 1:05, 1:01:01."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock_span(early: float | None, late: float | None) -> str:
    """Format a time left of which one end, or both, may be unknown."""
    if early is None:
        return "-" if late is None else f"at most {clock(late)}"
    return f"{clock(early)} or more" if late is None else f"{clock(early)} to {clock(late)}"


def duration(seconds: float | None) -> str:
    """Format a measured time with three digits below a second, else with one or two places: 12.3 us, 5.3 s, 5.45 min."""
    if seconds is None:
        return "-"
    if seconds >= 120:
        return f"{seconds / 60:.2f} min"
    if seconds >= 1 or seconds <= 0:
        return f"{seconds:.1f} s"
    unit, size = next((unit, size) for unit, size in (("ms", 1e-3), ("us", 1e-6), ("ns", 0.0)) if seconds >= size)
    return f"{seconds / (size or 1e-9):.3g} {unit}"
