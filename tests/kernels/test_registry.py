"""Choice of an op's implementation: the first that supports the inputs, or the named one, with the reasons."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from kernels import OPS, Dropout, choose, only_capturable, varlen_attention
from kernels.__main__ import main
from kernels.registry import Implementation, Op, signature
from kernels.tuning.examples import example_inputs


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def only_float32(x: Tensor, _factor: float) -> list[str]:
    reasons = [] if x.dtype == torch.float32 else [f"{x.dtype} is not float32"]
    return reasons + (["autocast is on"] if torch.is_autocast_enabled("cpu") else [])


@pytest.fixture
def op() -> Op[[Tensor, float], Tensor]:
    """Test op whose implementations each add a different number to the definition's result."""
    order = (
        Implementation("picky", {"scaled": lambda x, factor: x * factor + 2, "no": lambda *_: ["never works"]}, "no"),
        Implementation("absent", "a_package_that_is_not_there.ops", requires="a_package_that_is_not_there"),
        Implementation("fast", {"scaled": lambda x, factor: x * factor + 1, "reasons": only_float32}, "reasons"),
        Implementation("reference", {"scaled": scaled}),
    )
    return Op(scaled, order)


def test_auto_takes_the_first_implementation_that_supports_the_inputs(op: Op[[Tensor, float], Tensor]) -> None:
    ones = torch.ones(3)
    for _ in range(2):
        assert op(ones, 2.0).tolist() == [3, 3, 3]
        assert op(ones.double(), 2.0).tolist() == [2, 2, 2]
        with torch.autocast("cpu", torch.bfloat16):
            assert op(ones, 2.0).tolist() == [2, 2, 2]


def test_an_explicitly_chosen_implementation_runs_or_raises_the_reason(op: Op[[Tensor, float], Tensor]) -> None:
    ones = torch.ones(3)
    with op.using("reference"):
        assert op(ones, 2.0).tolist() == [2, 2, 2]
    for name, x, reason in (
        ("fast", ones.double(), "torch.float64 is not float32"),
        ("picky", ones, "never works"),
        ("absent", ones, "a_package_that_is_not_there is not installed"),
    ):
        with op.using(name), pytest.raises(ValueError, match=f"scaled={name} .*{reason}.*picky, absent, fast"):
            op(x, 2.0)
    with pytest.raises(ValueError, match="'slow'"):
        op.ask_for("slow")
    assert op.asked == "auto"
    assert op(ones, 2.0).tolist() == [3, 3, 3]


def test_auto_prefers_the_measured_implementation_if_it_supports_the_inputs(op: Op[[Tensor, float], Tensor]) -> None:
    ones = torch.ones(3)
    op.prefer({signature(ones, 2.0): "reference", signature(ones.double(), 2.0): "fast"})
    assert op(ones, 2.0).tolist() == [2, 2, 2]
    assert op(torch.ones(4), 2.0).tolist() == [2, 2, 2, 2]  # sizes 3 and 4 share one choice
    assert op(torch.ones(5), 2.0).tolist() == [3] * 5
    assert op(ones.double(), 2.0).tolist() == [2, 2, 2]  # "fast" does not support float64
    with op.using("fast"):
        assert op(ones, 2.0).tolist() == [3, 3, 3]
    op.prefer({}, {"fast": "it failed to be captured"})
    assert op.chosen(ones, 2.0).name == "reference"
    with op.using("fast"), pytest.raises(ValueError, match="it failed to be captured"):
        op(ones, 2.0)
    op.prefer({})
    assert op(ones, 2.0).tolist() == [3, 3, 3]


def test_takes_raises_only_if_asked_about_an_explicit_choice_that_is_unusable(op: Op[[Tensor, float], Tensor]) -> None:
    """``takes`` says whether the op would use an implementation. It is no error if another, unusable one is chosen."""
    ones = torch.ones(3)
    assert [name for name in op.implementations if op.takes(name, ones, 2.0)] == ["fast"]
    op.prefer({signature(ones, 2.0): "picky"})
    assert not any(op.takes(name, ones, 2.0) for name in op.implementations)
    with op.using("picky"):
        assert not op.takes("fast", ones, 2.0)
        with pytest.raises(ValueError, match="scaled=picky cannot be used: never works"):
            op.takes("picky", ones, 2.0)


@pytest.mark.parametrize("name", ["attention_cast_fp8", "attention_backward_cast_fp8"])
def test_takes_raises_for_attention_with_casts_that_cannot_be_captured(name: str):
    with FakeTensorMode(), only_capturable(), OPS[name].using("reference"):
        qkv = torch.zeros(8, 3, 2, 64, device="cuda")
        assert not OPS[name].takes("triton", qkv)
        with pytest.raises(ValueError, match=f"{name}=reference cannot be used: it copies values .* set it to auto"):
            OPS[name].takes("reference", qkv)


@pytest.mark.oldest_torch
def test_signatures_differ_in_every_property_that_may_affect_the_choice():
    x = torch.ones(3, 8)
    kinds = [signature(x, factor) for factor in (2.0, None, torch.float32, torch.float16, True)]
    kinds += [signature(torch.ones(shape), 2.0) for shape in ((5, 8), (0, 4), (1, 4), (2, 4), (3, 9), ())]
    kinds += [signature(x, factor=2.0), signature(x.double(), 2.0), signature(x.clone().requires_grad_(), 2.0)]
    with torch.no_grad():
        kinds.append(signature(x, 2.0))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            kinds.append(signature(x, 2.0))
    assert len(set(kinds)) == len(kinds)
    assert signature(x, 2.0) == signature(torch.zeros(4, 8), 3.0)


def test_a_fall_back_on_a_gpu_is_logged_once_with_its_reasons(
    op: Op[[Tensor, float], Tensor], caplog: pytest.LogCaptureFixture
):
    op(torch.ones(3), 2.0)
    assert caplog.messages == []
    with FakeTensorMode():
        for size in (3, 100, 1000):
            op(torch.ones(size, device="cuda"), 2.0)
    assert caplog.messages == ["scaled: fast instead of picky: never works"]


def test_choose_changes_nothing_if_one_of_its_choices_does_not_exist():
    choose({"varlen_attention": "reference", "lamb_step": "auto"})
    assert varlen_attention.asked == "reference"
    for wrong, message in (
        ({"varlen_attention": "auto", "attention": "triton"}, "no op 'attention'"),
        ({"varlen_attention": "auto", "lamb_step": "pytorch"}, "lamb_step .*'pytorch'"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(wrong)
        assert varlen_attention.asked == "reference"


def attention_call(head_size: int, device: str = "cuda") -> tuple[Any, ...]:
    bounds = torch.zeros(3, dtype=torch.int32, device=device)
    heads = torch.zeros(8, 2, head_size, dtype=torch.bfloat16, device=device)
    dropout = Dropout(0.1, torch.zeros(2, dtype=torch.int64, device=device), 0)
    return heads, heads, heads, bounds, bounds, 4, dropout


def test_a_capture_never_uses_attention_that_reads_lengths_on_the_host():
    """Reading lengths breaks a capture, so neither a measurement nor an explicit choice may select such attention."""
    with FakeTensorMode():
        usual, odd = attention_call(64), attention_call(24 * 8 + 4)  # no kernel supports a head size of 196
        assert varlen_attention.chosen(*odd).name == "pytorch"
        varlen_attention.prefer({signature(*usual): "pytorch"})
        assert varlen_attention.chosen(*usual).name == "pytorch"
        with only_capturable():
            assert varlen_attention.chosen(*usual).name == "triton"
            with pytest.raises(
                ValueError, match=r"no implementation that a CUDA graph .*triton: head size 196; .*False"
            ):
                varlen_attention.chosen(*odd)
            for name in ("pytorch", "reference"):
                with varlen_attention.using(name), pytest.raises(ValueError, match=f"{name} cannot .* to the host"):
                    varlen_attention.chosen(*usual)
            assert varlen_attention.chosen(*attention_call(64, "cpu")).name == "pytorch"
        assert varlen_attention.chosen(*odd).name == "pytorch"


OWN = [
    (op, implementation)
    for op in OPS.values()
    for implementation in op.implementations.values()
    if implementation.name in ("pytorch", "reference")
]


@pytest.mark.parametrize(("op", "implementation"), OWN, ids=lambda each: each.name)
def test_implementations_that_read_on_the_host_are_not_capturable(op: Op[..., Any], implementation: Implementation):
    """An implementation that calls ``tolist`` or ``item`` on a CPU also calls it on a GPU, where it breaks a capture."""
    reads: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if getattr(func, "__name__", "") in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__"):
                reads.append(func.__name__)
            return func(*args, **kwargs or {})

    args, kwargs = example_inputs(op.name, torch.device("cpu"), torch.float32)
    if not implementation.unsupported_reasons(*args, **kwargs):
        with Watch():
            implementation.function(op.name)(*args, **kwargs)
        assert implementation.capturable is (reads == [])


@pytest.mark.oldest_torch
def test_the_command_lists_all_ops_and_marks_the_chosen_implementations(capsys: pytest.CaptureFixture[str]):
    assert main(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == ["op", *OPS]
    taken = [line.removesuffix("usable").split()[-2] for line in lines if "<-" in line]
    in_pytorch = ("varlen_attention", "varlen_self_attention", "dropout_add_layer_norm", "embedding_layer_norm")
    assert taken == ["pytorch" if name in in_pytorch else "reference" for name in OPS]
    assert any("flash_attn is not installed" in line or "expected a GPU" in line for line in lines)
    for wrong in ("tpu", *([] if torch.cuda.is_available() else ["cuda"])):
        assert main(["--device", wrong]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith("error: ")
