"""Compare the bytes that a rank sends in a step with formulas. docs/scaling.md has the formulas of the reductions.

Each rank is in its own network namespace, whose interface counts all bytes that the rank sends. The ranks are told that
RANKS_OF_A_NODE of them share a node. A shape is TENSOR,PIPELINE,REDUCTION,REDUCE_DTYPE,RANKS_OF_A_NODE,ACCUMULATION.
"""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.hosts import bridged_hosts, enter, why_not
from bert.configuration.sections import ModelConfig, ParallelConfig
from bert.parallel.mesh import Mesh
from bert.parallel.reduction.sharded_lamb import ShardedLamb
from dataloading.batches.loader import batch_of
from dataloading.batches.sampler import MicroBatch, ShapeBucket
from dataloading.shards.samples import synthetic_samples
from tests.bert.small_models import step_config, training_step
from tests.distributed.ranks import WORKER, Ranks, free_port, name_of, program
from tests.distributed.worker import end_groups, regrouped
from tests.programs import Program

RANKS = 4
STEPS = 2
MODEL = ModelConfig(2, 128, 4, 256, 2048, 64, hidden_dropout=0.0, attention_dropout=0.0)
BUCKET = ShapeBucket(1600, 50, 256, 64)
SHAPES = [
    "1,1,flat,fp32,2,1",
    "1,1,hierarchical,fp32,2,1",
    "1,1,sharded,fp32,2,2",
    "1,1,sharded_world,bf16,2,1",
    "2,1,sharded,fp32,4,1",
    "1,2,sharded_world,fp32,2,2",
    "2,2,flat,fp32,4,2",
]
MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def sent_bytes() -> int:
    """Return the bytes sent by this network namespace's interface. (/sys would show the interfaces of the machine.)"""
    [line] = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.lstrip().startswith("v0:"))
    return int(line.partition(":")[2].split()[8])


def measured(joined: Mesh) -> dict[str, list[Any]]:
    """Return for each shape and rank the bytes sent in a step, and the sizes that the formulas need."""
    return {shape: in_shape(joined, shape) for shape in SHAPES}


def in_shape(joined: Mesh, shape: str) -> list[Any]:
    tensor, pipeline, reduction, reduce_dtype, local_size, accumulation = shape.split(",")
    parallel = ParallelConfig(int(tensor), int(pipeline))
    training = {"reduction": reduction, "reduce_dtype": reduce_dtype, "bucket_bytes": 10**6}
    chosen = step_config(MODEL, gradient_accumulation_steps=int(accumulation), **training)
    chosen = replace(chosen, parallel=parallel)
    mesh = replace(regrouped(joined, "block", int(local_size)), tensor=parallel.tensor, pipeline=parallel.pipeline)
    step = training_step(chosen, mesh)
    samples = synthetic_samples(np.full(49, 32), MODEL.vocab_size)
    batch = batch_of(samples, MicroBatch(np.arange(49), 49, len(samples.masked_lm_ids)), BUCKET)
    sent = []
    for _ in range(1 + STEPS):  # the first step, which opens connections, is excluded below
        dist.barrier()
        before = sent_bytes()
        step([batch] * int(accumulation))
        dist.barrier()
        sent.append(sent_bytes() - before)
    own = {"rank": mesh.pipeline_rank, "sent": min(sent[1:]), "parameters": len(step.flat.weights_N)}
    if isinstance(step.optimizer, ShardedLamb):
        own["on_all_ranks"] = len(step.optimizer._everywhere_I)
    ranks: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(ranks, own)
    if step.reduction is not None:
        step.reduction.close()
    end_groups()
    return ranks


def in_namespace(namespace: str, module: str, *arguments: str) -> None:
    """Enter a host's namespaces and run a module as ``python -m`` would. All ranks have the same host name."""
    enter(namespace, "h0")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    out, port = tmp_path_factory.mktemp("bytes") / "out.pt", free_port()
    place = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": port}
    place |= {"GLOO_SOCKET_IFNAME": "v0", "OMP_NUM_THREADS": 1}
    command = [WORKER, "tests.distributed.worker:joined", out, name_of(measured)]
    with bridged_hosts(RANKS) as hosts:
        programs = [program(in_namespace, [host, *command]) for host in hosts]
        started = [Program(*each, **place, RANK=rank, LOCAL_RANK=rank) for rank, each in enumerate(programs)]
        with Ranks.of(started, port) as ranks:
            assert ranks.ends() == [0] * RANKS, ranks.output
    return torch.load(out)


def all_gather(size: float, ranks: int) -> float:
    """Return the bytes that a rank sends in an all-gather of ``size`` bytes in total. An all-to-all sends as many."""
    return (ranks - 1) / ranks * size


def all_reduce(size: float, ranks: int) -> float:
    return 2 * all_gather(size, ranks)


reduce_scatter = all_reduce
"""gloo implements reduce-scatter as an all-reduce, after which each rank keeps its shard."""


def reduced(reduction: str, dtype: str, size: float, ranks: int, node: int) -> float:
    rails = ranks // node
    scatter, sent = (reduce_scatter, size) if dtype == "fp32" else (all_gather, size / 2)
    match reduction:
        case "flat":
            return all_reduce(sent, ranks)
        case "sharded_world":
            return scatter(sent, ranks) + all_gather(size, ranks)
        case "hierarchical":
            return scatter(sent, node) + all_reduce(sent / node, rails) + all_gather(sent, node)
    return scatter(sent, node) + all_reduce(sent / node, rails) + all_gather(size, node)


def exchanged(tensor: int, layers: int, has_ends: tuple[bool, bool]) -> float:
    """Return the bytes that a rank sends to its tensor group in a micro-batch, forward and backward.

    ``rows`` counts the rows of activations in all all-gathers. Reduce-scatters send equally many rows.
    """
    first, last = has_ends
    heads = BUCKET.sequences + BUCKET.masked
    rows = first * BUCKET.tokens + 4 * (layers - last) * BUCKET.tokens
    rows += last * (BUCKET.tokens + 4 * heads + BUCKET.masked)
    return 2 * all_gather(4 * MODEL.hidden_size * rows, tensor)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_sent_in_a_step_match_the_formulas(found: dict[str, list[dict[str, Any]]], shape: str) -> None:
    tensor, pipeline, reduction, dtype, node, accumulation = shape.split(",")
    shared, stages, micro_batches = int(tensor), int(pipeline), int(accumulation)
    copies = RANKS // (shared * stages)
    a_node = max(1, int(node) // (shared * stages))
    for rank in found[shape]:
        is_first, is_last = rank["rank"] == 0, rank["rank"] == stages - 1
        expected = 0.0
        if copies > 1:
            expected += reduced(reduction, dtype, 4 * rank["parameters"], copies, a_node)
        if shared > 1:
            layers = MODEL.num_hidden_layers // stages
            expected += micro_batches * exchanged(shared, layers, (is_first, is_last))
            expected += all_reduce(4 * rank["on_all_ranks"], shared)
        if stages > 1:
            hidden = micro_batches * 4 * MODEL.hidden_size * BUCKET.tokens / shared
            expected += hidden * ((not is_first) + (not is_last))
            expected += 4 * MODEL.hidden_size * MODEL.vocab_size / shared  # the word table or its gradient
        assert rank["sent"] == pytest.approx(expected, rel=0.02), rank
