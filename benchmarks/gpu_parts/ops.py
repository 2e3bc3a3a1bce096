"""Check every implementation of every op against float64, time it, and compare it with its floor and with peers.

Shape legend in ``kernels/__init__.py``.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_parts.accuracy import largest_ratio, outcome, uninitialized_memory_is_nan
from benchmarks.gpu_parts.cases import Case, call, cases, fp8_cases, lamb_cases, size_of, weight_gradient_cases
from benchmarks.gpu_parts.peers import plain_attention
from benchmarks.gpu_parts.report import Figure, NotUsableError
from benchmarks.gpu_parts.scale import Context, samples_of
from benchmarks.gpu_parts.timing import Ceilings, measured, timed_row
from bert.configuration.recipes import RECIPES
from bert.execution.cuda_graphs import replay_of
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb
from kernels import OPS, attention_cast_fp8, lamb_step, scaled_matmul, varlen_self_attention
from kernels.reference.ops import summed_embeddings
from kernels.tuning import autotune

_LAMB_BYTES = 36
"""Bytes that a step moves for each parameter. The gradient norm reads 4 bytes. The pass for moments and direction reads 16,
writes 8, and sets the 4 bytes of the gradient to zero. The parameter update writes 4. Tensors that are read again come from
the L2 cache and do not count. Only the word embedding is too large for it."""


def correctness(context: Context) -> None:
    """Compare each implementation's errors with the errors of plain PyTorch in the same types (``largest_ratio``)."""
    size, device = size_of(context.scale.model, _awkward_lengths(context), masked=101), context.device
    made = [
        replace(case, variant=f" in {str(dtype).removeprefix('torch.')}")
        for dtype in (torch.float32, torch.bfloat16)
        for case in cases(size, device, dtype, counting=True)
    ]
    made += *fp8_cases(size, device), *lamb_cases(size, device), *weight_gradient_cases(size, device)
    for case in made:
        for name in context.implementations(case.op):
            # The reference implementation is the definition itself, so there is nothing to check.
            if name != "reference":
                title = f"{case.title}, {name}"
                context.report.attempt(title, partial(_error_row, title, case, name))
    # Omit rows without a figure: an implementation that this device cannot use is not an error.
    checked = [row for row in context.report.rows if row.figure is not None]
    worst = max((row.figure or 0 for row in checked), default=None)
    note = f"{len(checked)} checked, {len(context.report.failures)} wrong" if checked else "failed: nothing was checked"
    context.report.add(Figure("largest error", figure=worst, unit="of allowed error", note=note, page=True))


def _awkward_lengths(context: Context) -> list[int]:
    longest = context.scale.model.max_position_embeddings
    longer = [longest, longest - 1, 1, 2, 37, longest // 2, 17, 1, 63, 31]
    # The lengths include the longest length, single tokens, and empty sequences at the end.
    return longer + [1 + 5 * i % 23 for i in range(8 if context.tiny else 200)] + [0, 0]


def _error_row(title: str, case: Case, name: str) -> Figure:
    """Return the row with an implementation's errors. Dropout is off if the implementation draws other masks."""
    if not OPS[case.op].implementations[name].repeatable:
        case = case.without_dropout()
    arguments, definition = (case.arguments, dict(case.named)), OPS[case.op].definition
    in_training = case.call_as_in_training
    # Fill new memory with NaN, because it may hold an earlier call's right result. Some ops warn in this mode.
    with warnings.catch_warnings(action="ignore"), uninitialized_memory_is_nan():
        ours = outcome(partial(in_training, partial(call, case.op, name)), arguments).tensors
    plain = outcome(partial(in_training, definition), arguments).tensors
    exact = outcome(definition, arguments, torch.float64).tensors
    # Tolerate results in bf16 that are rounded the other way, and sums in fp32 that are added in another order.
    tolerance = (torch.finfo(case.dtype).eps if case.dtype.itemsize < 4 else 0) + 16 * torch.finfo(torch.float32).eps
    ratio, place = largest_ratio(ours, plain, exact, tolerance)
    verdict = "right" if ratio <= 1 else "WRONG"
    return Figure(title, figure=ratio, unit="of allowed error", note=f"{verdict}, worst in tensor {place}")


def kernels(context: Context) -> None:
    """Time ops on one micro-batch, without and then with the backward pass. Peers come last: their compilation is slow."""
    ceilings, report = Ceilings.of(context), context.report
    # The fixed seed gives the same samples in every part.
    samples = samples_of(context.scale, context.scale.sequences)
    size, device = size_of(context.scale.model, samples.lengths.tolist(), len(samples.masked_lm_ids)), context.device
    made = cases(size, device, context.low_precision)
    added, _ = weight_gradient_cases(size, device)
    for case in (*made, *fp8_cases(size, device), added):
        # FP8 attention is timed below, with the passes before and after it.
        if not case.op.startswith("attention"):
            _time(context, case, _implementations(context, case), ceilings)
    name = "attention between FP8 products"
    attention = next(case for case in made if case.op == varlen_self_attention.name)
    report.attempt(name, partial(_attention_row, context, name, attention))
    for name in context.implementations(lamb_step.name):
        report.attempt(f"lamb_step, {name}", partial(_lamb_time_row, context, name, ceilings))
    _compare(context, lamb_step.name, lamb_step.name)
    for case in made:
        _time(context, case, _peers(case), ceilings)


_DIRECTIONS = ("forward", "both ways")


def _implementations(context: Context, case: Case) -> dict[str, Callable[..., object]]:
    names = context.implementations(case.op)
    # Skip the reference attention, which takes seconds because it processes one sequence at a time.
    slow = case.op.startswith("varlen") and not context.tiny
    return {name: partial(call, case.op, name) for name in names if not (slow and name == "reference")}


def _time(context: Context, case: Case, sides: Mapping[str, Callable[..., object]], ceilings: Ceilings) -> None:
    for direction in _DIRECTIONS if case.gradients else ("",):
        what = f"{case.title} {direction}".strip()
        for name, side in sides.items():
            title = f"{what}, {name}"
            ours = OPS[case.op].implementations.get(name)
            capturable = ours is None or ours.capturable
            both_ways = direction == _DIRECTIONS[1]
            measure = partial(_time_row, context, title, case, side, ceilings, both_ways, capturable)
            context.report.attempt(title, measure)
        # Compare after each op, so that a part that is cut off has compared all ops that it has timed.
        _compare(context, case.op, what)


def _compare(context: Context, op: str, what: str) -> None:
    """Add a row that compares the first usable implementation with the fastest alternative timed so far."""
    rows = [row for row in context.report.rows if row.name.startswith(f"{what}, ") and row.milliseconds]
    order = [f"{what}, {implementation.name}" for implementation in OPS[op].orders[context.device.type]]
    # Take the first implementation in the order of preference. Training measures all of them and may choose another one.
    ours = min((row for row in rows if row.name in order), key=lambda row: order.index(row.name), default=None)
    if ours is None:
        return
    # The alternatives include our other implementations, some of which call a library.
    fastest = min((row for row in rows if row is not ours), key=lambda row: row.milliseconds or 0, default=None)
    assert ours.milliseconds
    ratio = fastest.milliseconds / ours.milliseconds if fastest and fastest.milliseconds else None
    taken, other = (row.name.removeprefix(f"{what}, ") if row else "none" for row in (ours, fastest))
    note = f"{taken}; fastest other: {other}; {ours.note}"
    on_page = not what.endswith(_DIRECTIONS[0])  # the page shows only the row with the backward pass
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
    if both_ways:
        work = partial(case.forward_and_gradients, side, case.upstream(side))
    else:
        work = torch.no_grad()(partial(case.outputs, side))
    # Time with a cold L2 cache, because in training the other kernels of a step replace its content.
    seconds = measured(work, context.device, 3 * context.scale.repeats, cold=True, capturable=capturable)
    flop, moved = case.work.flop[both_ways], case.work.moved[both_ways]
    floor, ceiling = ceilings.floor(flop, moved, fp8=case.op == scaled_matmul.name)
    # Use the unit of the ceiling that limits this row.
    amount, unit = (moved, "TB/s") if not flop or "copy" in ceiling else (flop, "TFLOP/s")
    note = ceiling if capturable or not context.on_gpu else f"{ceiling}; not captured: it times the host as well"
    return timed_row(title, seconds, amount / 1e12, unit, floor, note)


def _attention_row(context: Context, name: str, case: Case) -> Figure:
    """Return the row of self-attention with its FP8 casts. The casts are fused or separate, as training would choose."""
    site = torch.ones((), device=context.device), torch.zeros((), device=context.device)
    calls = {case.op: case.arguments, attention_cast_fp8.name: (*case.arguments, *site)}
    requests = [autotune.CallKind.of(op, arguments, {}) for op, arguments in calls.items()]
    choices = autotune.tune(requests, partial(replay_of, context.device) if context.captures else autotune.run_once)
    if not choices:
        raise NotUsableError("only one form of attention is usable, or too little memory is left to measure several")
    (taken, milliseconds), *others = choices[0].milliseconds.items()
    peer = others[0][1] / milliseconds if others else None
    return Figure(name, milliseconds, peer=peer, note=f"{taken}; {choices[0]}", page=True)


def _lamb_time_row(context: Context, name: str, ceilings: Ceilings) -> Figure:
    """Return the row with the time of the optimizer's step on the flat buffers of the whole model."""
    with context.device:
        flat = FlatParameters.of(BertForPreTraining(context.scale.model))
    optimizer = Lamb(flat, RECIPES["h100_1x1"]().optimizer)
    drawn_P = torch.randn_like(flat.gradients_P)

    def step() -> None:
        # An implementation that is chosen by name either works or raises; it never falls back silently.
        with lamb_step.using(name):
            optimizer.step()

    def draw() -> None:
        flat.gradients_P.copy_(drawn_P)  # the previous step has set the gradients to zero

    flat.weights_P.copy_(drawn_P)
    # ``step`` raises ValueError if the implementation does not support the arguments.
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
    # Use PyTorch's dropout in these two ops, because the Philox generator of their definitions is much slower.
    with_dropout = {"dropout_add_layer_norm": _plain_add_norm, "embedding_layer_norm": _plain_embeddings}
    plain = with_dropout.get(case.op, OPS[case.op].definition)
    # Shapes are fixed in this part, so dynamic shapes are not needed.
    backend = "inductor" if case.leaves[0].is_cuda else "aot_eager"
    return {"torch.compile": torch.compile(plain, dynamic=False, backend=backend)}


def _torch_varlen(qkv_T3HE: Tensor, bounds: Tensor, max_seqlen: int, _dropout: object) -> Tensor:
    if not qkv_T3HE.is_cuda:
        raise NotUsableError("needs a CUDA device")
    query, key, value = qkv_T3HE.unbind(1)
    return plain_attention(query, key, value, bounds, max_seqlen)


def _plain_add_norm(x, bias, residual, weight, norm_bias, eps, dropout) -> Tensor:  # noqa: ANN001
    return F.layer_norm(residual + F.dropout(x + bias, dropout.p), weight.shape, weight, norm_bias, eps)


def _plain_embeddings(ids, positions, segments, word, position, segment, weight, bias, eps, dropout) -> Tensor:  # noqa: ANN001
    summed = summed_embeddings(ids, positions, segments, word, position, segment)
    return F.dropout(F.layer_norm(summed, weight.shape, weight, bias, eps), dropout.p)
