"""Products of PyTorch's libraries add up in fp32 wherever a device is set up, whatever the process was told before."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts import part as gpu_part
from bert.parallel.mesh import join_mesh
from kernels.__main__ import main
from kernels.precision import set_product_precision


def settings() -> tuple[object, ...]:
    """Whether parts may be added up in bf16 and in fp16, whether TF32 is on, and PyTorch's word for it."""
    products = torch.backends.cuda.matmul
    return (
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


STRICT = (False, False, False, "highest")


def loosen() -> None:
    """Everything allowed, as a program or a container may have it."""
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    torch.set_float32_matmul_precision("high")


@pytest.fixture(autouse=True)
def loose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = settings()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    loosen()
    assert settings() == (True, True, True, "high")
    yield
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before[:2]
    torch.set_float32_matmul_precision(str(before[3]))


def benchmark(folder: Path) -> None:
    """The quickest part."""
    assert gpu_part.run("benchmarks.gpu_parts.ceilings:ceilings", folder / "ceilings.json", "cpu", tiny=True) == 0


def autotune(folder: Path) -> None:
    """Of one op."""
    del folder
    assert main(["autotune", "dense_gelu", "--device", "cpu", "--dtype", "fp32"]) == 0


@pytest.mark.parametrize(
    "set_up", [lambda _: set_product_precision(), lambda _: join_mesh("cpu"), benchmark, autotune],
    ids=["itself", "training", "benchmark", "autotune"],
)  # fmt: skip
def test_a_device_is_set_up_with_sums_in_fp32(
    set_up: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLPERF_BERT_CACHE", str(tmp_path))
    set_up(tmp_path)
    assert settings() == STRICT


def test_the_container_does_not_decide() -> None:
    """What NVIDIA's sets is read once, when PyTorch is loaded."""
    program = (
        "import torch; from kernels.precision import set_product_precision; "
        "before = torch.backends.cuda.matmul.allow_tf32; set_product_precision(); "
        "print(before, torch.backends.cuda.matmul.allow_tf32)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        env={"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "False"]
