"""One rank of ``test_pipeline_parallel.py``: the training step in many shapes, one after the other, on the same ranks.

python -m tests.distributed.workers.pipeline_worker OUT.pt SHAPE...

A shape is TENSOR,PIPELINE,VIRTUAL_STAGES,STRATEGY,ORDER,RANKS_OF_A_NODE,ACCUMULATION,STEPS,PRECISION: fp32, or in fp64 one
of fp64, dropout, recomputed, deep, accumulating (products and embeddings add gradients of weights by themselves, as on a
GPU). OUT.pt maps each shape to what it came to.
"""

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import bert.build
from bert.checkpoints.initial_model import draw_model
from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig, OptimizerConfig, ParallelConfig
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from kernels import choose
from tests.distributed.workers.reduction_worker import regrouped
from tests.distributed.workers.tensor_worker import (
    MODEL,
    agreed,
    correct_predictions,
    global_batches,
    returns,
    skips,
    state,
    train_all,
)

PIPELINE_MODEL = replace(MODEL, num_hidden_layers=5)
DEEP = 48
"""Layers of the model of 3.9 billion parameters, of which ``deep`` is a narrow one."""


def config(shape: str) -> Config:
    tensor, pipeline, virtual_stages, strategy, _, _, accumulation, _, precision = shape.split(",")
    recipe = tiny_cpu()
    model: ModelConfig = PIPELINE_MODEL
    if precision == "dropout":
        model = replace(model, hidden_dropout=0.1, attention_dropout=0.1)
    if precision == "deep":
        model = replace(model, num_hidden_layers=DEEP)
    return replace(
        recipe,
        model=model,
        training=replace(
            recipe.training,
            reduction=strategy,  # type: ignore[arg-type]
            gradient_accumulation_steps=int(accumulation),
            recompute="selective" if precision == "recomputed" else "none",
            bucket_bytes=20_000,
        ),
        optimizer=OptimizerConfig(2e-2, 60, num_warmup_steps=5, start_warmup_step=-1),
        parallel=ParallelConfig(int(tensor), int(pipeline), int(virtual_stages)),
    )


def train(joined: Mesh, shape: str) -> dict[str, Any]:
    """Losses and norms of every step, what the first one came to, and the end: whole vectors on all ranks."""
    _, _, _, _, order, local_size, accumulation, steps, precision = shape.split(",")
    chosen = config(shape)
    parallel = chosen.parallel
    mesh = replace(regrouped(joined, order, int(local_size)), tensor=parallel.tensor, pipeline=parallel.pipeline)
    model = draw_model(chosen, Mesh(0, 1, 0, torch.device("cpu")), seed=3)
    if precision != "fp32":
        model.double()
    reference = {"dropout_add_layer_norm": "reference", "varlen_self_attention": "reference"}
    choose(reference | {"embedding_layer_norm": "reference", "varlen_attention": "reference"})
    with patch.object(bert.build, "accumulates_products", lambda *_: precision == "accumulating"):
        step = TrainingStep(model, chosen, mesh, Stopwatch())
    step.model.seed_dropout(7)
    batches = global_batches(mesh, int(accumulation), padded=order == "cyclic", count=int(steps))
    if precision != "deep":  # a warm-up is no other for that
        step.warm_up(batches[0], 1)
    means, first = [], {}
    for micro_batches in batches:
        step(micro_batches)
        means.append(step.statistics.fetch()[0])
        first = first or state(step)
    last = state(step) if len(batches) > 1 else first
    found = {
        "means": means,
        "first": first,
        "last": last,
        "correct": correct_predictions(step, mesh, batches[:2]),
        "agreed": agreed(list(last.values())),
        "returns": returns(step),
        "saved": dict(step.gather_whole_model().state_dict()),
        "elements": len(step.flat.weights_P),
        "skips": skips(step, mesh),
    }
    step._reduction.close()
    return found


if __name__ == "__main__":
    train_all(train, *sys.argv[1:])
