"""What is measured: the model, its batches, and the work that they are.

Shape legend: T tokens, S sequences, M masked tokens, D hidden, F intermediate, V vocabulary, H heads, E head size.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_timing import Report, measured
from bert.config import ModelConfig
from dataloading.capacity import Capacity
from dataloading.loader import Batch, batch_of
from dataloading.samples import Samples
from dataloading.synthetic import synthetic_samples

HISTOGRAM = Path(__file__).parent / "data" / "wikipedia_length_histogram.csv"


@dataclass(frozen=True)
class Scale:
    """Sizes of everything."""

    model: ModelConfig
    sequences: int
    """Of one micro-batch."""
    repeats: int
    """Timed steps; kernels are timed three times as often."""
    square: int
    """Rows and columns of the large matrix product."""
    copied: int
    """Bytes of the large copy."""
    parity_steps: int
    parity_sequences: int


FULL = Scale(ModelConfig(), 96, 10, 8192, 2**31, 50, 16)
TINY = Scale(ModelConfig(2, 64, 2, 128, 500, 64), 4, 1, 64, 2**16, 3, 4)


@dataclass(frozen=True)
class Context:
    """What every part gets."""

    device: torch.device
    scale: Scale
    report: Report

    @property
    def tiny(self) -> bool:
        """Whether this only shows that the code runs."""
        return self.scale is TINY

    @property
    def low_precision(self) -> torch.dtype:
        """bf16, the type that figures are about; fp32 where the scale is tiny."""
        return torch.float32 if self.tiny else torch.bfloat16


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: a large matrix product and a large copy."""

    flop_per_s: float
    """Multiply-add = 2."""
    bytes_per_s: float
    """Read and written."""

    @classmethod
    def of(cls, context: Context) -> "Ceilings":
        """Measured here and now."""
        return cls(large_product(context)[0], large_copy(context)[0])


def large_product(context: Context) -> tuple[float, list[float]]:
    """FLOP/s of the large matrix product in low precision, best of all calls, and the seconds of every call."""
    n = context.scale.square
    left, right = (torch.randn(n, n, device=context.device, dtype=context.low_precision) for _ in range(2))
    seconds = measured(lambda: left @ right, context.device, 3 * context.scale.repeats, cold=False)
    return 2 * n**3 / min(seconds), seconds


def large_copy(context: Context) -> tuple[float, list[float]]:
    """Bytes/s, read and written, of the large copy, best of all calls, and the seconds of every call."""
    source = torch.zeros(context.scale.copied, dtype=torch.int8, device=context.device)
    target = torch.empty_like(source)
    seconds = measured(lambda: target.copy_(source), context.device, 3 * context.scale.repeats, cold=False)
    return 2 * source.numel() / min(seconds), seconds


def wikipedia_lengths(sequences: int, longest: int) -> NDArray[np.int64]:
    """Lengths [sequences], longest first, spread over Wikipedia's as evenly as so many can be."""
    length, count = np.loadtxt(HISTOGRAM, delimiter=",", skiprows=1, dtype=np.int64, unpack=True)
    below = np.cumsum(count) / count.sum()
    quantiles = (np.arange(sequences) + 0.5) / sequences
    return np.clip(length[np.searchsorted(below, quantiles)][::-1], 3, longest)


def samples_of(scale: Scale, sequences: int, seed: int = 0) -> Samples:
    """Random tokens of Wikipedia's lengths."""
    lengths = wikipedia_lengths(sequences, scale.model.max_position_embeddings)
    return synthetic_samples(lengths, scale.model.vocab_size, seed)


def micro_batches(context: Context, sequences: int, count: int, seed: int = 0, *, padded: bool = False) -> list[Batch]:
    """A global batch as ``count`` micro-batches of ``sequences``, on the device; ``padded`` to capacities, each its own."""
    batches = []
    for index in range(count):
        samples = samples_of(context.scale, sequences, seed + index)
        longest = context.scale.model.max_position_embeddings
        sizes = len(samples.input_ids), sequences, len(samples.masked_lm_ids), longest
        batches.append(batch_of(samples, capacity=Capacity.around(*sizes) if padded else None))
    counts = torch.stack([batch.global_counts for batch in batches]).sum(dim=0)
    return [replace(batch, global_counts=counts).to(context.device) for batch in batches]


def training_flop(model: ModelConfig, batch: Batch) -> float:
    """Model FLOP of a training step on a micro-batch: three times the forward pass, nothing padded, nothing left out."""
    hidden, layers = model.hidden_size, model.num_hidden_layers
    lengths = batch.cu_seqlens.diff().double()
    dense = 2 * batch.tokens * (4 * hidden**2 + 2 * hidden * model.intermediate_size)
    attention = 4 * hidden * float((lengths**2).sum())
    head = 2 * batch.masked_lm_ids.numel() * (hidden**2 + hidden * model.vocab_size)
    return 3 * (layers * (dense + attention) + head)
