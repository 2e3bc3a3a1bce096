"""Measure the training rate of other implementations on the same samples and device, in the same run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.ceilings import Ceilings
from benchmarks.gpu_parts.measuring.report import Figure, NotUsableError
from benchmarks.gpu_parts.measuring.scale import Context, micro_batches, samples_of
from benchmarks.gpu_parts.measuring.timing import measured, release, timed_row
from benchmarks.gpu_parts.step import rate, recipe
from benchmarks.training.hugging_face import new_model, padded
from kernels import OPS

OURS = "this repository, unpadded"


def peers(context: Context) -> None:
    """Measure a training step of each peer. All use fp32 weights under bf16 autocast and PyTorch's fused AdamW."""
    sides: dict[str, Callable[[Context, int], Callable[[], None]]] = {
        "flash-attn and plain PyTorch, unpadded": _library_ops,
        "Hugging Face, padded, SDPA": _hugging_face,
        "Hugging Face, padded, SDPA, torch.compile": partial(_hugging_face, compiled=True),
    }
    ceilings = Ceilings.of(context)
    config = recipe("h100_1x1", gradient_accumulation_steps=1)
    context.report.attempt(OURS, partial(rate, context, OURS, config, context.scale.sequences, ceilings))
    for name, side in sides.items():
        context.report.attempt(name, partial(_peer_row, context, name, side))
    context.report.attempt("ours against the fastest peer", partial(_against_fastest, context, list(sides)))


def _against_fastest(context: Context, names: list[str]) -> Figure:
    # Only peers that were measured. A peer that is not installed has no figure.
    rates = {name: row.figure for name in names if (row := context.report.row(name)) and row.figure}
    ours = context.report.row(OURS)
    if not (ours and ours.figure and rates):
        raise NotUsableError("one side was not measured")
    fastest = max(rates, key=lambda name: rates[name])
    name, ratio = "ours against the fastest peer", ours.figure / rates[fastest]
    return Figure(name, ours.milliseconds, ours.figure, ours.unit, ours.share, ratio, fastest, page=True)


def _peer_row(context: Context, name: str, side: Callable[[Context, int], Callable[[], None]]) -> Figure:
    """Return the peer's rate with the largest batch that fits into memory: all of our sequences, half, or a quarter."""
    # A peer that pads needs more memory for each sequence.
    for parts in (1, 2, 4):
        sequences = context.scale.sequences // parts
        if seconds := _seconds_if_it_fits(context, side, sequences):
            row = timed_row(name, seconds, sequences, "sequences/s", note=f"{sequences} sequences at once", page=True)
            ours = context.report.row(OURS)
            if ours and ours.figure and row.figure:
                row = replace(row, note=f"ours is {ours.figure / row.figure:.2f}x as fast; {row.note}")
            return row
        # Release the memory that a failed attempt has cached before the next attempt.
        release(context.device)
    return Figure(name, note="does not fit the device's memory", page=True)


def _seconds_if_it_fits(
    context: Context, side: Callable[[Context, int], Callable[[], None]], sequences: int
) -> list[float]:
    try:
        return measured(side(context, sequences), context.device, context.scale.repeats, cold=False)
    except torch.OutOfMemoryError:
        return []


def _hugging_face(context: Context, sequences: int, *, compiled: bool = False) -> Callable[[], None]:
    with context.device:  # drawing the weights on the device is many times as fast
        model = new_model(context.scale.model).train()
    samples = samples_of(context.scale, sequences)
    inputs = {
        name: tensor.to(context.device)
        for name, tensor in padded(samples, context.scale.model.max_position_embeddings).items()
    }
    called = model
    if compiled:
        # Shapes are static, because all padded batches have the same shape.
        called = torch.compile(model, dynamic=False, backend="inductor" if context.on_gpu else "aot_eager")
    return _step(context, model, lambda: called(**inputs).loss)


def _library_ops(context: Context, sequences: int) -> Callable[[], None]:
    """Prepare a step of our model with other libraries' ops: attention by flash-attn, the other ops in plain PyTorch."""
    model = context.model()
    (batch,) = micro_batches(context, sequences, 1)

    def loss() -> Tensor:
        with ExitStack() as chosen:
            for op in OPS.values():
                plain = "pytorch" if "pytorch" in op.implementations else "reference"
                is_fused = op.name.startswith("varlen") and context.on_gpu
                chosen.enter_context(op.using("flash_attn" if is_fused else plain))
            masked_lm_loss, next_sentence_loss = model(batch).mean_losses(batch)
        return masked_lm_loss + next_sentence_loss

    return _step(context, model, loss)


def _step(context: Context, model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        with torch.autocast(context.device.type, torch.bfloat16, enabled=context.on_gpu):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run
