"""The loader that is taken: the one that is set, or the one that is clearly faster, on made-up samples."""

import importlib.util
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataloading.batches import loader_choice
from dataloading.batches.loader import Batch, NumpyLoader
from dataloading.batches.loader_choice import check_loader, choose_loader, faster_loader
from dataloading.batches.sampler import MicroBatch

CPU = torch.device("cpu")
LENGTHS = np.array([5, 40, 3, 17, 9, 30])
STEP = [MicroBatch(np.array([4, 1, 2]), 6, 16), MicroBatch(np.array([0, 5]), 6, 16)]


@dataclass
class Clock:
    """Seconds that only loaders spend, and what was made."""

    now: float = 0.0
    open: int = 0
    batches: list[list[Batch]] = field(default_factory=list)

    def loader(self, seconds: float) -> Any:
        """The class of a loader that takes ``seconds`` a step."""
        clock = self

        class Timed(NumpyLoader):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                clock.open += 1

            def __next__(self) -> list[Batch]:
                clock.now += seconds
                clock.batches.append(super().__next__())
                return clock.batches[-1]

            def close(self) -> None:
                clock.open -= 1
                super().close()

        return Timed


@pytest.mark.parametrize(
    ("numpy_s", "dali_s", "name"), [(1.0, 0.5, "dali"), (1.0, 0.98, "numpy"), (1.0, 1.0, "numpy"), (0.25, 1.0, "numpy")]
)
def test_dali_is_taken_where_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, numpy_s: float, dali_s: float, name: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(loader_choice, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    numpy, dali = clock.loader(numpy_s), clock.loader(dali_s)
    monkeypatch.setattr(loader_choice, "NumpyLoader", numpy)
    choice = faster_loader(dali, CPU, lambda _: STEP, LENGTHS, prefetch=2)
    assert str(choice) == f"loader: {name} (numpy {1000 * numpy_s:.2f} ms a step, dali {1000 * dali_s:.2f} ms)"
    assert choice.make is {"numpy": numpy, "dali": dali}[name]
    assert clock.open == 0
    for step in clock.batches:
        assert [batch.cu_seqlens.diff().tolist() for batch in step] == [[9, 40, 3], [5, 30]], "lengths of the step"


def test_the_loader_of_dali_is_measured_where_it_is_installed() -> None:
    if importlib.util.find_spec("nvidia.dali") is None:
        pytest.skip("nvidia-dali is not installed")
    choice = faster_loader(loader_choice._dali(), CPU, lambda _: STEP, LENGTHS, prefetch=1)
    assert choice.name in ("numpy", "dali")
    assert choice.reason.startswith("numpy ")


def test_what_is_set_or_alone_possible_is_taken_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(step: int) -> list[MicroBatch]:
        raise AssertionError(f"step {step} was asked for")

    def chosen(kind: str, device: str) -> str:
        return str(choose_loader(kind, torch.device(device), untouched, LENGTHS, 1))

    assert chosen("auto", "cpu") == "loader: numpy (no GPU)"
    assert chosen("numpy", "cuda") == "loader: numpy (as set)"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert chosen("auto", "cuda") == "loader: numpy (nvidia-dali is not installed)"
    for check in (check_loader, lambda kind: chosen(kind, "cpu")):
        with pytest.raises(ValueError, match=r"data\.loader is dali, but nvidia-dali is not installed"):
            check("dali")


class Unable:
    """A loader whose pipeline cannot be built, as that of DALI with a driver that is too old."""

    closed = 0

    def __init__(self, *_: Any) -> None:
        """Nothing fails before the first step, as with DALI."""

    def __next__(self) -> list[Batch]:
        raise RuntimeError("CUDA driver version is insufficient\nStacktrace (12 entries):\n[frame 0]: libdali.so")

    def close(self) -> None:
        Unable.closed += 1


@pytest.mark.parametrize("fails_at", ["import", "first step"])
def test_a_dali_that_cannot_start_is_no_end_unless_it_was_set(monkeypatch: pytest.MonkeyPatch, fails_at: str) -> None:
    def missing() -> type:
        raise ImportError("libnvimgcodec.so: cannot open shared object file")

    monkeypatch.setattr(loader_choice, "_is_dali_installed", lambda: True)
    monkeypatch.setattr(loader_choice, "_dali", missing if fails_at == "import" else lambda: Unable)
    said = "libnvimgcodec.so" if fails_at == "import" else "CUDA driver version is insufficient"
    closed = Unable.closed

    choice = choose_loader("auto", torch.device("cuda", 0), lambda _: STEP, LENGTHS, 1)
    assert (choice.name, choice.make, choice.is_fallback) == ("numpy", NumpyLoader, True)
    assert said in choice.reason
    assert "\n" not in choice.reason

    with pytest.raises(ValueError, match=rf"data\.loader is dali.*{said}.*set data\.loader to numpy"):
        choose_loader("dali", CPU, lambda _: STEP, LENGTHS, 1)
    assert Unable.closed == closed + (0 if fails_at == "import" else 2)


def test_dali_has_loaded_a_step_before_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    dali = Clock()
    monkeypatch.setattr(loader_choice, "_is_dali_installed", lambda: True)
    monkeypatch.setattr(loader_choice, "_dali", lambda: dali.loader(0.0))
    assert str(choose_loader("dali", CPU, lambda _: STEP, LENGTHS, 1)) == "loader: dali (as set)"
    assert len(dali.batches) == 1
    assert dali.open == 0
