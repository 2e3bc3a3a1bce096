"""One rank of ``test_tensor_parallel.py``: the training step in many shapes, one after the other, on the same ranks.

python -m tests.distributed.workers.tensor_worker OUT.pt SHAPE...

A shape is TENSOR,STRATEGY,ORDER,RANKS_OF_A_NODE,ACCUMULATION,PRECISION. OUT.pt maps each to what it came to.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bert.checkpoints.initial_model import draw_model
from bert.configuration.config import Config
from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.sampler import BatchPlan
from dataloading.batches.shape_buckets import ShapeBucket
from dataloading.batches.synthetic import synthetic_samples
from tests.distributed.workers.reduction_worker import end_groups, regrouped

STEPS = 4
DRAWS = 20
ALONE, ALONE_FP32, ALONE_FP8 = (f"1,flat,block,1,1,{precision}" for precision in ("fp64", "fp32", "fp8"))
DROPPING = "4,flat,block,4,1,fp64"
"""The shape in which dropout is drawn."""
MODEL = ModelConfig(3, 24, 8, 40, 70, 64, hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.3)
"""Of a vocabulary that divides by no number of ranks, and of which the last of four has nothing."""
FP8_MODEL = replace(MODEL, hidden_size=64, intermediate_size=128, initializer_range=0.05)


def config(tensor: int, strategy: str, accumulation: int, precision: str) -> Config:
    recipe = tiny_cpu()
    training = replace(
        recipe.training,
        reduction=strategy,  # type: ignore[arg-type]
        gradient_accumulation_steps=accumulation,
        precision="fp8" if precision == "fp8" else "fp32",
    )
    return replace(
        recipe,
        model=FP8_MODEL if precision == "fp8" else MODEL,
        training=training,
        optimizer=OptimizerConfig(2e-2, 60, num_warmup_steps=5, start_warmup_step=-1),
        parallel=replace(recipe.parallel, tensor=tensor),
    )


def global_batches(mesh: Mesh, accumulation: int, padded: bool, count: int = STEPS) -> list[list[Batch]]:
    """Make this rank's micro-batches of each step: of lengths that divide by nothing, or padded to shape buckets."""
    samples = synthetic_samples(np.random.default_rng(5).integers(4, 31, 160), MODEL.vocab_size, seed=5)
    samples.masked_lm_ids[:] = samples.masked_lm_positions % 3 * 12 + 20  # learnable, and on different ranks
    plan = BatchPlan(samples.lengths, samples.masked_counts, 8, mesh.data_size, accumulation, 2)
    steps = []
    for step in range(count):
        taken = [(samples.take(micro.indices), micro) for micro in plan.rank_batches(step, mesh.data_rank)]
        buckets = [
            ShapeBucket(len(some.input_ids) + 3, len(some) + 1, len(some.masked_lm_ids) + 2, 32) for some, _ in taken
        ]
        steps.append(
            [
                batch_of(some, micro, bucket if padded else None)
                for (some, micro), bucket in zip(taken, buckets, strict=True)
            ]
        )
    return steps


def train(mesh: Mesh, shape: str) -> dict[str, Any]:
    """Losses and norms of every step, what the first one came to, and the end: whole vectors on all ranks."""
    tensor, strategy, order, local_size, accumulation, precision = shape.split(",")
    mesh = replace(regrouped(mesh, order, int(local_size)), tensor=int(tensor))
    chosen = config(int(tensor), strategy, int(accumulation), precision)
    model = draw_model(chosen, Mesh(0, 1, 0, torch.device("cpu")), seed=3)
    if precision == "fp64":
        model.double()
    step = TrainingStep(model, chosen, mesh, Stopwatch())
    torch.manual_seed(0)
    means, first = [], {}
    batches = global_batches(mesh, int(accumulation), padded=order == "cyclic")
    if step.fp8 is not None:
        batches = batches[:1]
    step.warm_up(batches[0], 1)
    scales = None if step.fp8 is None else step.fp8.scale_S.clone()
    for micro_batches in batches:
        step(micro_batches)
        means.append(step.statistics.fetch()[0])
        first = first or state(step)
    last = state(step)
    found = {
        "means": means,
        "first": first,
        "last": last,
        "correct": correct_predictions(step, mesh, batches[:2]),
        "agreed": agreed(list(last.values())),
        "scales": scales,
        "words": len(step.model.embeddings.word),
        "returns": returns(step),
        "saved": dict(step.gather_whole_model().state_dict()),
        "dropped": _losses_with_dropout(step, mesh, batches[0]) if shape in (ALONE, DROPPING) else [],
        "skips": skips(step, mesh),
    }
    step._reduction.close()
    return found


def state(step: TrainingStep) -> dict[str, torch.Tensor]:
    """Weights and moments of the whole model by name."""
    step.gather_weights()
    vectors = {
        "weight": step.flat.weights_P,
        **dict(zip(("momentum", "variance"), step.optimizer.moments(), strict=True)),
    }
    return {
        f"{kind} {name}": part.detach().clone()
        for kind, vector_P in vectors.items()
        for name, part in step.whole.parts(step.whole.gather(vector_P))
    }


def correct_predictions(step: TrainingStep, mesh: Mesh, batches: list[list[Batch]]) -> int:
    """Over the batches of all ranks, each counted once."""
    step.model.eval()
    counts = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode(), step.autocast():
        for batch in (batch for micro_batches in batches for batch in micro_batches):
            correct = step.model(batch).masked_lm_correct
            assert correct is not None
            counts += correct if mesh.counts_losses else 0
    step.model.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return int(counts)


def returns(step: TrainingStep) -> bool:
    """Tell whether shards of a whole vector are what they were before it was brought together."""
    before = step.flat.weights_P.clone()
    whole = step.whole.gather(step.flat.weights_P).clone()
    step.flat.weights_P.data.zero_()
    with torch.no_grad():
        step.whole.shard_(step.flat.weights_P, whole)
    return torch.equal(before, step.flat.weights_P)


def _losses_with_dropout(step: TrainingStep, mesh: Mesh, micro_batches: list[Batch]) -> list[float]:
    """Sums over all ranks of the losses of the same batch, each time with other elements dropped."""
    config = replace(step.model.config, hidden_dropout=0.1, attention_dropout=0.1)
    for part in (step.model, step.model.embeddings, *step.model.layers):
        part.config = config  # type: ignore[assignment]
    torch.manual_seed(11 + mesh.rank)
    step.model.seed_dropout(11 + mesh.rank)
    losses = torch.zeros(DRAWS, dtype=torch.float64)
    with torch.no_grad(), step.autocast():
        for draw in range(DRAWS):
            for batch in micro_batches:
                losses[draw] += step.model(batch).masked_lm_loss / mesh.tensor
    if dist.is_initialized():
        dist.all_reduce(losses)
    return losses.tolist()


def skips(step: TrainingStep, mesh: Mesh) -> bool:
    """Tell whether no rank takes a step where one rank's gradient is not finite, and all take the next."""

    def own() -> torch.Tensor:
        step.gather_weights()
        return torch.cat([step.flat.weights_P.detach(), *step.optimizer.moments()])

    taken, before = int(step.optimizer.steps), own()
    steps = []
    for value in (torch.nan, 1e-3):
        with step._reduction.overlapped():
            for parameter in step.flat.places:
                assert parameter.grad is not None
                parameter.grad.fill_(1e-3)
            if mesh.rank == mesh.world_size - 1:
                parameter.grad.view(-1)[-1] = value  # type: ignore[union-attr]
        step._reduction.finish()
        step.optimizer.step()
        unchanged = torch.tensor([int(torch.equal(own(), before))])
        if dist.is_initialized():
            dist.all_reduce(unchanged, dist.ReduceOp.MIN)
        steps.append((int(step.optimizer.steps) - taken, bool(unchanged)))
    return steps == [(0, True), (1, False)]


def agreed(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether all ranks have the same to the last bit."""
    if not dist.is_initialized():
        return True
    one = torch.cat([tensor.flatten().double() for tensor in tensors])
    other = one.clone()
    dist.broadcast(other, src=0)
    same = torch.tensor([int(torch.equal(one, other))])
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def train_all(train: Callable[[Mesh, str], dict[str, Any]], out: str, *shapes: str) -> None:
    """Train each shape on the same ranks, and save what ``train`` gives on the main one."""
    mesh = join_mesh("cpu")
    found = {}
    for shape in shapes:
        found[shape] = train(mesh, shape)
        end_groups()
    if mesh.is_main:
        torch.save(found, out)
    leave_mesh()


if __name__ == "__main__":
    train_all(train, *sys.argv[1:])
