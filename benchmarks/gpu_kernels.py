"""Every op with every implementation: its errors against a float64 oracle, and its time against the floor.

Shape legend in ``kernels/__init__.py``.
"""

import importlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_cases import Case, cases
from benchmarks.gpu_fp8 import Fp8Case, fp8_cases
from benchmarks.gpu_scale import Ceilings, Context, samples_of
from benchmarks.gpu_timing import NotUsableError, Row, measured, timed_row
from bert.model import BertForPreTraining
from bert.optimizer import lamb_segments
from kernels import OPS, LambSegments, LambState, lamb_step

_LAMB_BYTES = 48
"""A parameter and step: the gradient's norm (4 read), moments and direction (16 read, 12 written, and the gradient's
zeros, 4), the step (8 and 4)."""


def correctness(context: Context) -> None:
    """The rule of the tests on the device: at most twice plain PyTorch's error in the same type."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for case in cases(context.scale.model, _awkward_lengths(context), 101, dtype, context.device):
            for name in OPS[case.op].implementations:
                if name != "reference":
                    title = f"{case.op}, {name}, {str(dtype).removeprefix('torch.')}"
                    context.report.attempt(title, partial(_error_row, title, case, name, dtype))
    for case in fp8_cases(context.scale.model, sum(_awkward_lengths(context)), torch.bfloat16, context.device):
        for name in OPS[case.op].implementations:
            title = f"{case.op}, {name}"
            context.report.attempt(title, partial(_fp8_error_row, title, case, name))
    for name in lamb_step.implementations:
        context.report.attempt(f"lamb_step, {name}", partial(_lamb_error_row, context, name))
    wrong = [row.name for row in context.report.rows if row.note.startswith(("WRONG", "failed"))]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(context.report.rows)} wrong: {'; '.join(wrong)}")


def kernels(context: Context) -> None:
    """Forward alone and both ways at the size of one micro-batch of training."""
    ceilings = Ceilings.of(context)
    samples = samples_of(context.scale, context.scale.sequences)
    lengths, masked = samples.lengths.tolist(), len(samples.masked_lm_ids)
    for case in cases(context.scale.model, lengths, masked, context.low_precision, context.device):
        sides = {name: partial(_with, case.op, name) for name in OPS[case.op].implementations}
        for name, side in (sides | _peers(case, lengths)).items():
            if case.op.startswith("varlen") and name == "reference" and not context.tiny:
                continue  # a sequence at a time: seconds that tell nothing
            for both_ways in (False, True):
                title = f"{case.op} {'both ways' if both_ways else 'forward'}, {name}"
                measure = partial(_time_row, context, title, case, side, ceilings, both_ways)
                context.report.attempt(title, measure)
    for case in fp8_cases(context.scale.model, sum(lengths), torch.bfloat16, context.device):
        for name in OPS[case.op].implementations:
            title = f"{case.op} forward, {name}"
            context.report.attempt(title, partial(_fp8_time_row, context, title, case, name, ceilings))
    for name in lamb_step.implementations:
        context.report.attempt(f"lamb_step, {name}", partial(_lamb_time_row, context, name, ceilings))


def _awkward_lengths(context: Context) -> list[int]:
    longest = context.scale.model.max_position_embeddings
    longer = [longest, longest - 1, 1, 2, 37, longest // 2, 17, 1, 63, 31]
    return longer + [1 + 5 * i % 23 for i in range(8 if context.tiny else 200)] + [0, 0]


def _with(op: str, name: str, *arguments: object, **settings: object) -> Any:
    chosen = OPS[op].implementations[name]
    if reasons := chosen.unsupported_reasons(op, *arguments, **settings):
        raise NotUsableError("; ".join(reasons))
    return chosen.function(op)(*arguments, **settings)


def _error_row(title: str, case: Case, name: str, dtype: torch.dtype) -> Row:
    """Dropout is left out for implementations that draw by another generator than the oracle."""
    if name != "triton":
        case = Case(case.op, tuple(None if type(value).__name__ == "Dropout" else value for value in case.arguments))
    definition = OPS[case.op].definition
    ours = partial(_with, case.op, name)
    upstream = case.upstream(ours)
    oracle = case.typed(torch.float64).forward_and_gradients(definition, upstream.double())
    plain = case.typed(dtype).forward_and_gradients(definition, upstream)
    return _judged(title, oracle, plain, case.typed(dtype).forward_and_gradients(ours, upstream), dtype)


def _fp8_error_row(title: str, case: Fp8Case, name: str) -> Row:
    """The definition rounds as it must; another may fall to the other side where it is between two numbers of FP8."""
    plain = case.results(OPS[case.op].definition)
    return _judged(title, case.exact(), plain, case.results(partial(_with, case.op, name)), torch.float32)


def _fp8_time_row(context: Context, title: str, case: Fp8Case, name: str, ceilings: Ceilings) -> Row:
    function = partial(_with, case.op, name)
    seconds = measured(lambda: function(*case.arguments), context.device, 3 * context.scale.repeats, cold=True)
    if case.flop:
        share, note = case.flop / ceilings.flop_per_s, "of the large bf16 product: 2 at best"
        return timed_row(title, seconds, case.flop / 1e12, "TFLOP/s", share, note)
    return timed_row(title, seconds, case.moved / 1e12, "TB/s", case.moved / ceilings.bytes_per_s, "of the large copy")


def _judged(title: str, oracle: list[Tensor], plain: list[Tensor], ours: list[Tensor], dtype: torch.dtype) -> Row:
    """The worst ratio of our error to what is allowed, over the output and every gradient."""
    ratios: list[float] = []
    for exact, expected, got in zip(oracle, plain, ours, strict=True):
        if not exact.is_floating_point():  # the count of right answers may differ by a tie
            ratios.append(float((exact - got).abs() > 1))
            continue
        scale = exact.abs().max().clamp(min=1e-30)
        errors = [((x.double() - exact).abs().max() / scale).item() for x in (expected, got)]
        ratios.append(errors[1] / (2 * errors[0] + torch.finfo(dtype).eps))
    worst = max(range(len(ratios)), key=lambda index: ratios[index] if ratios[index] == ratios[index] else float("inf"))
    place = "output" if worst == 0 else f"result {worst} of {len(ratios) - 1}"
    verdict = "right" if ratios[worst] <= 1 else "WRONG"  # also for a NaN
    return Row(title, figure=ratios[worst], unit="of allowed error", note=f"{verdict}, worst in the {place}")


def _time_row(
    context: Context, title: str, case: Case, side: Callable[..., object], ceilings: Ceilings, both_ways: bool
) -> Row:
    upstream = case.upstream(side)

    def both() -> None:
        case.forward_and_gradients(side, upstream)

    @torch.no_grad()
    def forward() -> None:
        side(*case.arguments)

    seconds = measured(both if both_ways else forward, context.device, 3 * context.scale.repeats, cold=True)
    flop, moved = case.flop[both_ways], case.moved[both_ways]
    by_products, by_copy = flop / ceilings.flop_per_s, moved / ceilings.bytes_per_s
    if by_products > by_copy:
        return timed_row(title, seconds, flop / 1e12, "TFLOP/s", by_products, "of the large matrix product")
    return timed_row(title, seconds, moved / 1e12, "TB/s", by_copy, "of the large copy")


def _peers(case: Case, lengths: list[int]) -> dict[str, Callable[..., object]]:
    """What else computes an op, of PyTorch and of libraries; they may do less (no dropout), never more."""
    if case.op == "varlen_attention":
        return {
            "PyTorch varlen_attn without dropout": _torch_varlen,
            "PyTorch SDPA, padded, mask": partial(_padded_sdpa, lengths=lengths),
            "flash-attn 3 without dropout": _flash_attention_3,
        }
    if case.op == "varlen_self_attention":
        return {}  # those of varlen_attention
    plain: dict[str, Callable[..., object]] = {
        "dropout_add_layer_norm": _plain_add_norm,
        "embedding_layer_norm": _plain_embeddings,
        "dense_gelu": OPS["dense_gelu"].definition,
        "masked_lm_loss": OPS["masked_lm_loss"].definition,
    }
    compiled = torch.compile(plain[case.op], dynamic=False, backend="inductor" if _on_gpu(case) else "aot_eager")
    return {"torch.compile": compiled}


def _on_gpu(case: Case) -> bool:
    return case.leaves[0].is_cuda


def _torch_varlen(query, key, value, bounds_q, bounds_k, max_seqlen, _dropout) -> Tensor:  # noqa: ANN001
    varlen = importlib.import_module("torch.nn.attention.varlen")
    query, key, value = (x.contiguous() for x in (query, key, value))
    return varlen.varlen_attn(query, key, value, bounds_q, bounds_k, max_seqlen, max_seqlen)


def _padded_sdpa(query, key, value, _bounds_q, _bounds_k, max_seqlen, dropout, lengths: list[int]) -> Tensor:  # noqa: ANN001
    """Filled up before and cut out after, outside of which there is padding anyway where one trains padded."""
    rows = [slice(*bounds) for bounds in pairwise([0, *torch.tensor(lengths).cumsum(0).tolist()])]
    padded = [
        torch.nn.utils.rnn.pad_sequence([x[row] for row in rows], batch_first=True).transpose(1, 2)
        for x in (query, key, value)
    ]
    counts = torch.tensor(lengths, device=query.device)
    real = torch.arange(max_seqlen, device=query.device) < counts[:, None]
    output = F.scaled_dot_product_attention(*padded, attn_mask=real[:, None, None, :], dropout_p=dropout.p)
    return output.transpose(1, 2)[real]


def _flash_attention_3(query, key, value, bounds_q, bounds_k, max_seqlen, _dropout) -> object:  # noqa: ANN001
    flash = importlib.import_module("flash_attn_interface")
    returned = flash.flash_attn_varlen_func(query, key, value, bounds_q, bounds_k, max_seqlen, max_seqlen)
    return returned[0] if isinstance(returned, tuple) else returned


def _plain_add_norm(x, bias, residual, weight, norm_bias, eps, dropout) -> Tensor:  # noqa: ANN001
    return F.layer_norm(residual + F.dropout(x + bias, dropout.p), weight.shape, weight, norm_bias, eps)


def _plain_embeddings(ids, positions, segments, word, position, segment, weight, bias, eps, dropout) -> Tensor:  # noqa: ANN001
    summed = F.embedding(ids, word) + F.embedding(positions, position) + F.embedding(segments, segment)
    return F.dropout(F.layer_norm(summed, weight.shape, weight, bias, eps), dropout.p)


def _lamb_error_row(context: Context, name: str) -> Row:
    """Five steps of 400 segments between 2 and 60,000 elements; parameters and both moments are compared."""
    function = partial(_with, lamb_step.name, name)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 60 if context.tiny else 60_000, (400,), generator=generator).tolist()
    segments = LambSegments(tuple(sizes), tuple(index % 3 > 0 for index in range(len(sizes))))

    def trained(step: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        draws = torch.Generator(context.device).manual_seed(0)
        parameters = torch.randn(sum(sizes), generator=draws, device=context.device).to(dtype)
        state = LambState.zeros_like(parameters)
        for index in range(5):
            gradients = torch.randn(sum(sizes), generator=draws, device=context.device).to(dtype)
            step(parameters, gradients, state, segments, **_lamb_settings(context, index + 1))
        return [parameters, state.momentum_P, state.variance_P]

    oracle, plain = (trained(lamb_step.definition, dtype) for dtype in (torch.float64, torch.float32))
    ours = trained(function, torch.float32)
    return _judged(f"lamb_step, {name}, float32", oracle, plain, ours, torch.float32)


def _lamb_time_row(context: Context, name: str, ceilings: Ceilings) -> Row:
    function = partial(_with, lamb_step.name, name)
    with torch.device("meta"):
        segments = lamb_segments(BertForPreTraining(context.scale.model))
    size = sum(segments.sizes)
    parameters, gradients = (torch.randn(size, device=context.device) for _ in range(2))
    state, settings = LambState.zeros_like(parameters), _lamb_settings(context, 10)
    seconds = measured(
        lambda: function(parameters, gradients, state, segments, **settings),
        context.device,
        context.scale.repeats,
        cold=True,
    )
    moved = _LAMB_BYTES * size
    note = f"of the large copy, at {_LAMB_BYTES} bytes a parameter"
    return timed_row(f"lamb_step, {name}", seconds, moved / 1e12, "TB/s", moved / ceilings.bytes_per_s, note)


def _lamb_settings(context: Context, step: int) -> dict[str, object]:
    return {
        "step": torch.tensor(step, device=context.device),
        "learning_rate": torch.tensor(3.5e-4, device=context.device),
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
