"""Setting up a device makes PyTorch accumulate matrix products in fp32, whatever the settings were before."""

import pytest
import torch

from bert.parallel.mesh import join_mesh


def test_a_device_is_set_up_with_sums_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    products, word = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    reduced = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = [getattr(products, name) for name in reduced]
    for name in reduced:
        setattr(products, name, True)
    torch.set_float32_matmul_precision("high")
    try:
        join_mesh("cpu")
        assert [getattr(products, name) for name in (*reduced, "allow_tf32")] == [False] * 3
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        for name, value in zip(reduced, before, strict=True):
            setattr(products, name, value)
        torch.set_float32_matmul_precision(word)
