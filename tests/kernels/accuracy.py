"""The rule by which an implementation of an op is right: at most twice plain PyTorch's error against float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def output_and_gradients(
    function: Callable[..., Any], arguments: Sequence[Any], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The first output, and of all tensors of numbers the gradients for an upstream one that is always the same.

    Computed in ``dtype``, or in the types of the arguments.
    """
    given = [
        value.detach().to(dtype or value.dtype).requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in arguments
    ]
    returned = function(*given)
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def assert_within_twice(
    function: Callable[..., Any], definition: Callable[..., Any], arguments: Sequence[Any], free: float
) -> None:
    """Output and every gradient: at most twice the error of the definition in the same types, and what is ``free``.

    Errors are the largest, in units of the largest exact value, or of 1 where all are smaller.
    """
    exact = output_and_gradients(definition, arguments, torch.float64)
    plain, ours = (output_and_gradients(each, arguments) for each in (definition, function))
    for place, (truth, theirs, mine) in enumerate(zip(exact, plain, ours, strict=True)):
        assert (mine.shape, mine.dtype) == (truth.shape, theirs.dtype), place
        if truth.numel():
            unit = truth.abs().max().clamp(min=1)
            error, allowed = (((x.double() - truth).abs().max() / unit).item() for x in (mine, theirs))
            assert error <= 2 * allowed + free, f"result {place}"
