"""Parts of the GPU benchmark for its tests, most of which end as no part should."""

import os
import signal
import time

from benchmarks.gpu_parts.measuring.report import DeviceLostError, Figure
from benchmarks.gpu_parts.measuring.scale import Context


def unlucky(context: Context) -> None:
    """A row that is killed, and one after which the device answers no more."""

    def killed() -> Figure:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def lost() -> Figure:
        context.report.settle = gone
        raise RuntimeError("an illegal memory access was encountered")

    def gone() -> None:
        raise DeviceLostError("an illegal memory access was encountered")

    report = context.report
    report.attempt("first", lambda: Figure("first", figure=1.0))
    report.attempt("killed", killed)
    report.attempt("second", lambda: Figure("second", figure=2.0))
    report.attempt("lost", lost)
    report.attempt("third", lambda: Figure("third", figure=3.0))


def endless(context: Context) -> None:
    """A row that ends, and one that never does."""
    context.report.attempt("first", lambda: Figure("first", figure=1.0))
    context.report.attempt("endless", lambda: time.sleep(3600))


def right(context: Context) -> None:
    """One row."""
    context.report.add(Figure("not on the page", figure=1.0))


def wrong(context: Context) -> None:
    """Two rows, of which one is wrong."""
    context.report.add(Figure("not on the page"), Figure("wrong", note="WRONG: 3"))
