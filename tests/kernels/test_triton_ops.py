"""All ops and all implementations that run on a CPU, compared with the definition in float64 for many inputs.

Triton's implementations run in the interpreter, on the test bench of ``tests.kernels.interpreted``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_parts.accuracy import outcome, same_bits
from kernels import OPS
from kernels.reference.random import Dropout
from kernels.triton.norms.rows import SUM_TILE
from kernels.tuning.examples import Size, example_inputs
from tests.bert.operators import Operators
from tests.kernels.accuracy import CPU, IN_TRITON, assert_within_twice, triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Seed and step exceed 32 bits; the generator uses only the lower 32 bits of the step.
DROPOUT = Dropout(0.1, torch.tensor([-(3 << 40) - 17, (1 << 33) + 77]), 16)
Inputs = tuple[list[Any], dict[str, Any]]
Change = Callable[[list[Any]], None]
STEPS = {op: 1e-3 if "gelu" in op else 0.1 for op in OPS if op.endswith("cast_fp8")}
"""Fraction of FP8 results that may differ by one FP8 step, because values are rounded before the cast."""


@dataclass(frozen=True)
class Case:
    """Inputs of an op. ``change`` edits the positional arguments."""

    op: str
    size: Size
    dtype: torch.dtype = FP32
    dropout: Dropout | None = DROPOUT
    change: Change = lambda _: None

    def __str__(self) -> str:
        size, dtype = self.size, str(self.dtype).removeprefix("torch.")
        shape = f"{sum(size.lengths)} {size.masked} x {size.hidden} {size.intermediate} {size.vocabulary}"
        return f"{self.op}, {shape}, {dtype}{', dropout' if self.dropout else ''}"

    def draw(self, seed: int) -> Inputs:
        args, kwargs = example_inputs(self.op, CPU, self.dtype, self.size, seed)
        changed = [self.dropout if isinstance(value, Dropout) else value for value in args]
        self.change(changed)
        return changed, kwargs

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return implementations to compare with the definition: they support the case and drop the same elements."""
        op, (args, kwargs) = OPS[self.op], self.draw(0)
        dropout = any(isinstance(value, Dropout) for value in args)
        return {
            name: each.function(self.op)
            for name, each in op.implementations.items()
            if name != "reference" and not (dropout and not each.repeatable)
            if not each.unsupported_reasons(*args, **kwargs)
        }


def unowned(rest: int) -> Change:
    """Return a change that leaves the last ``rest`` tokens outside of all sequences."""

    def change(args: list[Any]) -> None:
        for place, x in enumerate(args):
            if isinstance(x, Tensor) and x.dtype == torch.int32 and rest:
                args[place] = x[:-1]

    return change


def lengths_of(lengths_q: Sequence[int], lengths_k: Sequence[int]) -> Change:
    """Return a change that gives queries and keys different sequence lengths."""

    def change(args: list[Any]) -> None:
        args[0], *args[1:3] = args[0][: sum(lengths_q)], *(x[: sum(lengths_k)] for x in args[1:3])
        args[3:5] = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
        args[5] = max(*lengths_q, *lengths_k)

    return change


def with_a_mean(args: list[Any]) -> None:
    """Make the residual's mean large compared with its standard deviation."""
    residual = next(place for place in (4, 2) if args[place].ndim == 2)
    args[residual] = (args[residual].detach() + 5).requires_grad_(args[residual].requires_grad)


def vectors_in_fp32(args: list[Any]) -> None:
    for place, x in enumerate(args):
        if isinstance(x, Tensor) and x.ndim == 1 and x.is_floating_point():
            args[place] = x.detach().float().requires_grad_(x.requires_grad)


def some_ignored(args: list[Any]) -> None:
    args[3][2::3] = -1


def counting(args: list[Any]) -> None:
    some_ignored(args)
    args[4] = True


def attention_cases() -> Iterator[Case]:
    for lengths, rest, size, heads, dtype, dropout in (
        ([31, 32, 33, 65], 7, 32, 2, FP32, DROPOUT),  # lengths near a block of keys (32 in fp32, otherwise 64)
        ([31, 64, 65], 0, 64, 1, BF16, DROPOUT),
        ([0, 5, 0, 0, 9, 9, 0], 41, 16, 2, FP16, None),
        ([70, 3], 7, 64, 1, FP32, None),
        ([150, 1, 0], 0, 16, 1, FP16, DROPOUT),
        ([1, 0, 0, 0] * 2, 0, 16, 2, FP32, DROPOUT),
    ):
        sizes = Size((*lengths, rest), max(lengths), hidden=heads * size, heads=heads)
        ops = ["varlen_self_attention"]
        # Longer sequences take seconds in the interpreter, so only this op has them. The others launch its kernels.
        # Another test compares the results of ``attention_cast_fp8`` with this op's.
        if sum(lengths) < 100:
            ops += ["varlen_attention", *["attention_cast_fp8"] * (dtype == FP32)]
        for op in ops:
            yield Case(op, sizes, dtype, dropout, unowned(rest))
    for lengths_q, lengths_k, dropout in (
        ([7, 7, 3, 7, 3, 3], [7, 7, 3, 7, 3, 3], None),
        ([2, 1, 2, 70], [66, 129, 1, 40], DROPOUT),
        ([0, 4, 0], [5, 6, 70], None),
        ([0, 4, 0], [5, 6, 70], DROPOUT),
        ([70, 3], [2, 1], DROPOUT),
        ([3, 3, 1, 2], [9, 9, 9, 4], None),
    ):
        yield Case(
            "varlen_attention", Size((240,), hidden=64, heads=2), FP32, dropout, lengths_of(lengths_q, lengths_k)
        )


def norm_cases() -> Iterator[Case]:
    for tokens, columns, dtype, dropout in (  # sizes near the tile's size, and more rows than programs
        *((5, 128, dtype, dropout) for dropout in (DROPOUT, None) for dtype in (FP32, BF16)),
        *((0, 64, FP32, DROPOUT), (1, 16, FP32, DROPOUT), (5, 64, FP16, DROPOUT), (16, 48, BF16, None)),
        *((70, 96, FP32, DROPOUT), (37, 144, FP16, None), (3, 1024, BF16, DROPOUT), (3, 2064, FP32, None)),
        (2, 4096, BF16, DROPOUT),
    ):
        size = Size((tokens - tokens // 2, tokens // 2), max(1, tokens), hidden=columns, heads=1, vocabulary=7)
        yield Case("embedding_layer_norm", size, dtype, dropout)
        yield Case("dropout_add_layer_norm", size, dtype, dropout, with_a_mean)
        for op in ("add_norm_cast_fp8", "add_norm_backward_cast_fp8"):
            if dtype == FP32:
                yield Case(op, size, dtype, dropout, with_a_mean)
    yield Case("dropout_add_layer_norm", Size((4,), hidden=8), FP32, DROPOUT)


def other_cases() -> Iterator[Case]:
    halves = cycle((FP16, BF16))
    for tokens, columns, wide in ((64, 8, 32), (65, 8, 32), (67, 7, 13), (3, 8, 513)):
        for dtype in (FP32, next(halves)):
            yield Case("dense_gelu", Size((tokens,), hidden=columns, intermediate=wide), dtype)
    for masked, columns, words in (
        *((1, 8, 16), (3, 8, 1), (5, 7, 13), (0, 8, 20), (4, 8, 65)),
        *((7, 16, 1025), (9, 16, 3001), (6, 8, 30522)),
    ):
        size = Size(masked=masked, hidden=columns, vocabulary=words)
        for dtype, change in product((FP32, next(halves)), (some_ignored, counting)):
            yield Case("masked_lm_loss", size, dtype, None, change)
    yield Case("bias_gelu", Size((131,), intermediate=130), FP32)
    yield Case("bias_gelu", Size((9,), intermediate=32), BF16, None, vectors_in_fp32)
    yield Case("sum_of_squares", Size(hidden=8, intermediate=5003))
    for op in ("lamb_directions", "lamb_apply"):
        yield Case(op, Size(hidden=8, intermediate=5003))
    yield Case("lamb_step", Size(hidden=8, intermediate=5003), BF16)  # with copies of the weights in bf16


def cast_cases() -> Iterator[Case]:
    # Row counts near the padding's and the tile's size. Column counts below a tile, and not multiples of a tile.
    shapes = [(0, 32), (1, 16), (15, 48), (16, 16), (17, 320), (128, 64), (129, 80), (255, 48), (300, 16)]
    for (tokens, columns), dtype in zip(shapes, 3 * (BF16, FP32, FP16), strict=True):
        size = Size((tokens,), hidden=columns, intermediate=columns)
        for op in OPS:
            if op.endswith("fp8") and "norm" not in op and "attention" not in op:
                yield Case(op, size, dtype)
        yield Case("bias_gelu_backward_cast_fp8", size, dtype, None, vectors_in_fp32)


CASES = [*attention_cases(), *norm_cases(), *other_cases(), *cast_cases()]


@pytest.fixture(autouse=True)
def wide_rows_are_summed_in_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum wide rows in wide tiles, because narrow tiles need hundreds of programs and would take most of the time."""
    monkeypatch.setitem(SUM_TILE, "COLUMNS", 512)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow
def test_errors_are_at_most_twice_the_definitions_errors(case: Case) -> None:
    """Allow one more rounding step in bf16, because the interpreter truncates, and a few rounding steps in fp32."""
    elements = max(1, sum(case.size.lengths) * case.size.hidden)
    draws = [case.draw(seed) for seed in range(min(2, -(-4000 // elements)))]
    free = torch.finfo(case.dtype).eps + 16 * torch.finfo(FP32).eps
    for function in case.functions().values():
        assert_within_twice(function, OPS[case.op].definition, draws, free, STEPS.get(case.op, 0))


def test_all_but_three_implementations_have_a_case() -> None:
    tested = {(case.op, name) for case in CASES for name in case.functions()}
    every = {(op.name, name) for op in OPS.values() for name in op.implementations if name in ("triton", "pytorch")}
    # The first op needs tensors from a forward pass, the second needs CUDA, and the third has tests in another file.
    others = {
        "attention_backward_cast_fp8": "triton",
        "accumulate_weight_gradient": "pytorch",
        "scaled_matmul": "pytorch",
    }
    assert every - tested == set(others.items())


@pytest.mark.parametrize("op", IN_TRITON)
def test_strided_and_contiguous_inputs_give_bitwise_equal_results(op: str) -> None:
    """Results for non-contiguous tensors are equal bit for bit."""
    args, kwargs = example_inputs(op, CPU, FP32, Size((9, 4), 9, 5, 64, 2, 64, 40))
    function = triton(op)
    # Other ops write their inputs or need tensors from a forward pass.
    takes = not op.startswith(("lamb", "sum", "cast_transpose_into", "attention_backward"))
    strided = [_strided(x) if isinstance(x, Tensor) and x.ndim > 1 and takes else x for x in args]
    for found, expected in zip(
        outcome(function, (strided, kwargs)).tensors, outcome(function, (args, kwargs)).tensors, strict=True
    ):
        assert same_bits(found, expected)


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x.detach(), x.detach()], -1)[..., 0].requires_grad_(x.requires_grad)


@pytest.mark.parametrize(
    "op", ["varlen_self_attention", "dropout_add_layer_norm", "dense_gelu", "embedding_layer_norm"]
)
def test_expanded_and_contiguous_upstream_gradients_give_equal_gradients(op: str) -> None:
    """The gradient that ``sum`` passes back is an expanded tensor, whose strides are 0."""
    args, _ = example_inputs(op, CPU, FP32, Size((9, 4), 9, 5, 64, 2, 64, 40))
    leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    output = triton(op)(*args)
    expected = torch.autograd.grad(output, leaves, torch.ones_like(output), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), leaves), expected)


WITH_DROPOUT = (
    "varlen_attention",
    "varlen_self_attention",
    *(op for op in OPS if "norm" in op or op == "attention_cast_fp8"),
)


@pytest.mark.parametrize(
    ("op", "dropout"), [*((op, None) for op in IN_TRITON), *((op, DROPOUT) for op in WITH_DROPOUT)]
)
def test_custom_operators_pass_opcheck(op: str, dropout: Dropout | None) -> None:
    """PyTorch's ``opcheck`` checks mutation, aliasing and fake tensors in forward and backward."""
    case = Case(op, Size((5, 2), 5, 5, 32, 1, 48, 40), BF16, dropout)
    args, kwargs = case.draw(0)
    if "norm_backward" in op:
        args[1] = None if dropout else args[1]
    with Operators() as operators:
        outcome(triton(op), (args, kwargs))
    calls = [(operator, given) for operator, given in operators.calls if operator.namespace == "mlperf_bert"]
    assert calls
    for operator, given in calls:
        tensors = tree_leaves(given)
        fp8 = any(isinstance(x, Tensor) and x.is_floating_point() and x.element_size() == 1 for x in tensors)
        # The schema check compares arguments, which PyTorch does not support for FP8.
        checks = ["test_faketensor"] if fp8 else ["test_faketensor", "test_schema"]
        torch.library.opcheck(operator, given, test_utils=checks)


FUSED = [
    case
    for case in CASES
    if case.op in ("dropout_add_layer_norm", "varlen_self_attention")
    if case.size.hidden % 16 == 0 and case.size.hidden <= 1024 and max(case.size.lengths) < 70
]


def casts_of(x_RC: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the casts, column sums and largest magnitude that the definition computes."""
    largest = torch.tensor(amax)
    *casts, sums = OPS["cast_transpose_sum_fp8"].definition(x_RC, torch.tensor(16.0), largest, dtype)
    return *casts, sums, largest


@pytest.mark.parametrize(("case", "amax"), list(zip(FUSED, cycle([0.0, 1e9]), strict=False)), ids=str)
@pytest.mark.slow
def test_fused_casts_equal_separate_casts(case: Case, amax: float) -> None:
    """A fused cast equals a separate cast bit for bit, also in rows after the last sequence and in padding."""
    args, _ = case.draw(0)
    args = [x.detach() if isinstance(x, Tensor) else x for x in args]
    vectors_in_fp32(args)
    leaves = [x.requires_grad_() for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    plain = triton(case.op)(*args)
    upstream = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    gradients = torch.autograd.grad(plain, leaves, upstream)
    given = [x.detach() if isinstance(x, Tensor) else x for x in args]
    scale, largest = torch.tensor([1.0, 16.0])[1], torch.tensor([7.0, amax])[1]  # elements of vectors, as in training
    backward_scale, backward_largest = scale.clone(), largest.clone()
    if "norm" in case.op:
        y, statistics, *casts = triton("add_norm_cast_fp8")(*given, scale, largest)
        inputs = upstream, None, *given[:4], statistics, given[-1], backward_scale, backward_largest
        *backward, dresidual, dbias, dweight, dnorm_bias = triton("add_norm_backward_cast_fp8")(*inputs)
        sums = dbias
        assert same_bits(dresidual, gradients[2])
        torch.testing.assert_close((dbias, dweight, dnorm_bias), (gradients[1], *gradients[3:]), rtol=1e-4, atol=1e-4)
    else:
        y, *casts, lse, kept = triton("attention_cast_fp8")(*given, scale, largest)
        qkv, bounds, longest, dropout = given
        inputs = upstream, qkv, bounds, y, lse, kept, longest, dropout, backward_scale, backward_largest
        *backward, sums = triton("attention_backward_cast_fp8")(*inputs)
    assert same_bits(y, plain)
    for (q, transposed), found, x, kind in (
        (casts, largest, plain, torch.float8_e4m3fn),
        (backward, backward_largest, gradients[0], torch.float8_e5m2),
    ):
        expected_q, expected_transposed, expected_sums, expected_amax = casts_of(x.detach().flatten(1), amax, kind)
        assert same_bits(q, expected_q)
        assert same_bits(transposed, expected_transposed)
        torch.testing.assert_close(found, expected_amax, rtol=0, atol=0, equal_nan=True)
        if kind == torch.float8_e5m2:
            torch.testing.assert_close(
                sums, expected_sums, rtol=0.02, atol=0.02 * float(expected_sums.abs().max() if len(x) else 0)
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("op", ["add_norm_cast_fp8", "attention_cast_fp8"])
def test_amax_is_not_finite_if_an_input_is_not(op: str, bad: float) -> None:
    """The largest magnitude is not finite even if the bad element is not in the first block of rows."""
    args, _ = Case(op, Size((70,), 70, hidden=32, heads=2), FP32, None).draw(0)
    args[0][41, 1 if op.startswith("add") else 2] = bad
    y, *others = triton(op)(*args)
    q = others[1 if op.startswith("add") else 0]  # add_norm returns statistics before the casts
    assert not args[-1].isfinite()
    assert torch.equal(q.float().isnan(), y.flatten(1).isnan())


def test_add_norm_returns_no_casts_without_a_scale() -> None:
    args, _ = Case("add_norm_cast_fp8", Size((5,), hidden=32)).draw(0)
    expected, found = (triton("add_norm_cast_fp8")(*args[:-2], *site) for site in (args[-2:], (None, None)))
    assert found[2:] == (None, None)
    assert all(map(same_bits, found[:2], expected[:2]))


ADDING = [
    # The embedding always adds, because the tied decoder has already written the table's gradient.
    *(("embedding_layer_norm", name, False, False) for name in ("reference", "pytorch", "triton")),
    *(("masked_lm_loss", name, *how) for name in ("reference", "triton") for how in product((False, True), repeat=2)),
]


@pytest.mark.parametrize(("op", "name", "copied", "overwrite"), ADDING)
def test_a_tables_gradient_is_added_to_or_written_over_the_given_tensor(
    op: str, name: str, copied: bool, overwrite: bool
) -> None:
    """The op adds a 16-bit table's gradient to an fp32 tensor and returns no gradient of the table to autograd."""
    inputs, _ = example_inputs(op, CPU, BF16, Size((9,), 9, 9, 64, vocabulary=40))
    args: list[Any] = [None if isinstance(x, Dropout) else x for x in inputs]
    place, option = (3, "word_gradient_VD") if op == "embedding_layer_norm" else (1, "decoder_gradient_VD")
    function = OPS[op].implementations[name].function(op)
    leaves = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    table = args[place]

    def backward(arguments: list[Any], **options: Any) -> list[Any]:
        for leaf in leaves:
            leaf.grad = None
        returned = function(*arguments, **options)
        (returned[0] if isinstance(returned, tuple) else returned).float().square().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = backward(args)
    found = torch.full(table.shape, torch.nan if overwrite else 1.0)
    given = [x.detach() if copied and x is table else x for x in args]
    options = {option: found, "overwrite": True} if overwrite else {option: found}
    for leaf, gradient, other in zip(leaves, backward(given, **options), expected, strict=True):
        if leaf is table:
            assert gradient is None
            most = float(other.abs().max())
            torch.testing.assert_close(found, other.float() + (not overwrite), rtol=0.02, atol=0.02 * most)
        else:
            assert torch.equal(gradient, other)
