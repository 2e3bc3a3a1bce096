"""Start the ranks of a run on this machine, directly or by torchrun, and read the results."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert.parallel.master_port import free_port
from tests.conftest import REPOSITORY, SmallRun
from tests.programs import PATIENCE_S, Program, wait_for, wait_for_text

Module = str | Callable[..., object]
WORKER = "tests.distributed.worker"
ENDLESS: dict[str, object] = {"training__max_samples": 10_000_000, "evaluation__interval_samples": 320}


class Ranks:
    """Processes of one run, which are killed at the end of the block. No launcher ends a rank when another fails."""

    def __init__(self, arguments: Sequence[object], count: int, module: Module = "bert.train") -> None:
        """Start ``count`` ranks of a module, or of ``worker.py`` with the name of a function that it calls."""
        module, arguments = program(module, arguments)
        self.master_port = free_port()
        self.processes = [Program(module, arguments, **self._launcher(rank, count)) for rank in range(count)]

    @classmethod
    def of(cls, processes: list[Program], master_port: int) -> "Ranks":
        """Return an object for processes that were already started as ranks."""
        ranks = cls([], 0)
        ranks.processes, ranks.master_port = processes, master_port
        return ranks

    def _launcher(self, rank: int, count: int) -> dict[str, object]:
        """Return the environment variables that a launcher would set. A run of one process needs none."""
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
        return "".join(process.output for process in self.processes)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    def ends(self, *ranks: int) -> list[int]:
        return [self.processes[rank].wait(PATIENCE_S) for rank in ranks or range(len(self.processes))]

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition()`` holds. Fails if rank 0 ends first."""
        wait_for(condition, self.processes[0])

    def wait_for_text(self, path: Path, text: str, count: int = 1) -> None:
        """Wait until a file contains ``text`` ``count`` times. Fails if rank 0 ends first."""
        wait_for_text(path, text, self.processes[0], count)


def train(run: SmallRun, results: Path, count: int, **changes: object) -> list[dict[str, Any]]:
    """Train until the end without reaching the target (exit status 1), and return the step records."""
    trained(run, results, count, **changes)
    return records(results, "step")


def trained(run: SmallRun, results: Path, count: int, **changes: object) -> str:
    """Train until the end without reaching the target (exit status 1), and return the output."""
    with Ranks(run.arguments(results, **changes), count) as started:
        assert started.ends() == [1] * count, started.output
    return started.output


def result_of(results: Path) -> Path:
    return results / "tiny_cpu" / "bert" / "result_0.txt"


def records(results: Path, event: str) -> list[dict[str, Any]]:
    lines = result_of(results).with_name("metrics_0.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def assert_aborted(results: Path, message: str = "") -> None:
    """Check that a log ends with the status aborted and, if ``message`` is given, that it quotes this error message."""
    lines = result_of(results).read_text().splitlines()
    assert '"status": "aborted"' in [line for line in lines if line.startswith(":::MLLOG")][-1]
    assert not message or f"# ended by a fault: {message.removeprefix('error: ')}" in lines


def compare_steps(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], rel: float = 2e-5, abs: float = 2e-6
) -> None:
    """Check that the step records of two runs agree, by default up to rounding."""
    for one, other in zip(expected, found, strict=True):
        for name in ("step", "masked_lm_loss", "next_sentence_loss", "gradient_norm", "learning_rate"):
            assert other[name] == pytest.approx(one[name], rel=rel, abs=abs), (one["step"], name)


def program(module: Module, arguments: Sequence[object]) -> tuple[str, list[str]]:
    """Return the module to run and its arguments. ``worker.py`` runs a function, whose name is its first argument."""
    texts = [str(each) for each in arguments]
    return (module, texts) if isinstance(module, str) else (WORKER, [name_of(module), *texts])


def name_of(function: Callable[..., object]) -> str:
    # Derive the module from the file's path, because pytest imports test modules under shorter names.
    file = Path(function.__code__.co_filename).relative_to(REPOSITORY).with_suffix("")
    return f"{'.'.join(file.parts)}:{function.__name__}"


def torchrun(ranks: int, arguments: Sequence[object], *options: str, module: str = "bert.train") -> Program:
    place = (f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    return Program("torch.distributed.run", [*place, *options, "-m", module, *map(str, arguments)], OMP_NUM_THREADS=1)
