"""Parts of a training step: this rank's model, flat vectors, reduction, optimizer."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from bert.build import RankModel, build_model
from bert.configuration.config import Config
from bert.configuration.sections import SHARDED
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.mesh import Mesh
from bert.parallel.reduction.choice import ReductionChoice, choose
from bert.parallel.reduction.gradients import Communicators, Reduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb, WeightGather
from bert.parallel.whole_vectors import WholeVectors
from bert.products.weight_gradients import product_weights
from bert.recompute import RECOMPUTED_OPS
from bert.timing.stopwatch import Stopwatch


@dataclass(frozen=True)
class StepParts:
    """Parts of a training step; all but ``choice`` hold memory of the same model."""

    built: RankModel
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


def build_parts(whole: BertForPreTraining, config: Config, mesh: Mesh, stopwatch: Stopwatch) -> StepParts:
    """Build what trains this rank's part of ``whole``. Every rank must call it at the same time."""
    training = config.training
    built = build_model(whole, config, mesh, stopwatch.exchanging)
    model, tensor, pipeline, fp8 = built.model, built.tensor, built.pipeline, built.fp8
    # How gradients are summed: groups of ranks, flat vectors, then the strategy, which may be measured on these vectors.
    communicators = Communicators.create(mesh)
    # Stages have several micro-batches under way at once.
    overwrites = built.accumulates and pipeline is None
    overwritten = product_weights(model, built.adds_to_table) if overwrites else ()
    flat = FlatParameters.of(model, communicators.world_size, overwritten)
    choice = choose(training, flat, communicators)
    reduction = Reduction(flat, communicators, choice.strategy, training.reduce_dtype, training.bucket_bytes)
    gather = WeightGather(model, flat, reduction) if choice.strategy in SHARDED else None
    # A rank that has parts of tensors needs sums over ranks for their norms, which ``ShardedLamb`` makes.
    if gather is None and tensor is None and pipeline is None:
        dtype = torch.bfloat16 if built.accumulates and fp8 is None else None
        casts = () if fp8 is None else fp8.casts(flat.places)  # in place of copies
        optimizer = Lamb(flat, config.optimizer, dtype, casts)
        built.copies.update(optimizer.copies())
    else:
        optimizer = ShardedLamb(flat, config.optimizer, reduction, tensor, None if pipeline is None else pipeline.group)
    return StepParts(
        built=built,
        recomputed=() if training.recompute == "none" else RECOMPUTED_OPS,
        flat=flat,
        whole=WholeVectors(model, flat, tensor, pipeline),
        choice=choice,
        reduction=reduction,
        gather=gather,
        optimizer=optimizer,
    )
