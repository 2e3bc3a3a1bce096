"""The loader that ``data.loader`` names, and what happens if it cannot start."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dataloading.batches.loader import Batch, NumpyLoader
from dataloading.batches.loader_choice import check_loader, loader_of
from dataloading.batches.sampler import MicroBatch

CPU = torch.device("cpu")
LENGTHS = np.array([5, 40, 3, 17, 9, 30])
STEP = [MicroBatch(np.array([4, 1, 2]), 6, 16), MicroBatch(np.array([0, 5]), 6, 16)]


def test_numpy_and_a_missing_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader_of("numpy", torch.device("cuda"), lambda _: STEP, LENGTHS, 1) is NumpyLoader
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for check in (check_loader, lambda kind: loader_of(kind, CPU, lambda _: STEP, LENGTHS, 1)):
        with pytest.raises(ValueError, match=r"data\.loader is dali, but nvidia-dali is not installed"):
            check("dali")


@pytest.mark.parametrize("fails", [False, True])
def test_dali_loads_a_step_of_the_runs_lengths_before_it_is_taken(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    seen: list[list[Batch]] = []
    closed: list[bool] = []

    class Dali(NumpyLoader):
        def __next__(self) -> list[Batch]:
            if fails:
                raise RuntimeError(
                    "CUDA driver version is insufficient\nStacktrace (12 entries):\n[frame 0]: libdali.so"
                )
            seen.append(super().__next__())
            return seen[-1]

        def close(self) -> None:
            closed.append(True)
            super().close()

    module: Any = ModuleType("dali")
    module.DaliLoader = Dali
    monkeypatch.setitem(sys.modules, "dataloading.batches.dali", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    if fails:
        with pytest.raises(ValueError, match=r"data\.loader is dali.*CUDA driver version is insufficient\)") as caught:
            loader_of("dali", CPU, lambda _: STEP, LENGTHS, 1)
        assert "\n" not in str(caught.value)
    else:
        assert loader_of("dali", CPU, lambda _: STEP, LENGTHS, 1) is Dali
        assert [batch.cu_seqlens.diff().tolist() for batch in seen[0]] == [[9, 40, 3], [5, 30]]
    assert closed == [True]
