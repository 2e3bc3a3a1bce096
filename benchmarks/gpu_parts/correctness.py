"""Check every implementation of every op against a float64 oracle.

Shape legend in ``kernels/__init__.py``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.cases import Case, Fp8Case, call, cases, drawn_model, fp8_cases
from benchmarks.gpu_parts.report import Figure
from benchmarks.gpu_parts.scale import Context
from kernels import (
    OPS,
    Dropout,
    LambHyperparameters,
    LambSegments,
    LambState,
    accumulate_weight_gradient,
    lamb_step,
)


def correctness(context: Context) -> None:
    """Compare errors with the limit that the tests use: twice the error of plain PyTorch in the same types."""
    model = drawn_model(context.scale.model, context.device)
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases(model, _awkward_lengths(context), 101, dtype, counting=True):
            for name in OPS[case.op].implementations:
                # The reference implementation is the definition itself, so there is nothing to check.
                if name != "reference":
                    title = f"{case.op}, {name}, {str(dtype).removeprefix('torch.')}"
                    context.report.attempt(title, partial(_error_row, title, case, name, dtype))
    for case in fp8_cases(model, sum(_awkward_lengths(context))):
        for name in OPS[case.op].implementations:
            title = f"{case.title}, {name}"
            context.report.attempt(title, partial(_fp8_error_row, title, case, name))
    for name in lamb_step.implementations:
        context.report.attempt(f"lamb_step, {name}", partial(_lamb_error_row, context, name))
    for name in accumulate_weight_gradient.implementations:
        title = f"{accumulate_weight_gradient.name}, {name}"
        context.report.attempt(title, partial(_sum_error_row, context, title, name))
    # A row has no figure if the implementation is not usable on this device, which is not an error.
    checked = [row for row in context.report.rows if row.figure is not None]
    worst = max((row.figure or 0 for row in checked), default=None)
    note = f"{len(checked)} checked, {len(context.report.failures)} wrong"
    context.report.add(Figure("largest error", figure=worst, unit="of allowed error", note=note, page=True))


def _awkward_lengths(context: Context) -> list[int]:
    longest = context.scale.model.max_position_embeddings
    longer = [longest, longest - 1, 1, 2, 37, longest // 2, 17, 1, 63, 31]
    # The lengths include the longest length, single tokens, and empty sequences at the end.
    return longer + [1 + 5 * i % 23 for i in range(8 if context.tiny else 200)] + [0, 0]


def _error_row(title: str, case: Case, name: str, dtype: torch.dtype) -> Figure:
    """Return the row of one implementation. Dropout is off unless the implementation draws the same masks as the oracle."""
    if name != "triton":
        arguments = tuple(None if isinstance(value, Dropout) else value for value in case.arguments)
        case = replace(case, arguments=arguments)
    definition = OPS[case.op].definition
    ours = partial(call, case.op, name)
    # The oracle, plain PyTorch and our implementation get the same upstream gradient.
    upstream = case.upstream(ours)
    oracle = case.exact().forward_and_gradients(definition, upstream)
    plain = case.fresh().forward_and_gradients(definition, upstream)
    return judged(title, oracle, plain, case.fresh().forward_and_gradients(ours, upstream), dtype)


def _fp8_error_row(title: str, case: Fp8Case, name: str) -> Figure:
    """Return the row of one FP8 implementation. The limit allows rounding to either neighbouring FP8 number."""
    plain = case.results(OPS[case.op].definition)
    return judged(title, case.exact(), plain, case.results(partial(call, case.op, name)), torch.float32)


def judged(title: str, oracle: list[Tensor], plain: list[Tensor], ours: list[Tensor], dtype: torch.dtype) -> Figure:
    """Return a row with the worst ratio of our error to the allowed error, over the output and every gradient."""
    ratios: list[float] = []
    for exact, expected, got in zip(oracle, plain, ours, strict=True):
        if not exact.is_floating_point():  # a tie may change the count of correct predictions by one
            ratios.append(float((exact - got).abs() > 1))
            continue
        scale = exact.abs().max().clamp(min=1e-30)
        # Subtract in fp64, because a difference in a narrower type would be rounded.
        errors = [((x.double() - exact).abs().max() / scale).item() for x in (expected, got)]
        ratios.append(
            errors[1] / (2 * errors[0] + torch.finfo(dtype).eps)
        )  # plain PyTorch's error may be 0, so add eps
    # NaN compares as false with everything, so it is treated as the worst ratio.
    worst = max(range(len(ratios)), key=lambda index: ratios[index] if ratios[index] == ratios[index] else float("inf"))
    place = "output" if worst == 0 else f"result {worst} of {len(ratios) - 1}"
    verdict = "right" if ratios[worst] <= 1 else "WRONG"  # a NaN is also WRONG
    return Figure(title, figure=ratios[worst], unit="of allowed error", note=f"{verdict}, worst in the {place}")


def _lamb_error_row(context: Context, name: str) -> Figure:
    """Return the row of five LAMB steps on 400 segments of 2 to 60,000 elements. It compares parameters and both moments."""
    steps = partial(_lamb_steps, context)
    oracle, plain = (steps(lamb_step.definition, dtype) for dtype in (torch.float64, torch.float32))
    ours = steps(partial(call, lamb_step.name, name), torch.float32)
    return judged(f"lamb_step, {name}", oracle, plain, ours, torch.float32)


def _sum_error_row(context: Context, title: str, name: str) -> Figure:
    """Return the row of a weight gradient over two bf16 micro-batches. The first micro-batch overwrites the buffer."""
    generator = torch.Generator(context.device).manual_seed(0)
    tokens, width = (40, 16) if context.tiny else (12_000, 1024)
    drawn = torch.randn(4, tokens, width, generator=generator, device=context.device)

    def of_two(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        first, x, second, y = drawn.bfloat16().to(dtype).unbind()
        # The buffer holds NaN. If the first micro-batch reads the buffer instead of overwriting it, the result is NaN.
        total = drawn.new_full((width, width), torch.nan, dtype=torch.promote_types(dtype, torch.float32))
        function(total, first, x, True)
        return [function(total, second, y)]

    definition = accumulate_weight_gradient.definition
    oracle, plain = of_two(definition, torch.float64), of_two(definition, torch.bfloat16)
    ours = of_two(partial(call, accumulate_weight_gradient.name, name), torch.bfloat16)
    return judged(title, oracle, plain, ours, torch.float32)


def _lamb_steps(context: Context, function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return parameters and both moments after five steps. Two of every three segments use a trust ratio."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 60 if context.tiny else 60_000, (400,), generator=generator).tolist()
    segments = LambSegments(tuple(sizes), tuple(index % 3 > 0 for index in range(len(sizes))))
    draws = torch.Generator(context.device).manual_seed(0)
    parameters = torch.randn(sum(sizes), generator=draws, device=context.device).to(dtype)
    state = LambState.zeros_like(parameters)
    hyperparameters = LambHyperparameters(0.9, 0.999, 1e-6, 0.01, 1.0)
    rate = torch.tensor(3.5e-4, device=context.device)
    for index in range(5):
        gradients = torch.randn(sum(sizes), generator=draws, device=context.device).to(dtype)
        step = torch.tensor(index + 1, device=context.device)
        function(parameters, gradients, state, segments, hyperparameters, step=step, learning_rate=rate)
    return [parameters, state.momentum_P, state.variance_P]
