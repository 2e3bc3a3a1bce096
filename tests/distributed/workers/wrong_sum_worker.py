"""A rank of a probe on whose rank 1 an all-reduce of floats gets one element wrong."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster.probe import computations
from cluster.probe.command import probe

right = dist.all_reduce


def wrong(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    work = right(tensor, *arguments, **named)
    if os.environ["RANK"] == "1" and tensor.dtype == torch.float32 and tensor.numel() > 1000:
        tensor[7] += 1
    return work


if __name__ == "__main__":
    dist.all_reduce = wrong
    computations._COPIES = 1  # of what no sum is in
    sys.exit(probe(Path(sys.argv[2]), seconds=1.0))
