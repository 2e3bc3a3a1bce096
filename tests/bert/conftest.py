"""A clock for runs in this process."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from bert.evaluation import Evaluator
from bert.step import TrainingStep
from dataloading.batches.loader import NumpyLoader

SECONDS: tuple[tuple[type, str, float], ...] = (
    (NumpyLoader, "__next__", 0.5),
    (TrainingStep, "forward_backward", 1.5),  # per micro-batch
    (TrainingStep, "update", 1.0),
    (Evaluator, "__call__", 7.0),
)


class Clock:
    """Clock that advances only in the methods listed in ``SECONDS``. Call ``begin`` before each run.

    After the warm-up, each update of the weights first calls ``at_update`` with the training step and its number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._steps = 1000.0, 0
        self.begin()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        for owner, name, seconds in SECONDS:
            monkeypatch.setattr(owner, name, self._slowed(getattr(owner, name), name, seconds))

    def begin(self, at_update: Callable[[TrainingStep, int], object] = lambda _step, _number: None) -> None:
        self._steps, self._at_update = 0, at_update

    def _slowed(self, original: Any, name: str, seconds: float) -> Any:
        def slowed(each: Any, *arguments: Any, **options: Any) -> Any:
            self.now += seconds
            self._steps += name == "__next__"
            if name == "update" and self._steps:  # the warm-up loads no batches
                self._at_update(each, self._steps)
            return original(each, *arguments, **options)

        return slowed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
