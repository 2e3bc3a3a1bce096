"""Setting up a device makes PyTorch accumulate matrix products in fp32, whatever the settings were before."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts import part as gpu_part
from bert.parallel.mesh import join_mesh
from kernels.precision import set_product_precision

PRODUCTS = torch.backends.cuda.matmul


def settings() -> tuple[object, ...]:
    """Return whether reductions in bf16, in fp16 and in TF32 are allowed, and the name of the precision."""
    reduced = PRODUCTS.allow_bf16_reduced_precision_reduction, PRODUCTS.allow_fp16_reduced_precision_reduction
    return *reduced, PRODUCTS.allow_tf32, torch.get_float32_matmul_precision()


def allow(bf16: bool, fp16: bool, word: str) -> None:
    PRODUCTS.allow_bf16_reduced_precision_reduction, PRODUCTS.allow_fp16_reduced_precision_reduction = bf16, fp16
    torch.set_float32_matmul_precision(word)


@pytest.fixture(autouse=True)
def everything_is_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow all reduced precisions, as another program or a container might."""
    bf16, fp16, _, word = settings()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    allow(True, True, "high")
    assert settings() == (True, True, True, "high")
    yield
    allow(bool(bf16), bool(fp16), str(word))


def benchmark(folder: Path) -> None:
    assert gpu_part.run("benchmarks.gpu_parts.ceilings:ceilings", folder / "ceilings.json", "cpu", tiny=True) == 0


@pytest.mark.parametrize(
    "set_up", [lambda _: set_product_precision(), lambda _: join_mesh("cpu"), benchmark],
    ids=["itself", "training", "benchmark"],
)  # fmt: skip
def test_a_device_is_set_up_with_sums_in_fp32(set_up: Callable[[Path], object], tmp_path: Path) -> None:
    set_up(tmp_path)
    assert settings() == (False, False, False, "highest")
