"""The setting ``data.loader`` selects the named loader, the faster loader, or NumPy's if DALI's cannot start."""

import importlib.util
import sys
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dataloading.batches.loader import Batch, NumpyLoader
from dataloading.batches.loader_choice import check_loader, choose_loader, fastest_turns
from dataloading.batches.plan import MicroBatch

CPU = torch.device("cpu")
LENGTHS = np.array([5, 40, 3, 17, 9, 30])
STEP = [MicroBatch(np.array([4, 1, 2]), 6, 16), MicroBatch(np.array([0, 5]), 6, 16)]


class Dali(NumpyLoader):
    """Stand-in for DALI's loader that counts the calls of its methods."""

    seen: list[list[Batch]] = []  # noqa: RUF012
    closed = 0
    error: str | None = None

    def __init__(self, *arguments: Any) -> None:
        if not self.error:  # the real DALI, too, fails only at the first step
            super().__init__(*arguments)

    def __next__(self) -> list[Batch]:
        if self.error:
            raise RuntimeError(self.error)
        self.seen.append(super().__next__())
        return self.seen[-1]

    def close(self) -> None:
        Dali.closed += 1
        if not self.error:
            super().close()


@pytest.fixture
def dali(monkeypatch: pytest.MonkeyPatch) -> type[Dali]:
    Dali.seen, Dali.closed = [], 0
    module: Any = ModuleType("dali")
    module.DaliLoader = Dali
    monkeypatch.setitem(sys.modules, "dataloading.batches.dali", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    return Dali


def choose(kind: str, device: str = "cpu") -> Any:
    return choose_loader(kind, torch.device(device), lambda _: STEP, LENGTHS, 1)


def test_without_dali_or_a_gpu_it_is_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("numpy", "cuda").name == choose("auto").name == "numpy"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    choice = choose("auto", "cuda")
    assert (choice.name, choice.is_fallback) == ("numpy", False)
    assert "nvidia-dali is not installed" in choice.reason
    for check in (check_loader, choose):
        with pytest.raises(ValueError, match=r"data\.loader is dali, but nvidia-dali is not installed"):
            check("dali")


def test_dali_loads_a_step_of_the_runs_lengths_before_it_is_taken(dali: type[Dali]) -> None:
    assert choose("dali").make is dali
    assert [batch.cu_seqlens.diff().tolist() for batch in dali.seen[0]] == [[9, 40, 3], [5, 30]]
    assert dali.closed == 1


def test_a_dali_that_cannot_start_ends_the_run_only_if_it_was_set(
    dali: type[Dali], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dali, "error", "CUDA driver version is insufficient\nStacktrace (12 entries):\n[frame 0]: lib.so"
    )
    with pytest.raises(ValueError, match=r"data\.loader is dali.*CUDA driver version is insufficient\)") as caught:
        choose("dali")
    assert "\n" not in str(caught.value)
    choice = choose("auto", "cuda")
    assert (choice.make, choice.is_fallback) == (NumpyLoader, True)
    assert "CUDA driver version is insufficient" in choice.reason
    assert dali.closed == 2


def test_each_loader_counts_with_its_best_turn() -> None:
    class Slow(Dali):
        def __next__(self) -> list[Batch]:
            time.sleep(0.005)
            return super().__next__()

    arguments: tuple[Any, ...] = (None, lambda _: [], CPU, 1, ())
    fast, slow = fastest_turns([NumpyLoader(*arguments), Slow(*arguments)], CPU, 1)
    assert 0 < fast < slow
    assert slow >= 0.005
