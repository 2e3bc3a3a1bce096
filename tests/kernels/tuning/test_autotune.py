"""Choice of implementations by measurement. Implementations that fail are dropped, and the run is not affected."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining
from bert.optimizer import hyperparameters
from dataloading.batches.loader import batch_of
from dataloading.shards.samples import synthetic_samples
from kernels import OPS, choose, dropout_add_layer_norm, lamb_step
from kernels.registry import Implementation, Op
from kernels.tuning.autotune import (
    ROUNDS,
    CallKind,
    KernelChoice,
    Timer,
    Work,
    apply,
    from_json,
    observed,
    to_json,
    tune,
)
from kernels.tuning.examples import SMALL, example_inputs

CPU = torch.device("cpu")


def grown(x: Tensor) -> Tensor:
    return x * 2


class Grown:
    """Test op with an implementation for each name in ``times``, which has the seconds that it seems to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.calls: list[str] = []
        self.capturing = False
        self.not_capturable: set[str] = set()
        self._times = times
        self.order = tuple(Implementation(name, {"grown": partial(self._call, name)}) for name in times)
        self._monkeypatch = monkeypatch
        self.have(self.order)

    def have(self, order: tuple[Implementation, ...]) -> None:
        self._monkeypatch.setitem(OPS, "grown", Op(grown, order))

    def _call(self, name: str, x: Tensor) -> Tensor:
        self.calls.append(name)
        if name == "broken" or (self.capturing and name in self.not_capturable):
            raise RuntimeError(f"{name} synchronizes{300 * '!'}\nmore")
        return x * 2

    def __call__(self, x: Tensor) -> str:
        """Call the op and return the name of the implementation that ran."""
        op: Any = OPS["grown"]
        op(x)
        return self.calls[-1]

    def timed(self, work: Callable[[], object]) -> float:
        work()
        return self._times[self.calls[-1]]

    def replayed(self, work: Work) -> Work:
        """Run ``work`` twice, the second time as if a CUDA graph captured it."""
        work()
        self.capturing = True
        try:
            work()
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 as PyTorch does
        finally:
            self.capturing = False
        return work


def request_for(x: Tensor) -> CallKind:
    return CallKind.of("grown", (x,), {})


def test_tune_measures_implementations_and_auto_takes_the_fastest(monkeypatch: pytest.MonkeyPatch):
    op = Grown(monkeypatch, {"slow": 9.0, "broken": 1.0, "fast": 2.0, "close": 2.03125})
    x = torch.rand(64, 64)
    assert op(x) == "slow"
    choices = tune([request_for(x), request_for(x)], timed=op.timed)
    (choice,) = choices
    assert choice.milliseconds == {"fast": 2000.0, "close": 2031.25, "slow": 9000.0}
    assert list(choice.milliseconds) == ["fast", "close", "slow"]
    assert choice.errors == {"broken": f"RuntimeError: broken synchronizes{181 * '!'}"}, "200 characters"
    assert all(word in str(choice) for word in (*choice.milliseconds, "64 x 64", "broken synchronizes"))
    apply(from_json(to_json(choices)))
    assert op(torch.rand(50, 64)) == "fast", "of the same bucket"
    assert op(torch.rand(65, 64)) == "slow", "not measured"
    apply([])
    assert op(x) == "slow"


@pytest.mark.parametrize("measured", [64, 65], ids=["a kind that was measured", "another kind of call"])
def test_an_implementation_that_cannot_be_captured_is_never_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measured: int
):
    """An implementation that cannot be captured would make the training step's capture fail."""
    op = Grown(monkeypatch, {"first": 1.0, "second": 3.0, "third": 2.0})
    op.not_capturable = {"first"}
    (choice,) = tune([request_for(torch.rand(measured, 8))], op.replayed, op.timed)
    assert (list(choice.milliseconds), list(choice.errors)) == (["third", "second"], ["first"])
    assert "first synchronizes" in caplog.text
    apply(from_json(to_json([choice])))
    assert op(torch.rand(64, 8)) == ("third" if measured == 64 else "second")
    with OPS["grown"].using("first"), pytest.raises(ValueError, match="first synchronizes"):
        op(torch.rand(64, 8))


def test_the_definition_is_measured_only_if_nothing_else_works(monkeypatch: pytest.MonkeyPatch):
    op = Grown(monkeypatch, {"triton": 1.0, "library": 1.0, "reference": 1.0})
    x = torch.rand(64, 8)
    (choice,) = tune([request_for(x)], op.replayed, op.timed)
    assert "reference" not in op.calls, "which takes seconds at full size"
    op.not_capturable = {"triton", "library"}
    (choice,) = tune([request_for(x)], op.replayed, op.timed)
    assert list(choice.milliseconds) == ["reference"]
    op.not_capturable = {"triton", "library", "reference"}
    (hopeless,) = tune([request_for(x)], op.replayed, op.timed)
    assert (hopeless.milliseconds, len(hopeless.errors)) == ({}, 3)
    apply([choice])
    assert op(x) == "reference"
    apply([hopeless])
    with pytest.raises(ValueError, match=r"triton synchronizes.*library synchronizes.*reference synchronizes"):
        op(x)


def test_explicitly_chosen_and_single_implementations_are_not_measured(monkeypatch: pytest.MonkeyPatch):
    op = Grown(monkeypatch, {"slow": 2.0, "fast": 1.0})
    request = request_for(torch.rand(64, 8))
    with OPS["grown"].using("slow"):
        assert tune([request], timed=op.timed) == [], "the run has asked for one"
    op.have(op.order[:1])
    assert tune([request], timed=op.timed) == []
    assert op.calls == []


PLAIN, CAST, BACKWARD = "varlen_self_attention", "attention_cast_fp8", "attention_backward_cast_fp8"
FUSED, SEPARATE, LIBRARY = "triton with fused casts", "triton with separate casts", "library with separate casts"


class Attention:
    """Attention that seems to take the given seconds, or fails if they are negative. A separate cast seems to take 1 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, triton: float, library: float, with_casts: float) -> None:
        self._spent: list[float] = []
        cast = [self._implementation("reference", 1.0)]
        fused = [self._implementation("triton", with_casts / 2), OPS[CAST].implementations["reference"]]
        plain = [self._implementation("triton", triton), self._implementation("library", library)]
        orders = {
            PLAIN: plain,
            CAST: fused,
            BACKWARD: fused,
            "cast_transpose_fp8": cast,
            "cast_transpose_sum_fp8": cast,
        }
        for op, order in orders.items():
            monkeypatch.setattr(OPS[op], "orders", {"cpu": order, "cuda": order})
            monkeypatch.setattr(OPS[op], "implementations", {each.name: each for each in order})
        self.plain_call, self.cast_call = (example_inputs(op, CPU, torch.float32)[0] for op in (PLAIN, CAST))

    def _implementation(self, name: str, seconds: float) -> Implementation:
        def charged(op: str, *args: Any) -> Any:
            self._spent.append(seconds)
            if seconds < 0:
                raise RuntimeError("no such kernel")
            return OPS[op].definition(*args)

        return Implementation(name, {op: partial(charged, op) for op in OPS})

    def _timed(self, work: Callable[[], object]) -> float:
        self._spent.clear()
        work()
        return sum(self._spent)

    def choose(self, in_fp8: bool = True) -> list[KernelChoice]:
        """Measure the calls, and apply the choices as another process would, which receives them as JSON."""
        requests = [CallKind.of(PLAIN, self.plain_call, {})]
        with torch.no_grad():
            requests += [CallKind.of(CAST, self.cast_call, {})] * in_fp8
        choices = tune(requests, timed=self._timed)
        apply(from_json(to_json(choices)))
        return choices

    def taken(self) -> tuple[str, bool]:
        """Return the chosen attention, and whether it also makes the casts."""
        name = OPS[PLAIN].chosen(*self.plain_call).name
        with torch.no_grad():
            return name, OPS[CAST].takes(name, *self.cast_call)


@pytest.mark.parametrize(
    ("library", "with_casts", "milliseconds", "taken"),
    [
        (5.0, 6.0, {FUSED: 6000.0, LIBRARY: 7000.0, SEPARATE: 8000.0}, ("triton", True)),
        (9.0, 8.125, {FUSED: 8125.0, SEPARATE: 8000.0, LIBRARY: 11000.0}, ("triton", True)),
        (9.0, 9.0, {SEPARATE: 8000.0, FUSED: 9000.0, LIBRARY: 11000.0}, ("triton", False)),
        (3.0, 9.0, {LIBRARY: 5000.0, SEPARATE: 8000.0, FUSED: 9000.0}, ("library", False)),
        (9.0, -1.0, {SEPARATE: 8000.0, LIBRARY: 11000.0}, ("triton", False)),
    ],
    ids=["fused", "equal", "separate", "library", "broken"],
)
def test_attention_makes_the_casts_for_fp8_products_if_that_is_fastest(
    monkeypatch: pytest.MonkeyPatch,
    library: float,
    with_casts: float,
    milliseconds: dict[str, float],
    taken: tuple[str, bool],
):
    attention = Attention(monkeypatch, 6.0, library, with_casts)
    choice = attention.choose()[0]
    assert list(choice.milliseconds.items()) == list(milliseconds.items())
    assert all(name in str(choice) for name in (FUSED, SEPARATE, LIBRARY))
    assert attention.taken() == taken


def test_without_fp8_attention_is_timed_without_casts(monkeypatch: pytest.MonkeyPatch):
    (choice,) = Attention(monkeypatch, 6.0, 5.0, 6.0).choose(in_fp8=False)
    assert list(choice.milliseconds.items()) == [("library", 5000.0), ("triton", 6000.0)]


@pytest.mark.parametrize(
    ("asked", "measured", "taken"),
    [
        ({CAST: "reference"}, [LIBRARY, SEPARATE], ("library", False)),
        ({BACKWARD: "reference"}, [LIBRARY, SEPARATE], ("library", False)),
        ({PLAIN: "triton"}, [SEPARATE, FUSED], ("triton", False)),
        ({CAST: "triton"}, [], ("triton", True)),
        ({PLAIN: "triton", CAST: "triton"}, [], ("triton", True)),
    ],
    ids=str,
)
def test_explicit_choices_restrict_how_attention_is_measured(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], measured: list[str], taken: tuple[str, bool]
):
    attention = Attention(monkeypatch, 6.0, 5.0, 9.0)
    choose(asked)
    found = [name for choice in attention.choose() if choice.op == PLAIN for name in choice.milliseconds]
    assert found == measured
    assert attention.taken() == taken


def test_a_call_is_not_measured_if_its_arguments_do_not_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    op = Grown(monkeypatch, {"slow": 2.0, "fast": 1.0})

    def full(_: Work) -> Work:
        raise torch.OutOfMemoryError("full")

    assert tune([request_for(torch.ones(3, 3))], full, op.timed) == []
    assert "grown (3 x 3, float32) is not measured" in caplog.text


def test_requests_describe_the_calls_and_keep_no_tensors_alive():
    weight = torch.ones(64, requires_grad=True)
    activation = torch.rand(6, 64).bfloat16()
    alive = weakref.ref(activation)

    def call(rows: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            dropout_add_layer_norm(rows, weight, rows, weight, weight, 1e-12)

    with observed() as requests:
        call(activation)
        call(activation)
        with torch.no_grad():
            call(activation)
    del activation
    gc.collect()
    assert alive() is None
    assert [(request.op, request.gradients, request.autocast) for request in requests] == [
        ("dropout_add_layer_norm", True, torch.bfloat16),
        ("dropout_add_layer_norm", False, torch.bfloat16),
    ]
    assert requests[1].label == "dropout_add_layer_norm (6 x 64, bfloat16, forward)"
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        again = CallKind.of("dropout_add_layer_norm", *requests[1].arguments())
    assert again.signature == requests[1].signature


def test_example_inputs_match_the_calls_of_a_models_first_step() -> None:
    config = ModelConfig(2, SMALL.hidden, SMALL.heads, SMALL.intermediate, SMALL.vocabulary, SMALL.max_seqlen)
    with observed() as calls:
        BertForPreTraining(config)(batch_of(synthetic_samples(np.array(SMALL.lengths), SMALL.vocabulary)))
    rate, norm = 1e-3, (128 * 256 + 256 + 128) ** 0.5
    first = {"lamb_step": [1, rate], "lamb_directions": [1, norm], "lamb_apply": [norm, rate], "scaled_matmul": [1, 1]}
    for op in OPS:
        example = CallKind.of(op, *example_inputs(op, CPU, torch.float32))
        tensors = [each for each in (*example.args, *example.kwargs.values()) if isinstance(each, Tensor)]
        numbers = [each.item() for each in tensors if not each.dim()]
        assert numbers == pytest.approx(first.get(op, [1, 0] if op.endswith("fp8") else []))
        if op in ("varlen_self_attention", "dense_gelu", "dropout_add_layer_norm", "embedding_layer_norm"):
            assert any(call.signature.startswith(example.signature) for call in calls if call.op == op)
        assert {each for each in example.args if isinstance(each, float)} <= {config.layer_norm_eps}
        if op == "lamb_step":
            assert example.args[4] == hyperparameters(OptimizerConfig(rate, 10))


def test_generated_arguments_have_the_strides_of_the_call():
    ids, fp8 = torch.arange(5), torch.zeros(16, 32).to(torch.float8_e5m2)
    views = torch.rand(5, 3, 2, 4).unbind(1)[1], torch.rand(0, 4), torch.rand(3).expand(2, 3), fp8.t()
    made, _ = CallKind.of("grown", (ids, torch.full((), 3.0), *views), {}).arguments()
    assert made[0].equal(ids)
    assert made[0] is not ids
    assert made[1] == 3
    for found, view in zip(made[2:], views, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (view.shape, view.stride(), view.dtype)
    assert made[-1].float().std() > 0.1


def test_measuring_changes_neither_tensors_nor_random_states():
    args, kwargs = example_inputs("lamb_step", CPU, torch.float32)
    tensors = [args[0], args[1], *vars(args[2]).values(), kwargs["step"], kwargs["learning_rate"]]
    before = [tensor.clone() for tensor in tensors]
    random = torch.random.get_rng_state()
    run: list[object] = []
    tune([CallKind.of("lamb_step", args, kwargs)], timed=lambda work: run.append(work()) or 1.0)
    tune([CallKind.of("dropout_add_layer_norm", *example_inputs("dropout_add_layer_norm", CPU, torch.float32))])
    assert all(tensor.equal(old) for tensor, old in zip(tensors, before, strict=True))
    assert torch.random.get_rng_state().equal(random)
    assert lamb_step.asked == "auto"
    worked: list[int] = []
    assert 0 < Timer(CPU)(lambda: worked.append(1)) < 60
    assert worked == [1]


def test_the_backward_pass_is_measured_if_inputs_require_gradients(monkeypatch: pytest.MonkeyPatch):
    ways: list[str] = []

    def watched(x: Tensor) -> Tensor:
        ways.append("forward")
        output = x * 2
        if output.requires_grad:
            output.register_hook(lambda _: ways.append("backward"))
        return output

    order = tuple(Implementation(name, {"grown": watched}) for name in ("one", "other"))
    monkeypatch.setitem(OPS, "grown", Op(grown, order))
    tune([request_for(torch.rand(3, requires_grad=True))])
    assert ways == ["forward", "backward"] * 2 * (1 + ROUNDS)
