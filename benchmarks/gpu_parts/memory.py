"""Measure the memory of captured training for several micro-batch sizes, and find the largest size that fits."""

from functools import partial

import numpy as np
import torch

from benchmarks.gpu_parts.measuring.report import Figure
from benchmarks.gpu_parts.measuring.scale import Context, clipped_lengths, samples_of
from benchmarks.gpu_parts.step import recipe, take_step, training_step
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import Precision
from dataloading.batches.loader import batch_of, shape_bucket_of
from dataloading.batches.plan import ShapeBucket, choose_shape_buckets, draw_sizes

_FITS, _DOES_NOT_FIT = "fits", "does not fit"
_SHAPE_BUCKETS = 4
"""Number of shape buckets. Training uses 16. Fewer need the same memory, that of the largest bucket, and save time."""


def memory(context: Context) -> None:
    """Double the micro-batch size until it does not fit, then bisect."""
    for precision in ("bf16", "fp8"):
        _search(context, precision)


def _search(context: Context, precision: Precision) -> None:
    report = context.report

    # Start with a quarter of the usual size.
    most, failing, size = 0, None, max(1, context.scale.sequences // 4)
    limit = context.scale.sequences * (1 if context.tiny else 16)
    # Stop when the bounds differ by at most 8 sequences, or by a sixteenth.
    while size <= limit and (failing is None or failing - most > max(8, most // 16)):
        name = f"{precision}, {size} sequences"
        row = report.attempt(name, partial(_peak, context, name, precision, size))
        if row is None or row.failed:  # it failed for a reason other than memory
            return
        most, failing = (size, failing) if row.note.startswith(_FITS) else (most, size)
        size = 2 * size if failing is None else (most + failing) // 2
    bound = f"{failing} do not" if failing else "more were not tried"
    report.add(Figure(f"{precision}, most sequences that fit", figure=most, unit="sequences", note=bound, page=True))


def _peak(context: Context, name: str, precision: Precision, sequences: int) -> Figure:
    """Return the row with the peak memory of start-up, capture and one replay for a micro-batch size."""
    if context.on_gpu:
        # A higher peak of an earlier size would hide the peak of this size.
        torch.cuda.reset_peak_memory_stats()
    try:
        _train(context, precision, sequences)
    except RuntimeError as error:
        # Running out of memory is a result. Any other error is a failure.
        if _is_lack_of_memory(error):
            return Figure(name, note=_DOES_NOT_FIT)
        raise
    if not context.on_gpu:
        return Figure(name, note=f"{_FITS}; a CPU keeps no count")
    free, total = torch.cuda.mem_get_info()
    # Reserved memory is the relevant figure, because other programs cannot use what the allocator holds.
    reserved, allocated = (
        2**-30 * read() for read in (torch.cuda.max_memory_reserved, torch.cuda.max_memory_allocated)
    )
    note = f"{_FITS}; share of the device's {total / 2**30:.0f}; {allocated:.1f} of them allocated, {free / 2**30:.1f} free"
    return Figure(name, figure=reserved, unit="GiB", share=reserved * 2**30 / total, note=note)


def _train(context: Context, precision: Precision, sequences: int) -> None:
    """Start up as a training run does, and take one step."""
    shape_buckets = _shape_buckets(context, sequences)
    samples = samples_of(context.scale, sequences)
    batch = batch_of(samples, shape_bucket=shape_bucket_of(samples, shape_buckets)).to(context.device)
    trained = training_step(context, recipe("h100_1x1", precision=precision))
    # Capture graphs for all shape buckets, which share one memory pool, as in training.
    trained.warm_up([batch], 1, shape_buckets)
    take_step(trained, [batch])
    if context.on_gpu:
        torch.cuda.synchronize()


def _shape_buckets(context: Context, sequences: int) -> list[ShapeBucket]:
    """Choose the shape buckets that the one-GPU recipe would use for micro-batches of this size."""
    longest = context.scale.model.max_position_embeddings
    count = RECIPES["h100_1x1"]().training.gradient_accumulation_steps
    lengths = clipped_lengths(20_000, longest, seed=0)
    masked = np.maximum(1, np.rint(0.15 * lengths).astype(np.int64))
    # Draw the sizes at random, because the choice of shape buckets depends on the spread of the sizes.
    tokens, masked_tokens = draw_sizes(lengths, masked, count * sequences, count)
    return choose_shape_buckets(tokens, masked_tokens, sequences, longest, _SHAPE_BUCKETS)


def _is_lack_of_memory(error: BaseException | None) -> bool:
    """Tell whether lack of memory caused an error. A capture that runs out of memory can raise another error."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
