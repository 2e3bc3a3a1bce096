"""Check every implementation of every op against a float64 oracle, time it, and compare it with its floor and with peers.

Shape legend in ``kernels/__init__.py``.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_parts.cases import Case, Fp8Case, call, cases, drawn_model, fp8_cases
from benchmarks.gpu_parts.report import Figure, NotUsableError
from benchmarks.gpu_parts.scale import Context, samples_of
from benchmarks.gpu_parts.timing import Ceilings, measured, timed_row
from bert.configuration.recipes import RECIPES
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb
from kernels import (
    OPS,
    Dropout,
    LambHyperparameters,
    LambSegments,
    LambState,
    accumulate_weight_gradient,
    lamb_step,
)
from kernels.reference.ops import summed_embeddings

_LAMB_BYTES = 36
"""Bytes that a step moves for each parameter: gradient norm (4 read), moments and direction (16 read, 8 written, and 4 to
zero the gradient), parameter update (4 written). Reading a tensor again hits the L2 cache, except for the word embedding."""


def correctness(context: Context) -> None:
    """Compare errors with the limit that the tests use: twice the error of plain PyTorch in the same types."""
    model = drawn_model(context.scale.model, context.device)
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases(model, _awkward_lengths(context), 101, dtype, counting=True):
            for name in context.implementations(case.op):
                # The reference implementation is the definition itself, so there is nothing to check.
                if name != "reference":
                    title = f"{case.op}, {name}, {str(dtype).removeprefix('torch.')}"
                    context.report.attempt(title, partial(_error_row, title, case, name, dtype))
    for case in fp8_cases(model, sum(_awkward_lengths(context))):
        for name in context.implementations(case.op):
            title = f"{case.title}, {name}"
            context.report.attempt(title, partial(_fp8_error_row, title, case, name))
    for name in context.implementations(lamb_step.name):
        context.report.attempt(f"lamb_step, {name}", partial(_lamb_error_row, context, name))
    for name in context.implementations(accumulate_weight_gradient.name):
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


def kernels(context: Context) -> None:
    """Time ops on one micro-batch, without and then with the backward pass. Peers come last, because most compile."""
    ceilings, report = Ceilings.of(context), context.report
    # The fixed seed gives the same samples in every part.
    samples = samples_of(context.scale, context.scale.sequences)
    lengths, masked = samples.lengths.tolist(), len(samples.masked_lm_ids)
    model = drawn_model(context.scale.model, context.device)
    made = cases(model, lengths, masked, context.low_precision)
    for case in made:
        names = context.implementations(case.op)
        # At the tiny scale the reference is fast enough to show that it works.
        if case.op.startswith("varlen") and not context.tiny:
            names.remove("reference")  # it processes one sequence at a time, which takes seconds and shows nothing
        _time(context, case, {name: partial(call, case.op, name) for name in names}, ceilings)
    for case in fp8_cases(model, sum(lengths)):
        for name in context.implementations(case.op):
            title = f"{case.title}, {name}"
            report.attempt(title, partial(_fp8_time_row, context, title, case, name, ceilings))
        # Compare after each op, so that a part that is cut off has compared all ops that it has timed.
        _compare(context, case.op, case.title)
    for name in context.implementations(lamb_step.name):
        report.attempt(f"lamb_step, {name}", partial(_lamb_time_row, context, name, ceilings))
    _compare(context, lamb_step.name, lamb_step.name)
    for case in made:
        _time(context, case, _peers(case), ceilings)


_DIRECTIONS = ("forward", "both ways")


def _time(context: Context, case: Case, sides: dict[str, Callable[..., object]], ceilings: Ceilings) -> None:
    for both_ways, direction in enumerate(_DIRECTIONS):
        for name, side in sides.items():
            title = f"{case.op} {direction}, {name}"
            ours = OPS[case.op].implementations.get(name)
            capturable = ours is None or ours.capturable
            measure = partial(_time_row, context, title, case, side, ceilings, bool(both_ways), capturable)
            context.report.attempt(title, measure)
        _compare(context, case.op, f"{case.op} {direction}")


def _compare(context: Context, op: str, what: str) -> None:
    """Add a row that compares the first usable implementation with the fastest alternative timed so far."""
    rows = [row for row in context.report.rows if row.name.startswith(f"{what}, ") and row.milliseconds]
    order = [f"{what}, {implementation.name}" for implementation in OPS[op].orders[context.device.type]]
    # `orders` lists the implementations by preference. Training measures all of them and may choose a later one.
    ours = min((row for row in rows if row.name in order), key=lambda row: order.index(row.name), default=None)
    if ours is None:
        return
    # The alternatives include our other implementations, some of which call a library.
    fastest = min((row for row in rows if row is not ours), key=lambda row: row.milliseconds or 0, default=None)
    assert ours.milliseconds
    ratio = fastest.milliseconds / ours.milliseconds if fastest and fastest.milliseconds else None
    taken, other = (row.name.removeprefix(f"{what}, ") if row else "none" for row in (ours, fastest))
    note = f"{taken}; fastest other: {other}; {ours.note}"
    on_page = not what.endswith(_DIRECTIONS[0])  # the row that includes the backward pass represents the op
    context.report.add(replace(ours, name=what, peer=ratio, note=note, page=on_page, seconds=[]), quiet=True)


def _time_row(
    context: Context,
    title: str,
    case: Case,
    side: Callable[..., object],
    ceilings: Ceilings,
    both_ways: bool,
    capturable: bool,
) -> Figure:
    upstream = case.upstream(side)

    def both() -> None:
        case.forward_and_gradients(side, upstream)

    @torch.no_grad()
    def forward() -> None:
        case.outputs(side)

    # The L2 cache is cold, because other kernels of a training step replace its content.
    work, repeats = both if both_ways else forward, 3 * context.scale.repeats
    seconds = measured(work, context.device, repeats, cold=True, capturable=capturable)
    flop, moved = case.work.flop[both_ways], case.work.moved[both_ways]
    floor, ceiling = ceilings.floor(flop, moved)
    # Use the unit of the ceiling that limits this row.
    amount, unit = (moved, "TB/s") if not flop or "copy" in ceiling else (flop, "TFLOP/s")
    note = ceiling if capturable or not context.on_gpu else f"{ceiling}; not captured: it times the host as well"
    return timed_row(title, seconds, amount / 1e12, unit, floor, note)


def _fp8_time_row(context: Context, title: str, case: Fp8Case, name: str, ceilings: Ceilings) -> Figure:
    function = partial(call, case.op, name)
    seconds = measured(lambda: function(*case.arguments), context.device, 3 * context.scale.repeats, cold=True)
    floor, ceiling = ceilings.floor(case.flop, case.moved, fp8=True)
    amount, unit = (case.flop, "TFLOP/s") if case.flop else (case.moved, "TB/s")
    return timed_row(title, seconds, amount / 1e12, unit, floor, ceiling)


def _lamb_time_row(context: Context, name: str, ceilings: Ceilings) -> Figure:
    """Return the row of the optimizer's step on the flat buffers of the whole model."""
    with context.device:
        flat = FlatParameters.of(BertForPreTraining(context.scale.model))
    optimizer = Lamb(flat, RECIPES["h100_1x1"]().optimizer)
    drawn_P = torch.randn_like(flat.gradients_P)

    def step() -> None:
        # An implementation that is chosen by name either works or raises; it never falls back silently.
        with lamb_step.using(name):
            optimizer.step()

    def draw() -> None:
        flat.gradients_P.copy_(drawn_P)  # a step zeroes the gradients

    flat.weights_P.copy_(drawn_P)
    # The registry raises ValueError if an implementation does not support the arguments.
    try:
        seconds = measured(step, context.device, context.scale.repeats, cold=True, before=draw)
    except ValueError as error:
        raise NotUsableError(str(error)) from None
    moved = _LAMB_BYTES * flat.weights_P.numel()
    floor, ceiling = ceilings.floor(moved=moved)
    note = f"{ceiling}, at {_LAMB_BYTES} bytes a parameter"
    return timed_row(f"lamb_step, {name}", seconds, moved / 1e12, "TB/s", floor, note)


def _peers(case: Case) -> dict[str, Callable[..., object]]:
    """Return other ways to compute an op. They may do less work (no dropout), but never more."""
    if case.op == "varlen_self_attention":
        return {"PyTorch varlen_attn without dropout": _torch_varlen}
    if case.op == "varlen_attention":
        return {}  # the peers are compared with varlen_self_attention, which every layer but the last one uses
    plain: dict[str, Callable[..., object]] = {
        "dropout_add_layer_norm": _plain_add_norm,
        "embedding_layer_norm": _plain_embeddings,
        "dense_gelu": OPS["dense_gelu"].definition,
        "bias_gelu": OPS["bias_gelu"].definition,
        "masked_lm_loss": OPS["masked_lm_loss"].definition,
    }
    on_gpu = case.leaves[0].is_cuda
    return {
        # Shapes are fixed in this part, so dynamic shapes are not needed.
        "torch.compile": torch.compile(plain[case.op], dynamic=False, backend="inductor" if on_gpu else "aot_eager")
    }


def _torch_varlen(qkv_T3HE: Tensor, bounds: Tensor, max_seqlen: int, _dropout: object) -> Tensor:
    if not qkv_T3HE.is_cuda:
        raise NotUsableError("needs a CUDA device")
    varlen = importlib.import_module("torch.nn.attention.varlen")
    query, key, value = (x.contiguous() for x in qkv_T3HE.unbind(1))
    return varlen.varlen_attn(query, key, value, bounds, bounds, max_seqlen, max_seqlen)


def _plain_add_norm(x, bias, residual, weight, norm_bias, eps, dropout) -> Tensor:  # noqa: ANN001
    return F.layer_norm(residual + F.dropout(x + bias, dropout.p), weight.shape, weight, norm_bias, eps)


def _plain_embeddings(ids, positions, segments, word, position, segment, weight, bias, eps, dropout) -> Tensor:  # noqa: ANN001
    summed = summed_embeddings(ids, positions, segments, word, position, segment)
    return F.dropout(F.layer_norm(summed, weight.shape, weight, bias, eps), dropout.p)
