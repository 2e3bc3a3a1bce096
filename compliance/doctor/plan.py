"""The run that is to be looked at: what is asked for, and the plan that the launchers would make of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compliance.doctor.host import ExaminedHost

RECIPE_TIMEOUT_S = 60.0

_ASK_RECIPE = """
import json, sys
from dataclasses import asdict
from bert.configuration.recipes import RECIPES
name = sys.argv[1]
print(json.dumps(asdict(RECIPES[name]()) if name in RECIPES else sorted(RECIPES), default=str))
"""


@dataclass(frozen=True)
class IntendedRun:
    """The run that is meant, as far as it is named; None stands for what the recipe says."""

    recipe: str = ""
    data: Path | None = None
    checkpoint: Path | None = None
    system: Path | None = None
    results: Path | None = None
    nodes: int | None = None
    quick: bool = False


@dataclass(frozen=True)
class RunLayout:
    """The run that is to be started: its recipe, "" when only the machine is looked at, and `ranks` on each of `nodes`.

    `config` has the recipe's settings by section, as `bert.configuration.recipes` has them.
    """

    recipe: str = ""
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nodes: int = 1
    ranks: int = 1

    def setting(self, section: str, name: str) -> Any:
        """A setting, None when there is no recipe."""
        return self.config.get(section, {}).get(name)

    @property
    def on_gpus(self) -> bool:
        """Tell whether the recipe trains on GPUs."""
        return self.setting("training", "device") == "cuda"

    @property
    def is_closed(self) -> bool:
        """Tell whether the results are to be closed."""
        return self.setting("log", "division") == "closed"

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return self.nodes * self.ranks

    @property
    def tensor(self) -> int:
        """Processes of a node that share a copy of the model, or a stage of it."""
        return self.setting("parallel", "tensor") or 1

    @property
    def pipeline(self) -> int:
        """Stages of a copy of the model."""
        return self.setting("parallel", "pipeline") or 1

    @property
    def copy(self) -> int:
        """Processes that share a copy of the model."""
        return self.tensor * self.pipeline


def shape_in_name(recipe: str) -> tuple[int, int] | None:
    """(nodes, GPUs of each) that a recipe is made for, by its name: dgxa100_8x8."""
    match = re.search(r"_(\d+)x(\d+)$", recipe)
    return (int(match[1]), int(match[2])) if match else None


def make_plan(intended: IntendedRun, host: ExaminedHost, gpus_here: int) -> RunLayout:
    """The run that is asked for: settings of the recipe, nodes and ranks as the launchers would choose them."""
    if intended.nodes is not None and intended.nodes < 1:
        raise ValueError(f"--nodes is {intended.nodes}, expected at least 1")
    shape = shape_in_name(intended.recipe)
    # What is given counts most, then the launcher's environment, then the job's, then the name.
    nodes = intended.nodes or _count(host, "NNODES") or _count(host, "SLURM_JOB_NUM_NODES") or (shape or (1,))[0]
    if not intended.recipe:
        return RunLayout(nodes=nodes, ranks=max(1, gpus_here))
    # In a process of its own: no module here may import bert, nor PyTorch with it.
    output = host.python("-c", _ASK_RECIPE, intended.recipe, timeout_s=RECIPE_TIMEOUT_S)
    try:
        config = json.loads(output.answer)
    except (ValueError, RecursionError):
        said = output.errors.strip().splitlines()[-1:] or [output.trouble]
        raise ValueError(
            f"the recipes cannot be read: {said[0][:200]}; install the packages again: rm -r .venv, and run run_and_time.sh"
        ) from None
    # A list in place of an object: the names that there are.
    if not isinstance(config, dict):
        raise ValueError(f"unknown recipe {intended.recipe!r}: expected one of {', '.join(map(str, config))}")
    plan = RunLayout(intended.recipe, {name: part for name, part in config.items() if isinstance(part, dict)}, nodes)
    # Those that this process may use, as the nproc of the launchers counts them.
    cores = len(os.sched_getaffinity(0))
    per_node = (
        # As `launch/processes.sh` counts them.
        shape[1] if shape else gpus_here if plan.on_gpus else 2 if intended.recipe == "tiny_cpu" and cores > 1 else 1
    )
    return replace(plan, ranks=max(1, _count(host, "NPROC") or per_node))


def _count(host: ExaminedHost, variable: str) -> int | None:
    text = host.environment.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
