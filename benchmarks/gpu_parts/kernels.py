"""Time every implementation of every op, and compare it with its floor and with other libraries.

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
from kernels import OPS, lamb_step
from kernels.reference.ops import summed_embeddings

_LAMB_BYTES = 36
"""Bytes that a step moves for each parameter: gradient norm (4 read), moments and direction (16 read, 8 written, and 4 to
zero the gradient), parameter update (4 written). Reading a tensor again hits the L2 cache, except for the word embedding."""


def kernels(context: Context) -> None:
    """Time ops on one micro-batch, without and then with the backward pass. Peers come last, because most compile."""
    ceilings, report = Ceilings.of(context), context.report
    # The fixed seed gives the same samples in every part.
    samples = samples_of(context.scale, context.scale.sequences)
    lengths, masked = samples.lengths.tolist(), len(samples.masked_lm_ids)
    model = drawn_model(context.scale.model, context.device)
    made = cases(model, lengths, masked, context.low_precision)
    for case in made:
        names = list(OPS[case.op].implementations)
        # At the tiny scale the reference is fast enough to show that it works.
        if case.op.startswith("varlen") and not context.tiny:
            names.remove("reference")  # it processes one sequence at a time, which takes seconds and shows nothing
        _time(context, case, {name: partial(call, case.op, name) for name in names}, ceilings)
    for case in fp8_cases(model, sum(lengths)):
        for name in OPS[case.op].implementations:
            title = f"{case.title}, {name}"
            report.attempt(title, partial(_fp8_time_row, context, title, case, name, ceilings))
        # Compare after each op, so that a part that is cut off has compared all ops that it has timed.
        _compare(context, case.op, case.title)
    for name in lamb_step.implementations:
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
