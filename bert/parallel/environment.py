"""A process's environment before it joins the other ranks: its rank, the number of ranks, its launcher and its host.

This module does not import PyTorch, so that a command line can be parsed, or an error reported with its rank, before PyTorch
is imported.
"""

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from console.processes import run

CLAIM = "MLPERF_BERT_CLAIM"
"""Variable that names a file. A run appends the path of its log to this file, for the program that started the run."""

SITE = "MLPERF_BERT_SITE"
"""Variable with the name of the site that this host belongs to."""

_INTERACTIVE_STEP = "4294967290"
"""Id of the Slurm step in which salloc runs the user's shell (SLURM_INTERACTIVE_STEP in slurm.h)."""


@dataclass(frozen=True)
class Launch:
    """Ranks and sizes that the launcher states in the environment. ``local_size`` is 0 if the launcher does not state it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 0
    rank_variable: str = "RANK"
    world_size_variable: str = "WORLD_SIZE"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{self.rank_variable}={self.rank} with {self.world_size_variable}={self.world_size}: "
                "start the run with torchrun, srun or mpirun, or unset both"
            )

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read the variables of torchrun, or else of mpirun (Open MPI), or else of srun. Without any, return one process.

        torchrun comes first because mpirun or srun may have started it. mpirun comes before srun for the same reason. Raises
        ``ValueError`` if a variable is not an integer, or if the rank is not below the number of ranks.
        """
        _parent()
        # Either variable counts as torchrun's, so that a rank above 0 without WORLD_SIZE raises an error.
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "OMPI_COMM_WORLD_RANK" in os.environ:
            names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        elif _is_slurm_task():
            # Prefer the step's variables, because SLURM_NTASKS and SLURM_NNODES may describe the whole job.
            sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
            of_tasks, of_nodes = (step if step in os.environ else job for step, job in sizes)
            tasks, nodes = _environment(of_tasks, 1), _environment(of_nodes, 1)
            rank, local_rank = _environment("SLURM_PROCID", 0), _environment("SLURM_LOCALID", 0)
            # If the tasks do not divide evenly among the nodes, the local size is unknown.
            local_size = tasks // nodes if nodes > 0 and tasks % nodes == 0 else 0
            return cls(rank, tasks, local_rank, local_size, "SLURM_PROCID", of_tasks)
        else:
            return cls()
        rank, world_size, local_rank, local_size = (
            _environment(name, default) for name, default in zip(names, (0, 1, 0, 0), strict=True)
        )
        return cls(rank, world_size, local_rank, local_size, names[0], names[1])


def _is_slurm_task() -> bool:
    """Tell whether srun started this process as a task. A process that the user started in a shell of srun is no task."""
    # A batch script has a SLURM_PROCID too, but no step id.
    if "SLURM_STEP_ID" not in os.environ or "SLURM_PROCID" not in os.environ:
        return False
    if os.environ.get("MASTER_ADDR") or os.environ["SLURM_STEP_ID"] == _INTERACTIVE_STEP:
        return bool(os.environ.get("MASTER_ADDR"))
    # Tasks that another srun starts from the shell of `srun --pty` inherit the shell's variables, but have no terminal.
    has_pty = "SLURM_PTY_PORT" in os.environ or "SLURM_PTY_WIN_COL" in os.environ
    return not (has_pty and _has_terminal())


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal, even if its input and output are redirected."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return True
    return False


def is_rank() -> bool:
    """Tell whether a launcher started this process as a rank of a run.

    A single task of srun without MASTER_ADDR is not a rank, but starts its own processes. With NNODES, every task starts
    its own processes, because srun often starts one launcher for each node.
    """
    names = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if any(os.environ.get(name) for name in names):
        return True
    if os.environ.get("NNODES"):
        return False
    return _is_slurm_task() and (bool(os.environ.get("MASTER_ADDR")) or Launch.from_environment().world_size > 1)


def lost_launcher() -> str:
    """Return a sentence if the launcher of this process has ended, or "" if it is running or there is none.

    Only launchers that outlive their processes count: a shell may end before a process that it started in the background.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ or _is_slurm_task()
    if not launched or os.getppid() == _parent():
        return ""
    return f"its launcher, process {_parent()}, is gone: killed, perhaps because memory ran out"


def host_of(rank: int, launch: Launch) -> str:
    """Return " on host NAME" (from Slurm's node list) or " on the node with index N", or "" if the host is unknown."""
    if not launch.local_size:
        return ""
    node = rank // launch.local_size
    names = scontrol_show(
        "hostnames", os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    )
    return f" on host {names[node]}" if node < len(names) else f" on the node with index {node}"


def scontrol_show(entity: str, names: str) -> list[str]:
    """Return the lines that ``scontrol show`` prints about nodes; [] without Slurm, or if ``names`` is not a host list."""
    # The names become arguments of a program, so only host lists are allowed, and no options.
    if not re.fullmatch(r"[\w.,\[\]-]{1,65536}", names, re.ASCII) or names.startswith("-"):
        return []
    return run(["scontrol", "show", entity, names], timeout_s=5).answer.splitlines()


def processor_name() -> str:
    """Return the model name of the processor, or its architecture if the system does not report a name."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.*)$", text, re.M):
            return found[1].strip()
    return platform.machine()


@cache
def _parent() -> int:
    return os.getppid()


def restarts() -> int:
    """Return how often torchrun's agent has restarted its processes, or how often Slurm has restarted the job.

    An agent does not count a restart that it makes because another agent restarts.
    """
    return _environment("TORCHELASTIC_RESTART_COUNT", 0) or _environment("SLURM_RESTART_COUNT", 0)


def may_start_again() -> bool:
    """Tell whether torchrun's agent restarts its processes when one of them fails."""
    return _environment("TORCHELASTIC_MAX_RESTARTS", 0) > 0


def job() -> str:
    """Return the job's name (torchrun's ``--rdzv-id``), which is the same after a restart, or "" if there is none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name[:256]  # torchrun sets "none" if no --rdzv-id was given


def site() -> str:
    """Return the site that this host's environment names, or "". Raises ``ValueError`` if it is not a short name."""
    name = os.environ.get(SITE, "")
    if name and not re.fullmatch(r"\w[\w.-]{0,31}", name, re.ASCII):
        raise ValueError(
            f"{SITE} is {name[:64]!r}: set it to up to 32 letters, digits, and characters of '_.-', or unset it"
        )
    return name


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("-?[0-9]{1,9}", text):  # int() also accepts non-ASCII digits
        raise ValueError(f"{name}={text!r} in the environment: set it to a whole number, or unset it")
    return int(text)
