"""One rank of ``test_overlap.py``: the training step in every order that it can run in, on the same batches.

torchrun ... step_worker.py OUT.json RANKS_OF_A_NODE
"""

import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

import bert.step
from bert.config import Config, ModelConfig, OptimizerConfig
from bert.metrics import Stopwatch
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.parallel.reduction import Reduction, Strategy
from bert.recipes import tiny_cpu
from bert.step import TrainingStep, build_model
from dataloading.capacity import Capacity
from dataloading.loader import Batch, batch_of
from dataloading.sampler import Plan
from tests.convergence.golden import predictable_samples
from tests.distributed.reduction_worker import regrouped
from tests.unit.test_graphs import Repeating

STEPS = 5
BUCKET_BYTES = 40_000


def config(strategy: Strategy | Literal["auto"], accumulation: int) -> Config:
    recipe = tiny_cpu()
    model = ModelConfig(2, 64, 4, 128, 128, 64, hidden_dropout=0.1, attention_dropout=0.1)
    training = replace(recipe.training, reduction=strategy, gradient_accumulation_steps=accumulation)
    return replace(recipe, model=model, optimizer=OptimizerConfig(1e-2, 100), training=training)


def global_batches(mesh: Mesh, accumulation: int) -> tuple[list[list[Batch]], list[Capacity]]:
    """This rank's micro-batches, padded to one of two recorded sizes or, one in seven, to one that is not recorded."""
    samples = predictable_samples()
    longest = int(samples.lengths.max())
    kinds = [Capacity(size, 16, 256, longest) for size in (640, 896, 1024)]
    plan = Plan(samples.lengths, samples.masked_counts, 16, mesh.world_size, accumulation, 2)
    batches = []
    for step in range(STEPS):
        batches.append([])
        for place, micro in enumerate(plan.rank_batches(step, mesh.rank)):
            number = step * accumulation + place
            kind = kinds[2] if number % 7 == 6 else kinds[(number + mesh.rank) % 2]
            batches[-1].append(batch_of(samples.take(micro.indices), micro, kind))
    return batches, kinds[:2]


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    """The step's reduction has more than one bucket for so small a model."""
    bert.step.Reduction = functools.partial(Reduction, bucket_bytes=BUCKET_BYTES)  # type: ignore[misc]
    try:
        yield
    finally:
        bert.step.Reduction = Reduction  # type: ignore[misc]


def train(mesh: Mesh, strategy: Strategy, order: str, accumulation: int) -> dict[str, Any]:
    """Losses of every step, final weights, moments, and how many buckets backward had started."""
    chosen = config(strategy, accumulation)
    with small_buckets():
        step = TrainingStep(build_model(chosen, mesh, seed=3), chosen, mesh, Stopwatch())
    reduction, early = step._reduction, []
    finish = reduction.finish

    def noted() -> None:
        early.append(reduction._started)
        finish()

    reduction.finish = noted
    if order == "after":
        reduction.overlapped = contextlib.nullcontext  # type: ignore[method-assign]
    elif order == "one message":
        reduction.overlapped = contextlib.nullcontext  # type: ignore[method-assign]
        reduction.finish = lambda: _in_one_message(step)
    recorder = Repeating() if order == "recorded" else None
    batches, capacities = global_batches(mesh, accumulation)
    torch.manual_seed(9 + mesh.rank)
    step.model.seed_dropout(9 + mesh.rank)
    step.warm_up(batches[0], 1, recorder, capacities)
    early.clear()
    torch.manual_seed(9 + mesh.rank)
    means = []
    for micro_batches in batches:
        step(micro_batches)
        means.append(step.statistics.fetch()[0])
    return {
        "means": means,
        "weights": step.flat.weights_P.clone(),
        "moments": [moment_P.clone() for moment_P in step.optimizer.moments()],
        "early": early,
        "buckets": len(reduction.buckets),
        "recordings": len(recorder.recorded) if recorder else 0,
        "replays": len(recorder.replays) if recorder else 0,
    }


def _in_one_message(step: TrainingStep) -> None:
    dist.all_reduce(step.flat.gradients_P)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Losses, weights and moments to the last bit, on every rank."""
    pairs = zip([one["weights"], *one["moments"]], [other["weights"], *other["moments"]], strict=True)
    equal = one["means"] == other["means"] and all(torch.equal(*pair) for pair in pairs)
    agreed = torch.tensor([int(equal)])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def automatic(mesh: Mesh) -> dict[str, Any]:
    """What is chosen where nothing is asked for, and how long that takes."""
    chosen = config("auto", 1)
    model = build_model(chosen, mesh, seed=3)
    dist.barrier()
    begin = time.perf_counter()
    step = TrainingStep(model, chosen, mesh, Stopwatch())
    seconds = time.perf_counter() - begin
    ways = [""] * mesh.world_size
    dist.all_gather_object(ways, str(step.way))
    return {"ways": ways, "seconds": seconds}


def main(out: str, local_size: str) -> None:
    mesh = regrouped(join_mesh("cpu"), "cyclic", int(local_size))
    result: dict[str, Any] = {}
    reference = {accumulation: train(mesh, "flat", "one message", accumulation) for accumulation in (1, 2)}
    for strategy in get_args(Strategy):
        for accumulation in (1, 2):
            runs = {order: train(mesh, strategy, order, accumulation) for order in ("after", "overlapped", "recorded")}
            whole = reference[accumulation]
            result[f"{strategy} {accumulation}"] = {
                "overlap_is_same": same(runs["after"], runs["overlapped"]),
                "recording_is_same": same(runs["overlapped"], runs["recorded"]),
                "one_message_is_same": same(whole, runs["after"]),
                "difference": float((whole["weights"] - runs["after"]["weights"]).norm() / whole["weights"].norm()),
                "moment_differences": [
                    float((one - other).norm() / one.norm())
                    for one, other in zip(whole["moments"], runs["after"]["moments"], strict=True)
                ],
                "losses": [means["masked_lm_loss"] for means in runs["recorded"]["means"]],
                "whole_losses": [means["masked_lm_loss"] for means in whole["means"]],
                **{f"early_{order}": run["early"] for order, run in runs.items()},
                **{name: runs["recorded"][name] for name in ("buckets", "recordings", "replays")},
            }
    result["automatic"] = automatic(mesh)
    if mesh.is_main:
        Path(out).write_text(json.dumps(result))
    leave_mesh()


if __name__ == "__main__":
    main(*sys.argv[1:])
