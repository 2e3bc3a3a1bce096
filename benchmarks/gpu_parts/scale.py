"""The model and batches that are measured, and the FLOP of a training step.

Shape legend: T tokens, S sequences, M masked tokens, D hidden, F intermediate, V vocabulary, H heads, E head size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu_parts.report import PartReport
from bert.checkpoints.initial_model import initialize_
from bert.configuration.sections import ModelConfig
from bert.execution.cuda_graphs import CudaCapturer
from bert.model import BertForPreTraining
from bert.parallel.mesh import Mesh
from cluster.model.histogram import drawn_lengths, length_counts
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.sampler import ShapeBucket
from dataloading.shards.samples import Samples, synthetic_samples
from kernels import OPS


@dataclass(frozen=True)
class Scale:
    model: ModelConfig
    sequences: int
    """Sequences of one micro-batch."""
    repeats: int
    """Number of timed steps. A kernel is timed in three times as many calls."""
    square: int
    """Number of rows, and of columns, of the matrices whose product shows the highest rate of matrix products."""
    copied: int
    """Bytes of the copy that shows the highest rate of the memory."""
    parity_steps: int
    parity_sequences: int
    """Number of steps in each run whose losses are compared, and number of sequences in each of these steps."""


FULL = Scale(ModelConfig(), 96, 10, 8192, 2**31, 200, 16)
TINY = Scale(ModelConfig(2, 64, 2, 128, 500, 64), 4, 1, 64, 2**16, 3, 4)


@dataclass(frozen=True)
class Context:
    device: torch.device
    scale: Scale
    report: PartReport
    without: Mapping[str, str] = field(default_factory=dict)
    """Ops whose usual implementation is replaced, each with its replacement."""
    end: float = math.inf
    """Value of ``time.monotonic`` at which the time of the part is up."""
    settings: Sequence[str] = ()
    """Arguments for ``bert.train`` in the part ``end-to-end``."""

    def implementations(self, op: str) -> list[str]:
        """Return the implementations of an op that are checked and timed."""
        return [self.without[op]] if op in self.without else list(OPS[op].implementations)

    @property
    def tiny(self) -> bool:
        """Whether the scale is tiny. Such figures only show that the code runs."""
        return self.scale is TINY

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def low_precision(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu or not self.tiny else torch.float32

    @property
    def mesh(self) -> Mesh:
        return Mesh(0, 1, 0, self.device)

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """Initial weights, drawn once in each process and kept on the host to save device memory."""
        with self.device:
            model = BertForPreTraining(self.scale.model)
        initialize_(model, seed=0)
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    @property
    def captures(self) -> bool:
        """Whether steps are captured: on a GPU, unless an op has a replacement that no CUDA graph can capture."""
        # Ignore attention with FP8 casts. Layers call it only in the implementation of attention itself, which is checked.
        called = {op: name for op, name in self.without.items() if not op.endswith("cast_fp8")}
        return self.on_gpu and all(OPS[op].implementations[name].capturable for op, name in called.items())

    def capturer(self) -> CudaCapturer | None:
        """Return the CUDA graph capturer that training uses, or None if steps are not captured."""
        return CudaCapturer(self.device) if self.captures else None

    def model(self, config: ModelConfig | None = None) -> BertForPreTraining:
        """Build a model on the device. All models start from the same weights."""
        with self.device:
            model = BertForPreTraining(config or self.scale.model)
        model.load_state_dict(self._weights)
        return model.train()


def clipped_lengths(count: int, longest: int, seed: int) -> NDArray[np.int64]:
    """Draw lengths [count] from Wikipedia's distribution."""
    # A sample has at least 3 tokens: [CLS] and two [SEP].
    return np.clip(drawn_lengths(np.random.default_rng(seed), count), 3, longest)


def wikipedia_lengths(sequences: int, longest: int) -> NDArray[np.int64]:
    """Return quantiles of Wikipedia's lengths, [sequences], longest first."""
    length, count = length_counts()
    below = np.cumsum(count) / count.sum()
    # Random lengths of a small batch would vary with the seed, and so would the figures.
    quantiles = (np.arange(sequences) + 0.5) / sequences
    # The longest length is first, as in batches of the loader.
    return np.clip(length[np.searchsorted(below, quantiles)][::-1], 3, longest)


def samples_of(scale: Scale, sequences: int, seed: int = 0) -> Samples:
    """Draw samples of random tokens. Their lengths are quantiles of Wikipedia's lengths, longest first."""
    lengths = wikipedia_lengths(sequences, scale.model.max_position_embeddings)
    return synthetic_samples(lengths, scale.model.vocab_size, seed)


def micro_batches(context: Context, sequences: int, count: int, seed: int = 0, *, padded: bool = False) -> list[Batch]:
    """Return a global batch of ``count`` micro-batches on the device. ``padded`` pads each of them to its shape bucket."""
    batches = []
    for index in range(count):
        samples = samples_of(context.scale, sequences, seed + index)
        longest = context.scale.model.max_position_embeddings
        sizes = len(samples.input_ids), sequences, len(samples.masked_lm_ids), longest
        batches.append(batch_of(samples, shape_bucket=ShapeBucket.around(*sizes) if padded else None))
    # Losses are divided by the counts of the whole global batch.
    counts = torch.stack([batch.global_counts for batch in batches]).sum(dim=0)
    return [replace(batch, global_counts=counts).to(context.device) for batch in batches]


def training_flop(model: ModelConfig, batch: Batch) -> float:
    """Return the model FLOP of a training step on an unpadded micro-batch: three times the FLOP of the forward pass."""
    hidden, layers = model.hidden_size, model.num_hidden_layers
    lengths = batch.cu_seqlens.diff().double()
    # Matrix products of the layers: query, key, value, output, and two in the feed-forward block.
    dense = 2 * batch.tokens * (4 * hidden**2 + 2 * hidden * model.intermediate_size)
    attention = 4 * hidden * float((lengths**2).sum())
    # The masked-LM transform and decoder run only on masked tokens.
    head = 2 * batch.masked_lm_ids.numel() * (hidden**2 + hidden * model.vocab_size)
    return 3 * (layers * (dense + attention) + head)
