"""Computations that the probe times: how much work each trial states, and in which order it runs forward and backward."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from cluster.probe.computations import _COPIES, _backward_of, trials_of


@pytest.mark.slow
def test_each_trial_states_its_work() -> None:
    """The first shape of each kind, by hand: calls, and the terms that its kind has in `cluster.model.work.TERMS`."""
    trials = [trial for trial in trials_of(torch.device("cpu")) if "bf16" not in trial.kind]
    attention, norm, embedding = (1, 128 * 128, 128**2 * 4, 128**2 * 128), (1, 32 * 128), (1, 64 * 128, 1024 * 128)
    expected = {"linear fp32": (1, 64 * 128 * 128, 64 * 256, 128 * 128), "gelu": (1, 32 * 128), "loss": (1, 8 * 1024)}
    expected |= {"lamb": (1, 8, 8 * 4096), "batch": (1, 32)}
    for dropout in ("", " with dropout"):
        expected |= {f"attention{dropout}": attention, f"norm{dropout}": norm, f"embedding{dropout}": embedding}
    assert {trial.kind: trial.counts for trial in reversed(trials)} == expected
    kinds = Counter(trial.kind.removesuffix(" with dropout") for trial in trials)
    counts = {"linear fp32": 7, "attention": 10, "norm": 6, "embedding": 6, "gelu": 3, "loss": 3, "lamb": 3, "batch": 2}
    assert kinds == Counter(counts)
    assert {(trial.kind in ("lamb", "batch"), trial.times) for trial in trials} == {(True, 1), (False, _COPIES)}


def test_computations_run_forward_before_the_first_runs_backward_and_only_parameters_accumulate() -> None:
    order: list[tuple[str, int]] = []
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(activation: Tensor, weight: Tensor) -> Tensor:
        number = list(known).index(id(activation)) if id(activation) in known else len(known)
        known[id(activation)] = activation, weight
        order.append(("forward", number))
        output = activation * weight
        output.register_hook(lambda _: order.append(("backward", number)))
        return output

    trial = _backward_of("kind", (1, 6), forward, [(2, 3)], [(3,)])
    assert (trial.counts, trial.times) == ((1.0, 6.0), _COPIES)
    order.clear()
    for _ in range(2):
        trial.action()
    forwards = [("forward", place) for place in range(_COPIES)]
    assert order == 2 * [*forwards, *(("backward", place) for _, place in reversed(forwards))]
    for activation, weight in known.values():
        torch.testing.assert_close(activation.grad, weight.detach().expand(2, 3))
        torch.testing.assert_close(weight.grad, 2 * activation.detach().sum(0))
