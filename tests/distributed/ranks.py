"""Ranks of one run on this machine, without a launcher that would end the others when one ends; and torchrun."""

import contextlib
import json
import random
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conftest import REPOSITORY, SmallRun
from tests.programs import PATIENCE_S, Program

WORKER = "tests.distributed.worker"


class Ranks:
    """Processes of one run, ended with the block in which they are used."""

    def __init__(
        self, arguments: Sequence[object], count: int, module: str | Callable[..., object] = "bert.train"
    ) -> None:
        """``module`` is a program, or a function of modules here that ``worker.py`` calls with the arguments."""
        module, arguments = program(module, arguments)
        self.master_port = free_port()
        self.processes = [Program(module, arguments, **self._launcher(rank, count)) for rank in range(count)]

    @classmethod
    def of(cls, processes: list[Program], master_port: int) -> "Ranks":
        """Take over processes that were started as ranks already."""
        ranks = cls([], 0)
        ranks.processes, ranks.master_port = processes, master_port
        return ranks

    def _launcher(self, rank: int, count: int) -> dict[str, object]:
        """The environment that a launcher gives; none for a run of one process."""
        if count == 1:
            return {}
        places: dict[str, object] = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
        return places | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.master_port}

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        self.ends()

    @property
    def output(self) -> str:
        """Return what all have written, rank after rank."""
        return "".join(process.output for process in self.processes)

    @property
    def errors(self) -> list[str]:
        """The lines that say what is wrong."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    def ends(self, *ranks: int) -> list[int]:
        """Return the exit statuses of these ranks, or of all, once they have ended."""
        return [self.processes[rank].wait(PATIENCE_S) for rank in ranks or range(len(self.processes))]

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition()`` holds, while rank 0 runs."""
        wait_for(condition, self.processes[0])


def train(run: SmallRun, results: Path, count: int, **changes: object) -> list[dict[str, Any]]:
    """The records of the steps of a run that misses its target."""
    trained(run, results, count, **changes)
    return records(results, "step")


def trained(run: SmallRun, results: Path, count: int, **changes: object) -> str:
    """Return what such a run prints."""
    with Ranks(run.arguments(results, **changes), count) as started:
        assert started.ends() == [1] * count, started.output
    return started.output


def result_of(results: Path) -> Path:
    return results / "tiny_cpu" / "bert" / "result_0.txt"


def last_record(result: Path) -> str:
    return [line for line in result.read_text().splitlines() if line.startswith(":::MLLOG")][-1]


def records(results: Path, event: str) -> list[dict[str, Any]]:
    """The metrics of run 0 of one kind."""
    lines = result_of(results).with_name("metrics_0.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def program(module: str | Callable[..., object], arguments: Sequence[object]) -> tuple[str, list[str]]:
    """Return module and arguments of a program; a function is called by ``worker.py``."""
    texts = [str(each) for each in arguments]
    return (module, texts) if isinstance(module, str) else (WORKER, [name_of(module), *texts])


def name_of(function: Callable[..., object]) -> str:
    # By its file: pytest imports modules of tests under shorter names.
    file = Path(function.__code__.co_filename).relative_to(REPOSITORY).with_suffix("")
    return f"{'.'.join(file.parts)}:{function.__name__}"


def run_on_ranks(folder: Path, count: int, function: Callable[..., object], *arguments: object) -> Any:
    """Return what a function of a mesh and the arguments returns on rank 0 of so many ranks."""
    out = folder / f"{count}.pt"
    with Ranks(["tests.distributed.worker:joined", out, name_of(function), *arguments], count, WORKER) as ranks:
        assert ranks.ends() == [0] * count, ranks.output
    return torch.load(out)


def wait_for(condition: Callable[[], object], process: Program | subprocess.Popen[str]) -> None:
    """Wait until ``condition()`` holds, while ``process`` runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        ended = process.poll() is not None
        assert condition() or not ended, process.communicate(timeout=PATIENCE_S)[0]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.05)


def torchrun(
    ranks: int, arguments: Sequence[object], *options: str, module: str | Callable[..., object] = "bert.train"
) -> Program:
    """torchrun itself, with ranks of its own."""
    module, arguments = program(module, arguments)
    place = (f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    return Program("torch.distributed.run", [*place, *options, "-m", module, *arguments], OMP_NUM_THREADS=1)


def free_port() -> int:
    """Find a port that nobody is given by chance before it is used: the system takes those of connections from 32,768 on."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 20_000)))
            return probe.getsockname()[1]
