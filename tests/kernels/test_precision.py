"""Products of PyTorch's libraries add up in fp32 wherever a device is set up, whatever the process was told before."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts import part as gpu_part
from bert.parallel.mesh import join_mesh
from kernels.precision import set_product_precision
from tests.conftest import REPOSITORY

PRODUCTS = torch.backends.cuda.matmul


def settings() -> tuple[object, ...]:
    """Return whether parts may be added up in bf16 and in fp16, whether TF32 is on, and PyTorch's word for it."""
    reduced = PRODUCTS.allow_bf16_reduced_precision_reduction, PRODUCTS.allow_fp16_reduced_precision_reduction
    return *reduced, PRODUCTS.allow_tf32, torch.get_float32_matmul_precision()


def allow(bf16: bool, fp16: bool, word: str) -> None:
    PRODUCTS.allow_bf16_reduced_precision_reduction, PRODUCTS.allow_fp16_reduced_precision_reduction = bf16, fp16
    torch.set_float32_matmul_precision(word)


@pytest.fixture(autouse=True)
def everything_is_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow all, as a program or a container may have it."""
    bf16, fp16, _, word = settings()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    allow(True, True, "high")
    assert settings() == (True, True, True, "high")
    yield
    allow(bool(bf16), bool(fp16), str(word))


def benchmark(folder: Path) -> None:
    """The quickest part."""
    assert gpu_part.run("benchmarks.gpu_parts.ceilings:ceilings", folder / "ceilings.json", "cpu", tiny=True) == 0


@pytest.mark.parametrize(
    "set_up", [lambda _: set_product_precision(), lambda _: join_mesh("cpu"), benchmark],
    ids=["itself", "training", "benchmark"],
)  # fmt: skip
def test_a_device_is_set_up_with_sums_in_fp32(set_up: Callable[[Path], object], tmp_path: Path) -> None:
    set_up(tmp_path)
    assert settings() == (False, False, False, "highest")


@pytest.mark.slow
def test_the_container_does_not_decide() -> None:
    """What NVIDIA's sets is read once, when PyTorch is loaded."""
    program = (
        "import torch; from kernels.precision import set_product_precision; "
        "before = torch.backends.cuda.matmul.allow_tf32; set_product_precision(); "
        "print(before, torch.backends.cuda.matmul.allow_tf32)"
    )
    container = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, env=container, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
