"""Stages of a copy: what each has of the model, how long micro-batches take through them, and how many are there at once.

The schedules are those of `bert.parallel.pipeline`. Shape legend: A micro-batches of a step, R copies of the model, P ranks
of a pipeline.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert.configuration.sections import ModelConfig, Precision
from bert.parallel.pipeline.division import stages_of
from cluster.model.strategy import Strategy


@dataclass(frozen=True)
class OwnLayers:
    """Layers that a rank of a pipeline has of the model.

    Attributes:
        inner: layers but the model's last one.
        has_last: the model's last layer and the heads.
        neighbours: stages next to its own ones, with each of which it exchanges hidden states and their gradients.
    """

    has_embeddings: bool
    inner: int
    has_last: bool
    neighbours: int


@functools.cache
def own_layers(model: ModelConfig, pipeline: int = 1, virtual_stages: int = 1) -> tuple[OwnLayers, ...]:
    """Return what each rank of a pipeline has."""
    stages = stages_of(model, pipeline * virtual_stages)
    found = []
    for rank in range(pipeline):
        # With interleaving a rank has every P-th stage, as PyTorch's schedules assign them.
        own = stages[rank::pipeline]
        first, last = any(stage.is_first for stage in own), any(stage.is_last for stage in own)
        layers = sum(len(stage.layers) for stage in own)
        # Each of its stages has two neighbours, but the model's first and last one have one.
        found.append(OwnLayers(first, layers - last, last, 2 * len(own) - first - last))
    return tuple(found)


def through_stages(
    compute_PAR: NDArray[np.float64],
    neighbours_P: NDArray[np.float64],
    message_s: float,
    strategy: Strategy,
    sharing: float,
) -> NDArray[np.float64]:
    """Seconds [R] from the first forward pass of a step to its last backward pass, in 1F1B or interleaved.

    The costliest rank computes all the time but at both ends, where others fill the pipeline and drain it. Each micro-batch
    waits for what neighbours send. Ranks that share processors (`Rates.sharing`) have those of others that wait: then all
    takes at least the mean work of a rank.
    """
    waits_P11 = message_s * neighbours_P[:, None, None]
    # A stage that waits leaves its processors to others, and the last line adds them up again.
    busy_PR = (compute_PAR / alone_in_stages(sharing, strategy.pipeline) + waits_P11).sum(1)
    costliest_R = busy_PR.max(0)
    # One micro-batch through all other ranks fills and drains the pipeline, hence the division by their number;
    # interleaved, one stage of each.
    ends_R = (busy_PR.sum(0) - costliest_R) / compute_PAR.shape[1] / strategy.virtual_stages
    # Never below the processors' own work: where all ranks share them, waiting does not make anything disappear.
    return np.maximum(costliest_R + ends_R, compute_PAR.sum(1).mean(0))


def alone_in_stages(sharing: float, pipeline: int) -> float:
    """Return how many times as fast a stage computes while the others wait.

    Its ranks, of all copies and tensor groups, still share processors with one another: only other stages' are free.
    """
    return min(sharing, float(pipeline))


def hidden_bytes(precision: Precision, on_gpu: bool) -> int:
    """Bytes of an element of what stages send one another: on CPUs autocast's norms give fp32."""
    return 2 if precision != "fp32" and on_gpu else 4


def under_way(strategy: Strategy, place: int) -> float:
    """Micro-batches whose activations the rank at this place of a pipeline keeps at once, as PyTorch schedules them."""
    stages, virtual = strategy.pipeline, strategy.virtual_stages
    if virtual == 1:
        # 1F1B: stage p runs ahead by the number of stages after it, then one backward pass for each forward pass.
        return min(stages - place, strategy.gradient_accumulation_steps) if stages > 1 else 1
    # Forward passes of a stage before the first backward pass, as ScheduleInterleaved1F1B counts its warm-up, and one
    # more.
    parts = (virtual - 1) * stages + 2 * (stages - 1 - place) + 1
    return min(parts / virtual, strategy.gradient_accumulation_steps)
