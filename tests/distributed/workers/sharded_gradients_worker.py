"""One rank of ``test_sharded_gradients.py``: steps with whole gradients and with sharded ones, on the same batches.

python -m tests.distributed.workers.sharded_gradients_worker OUT.json CASE...

A case is STRATEGY,REDUCE_DTYPE,RANKS_OF_A_NODE,ACCUMULATION,STEPS,ORDER, the last of which is plain or captured.
OUT.json maps each to how both runs differ, and to what was held.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bert.checkpoints.initial_model import draw_model
from bert.configuration.config import Config
from bert.optimizer import FlatParameters
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.parallel.reduction.sharded_gradients import ShardedReduction
from bert.parallel.reduction.sharded_lamb import ShardedLamb
from bert.step import TrainingStep
from bert.timing.stopwatch import Stopwatch
from tests.bert.recording import Recording, recordable_attention
from tests.distributed.workers.reduction_worker import end_groups, regrouped
from tests.distributed.workers.step_worker import config, global_batches
from tests.distributed.workers.tensor_worker import agreed


def train(mesh: Mesh, chosen: Config, steps: int, captured: bool) -> dict[str, Any]:
    end_groups()
    stopwatch = Stopwatch()
    step = TrainingStep(draw_model(chosen, mesh, seed=3), chosen, mesh, stopwatch, Recording() if captured else None)
    step.model.seed_dropout(9 + mesh.rank)
    torch.manual_seed(9 + mesh.rank)
    batches, shape_buckets = global_batches(mesh, chosen.training.gradient_accumulation_steps, steps)
    # Before the warm-up: a replay does not call the reduction again.
    pending = note_pending(step._reduction) if isinstance(step._reduction, ShardedReduction) else []
    step.warm_up(batches[0], 1, shape_buckets)
    torch.manual_seed(9 + mesh.rank)
    means = []
    for micro_batches in batches:
        step(micro_batches)
        means.append(step.statistics.fetch()[0])
    step.gather_weights()
    assert isinstance(step.optimizer, ShardedLamb)
    held = {
        "held": sum(vector.untyped_storage().nbytes() for vector in vectors(step)),
        "longest": 4 * max(bucket.stop - bucket.start for bucket in step._reduction.buckets),
        "layer": 4 * sum(parameter.numel() for parameter in step.model.layers[0].parameters()),
        "pending": pending,
        "N": len(step.flat.weights_N),
        "left": sum(parameter.grad is not None for parameter in step.model.parameters()),
        "waited": stopwatch.take()["reduce"] > 0,
    }
    moments = [moment_P.clone() for moment_P in step.optimizer.moments()]
    step._reduction.close()
    return {"means": means, "weights": step.flat.weights_P.clone(), "moments": moments, "held": held}


def note_pending(reduction: ShardedReduction) -> list[int]:
    """Bytes of the gradients that autograd has made and no bucket has taken, whenever a bucket is complete."""
    pending, pack = [], reduction._pack

    def noting(bucket: int, buffer: torch.Tensor) -> torch.Tensor:
        pending.append(sum(each.grad.nbytes for each in reduction._touched if each.grad is not None))
        return pack(bucket, buffer)

    reduction._pack = noting  # type: ignore[method-assign]
    return pending


def vectors(step: TrainingStep) -> list[torch.Tensor]:
    """List what is held of weights, gradients and the optimizer from one step to the next, each storage once."""
    owners: list[FlatParameters | ShardedLamb | object] = [step.flat, step.optimizer, step._reduction]
    found: dict[int, torch.Tensor] = {}
    for owner in owners:
        for value in vars(owner).values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, torch.Tensor) and each.dtype == torch.float32 and each.numel():
                    found[each.untyped_storage().data_ptr()] = each
    return list(found.values())


def compared(mesh: Mesh, case: str) -> dict[str, Any]:
    strategy, reduce_dtype, local_size, accumulation, steps, order = case.split(",")
    mesh = regrouped(mesh, "block", int(local_size))
    chosen = config(strategy, int(accumulation))  # type: ignore[arg-type]
    runs = []
    for shard_gradients in (False, True):
        training = replace(chosen.training, reduce_dtype=reduce_dtype, shard_gradients=shard_gradients)  # type: ignore[arg-type]
        runs.append(train(mesh, replace(chosen, training=training), int(steps), order == "captured"))
    whole, sharded = runs
    pairs = [(whole["weights"], sharded["weights"]), *zip(whole["moments"], sharded["moments"], strict=True)]
    return {
        "equal": whole["means"] == sharded["means"] and all(torch.equal(*pair) for pair in pairs),
        "differences": [float((one - other).norm() / one.norm()) for one, other in pairs],
        "losses": [[means["masked_lm_loss"] for means in each["means"]] for each in (whole, sharded)],
        "norms": [[means["gradient_norm"] for means in each["means"]] for each in (whole, sharded)],
        "agreed": agreed([sharded["weights"]]),
        "whole": whole["held"],
        "sharded": sharded["held"],
    }


def main(out: str, *cases: str) -> None:
    mesh = join_mesh("cpu")
    found = {case: compared(mesh, case) for case in cases}
    if mesh.is_main:
        Path(out).write_text(json.dumps(found))
    leave_mesh()


if __name__ == "__main__":
    with recordable_attention():
        main(*sys.argv[1:])
