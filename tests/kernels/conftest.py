"""The tests of Triton kernels run under its interpreter, on CPU tensors.

Triton reads ``TRITON_INTERPRET`` once, when it is imported: it is set here, before any test module is.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    raise RuntimeError("something has imported triton before tests/kernels/conftest.py could set TRITON_INTERPRET")
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def language_is_patched_once() -> None:
    """The interpreter patches all of Triton's language at each call of a device function, and leaves it so: once is enough.

    A kernel's launch patches what its own module sees.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patched = set()

    def call(function: interpreter.InterpretedFunction, *args, **kwargs):
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a kernel leaves out is not zero by chance: PyTorch fills new tensors with NaN, integers with their largest."""
    in_triton = request.path.name.startswith("test_triton_")
    if in_triton:
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    if in_triton:  # a call takes seconds, for what PyTorch imports in it
        torch.use_deterministic_algorithms(False)


class _WithoutTriton(pytest.Module):
    """A module that cannot be imported here."""

    def collect(self):
        pytest.skip("triton is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name.startswith("test_triton_") and importlib.util.find_spec("triton") is None:
        return _WithoutTriton.from_parent(parent, path=module_path)
    return None
