"""One rank of ``test_reduction.py``: trains some steps and writes what it saw.

python -m tests.distributed.workers.reduction_worker OUT.json STRATEGY REDUCE_DTYPE ORDER RANKS_OF_A_NODE
"""

import gc
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bert.configuration.sections import ModelConfig, OptimizerConfig, ReduceDtype, ReductionStrategy
from bert.model import BertForPreTraining, initialize_
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.parallel.reduction.choice import measured_choice
from bert.parallel.reduction.gradients import Communicators, Reduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb, WeightGather
from dataloading.batches.loader import batch_of
from dataloading.batches.sampler import BatchPlan
from tests.convergence.golden import predictable_samples

STEPS = 6
MICRO_BATCHES = 2


def regrouped(mesh: Mesh, order: str, local_size: int) -> Mesh:
    """Regroup ranks as if on hosts of ``local_size``, in block or cyclic order."""
    count = mesh.world_size // local_size
    if order == "block":
        nodes = tuple(tuple(range(node * local_size, (node + 1) * local_size)) for node in range(count))
    else:
        nodes = tuple(tuple(range(node, mesh.world_size, count)) for node in range(count))
    return replace(mesh, nodes=nodes)


def end_groups() -> None:
    """End all groups but the world's: of each that is left, a thread of gloo's wakes a hundred times a second.

    Those of a ``TrainingStep`` end where its reduction is closed, whose hooks keep all of it alive.
    """
    if (world := dist.group.WORLD) is None:
        return
    dist.barrier()
    groups = dist.distributed_c10d._world.pg_map
    for group in groups.keys() - {world}:
        dist.destroy_process_group(group)
    gc.collect()
    backend, store = groups[world]
    groups[world] = backend, PrefixStore("next", store)  # groups that come may be called as those that were here


def fresh_model() -> BertForPreTraining:
    model = BertForPreTraining(ModelConfig(2, 64, 4, 128, 128, 64, hidden_dropout=0.0, attention_dropout=0.0))
    initialize_(model, torch.Generator().manual_seed(1))
    return model


def train(mesh: Mesh, strategy: ReductionStrategy, reduce_dtype: ReduceDtype) -> dict[str, object]:
    """The loop that a step would run: micro-batches, overlap in the last backward, finish, update."""
    model = fresh_model()
    communicators = Communicators.create(mesh)
    flat = FlatParameters.of(model, communicators.world_size)
    reduction = Reduction(flat, communicators, strategy, reduce_dtype, bucket_bytes=60_000)
    config = OptimizerConfig(2e-2, 60, num_warmup_steps=5, start_warmup_step=-1)
    optimizer, gather = Lamb(flat, config), None
    if strategy.startswith("sharded"):
        optimizer, gather = ShardedLamb(flat, config, reduction), WeightGather(model, flat, reduction)
    samples = predictable_samples()
    plan = BatchPlan(samples.lengths, samples.masked_counts, 16, mesh.world_size, MICRO_BATCHES, 2)
    losses, norms, early = [], [], []
    for step in range(STEPS):
        loss = torch.zeros(2, dtype=torch.float64)
        micros = plan.rank_batches(step, mesh.rank)
        for place, micro in enumerate(micros):
            batch = batch_of(samples.take(micro.indices), micro)
            if gather is not None and place == 0:
                gather.start()
            means = model(batch).mean_losses(batch)
            if place < len(micros) - 1:
                sum(means).backward()  # type: ignore[union-attr]
            else:
                with reduction.overlapped():
                    sum(means).backward()  # type: ignore[union-attr]
                early.append(reduction._started)
            loss += torch.stack([mean.detach() for mean in means])
        reduction.finish()
        norms.append(float(optimizer.step()))
        if dist.is_initialized():
            dist.all_reduce(loss)
        losses.append(loss.tolist())
    if gather is not None:
        gather()
    weights = flat.weights_P.double()
    seen = [weights.clone() for _ in range(mesh.world_size)]
    if dist.is_initialized():
        dist.all_gather(seen, weights)
    result: dict[str, object] = {
        "losses": losses,
        "norms": norms,
        "early": early,
        "buckets": len(reduction.buckets),
        "same_weights": all(torch.equal(seen[0], other) for other in seen),
        "weights": weights[::97].tolist(),
    }
    if isinstance(optimizer, Lamb):
        result["state_bytes"], result["P"] = bytes_held(optimizer), len(flat.weights_P)
    else:
        result["sharded"] = sharded_facts(flat, optimizer, reduction, mesh)
    return result


def bytes_held(optimizer: Lamb | ShardedLamb) -> int:
    """Bytes of the optimizer's own fp32 vectors."""
    state = optimizer.state if isinstance(optimizer, Lamb) else optimizer._state
    held = [value for owner in (optimizer, state) for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    return sum({value.data_ptr(): 4 * value.numel() for value in held if value.dtype == torch.float32}.values())


def sharded_facts(flat: FlatParameters, optimizer: ShardedLamb, reduction: Reduction, mesh: Mesh) -> dict[str, object]:
    """Bytes of state, and whether a step with one rank's NaN changes nothing anywhere."""
    facts: dict[str, object] = {"state_bytes": bytes_held(optimizer), "P": len(flat.weights_N)}
    before = [
        tensor.clone() for tensor in (flat.weights_N, optimizer.momentum_W, optimizer.variance_W, optimizer.steps)
    ]
    for bad in (float("nan"), float("inf")):
        flat.gradients_P.normal_()
        if mesh.rank == mesh.world_size - 1:
            flat.gradients_P[1234] = bad
        reduction.finish()
        optimizer.step()
    after = (flat.weights_N, optimizer.momentum_W, optimizer.variance_W, optimizer.steps)
    unchanged = torch.tensor([int(all(torch.equal(one, other) for one, other in zip(before, after, strict=True)))])
    if dist.is_initialized():
        dist.all_reduce(unchanged, dist.ReduceOp.MIN)
    facts |= {"unchanged": bool(unchanged), "skipped": int(optimizer.skipped), "zeroed": not flat.gradients_N.any()}
    flat.gradients_P.fill_(0.01)
    reduction.finish()
    optimizer.step()
    facts |= {"steps_after": int(optimizer.steps), "goes_on": not torch.equal(before[0], flat.weights_N)}
    flat.gradients_P.fill_(1.0)
    optimizer.reset()
    left = (optimizer.steps, optimizer.skipped, optimizer.momentum_W, optimizer.variance_W, flat.gradients_N)
    return facts | {"forgotten": not any(tensor.any() for tensor in left)}


def difference_from_unsharded(
    mesh: Mesh, communicators: Communicators, strategy: ReductionStrategy, bucket_bytes: int
) -> float:
    """The largest difference of a tensor, as a part of its norm, over as many steps on equal gradients."""
    config = OptimizerConfig(2e-2, 60, num_warmup_steps=5, start_warmup_step=-1)
    model = fresh_model()
    whole, divided = (FlatParameters.of(each, communicators.world_size) for each in (fresh_model(), model))
    reduction = Reduction(divided, communicators, strategy, bucket_bytes=bucket_bytes)
    lamb, sharded = Lamb(whole, config), ShardedLamb(divided, config, reduction)
    gather = WeightGather(model, divided, reduction)
    generator = torch.Generator().manual_seed(11)
    worst = 0.0
    for step in range(STEPS):
        gradients = torch.randn(len(whole.gradients_P), generator=generator) * (1e-4 if step % 2 else 1.0)
        whole.gradients_P.copy_(gradients)
        divided.gradients_P.copy_(gradients * mesh.is_main)  # a sum without rounding
        norm = lamb.step()
        reduction.finish()
        assert math.isclose(sharded.step(), norm, rel_tol=1e-6)  # torch.testing imports for seconds
        gather()
        for one, other in zip(*(flat.segments.views(flat.weights_P) for flat in (whole, divided)), strict=True):
            worst = max(worst, float((one - other).norm() / one.norm()))
    return worst


def differences_and_choice(mesh: Mesh, strategy: ReductionStrategy) -> dict[str, object]:
    """Compare with the optimizer that is not divided, with tensors divided and not; and say what measuring chose."""
    model = fresh_model()
    communicators = Communicators.create(mesh)
    choice = measured_choice(FlatParameters.of(model, communicators.world_size), communicators)
    ways = [""] * mesh.world_size
    if dist.is_initialized():
        dist.all_gather_object(ways, choice.strategy)
    over: ReductionStrategy = "sharded_world" if strategy == "sharded_world" else "sharded"
    found: dict[str, object] = {"difference": difference_from_unsharded(mesh, communicators, over, 40_000)}
    if len(mesh.nodes) == mesh.world_size:
        found["undivided_difference"] = difference_from_unsharded(mesh, communicators, over, 10**9)
    return found | {
        "agreed": len(set(ways)) == 1,
        "choice": str(choice),
    }


def main(out: str, strategy: ReductionStrategy, reduce_dtype: ReduceDtype, order: str, local_size: str) -> None:
    mesh = regrouped(join_mesh("cpu"), order, int(local_size))
    result = train(mesh, strategy, reduce_dtype)
    if reduce_dtype == "fp32":
        result |= differences_and_choice(mesh, strategy)
    if mesh.is_main:
        Path(out).write_text(json.dumps(result))
    leave_mesh()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
