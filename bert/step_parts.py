"""Parts of a training step: the model as ranks share it, its products, flat vectors, reduction, optimizer.

They change the model in place, so their order counts: layers are divided before FP8 replaces their products, both before
recomputation wraps their forward passes, and the flat vectors take the parameters that are then left on this rank.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bert.configuration.config import Config
from bert.configuration.sections import SHARDED
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.mesh import Mesh
from bert.parallel.reduction.choice import ReductionChoice, choose
from bert.parallel.reduction.gradients import Communicators, Reduction
from bert.parallel.reduction.sharded_gradients import ShardedReduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb, WeightGather
from bert.parallel.tensor.shards import tensor_parallel
from bert.parallel.whole_vectors import WholeVectors
from bert.products.chosen import Fp8State, accumulates_products, fp8_state
from bert.products.weight_gradients import WeightGradients, accumulate_products, product_weights
from bert.timing.stopwatch import Stopwatch

if TYPE_CHECKING:
    from bert.parallel.pipeline.stages import PipelineParallel


@dataclass(frozen=True)
class StepParts:
    """Parts of a training step; all but the first two hold memory of the same model."""

    weight_gradients: WeightGradients
    """Where products add gradients of their weights, past autograd."""
    pipeline: "PipelineParallel | None"
    fp8: Fp8State | None
    recomputed: Collection[str]
    """Names of the ops whose forward pass runs again in the backward pass."""
    flat: FlatParameters
    whole: WholeVectors
    """How flat vectors of this rank go together to those of the whole model."""
    choice: ReductionChoice
    """How gradients are summed over ranks, and why so."""
    reduction: Reduction
    gather: WeightGather | None
    """Gathers the weights that only other ranks have updated."""
    optimizer: Lamb | ShardedLamb


def build_parts(model: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch) -> StepParts:
    """Change ``model`` into what this rank trains and build what trains it. Every rank must call it at the same time."""
    training = config.training
    tensor = tensor_parallel(model, mesh, stopwatch.exchanging)
    pipeline: PipelineParallel | None = None
    if mesh.pipeline > 1:
        from bert.parallel.pipeline.stages import pipeline_parallel

        pipeline = pipeline_parallel(model, mesh, config.parallel)
    weight_gradients = WeightGradients()
    agree_ = None if tensor is None else tensor.all_reduce_max_
    fp8 = fp8_state(model, training, mesh.device, agree_, weight_gradients)
    recomputed: Collection[str] = ()
    if training.recompute != "none":
        from bert.recompute import RECOMPUTED_OPS, recompute_layers

        recompute_layers(model, training.recompute)
        recomputed = RECOMPUTED_OPS
    # How gradients are summed: groups of ranks, flat vectors, then the way, which may be measured on these vectors.
    communicators = Communicators.create(mesh, training.in_network, training.reduce_dtype)
    # One copy of the model has no other to share gradients with.
    shards_gradients = training.shard_gradients and communicators.world is not None
    accumulates = accumulates_products(mesh.device, training.precision)
    # Stages have several micro-batches under way at once.
    overwritten = product_weights(model) if accumulates and pipeline is None and not shards_gradients else ()
    flat = FlatParameters.of(model, communicators.world_size, not shards_gradients, overwritten)
    choice = choose(training, flat, communicators)
    # The rail that is not used is given back before the reduction keeps the groups.
    communicators = communicators.settle(choice.way)
    settings = flat, communicators, choice.way.strategy, training.reduce_dtype, training.bucket_bytes
    reduction = ShardedReduction(*settings, stopwatch.waiting) if shards_gradients else Reduction(*settings)
    gather = WeightGather(model, flat, reduction) if choice.way.strategy in SHARDED else None
    # A rank that has parts of tensors needs sums over ranks for their norms, which ``ShardedLamb`` makes.
    if gather is None and tensor is None and pipeline is None:
        dtype = torch.bfloat16 if accumulates and fp8 is None else None
        casts = () if fp8 is None else fp8.casts(flat.places)  # in place of copies
        optimizer = Lamb(flat, config.optimizer, dtype, casts)
    else:
        optimizer = ShardedLamb(flat, config.optimizer, reduction, tensor, None if pipeline is None else pipeline.group)
    if accumulates:
        # After FP8 has been enabled: only layers that still multiply as PyTorch does are changed.
        copies = optimizer.copies() if isinstance(optimizer, Lamb) else {}
        accumulate_products(model, weight_gradients, copies)
    return StepParts(
        weight_gradients=weight_gradients,
        pipeline=pipeline,
        fp8=fp8,
        recomputed=recomputed,
        flat=flat,
        whole=WholeVectors(model, flat, tensor, pipeline),
        choice=choice,
        reduction=reduction,
        gather=gather,
        optimizer=optimizer,
    )
