"""Run the tests of Triton kernels in Triton's interpreter, on CPU tensors.

Triton reads ``TRITON_INTERPRET`` once when it is imported, so it is set here, before test modules are imported.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts import accuracy

if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    raise RuntimeError("something has imported triton before tests/kernels/conftest.py could set TRITON_INTERPRET")
os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)  # with several threads, a product's last bit may depend on the strides of its operands


@pytest.fixture(scope="session", autouse=True)
def launches_are_watched() -> None:
    """Run every interpreted kernel on the test bench of ``tests.kernels.interpreted``."""
    if importlib.util.find_spec("triton") is not None:
        from tests.kernels import interpreted

        interpreted.install()


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    in_triton = request.path.name.startswith("test_triton_")
    with accuracy.uninitialized_memory_is_nan() if in_triton else nullcontext():
        yield


class _WithoutTriton(pytest.Module):
    """Skipped test module that needs Triton, which is not installed."""

    def collect(self):
        pytest.skip("triton is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name.startswith("test_triton_") and importlib.util.find_spec("triton") is None:
        return _WithoutTriton.from_parent(parent, path=module_path)
    return None
