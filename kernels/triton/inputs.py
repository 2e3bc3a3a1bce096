# pyright: reportAttributeAccessIssue=false
"""Checks that return the reasons why Triton's kernels cannot take given inputs."""

from collections.abc import Collection
from typing import Any

import torch
import triton
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def tensor_reasons(*tensors: Tensor, dtypes: Collection[torch.dtype] = FLOATS) -> list[str]:
    """Check the device and the types of these tensors."""
    reasons = []
    device = tensors[0].device.type
    if device != "cuda" and not triton.knobs.runtime.interpret:
        reasons.append(f"tensors on {device}: Triton needs a CUDA device")
    if others := {x.dtype for x in tensors} - set(dtypes):
        reasons.append(f"tensors in {_names(others)}: expected {_names(dtypes)}")
    return reasons


def vector_reasons(vector_P: Tensor, *_: Any, **__: Any) -> list[str]:
    """Check that the first argument, a vector, is fp32."""
    return tensor_reasons(vector_P, dtypes=(torch.float32,))


def mixed_reasons(names: str, *tensors: Tensor) -> list[str]:
    """Check that these tensors share a dtype. ``names`` describes the tensors in the reason."""
    dtypes = {x.dtype for x in tensors}
    return [] if len(dtypes) == 1 else [f"{names} are in {_names(dtypes)}: expected one type"]


def _names(dtypes: Collection[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
