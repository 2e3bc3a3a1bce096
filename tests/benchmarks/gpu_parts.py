"""Parts for tests of the GPU benchmark's command. Most of them fail in some way."""

import os
import signal
import time

from benchmarks.gpu_parts.report import DeviceLostError, Figure
from benchmarks.gpu_parts.scale import Context
from kernels import OPS


def unlucky(context: Context) -> None:
    """Report several rows. One of them kills the process, and a later one makes the device unusable."""

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
    """Report a row that hangs, between two rows that end."""
    context.report.attempt("first", lambda: Figure("first", figure=1.0))
    context.report.attempt("endless", lambda: time.sleep(3600))
    context.report.attempt("last", lambda: Figure("last", figure=1.0))


def right(context: Context) -> None:
    context.report.add(Figure("not on the page", figure=1.0, note="right"))


def asked(context: Context) -> None:
    """Report the replacement of each op in ``without``."""
    context.report.add(*(Figure(op, note=OPS[op].asked) for op in context.without))


def wrong(context: Context) -> None:
    context.report.add(Figure("not on the page"), Figure("wrong", note="WRONG: 3"))
