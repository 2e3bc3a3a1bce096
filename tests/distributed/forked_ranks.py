"""Ranks of a test as forks of one process, which imports PyTorch once for all of them.

python -m tests.distributed.forked_ranks RANKS PORT MODULE ARGUMENT ...

Each rank calls ``main(*arguments)`` of the module, in the environment that torchrun would give it. When a rank fails, the
others are ended and its traceback is the error.
"""

import importlib
import os
import sys

from torch.multiprocessing.spawn import start_processes


def main(ranks: str, port: str, module: str, *arguments: str) -> None:
    """Run them all."""
    worker = importlib.import_module(module)

    def one(rank: int) -> None:
        launcher = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in launcher.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        worker.main(*arguments)

    start_processes(one, nprocs=int(ranks), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
