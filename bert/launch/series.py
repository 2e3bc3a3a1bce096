"""A series of runs on this node: the check before each run, its processes, and the verdict after the last run."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bert.configuration.config import Config
from bert.launch.binding import torchrun, torchrun_environment
from bert.launch.layout import Layout, has_gpus
from bert.launch.supervision import Stopped, Supervisor, announce, await_orphans, say_at_once
from bert.parallel.environment import CLAIM
from bert.parallel.master_port import free_port, require_free_port
from bert.train import refused
from compliance.log.reader import read_log
from console.text import counted

_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Nodes:
    """Nodes of a run. By default, this node is the only one."""

    count: int = 1
    rank: int = 0
    """Index of this node, from 0."""
    address: str = "127.0.0.1"
    """Host at which rank 0 listens."""
    port: int = 0
    """Port at which rank 0 listens. On a single node, 0 stands for any free port."""


@dataclass(frozen=True)
class Series:
    """Runs of one configuration."""

    config: Config
    arguments: Sequence[str]
    """Arguments of `bert.train`, from which ``config`` was parsed."""
    runs: int
    nodes: Nodes
    layout: Layout
    clear_caches: bool

    @property
    def world_size(self) -> int:
        return self.nodes.count * self.layout.processes

    def prepare(self, supervisor: Supervisor) -> int:
        """Check the run and print its predicted memory and step time (--prepare, --dry-run). Return the exit status."""
        command = [sys.executable, "-m", "cluster.dry_run", *self.arguments]
        trains_here = self.config.training.device == "cpu" or has_gpus()
        # On a machine without the GPUs that the run needs, the plan or the recipe states the number of ranks.
        if not os.environ.get("WORLD_SIZE") and (trains_here or os.environ.get("NPROC") or self.nodes.count > 1):
            return supervisor.run(command, os.environ | {"WORLD_SIZE": str(self.world_size)})
        return supervisor.run(command)

    def train(self, supervisor: Supervisor) -> int:
        """Train, then judge the results. A run that misses its target does not end the series; a fault or wrong input does.

        Return the exit status of the run that has ended the series, or else that of the verdict, or 1 if a run has failed.
        """
        results: list[Path] = []
        status, processes = 0, counted(self.layout.processes, "process")
        with TemporaryDirectory(prefix="mlperf-bert-") as folder, suppress(Stopped):
            for number in range(1, self.runs + 1):
                claim = Path(folder, str(number))
                if ended := self._check(claim, supervisor):
                    status = ended
                    break
                announce(
                    f"{self.config.recipe}, run {number} of {self.runs}: {processes} with "
                    f"{counted(self.layout.threads, 'thread')} each"
                )
                ended = self.train_once(claim, supervisor)
                if claim.exists():
                    results.append(Path(os.fsdecode(claim.read_bytes().removesuffix(b"\n"))))
                elif not ended and not self.nodes.rank:
                    # A status of 0 does not prove success: torchrun's status is also 0 after a signal to all ranks.
                    say_at_once(f"error: run {number} has left no log")
                    ended = 1
                status = ended or status
                if supervisor.status:
                    break
                if ended > 1:
                    cause = f"signal {ended - 128}" if ended > 128 else "an error"
                    no_more = ": no further runs are started" if number < self.runs else ""
                    if no_more or ended > 128:
                        say_at_once(f"warning: {cause} has ended run {number}{no_more}")
                    break
        if results:  # only the first node has logs, because rank 0 writes them
            verdict = judge(results, supervisor)
            status = status if status > 1 else verdict or status
        return supervisor.status or status

    def _check(self, claim: Path, supervisor: Supervisor) -> int:
        """Check this node and the run's inputs. Return the exit status.

        A single process checks before any rank starts. So a fault is reported once, and no rank waits for others in vain.
        """
        if self.nodes.count > 1 and self.nodes.rank == 0:
            try:
                require_free_port(self.nodes.port)
            except ValueError as error:
                return refused(error)
        places = {"WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(self.layout.processes)}
        command = [sys.executable, "-m", "bert.train", *self.arguments, "--dry-run"]
        return supervisor.run(command, os.environ | places | {CLAIM: str(claim)}, quiet=True)

    def train_once(self, claim: Path, supervisor: Supervisor, *, quiet: bool = False) -> int:
        """Start the processes of one run and return its exit status. The run writes its log's path to the file ``claim``.

        ``quiet`` drops the standard output.
        """
        cleared = ["--log.cache-cleared"] if self.clear_caches and _clear_caches() else []
        variables = torchrun_environment() | {CLAIM: str(claim), "OMP_NUM_THREADS": str(self.layout.threads)}

        def stop(process: int, number: int, earlier: int) -> None:
            ranks = [process] if self.world_size == 1 else _children(process)
            graceful = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            if claim.exists() or self.nodes.rank:  # other nodes never see a claim, so assume that there is a log
                say_at_once("ending now" if earlier else "stopping after this step; again to end now")
                # Signal the ranks and not torchrun, which would kill the ranks before they have completed the log.
                _send(graceful if earlier < 2 else signal.SIGKILL, ranks or [process])
                return
            if not earlier:
                say_at_once("interrupted")
            if self.world_size > 1:
                _send(signal.SIGKILL, [process])
            _send(signal.SIGKILL if earlier else signal.SIGTERM, ranks)

        command = [*self._launcher(claim.parent), *self.arguments, *cleared]
        status = supervisor.run(command, variables, stop=stop, quiet=quiet)
        if status > 128:
            await_orphans()  # the ranks soon notice that torchrun is gone, and complete the log
        return status

    def _launcher(self, folder: Path) -> list[str]:
        """Return the command that starts the processes, up to the arguments of `bert.train`."""
        if self.world_size == 1:
            return [sys.executable, "-m", "bert.train"]
        # Do not use torchrun's elastic agents (--standalone, --rdzv-backend c10d), because they unpickle the content of a
        # store that listens on all addresses without a password.
        options = {
            "nproc-per-node": self.layout.processes,
            "nnodes": self.nodes.count,
            "node-rank": self.nodes.rank,
            "master-addr": self.nodes.address,
            "master-port": self.nodes.port or free_port(),
            "log-dir": folder,  # otherwise torchrun leaves a folder in /tmp
        }
        return torchrun(self.config.log.folder, options)


def judge(results: Sequence[Path], supervisor: Supervisor) -> int:
    """Check result files, print the table of their folder and write its report. Return 1 if anything fails.

    For runs without a target, skip the check and the system description, because MLPerf's rules do not apply to them. Such
    a run fails if it has not trained to its end.
    """
    folder, run = results[0].parent, read_log(results[0]).run
    steps = [["summary", str(folder)], ["report", str(folder)]]
    description = folder.parent.parent / "systems" / f"{folder.parent.name}.json"
    if not run.trains_to_end and not description.exists():
        steps.insert(0, ["system", "--out", str(description), "--division", run.division])
    if not run.trains_to_end:
        steps.insert(0, ["check", *map(str, results)])
    announce("summary and report" if run.trains_to_end else "check, summary and report")
    status = int(run.trains_to_end and any(read_log(path).run.status != "success" for path in results))
    for words in steps:  # continue after a failure, so that the later steps still report
        status |= supervisor.run([sys.executable, "-m", "compliance", *words]) != 0
        if supervisor.signals:
            break
    return status


def _clear_caches() -> bool:
    """Empty the page cache, which needs root, and return whether this succeeded."""
    if not os.access(_CACHES, os.W_OK):
        return False
    os.sync()
    with suppress(OSError):  # in a container, even root may be refused
        _CACHES.write_text("3\n", encoding="ascii")
        return True
    return False


def _children(process: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(process).children()]
    return []


def _send(number: int, processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
