"""One rank of the test of the measured choice: which strategy is taken when one of them is slow.

python -m tests.distributed.workers.choice_worker OUT.json

Two nodes of two ranks. A slow group takes its time on one rank, by a
clock that only slow groups move: how busy the machine is decides nothing.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bert.configuration.recipes import tiny_cpu
from bert.optimizer import FlatParameters
from bert.parallel.mesh import join_mesh, leave_mesh
from bert.parallel.reduction import choice as reduction_choice
from bert.parallel.reduction.choice import choose
from bert.parallel.reduction.gradients import Communicators, Reduction
from tests.distributed.workers.reduction_worker import fresh_model, regrouped

SLOW_RANK = 3


def main(out: str) -> None:
    mesh = regrouped(join_mesh("cpu"), "cyclic", 2)
    training = tiny_cpu().training
    found = Communicators.create(mesh)
    all_reduce, slow, clock = dist.all_reduce, set(), [0.0]

    def delayed(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        if mesh.rank == SLOW_RANK and keywords.get("group") in slow and tensor.dtype == torch.float32:
            clock[0] += 0.15
        all_reduce(tensor, *arguments, **keywords)

    dist.all_reduce = delayed
    reduction_choice.time = SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]
    model = fresh_model()
    flat = FlatParameters.of(model, found.world_size)
    result: dict[str, Any] = {}
    for fast in ("world", "rail"):
        slow = {found.world, found.rail} - {getattr(found, fast)}
        choice = choose(training, flat, found)
        result[fast] = [""] * mesh.world_size
        dist.all_gather_object(result[fast], str(choice))
    slow = set()
    flat.gradients_N.fill_(mesh.rank + 1)
    Reduction(flat, found, choice.strategy).finish()
    result["sums"] = flat.gradients_N.unique().tolist()
    if mesh.is_main:
        Path(out).write_text(json.dumps(result))
    leave_mesh()


if __name__ == "__main__":
    main(*sys.argv[1:])
