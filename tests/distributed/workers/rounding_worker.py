"""One rank of the test of what sums over ranks lose: every way, over nodes of every size, against sums in fp64.

python -m tests.distributed.workers.rounding_worker OUT.json
"""

import json
import sys
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist

from bert.configuration.sections import ReduceDtype, ReductionStrategy
from bert.optimizer import FlatParameters
from bert.parallel.mesh import join_mesh, leave_mesh
from bert.parallel.reduction.gradients import Communicators, Reduction
from tests.distributed.workers.reduction_worker import end_groups, fresh_model, regrouped


def contribution(rank: int, size: int) -> torch.Tensor:
    """Contribution of one rank, over 8 binary orders of magnitude: fp32 [size]."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * torch.exp2(-8 * torch.rand(size, generator=generator))


def main(out: str) -> None:
    joined, errors = join_mesh("cpu"), {}
    local_size = 1
    while local_size <= joined.world_size:
        mesh = regrouped(joined, "cyclic", local_size)
        communicators = Communicators.create(mesh)
        model = fresh_model()
        flat = FlatParameters.of(model, mesh.world_size)
        size = len(flat.gradients_N)
        contributions = [contribution(rank, size) for rank in range(mesh.world_size)]
        exact = torch.stack(contributions).double().sum(0)
        for strategy in get_args(ReductionStrategy):
            for dtype in get_args(ReduceDtype):
                reduction = Reduction(flat, communicators, strategy, dtype, bucket_bytes=200_000)
                flat.gradients_N.copy_(contributions[mesh.rank])
                reduction.finish()
                reduction.close()
                if strategy.startswith("sharded"):
                    for bucket in reduction.buckets:
                        reduction.gather(flat.gradients_N, bucket)
                everyones = [torch.empty_like(flat.gradients_N) for _ in range(mesh.world_size)]
                dist.all_gather(everyones, flat.gradients_N)
                errors[f"{strategy} {dtype} {local_size}"] = {
                    "error": float((flat.gradients_N - exact).norm() / exact.norm()),
                    "same": all(torch.equal(everyones[0], other) for other in everyones),
                }
        end_groups()
        local_size *= 2
    if joined.is_main:
        Path(out).write_text(json.dumps(errors))
    leave_mesh()


if __name__ == "__main__":
    main(*sys.argv[1:])
