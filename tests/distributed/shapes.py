"""Training steps in a shape, which says how ranks divide the model and sum gradients.

A shape is TENSOR,PIPELINE,VIRTUAL_STAGES,REDUCTION,ORDER,RANKS_OF_A_NODE,ACCUMULATION,STEPS,PRECISION. A + after the
reduction means sharded gradients. The precision is fp32, fp8 or fp64, or fp64 with a variation: "dropout",
"recomputed", or "accumulating", in which products and embeddings add weight gradients themselves, as on a GPU.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bert.configuration.config import Config
from bert.configuration.sections import ModelConfig, OptimizerConfig, ParallelConfig
from bert.optimizer import Lamb
from bert.parallel.mesh import Mesh
from bert.products import weight_gradients
from bert.step import TrainingStep
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.sampler import BatchSampler, MicroBatch, ShapeBucket
from dataloading.shards.samples import synthetic_samples
from kernels import choose
from tests.bert.small_models import drawn_model, step_config, step_on
from tests.distributed.worker import end_groups, on_all, regrouped

DRAWS = 20
DROPPING = "4,1,1,flat,block,4,1,4,fp64"
"""Shape whose losses with dropout are compared with the losses of one rank."""
MIXED = {"dropout": 4, "fp32": 4}
"""By precision, the number of micro-batches in the one-rank run, on which dropout and rounding depend. Default: 1."""
MODEL = ModelConfig(5, 24, 8, 40, 70, 64, hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.3)
"""Model whose vocabulary does not divide evenly. The last of four tensor-parallel ranks has no words."""
MODELS = {
    "dropout": replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1),
    "fp8": replace(MODEL, num_hidden_layers=3, hidden_size=64, intermediate_size=128, initializer_range=0.05),
}


def config(shape: str) -> Config:
    tensor, pipeline, virtual_stages, reduction, _, _, accumulation, _, precision = shape.split(",")
    chosen = step_config(
        MODELS.get(precision, MODEL),
        reduction=reduction.rstrip("+"),
        shard_gradients=reduction.endswith("+"),
        gradient_accumulation_steps=int(accumulation),
        recompute="selective" if precision == "recomputed" else "none",
        precision="fp8" if precision == "fp8" else "fp32",
        bucket_bytes=20_000,
    )
    lamb = OptimizerConfig(2e-2, 60, num_warmup_steps=5, start_warmup_step=-1)
    return replace(chosen, optimizer=lamb, parallel=ParallelConfig(int(tensor), int(pipeline), int(virtual_stages)))


def alone(shape: str) -> str:
    *_, steps, precision = shape.split(",")
    return f"1,1,1,flat,block,1,{MIXED.get(precision, 1)},{steps},{precision.replace('accumulating', 'fp64')}"


def global_batches(mesh: Mesh, accumulation: int, padded: bool, count: int) -> list[list[Batch]]:
    """Make this rank's micro-batches of each step, unpadded or padded to shape buckets."""
    samples = synthetic_samples(np.random.default_rng(5).integers(4, 31, 160), MODEL.vocab_size, seed=5)
    samples.masked_lm_ids[:] = (
        samples.masked_lm_positions % 3 * 12 + 20
    )  # predictable labels, so that there is something to learn
    sampler = BatchSampler(samples.lengths, samples.masked_counts, 8, mesh.data_size, accumulation, 2)

    def batch(micro: MicroBatch) -> Batch:
        some = samples.take(micro.indices)
        bucket = ShapeBucket(len(some.input_ids) + 3, len(some) + 1, len(some.masked_lm_ids) + 2, 32)
        return batch_of(some, micro, bucket if padded else None)

    return [[batch(micro) for micro in sampler.rank_batches(step, mesh.data_rank)] for step in range(count)]


def train_all(mesh: Mesh, *shapes: str) -> dict[str, dict[str, Any]]:
    return {shape: train(mesh, shape) for shape in shapes}


def train(joined: Mesh, shape: str) -> dict[str, Any]:
    """Return losses and gradient norms of every step, the state after the first and the last step, and sizes.

    The state has the whole model's tensors, gathered from all ranks.
    """
    order, local_size, accumulation, steps, precision = shape.split(",")[4:]
    chosen = config(shape)
    parallel = chosen.parallel
    mesh = replace(regrouped(joined, order, int(local_size)), tensor=parallel.tensor, pipeline=parallel.pipeline)
    model = drawn_model(chosen.model, seed=3)
    if precision not in ("fp32", "fp8"):
        model.double()
    references = ("dropout_add_layer_norm", "varlen_self_attention", "embedding_layer_norm", "varlen_attention")
    choose(dict.fromkeys(references, "reference") if parallel.pipeline > 1 or precision == "dropout" else {})
    with patch.object(weight_gradients, "accumulates_products", lambda *_: precision == "accumulating"):
        step = step_on(model, chosen, mesh)
    torch.manual_seed(0)
    step.model.seed_dropout(7)
    batches = global_batches(mesh, int(accumulation), order == "cyclic", int(steps))
    step.warm_up(batches[0], 1)
    scales = None if step.fp8 is None else step.fp8.scale_S.clone()
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
        "scales": scales,
        "words": len(step.model.embeddings.word) if parallel.pipeline == 1 else 0,
        "elements": len(step.flat.weights_P),
        "gradients": len(step.flat.gradients_N),
        "state_bytes": bytes_held(step),
        "ranks": mesh.world_size,
        "dropped": _losses_with_dropout(step, mesh, batches[0]) if shape in (alone(DROPPING), DROPPING) else [],
    }
    assert on_all(same_as_rank_0(list(last.values()))), "the gathered state differs between ranks"
    for name, weight in step.gather_whole_model().state_dict().items():
        assert torch.equal(weight.float(), last[f"weight {name}"].float()), name
    assert skips(step, mesh)
    if step.reduction is not None:
        step.reduction.close()
    end_groups()
    return found


def state(step: TrainingStep) -> dict[str, torch.Tensor]:
    step.gather_weights()
    vectors = (step.flat.weights_P, *step.optimizer.moments())
    return {
        f"{kind} {name}": part.detach().clone()
        for kind, vector_P in zip(("weight", "momentum", "variance"), vectors, strict=True)
        for name, part in step.vectors.parts(step.vectors.gather(vector_P))
    }


def correct_predictions(step: TrainingStep, mesh: Mesh, batches: list[list[Batch]]) -> int:
    """Count the correct predictions in all ranks' batches. A batch counts once even if several ranks share it."""
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


def _losses_with_dropout(step: TrainingStep, mesh: Mesh, micro_batches: list[Batch]) -> list[float]:
    """Return the loss of one global batch for each of several draws of dropout."""
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


def bytes_held(step: TrainingStep) -> int:
    optimizer = step.optimizer
    state = optimizer.state if isinstance(optimizer, Lamb) else optimizer._state
    held = [value for owner in (optimizer, state) for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    return sum({value.data_ptr(): value.nbytes for value in held if value.is_floating_point()}.values())


def skips(step: TrainingStep, mesh: Mesh) -> bool:
    """Return whether all ranks skip a step if one rank has a NaN gradient, and take the next step."""

    def own() -> torch.Tensor:
        step.gather_weights()
        return torch.cat([step.flat.weights_P.detach(), *step.optimizer.moments()])

    taken, before = int(step.optimizer.steps), own()
    steps = []
    for value in (torch.nan, 1e-3):
        with nullcontext() if step.reduction is None else step.reduction.overlapped():
            for parameter in step.flat.places:
                if parameter.grad is None:  # with sharded gradients, only a backward pass allocates gradients
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.fill_(1e-3)
            if mesh.rank == mesh.world_size - 1:
                next(reversed(step.flat.places)).grad.view(-1)[-1] = value  # type: ignore[union-attr]
        if step.reduction is not None:
            step.reduction.finish()
        step.optimizer.step()
        steps.append((int(step.optimizer.steps) - taken, on_all(torch.equal(own(), before))))
    return steps == [(0, True), (1, False)]


def same_as_rank_0(tensors: list[torch.Tensor]) -> bool:
    one = torch.cat([tensor.flatten().double() for tensor in tensors])
    other = one.clone()
    if dist.is_initialized():
        dist.broadcast(other, src=0)
    return torch.equal(one, other)


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return relative differences, without key biases: softmax ignores them, so their gradients are rounding errors."""
    assert one.keys() == other.keys()
    kept = {name: torch.ones_like(tensor) for name, tensor in one.items()}
    for name, ones in kept.items():
        if name.endswith("query_key_value.bias"):
            ones[len(ones) // 3 : 2 * len(ones) // 3] = 0
    return {
        name: float(((other[name] - tensor) * kept[name]).norm() / (tensor * kept[name]).norm().clamp(min=1e-30))
        for name, tensor in one.items()
    }


def require_same_training(shape: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare losses and gradient norms of every step, the weights, and in fp64 the moments.

    The moments after the first step are proportional to its gradients, or to their squares.
    """
    tensor, pipeline, _, reduction, _, local_size, _, _, precision = shape.split(",")
    precise = precision != "fp32"
    for step, (mean, means) in enumerate(zip(one["means"], other["means"], strict=True)):
        for name in ("masked_lm_loss", "next_sentence_loss", "gradient_norm"):
            assert means[name] == pytest.approx(mean[name], rel=1e-12 if precise else 1e-5), (step, name)
        assert (means["tokens"], means["skipped_steps"]) == (mean["tokens"], 0), step
    for when in ("first", "last"):
        by_name = differences(one[when], other[when])
        worst = {name: each for name, each in by_name.items() if precise or name.startswith("weight ")}
        assert max(worst.values()) < (1e-10 if precise else 1e-5), (when, max(worst, key=worst.__getitem__))
    assert other["correct"] == one["correct"]
    assert one["correct"] > 0
    assert (other["gradients"] == 0) == reduction.endswith("+")
    if int(pipeline) > 1:
        assert other["elements"] < one["elements"] * 0.72, "no rank has all layers"
    elif int(tensor) > 1:
        assert other["words"] == -(-MODEL.vocab_size // (8 * int(tensor))) * 8, "no rank has all words, or all logits"
    else:  # docs/scaling.md states the number of values per parameter
        shards = {"sharded": int(local_size), "sharded_world": other["ranks"]}.get(reduction.rstrip("+"))
        values = 3 if shards is None else 5 / shards
        assert other["state_bytes"] == pytest.approx((8 if precise else 4) * values * other["elements"], rel=0.05)
