"""Accuracy rule for implementations of ops: at most twice plain PyTorch's error, measured against float64."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_parts.accuracy import Arguments, outcome, rms
from kernels import OPS

CPU = torch.device("cpu")
IN_TRITON = [name for name, op in OPS.items() if "triton" in op.implementations]
NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
EITHER = pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=NO_TRITON)])
"""Parameter for tests of the definition and of Triton's kernels in the interpreter."""


def triton(op: str) -> Callable[..., Any]:
    return OPS[op].implementations["triton"].function(op)


def assert_within_twice(
    function: Callable[..., Any],
    definition: Callable[..., Any],
    draws: Sequence[Arguments],
    free: float,
    steps: float = 0,
) -> None:
    """Check that a function's error against float64 is at most twice the definition's error plus ``free``.

    An error is a root mean square over several draws, because the largest error of a few values is random. ``free`` is
    relative to the root mean square of the exact values. FP8 results must equal the definition's results, except that
    a fraction ``steps`` of the elements may differ by one FP8 step.
    """
    found = [outcome(function, draw).tensors for draw in draws]
    assert all(found), "a call that neither returns nor writes a tensor shows nothing"
    plain = [outcome(definition, draw).tensors for draw in draws]
    exact = [outcome(definition, draw, torch.float64).tensors for draw in draws]
    for place, (mine, theirs, truth) in enumerate(
        zip(*(list(zip(*each, strict=True)) for each in (found, plain, exact)), strict=True)
    ):
        if not theirs[0].numel():  # the definition leaves this result empty
            continue
        assert [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in theirs], place
        if mine[0].is_floating_point() and mine[0].element_size() == 1:
            for ours, plains in zip(mine, theirs, strict=True):
                assert_same_fp8(ours, plains, steps)
            continue
        ours, plains, exacts = (torch.cat([x.double().flatten() for x in each]) for each in (mine, theirs, truth))
        unit = rms(exacts) if rms(exacts) > 1e-6 else 1.0
        assert rms(ours - exacts) <= 2 * rms(plains - exacts) + free * unit, f"result {place}"


def assert_same_fp8(found: Tensor, expected: Tensor, steps: float) -> None:
    """Check that FP8 numbers are equal. A fraction ``steps`` of the elements may differ by one FP8 step."""
    kind, mine, truth = torch.finfo(found.dtype), found.double(), expected.double()
    assert torch.equal(mine.isnan(), truth.isnan())
    mine, truth = mine.nan_to_num(), truth.nan_to_num()
    spacing = kind.eps * torch.maximum(mine.abs(), truth.abs()).clamp(min=kind.tiny)
    assert ((mine - truth).abs() <= spacing).all()
    assert (mine != truth).sum() <= (max(2, steps * mine.numel()) if steps else 0)
