"""One rank of ``test_bytes.py``, on a host of its own: bytes that its interface sends in a step, in many shapes.

python -m tests.distributed.workers.bytes_worker OUT.json SHAPE...

A shape is TENSOR,PIPELINE,STRATEGY,REDUCE_DTYPE,RANKS_OF_A_NODE,ACCUMULATION. OUT.json maps each to what every rank has
sent, and to the sizes that the formulas are about.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.training.collectives import sent_bytes
from bert.checkpoints.initial_model import draw_model
from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig, ParallelConfig
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.parallel.reduction.sharded_lamb import ShardedLamb
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.sampler import MicroBatch
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.batches.synthetic import synthetic_samples
from tests.distributed.workers.reduction_worker import end_groups, regrouped

STEPS = 2
MODEL = ModelConfig(2, 128, 4, 256, 2048, 64, hidden_dropout=0.0, attention_dropout=0.0)
BUCKET = ShapeBucket(1600, 50, 256, 64)


def config(shape: str) -> Config:
    tensor, pipeline, strategy, reduce_dtype, _, accumulation = shape.split(",")
    recipe = tiny_cpu()
    training = replace(
        recipe.training,
        reduction=strategy,  # type: ignore[arg-type]
        reduce_dtype=reduce_dtype,  # type: ignore[arg-type]
        gradient_accumulation_steps=int(accumulation),
        bucket_bytes=10**6,
    )
    parallel = ParallelConfig(int(tensor), int(pipeline))
    return replace(recipe, model=MODEL, training=training, parallel=parallel)


def micro_batch() -> Batch:
    """Make a micro-batch of the same sizes on all ranks, and always."""
    samples = synthetic_samples(np.full(49, 32), MODEL.vocab_size)
    return batch_of(samples, MicroBatch(np.arange(49), 49, len(samples.masked_lm_ids)), BUCKET)


def measured(joined: Mesh, shape: str) -> dict[str, Any]:
    chosen = config(shape)
    tensor, pipeline = chosen.parallel.tensor, chosen.parallel.pipeline
    mesh = replace(regrouped(joined, "block", int(shape.split(",")[4])), tensor=tensor, pipeline=pipeline)
    step = TrainingStep(draw_model(chosen, Mesh(0, 1, 0, torch.device("cpu")), seed=3), chosen, mesh, Stopwatch())
    micro_batches = [micro_batch()] * chosen.training.gradient_accumulation_steps
    sent = []
    for _ in range(1 + STEPS):  # the first one connects
        dist.barrier()
        before = sent_bytes()
        step(micro_batches)
        dist.barrier()
        sent.append(sent_bytes() - before)
    own = {"rank": mesh.pipeline_rank, "sent": min(sent[1:]), "parameters": len(step.flat.weights_N)}
    if tensor > 1:
        assert isinstance(step.optimizer, ShardedLamb)
        own["on_all_ranks"] = len(step.optimizer._everywhere_I)
    ranks: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(ranks, own)
    step._reduction.close()
    return {"ranks": ranks}


def main(out: str, *shapes: str) -> None:
    torch.set_num_threads(1)
    mesh = join_mesh("cpu")
    found = {}
    for shape in shapes:
        found[shape] = measured(mesh, shape)
        end_groups()
    if mesh.is_main:
        Path(out).write_text(json.dumps(found))
    leave_mesh()


if __name__ == "__main__":
    main(*sys.argv[1:])
