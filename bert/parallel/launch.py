"""Launch environment: this process's rank among the others, before it has joined them.

Needs no PyTorch, so that a command line is understood, or an error told with its rank, before that is imported.
"""

import os
import re
from dataclasses import dataclass
from functools import cache

from console.processes import run


@dataclass(frozen=True)
class Launch:
    """Ranks and sizes that the launcher states in the environment. ``local_size`` is 0 where it states none."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 0
    rank_variable: str = "RANK"
    world_size_variable: str = "WORLD_SIZE"

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read torchrun's variables, else mpirun's (Open MPI), else those of an srun step, else be alone.

        torchrun comes first because mpirun and srun may have started it, and mpirun before srun for the same reason. Raises
        ``ValueError`` when a variable is no whole number or the rank lies outside the world.
        """
        _parent()
        launch = cls._read()
        if not 0 <= launch.rank < launch.world_size:
            raise ValueError(
                f"{launch.rank_variable}={launch.rank} with {launch.world_size_variable}={launch.world_size}: "
                "start the run with torchrun, srun or mpirun, or unset both"
            )
        return launch

    @classmethod
    def _read(cls) -> "Launch":
        # One of them will do: half of what a launcher states is refused, and not taken for no launcher.
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "OMPI_COMM_WORLD_RANK" in os.environ:
            names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        elif "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
            # A batch script has a SLURM_PROCID too, but is no step.
            tasks, nodes = _environment("SLURM_NTASKS", 1), _environment("SLURM_NNODES", 1)
            rank, local_rank = _environment("SLURM_PROCID", 0), _environment("SLURM_LOCALID", 0)
            # Where tasks are uneven, their mean is no size of a host.
            local_size = tasks // nodes if nodes > 0 and tasks % nodes == 0 else 0
            return cls(rank, tasks, local_rank, local_size, "SLURM_PROCID", "SLURM_NTASKS")
        else:
            return cls()
        rank, world_size, local_rank, local_size = (
            _environment(name, default) for name, default in zip(names, (0, 1, 0, 0), strict=True)
        )
        return cls(rank, world_size, local_rank, local_size, names[0], names[1])


def lost_launcher() -> str:
    """Return a sentence if the launcher of this process is gone; "" while it is there, or if there is none.

    Only launchers that stay count: a shell may end before a process that it has started in the background.
    """
    launched = any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"))
    if not launched or os.getppid() == _parent():
        return ""
    return f"its launcher, process {_parent()}, is gone: killed, perhaps because memory ran out"


def host_of(rank: int, launch: Launch) -> str:
    """Say on which host a rank was to start: by Slurm's list of nodes, otherwise by its number; "" if unknown."""
    if not launch.local_size:
        return ""
    node = rank // launch.local_size
    names = scontrol_show(
        "hostnames", os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    )
    return f" on host {names[node]}" if node < len(names) else f" on node {node} from 0"


def scontrol_show(entity: str, names: str) -> list[str]:
    """Return the lines that ``scontrol show`` prints about nodes; none without Slurm, or if these are not host names."""
    # The names become arguments of a program: only host lists may, and no options.
    if not re.fullmatch(r"[\w.,\[\]-]{1,65536}", names, re.ASCII) or names.startswith("-"):
        return []
    return run(["scontrol", "show", entity, names], timeout_s=5).answer.splitlines()


@cache
def _parent() -> int:
    return os.getppid()


def restarts() -> int:
    """Return how often torchrun's agent has restarted its processes, or Slurm the job.

    An agent that restarts because another agent does so has not counted that.
    """
    return _environment("TORCHELASTIC_RESTART_COUNT", 0) or _environment("SLURM_RESTART_COUNT", 0)


def may_start_again() -> bool:
    """Tell whether an agent of torchrun starts its processes again when one fails."""
    return _environment("TORCHELASTIC_MAX_RESTARTS", 0) > 0


def job() -> str:
    """Return the name that torchrun's agents meet under (``--rdzv-id``), equal after every restart; "" if there is none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name[:256]  # torchrun says "none" where no --rdzv-id was given


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("-?[0-9]{1,9}", text):  # int() reads digits of other scripts, and has errors of its own
        raise ValueError(f"{name}={text!r} in the environment: expected a whole number")
    return int(text)
