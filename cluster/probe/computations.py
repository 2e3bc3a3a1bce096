"""Timing of a training step's computations, forward and backward, on all ranks at once.

Each kind of computation is timed in a few shapes. The costs of its terms (`cluster.model.work.TERMS`) are fitted to
these times. As in a model, several computations of a kind run forward before the first of them runs backward. By then, their
inputs have left the caches. Memory is also allocated and freed in the same order as in a model.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bert.parallel.mesh import Mesh, agreed_integer, barrier
from cluster.model.work import Count, linear
from cluster.probe.computing import gather_numbers, time_in_window
from cluster.view import ComputationTime, Contention
from dataloading.batches.loader import batch_of
from dataloading.batches.sampler import BatchSampler
from dataloading.shards.samples import synthetic_samples
from kernels import (
    Dropout,
    LambHyperparameters,
    LambSegments,
    LambState,
    cross_entropy_sum,
    dropout_add_layer_norm,
    embedding_layer_norm,
    lamb_step,
    varlen_self_attention,
)

_COPIES = 4
"""Number of computations that one call of a trial's ``action`` runs. Each of them has its own inputs."""
_DROPOUT = 0.1
_EPS = 1e-12
_MOST_TURNS = 3
_SLICE_S = 0.015
"""Shortest window of a measurement if each rank has a processor. It covers several time slices of the system's scheduler."""
_LINEAR = (
    (64, 128, 128),
    (512, 128, 512),
    (512, 512, 128),
    (768, 256, 256),
    (96, 256, 1024),
    (192, 1024, 384),
    (64, 256, 8192),
)
"""Shapes of the timed linear layers: (rows, inputs, outputs). On a GPU, each number is eight times as large."""
_ATTENTION = ((1, 128, 4, 32), (1, 384, 4, 64), (16, 32, 4, 32), (6, 128, 4, 32), (2, 96, 16, 64))
"""Shapes of the timed attention layers: (sequences, length of each sequence, heads, head size)."""
_NORM = ((32, 128), (512, 128), (768, 512))
_GELU = ((32, 128), (512, 512), (512, 1024))
_LOSS = ((8, 1024), (64, 1024), (32, 16384))
"""Shapes of the timed norms, GELUs and losses: (rows, columns)."""
_EMBEDDING = ((64, 128, 1024), (768, 128, 1024), (192, 256, 8192))
"""Shapes of the timed embeddings: (tokens, hidden size, vocabulary size)."""
_LAMB = ((8, 4096), (32, 16384), (16, 393216))
"""Sizes of the timed LAMB: (segments, elements of each). One fits a core's cache, one the processor's, and one neither."""
_BATCH = (32, 256)
"""Global batch sizes for which the assembly of batches is timed."""
_PRODUCT, _REPEATS = 256, 3
"""Matrix size of the products that measure contention, and the number of times that this measurement is repeated."""


@dataclass(frozen=True)
class ComputationTrial:
    """A computation to time. One call of ``action`` runs the computation ``times`` times."""

    kind: str
    counts: tuple[float, ...]
    action: Callable[[], object]
    times: int


def trials_of(device: torch.device) -> list[ComputationTrial]:
    # The shapes of linear layers suit a CPU. They would leave most of a GPU idle, so use larger ones there.
    factor = 8 if device.type == "cuda" else 1
    dtypes = [torch.float32]
    # Time bf16 only if it is native, because PyTorch would emulate it slowly otherwise.
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.append(torch.bfloat16)
    with device:
        trials = [_linear(dtype, *(factor * size for size in shape)) for dtype in dtypes for shape in _LINEAR]
        for dropout in (None, Dropout(_DROPOUT, torch.zeros(2, dtype=torch.int64), 0)):
            trials += [_attention(dtype, *shape, dropout) for dtype in dtypes for shape in _ATTENTION]
            trials += [_norm(*shape, dropout) for shape in _NORM]
            trials += [_embedding(*shape, dropout) for shape in _EMBEDDING]
        gelu = partial(F.gelu, approximate="tanh")
        trials += [_backward_of("gelu", (1, rows * size), gelu, [(rows, size)]) for rows, size in _GELU]
        trials += [_loss(*shape) for shape in _LOSS]
        trials += [_lamb(*shape) for shape in _LAMB]
    return trials + [_batch(size) for size in _BATCH]


def measure_computations(mesh: Mesh, processors: int, seconds: float) -> list[ComputationTime]:
    """Time all computations in about ``seconds`` seconds. All ranks must call this function at the same time.

    ``processors`` is the number of processors of all machines. If ranks share processors, each window is longer than the
    scheduler's time slices, and there are fewer windows.
    """
    start = time.perf_counter()
    trials = trials_of(mesh.device)
    for trial in trials:  # the first call allocates memory and chooses implementations
        trial.action()
    # The ranks agree on the time spent, because all ranks must run equally many turns.
    seconds -= agreed_integer(round(1000 * (time.perf_counter() - start)), mesh) / 1000
    window = max(seconds / (_MOST_TURNS * len(trials)), _SLICE_S * mesh.world_size / processors)
    turns = max(1, round(seconds / (window * len(trials))))
    barrier()
    own_TK = np.array([[time_in_window(t.action, window, mesh.device) / t.times for t in trials] for _ in range(turns)])
    # Average over the ranks first, because ranks that share processors gain time at each other's expense.
    found_K = np.median(gather_numbers(own_TK, mesh).mean(axis=0), axis=0)
    return [
        ComputationTime(trial.kind, trial.counts, found) for trial, found in zip(trials, found_K.tolist(), strict=True)
    ]


def measure_contention(mesh: Mesh, processors: int, seconds: float) -> Contention:
    """Time the same products on one rank alone and on all ranks. All ranks must call this function at the same time."""
    one, other = torch.rand(2, _PRODUCT, _PRODUCT, device=mesh.device)
    out = torch.empty_like(one)
    share = seconds / _REPEATS / 3
    barrier()
    count = max(4, int(share / time_in_window(lambda: torch.mm(one, other, out=out), 0.02, mesh.device)))
    count = agreed_integer(count, mesh)

    def work() -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(one, other, out=out)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        return time.perf_counter() - start

    rows = []
    for _ in range(_REPEATS):
        # The other ranks wait in the barrier.
        alone = work() if mesh.is_main else 0.0
        barrier()
        # Repeat until the window ends, so that no rank finishes early and frees processors.
        together = time_in_window(work, share, mesh.device)
        barrier()
        # Do the work once, as in a step: a rank that has finished leaves its processors to the other ranks.
        rows.append((alone, together, work()))
        barrier()
    alone_RT, together_RT, begun_RT = np.moveaxis(gather_numbers(np.array(rows), mesh), 2, 0)
    times = (alone_RT[0], together_RT.mean(axis=0), begun_RT.mean(axis=0), begun_RT.max(axis=0))
    return Contention(processors, torch.get_num_threads(), *(float(np.median(time_T)) for time_T in times))


def _backward_of(
    kind: str,
    counts: Sequence[Count],
    forward: Callable[..., Tensor],
    activations: Sequence[tuple[int, ...]],
    parameters: Sequence[tuple[int, ...]] = (),
    dtype: torch.dtype = torch.float32,
) -> ComputationTrial:
    """Return a trial that runs ``_COPIES`` computations forward, and then backward in reverse order.

    ``forward`` gets the activations, which have type ``dtype``, and then the parameters. Both have the given shapes.
    """
    copies = [
        [*(torch.rand(shape, dtype=dtype, requires_grad=True) for shape in activations), *map(_leaf, parameters)]
        for _ in range(_COPIES)
    ]
    with torch.enable_grad():
        gradient = torch.ones_like(forward(*copies[0]))

    def action() -> None:
        outputs = []
        with torch.enable_grad():
            for inputs in copies:
                # Clear the gradients of activations, because they do not accumulate in a step.
                for activation in inputs[: len(activations)]:
                    activation.grad = None
                outputs.append(forward(*inputs))
            # Free each output's graph before the next backward pass, as in a model.
            while outputs:
                output = outputs.pop()
                output.backward(gradient if output.ndim else None)

    return ComputationTrial(kind, tuple(map(float, counts)), action, _COPIES)


def _leaf(shape: tuple[int, ...]) -> Tensor:
    # The backward pass adds to an existing gradient, as in training with the flat gradient vector.
    leaf = torch.rand(shape, requires_grad=True)
    leaf.grad = torch.zeros_like(leaf)
    return leaf


def _linear(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> ComputationTrial:
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            return F.linear(x, weight, bias)

    counts = linear(rows, inputs, outputs).counts
    kind = "linear fp32" if dtype == torch.float32 else "linear bf16"
    return _backward_of(kind, counts, forward, [(rows, inputs)], [(outputs, inputs), (outputs,)], dtype)


def _attention(
    dtype: torch.dtype, count: int, length: int, heads: int, size: int, dropout: Dropout | None
) -> ComputationTrial:
    cu_seqlens = torch.arange(count + 1, dtype=torch.int32) * length
    pairs = count * length**2
    counts = (1, count * length * heads * size, pairs * heads, pairs * heads * size)
    kind = _named("attention" + " bf16" * (dtype == torch.bfloat16), dropout)

    def forward(qkv: Tensor) -> Tensor:
        return varlen_self_attention(qkv, cu_seqlens, length, dropout)

    return _backward_of(kind, counts, forward, [(count * length, 3, heads, size)], dtype=dtype)


def _norm(rows: int, size: int, dropout: Dropout | None) -> ComputationTrial:
    def forward(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
        return dropout_add_layer_norm(x, bias, residual, weight, norm_bias, _EPS, dropout)

    return _backward_of(_named("norm", dropout), (1, rows * size), forward, [(rows, size)] * 2, [(size,)] * 3)


def _embedding(tokens: int, size: int, words: int, dropout: Dropout | None) -> ComputationTrial:
    ids = torch.randint(words, (tokens,))
    positions, segments = torch.arange(tokens) % 128, torch.zeros_like(ids)

    def forward(word: Tensor, position: Tensor, segment: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return embedding_layer_norm(ids, positions, segments, word, position, segment, weight, bias, _EPS, dropout)

    shapes = [(words, size), (128, size), (2, size), (size,), (size,)]
    return _backward_of(_named("embedding", dropout), (1, tokens * size, words * size), forward, [], shapes)


def _named(kind: str, dropout: Dropout | None) -> str:
    return f"{kind} with dropout" if dropout else kind


def _loss(rows: int, words: int) -> ComputationTrial:
    labels = torch.randint(words, (rows,))
    return _backward_of("loss", (1, rows * words), lambda logits: cross_entropy_sum(logits, labels), [(rows, words)])


def _lamb(segments: int, size: int) -> ComputationTrial:
    weights = torch.rand(segments * size)
    gradients, state = torch.rand_like(weights), LambState.zeros_like(weights)
    layout = LambSegments((size,) * segments, (True,) * segments)
    hyperparameters = LambHyperparameters(0.9, 0.999, 1e-6, 0.01, 1.0)
    # A learning rate of 0 leaves the weights unchanged, so that every call does the same work.
    step, rate = torch.ones((), dtype=torch.int64), torch.zeros(())
    action = partial(lamb_step, weights, gradients, state, layout, hyperparameters, step=step, learning_rate=rate)
    return ComputationTrial("lamb", (1.0, float(segments), float(segments * size)), action, 1)


def _batch(size: int) -> ComputationTrial:
    # Use uint16, because the length index on disk has this data type.
    lengths = np.random.default_rng(0).integers(8, 128, 8192).astype(np.uint16)
    # Do the work of one of four ranks: deal the whole global batch and assemble a quarter of it.
    sampler = BatchSampler(lengths, (lengths // 7 + 1).astype(np.uint16), size, 4, 1, 0)
    samples = synthetic_samples(lengths[: size // 4], 1024)
    return ComputationTrial("batch", (1.0, float(size)), lambda: batch_of(samples, sampler.rank_batches(1, 0)[0]), 1)
