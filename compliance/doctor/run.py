"""The run to check: the user's request, and the layout that the launchers would choose for it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compliance.doctor.host import ExaminedHost, run_root

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
    """The run that the user requests. None stands for the recipe's value."""

    recipe: str = ""
    data: Path | None = None
    checkpoint: Path | None = None
    results: Path | None = None
    nodes: int | None = None
    quick: bool = False


@dataclass(frozen=True)
class ExaminedRun:
    """A requested run with the recipe's settings by section, as `ranks` ranks on each of `nodes` nodes.

    Without a recipe there are no settings, and only the machine is checked.
    """

    intended: IntendedRun
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nodes: int = 1
    ranks: int = 1

    def setting(self, section: str, name: str) -> Any:
        """Return a setting of the recipe; None without a recipe."""
        return self.settings.get(section, {}).get(name)

    @property
    def recipe(self) -> str:
        """Name of the recipe; "" without one."""
        return self.intended.recipe

    @property
    def on_gpus(self) -> bool:
        """Whether the recipe trains on GPUs."""
        return self.setting("training", "device") == "cuda"

    @property
    def is_closed(self) -> bool:
        """Whether the run is for the closed division."""
        return self.setting("log", "division") == "closed"

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks

    def folder(self, name: Literal["train", "evaluation"]) -> Path | None:
        """Return a data set of the run."""
        given = self.intended.data
        if given is None:
            return self._named("data", name)
        inside = given / name
        # A folder that does not contain train and evaluation is itself a data set.
        return inside if inside.exists() or self.recipe else given if name == "train" else None

    @property
    def results(self) -> Path | None:
        """The run's results/ folder."""
        return self.intended.results or self._named("log", "results")

    def _named(self, section: str, name: str) -> Path | None:
        """Return a path setting, which is relative to `run_root`, as a path from the current folder."""
        named = self.setting(section, name)
        return Path(os.path.relpath(run_root() / named)) if named else None


def shape_in_name(recipe: str) -> tuple[int, int] | None:
    """Return the number of nodes and of GPUs per node from a recipe's name, such as dgxa100_8x8."""
    match = re.search(r"_(\d+)x(\d+)$", recipe)
    return (int(match[1]), int(match[2])) if match else None


def lay_out(intended: IntendedRun, host: ExaminedHost, gpus_here: int) -> ExaminedRun:
    """Return the requested run with the nodes and ranks that the launchers would choose.

    Raises:
        ValueError: the recipe is unknown, the number of nodes is below 1, or a given file or folder does not exist.
    """
    for path in (intended.data, intended.checkpoint):
        if path is not None and not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if intended.checkpoint and not intended.recipe:
        raise ValueError("--checkpoint needs --recipe: the trainer checks that the weights fit its model")
    if intended.nodes is not None and intended.nodes < 1:
        raise ValueError(f"--nodes is {intended.nodes}, expected at least 1")
    shape = shape_in_name(intended.recipe)
    nodes = intended.nodes or _count(host, "NNODES") or _count(host, "SLURM_JOB_NUM_NODES") or (shape or (1,))[0]
    if not intended.recipe:
        return ExaminedRun(intended, {}, nodes, max(1, gpus_here))
    settings = _ask_recipe(intended.recipe, host)
    on_gpus = settings["training"]["device"] == "cuda"
    # Count processes as `launch/processes.sh` does.
    on_cpu = 2 if intended.recipe == "tiny_cpu" and len(os.sched_getaffinity(0)) > 1 else 1
    per_node = shape[1] if shape else gpus_here if on_gpus else on_cpu
    return ExaminedRun(intended, settings, nodes, max(1, _count(host, "NPROC") or per_node))


def _ask_recipe(recipe: str, host: ExaminedHost) -> dict[str, Mapping[str, Any]]:
    # Use a separate process, because modules of this package must not import bert, which imports PyTorch.
    output = host.python("-c", _ASK_RECIPE, recipe, timeout_s=RECIPE_TIMEOUT_S)
    try:
        config = json.loads(output.answer)
    except ValueError:
        remedy = "install the packages again: rm -r .venv, and run run_and_time.sh"
        raise ValueError(f"the recipes cannot be read: {output.complaint[:200]}; {remedy}") from None
    if not isinstance(config, dict):
        raise ValueError(f"unknown recipe {recipe!r}: expected one of {', '.join(map(str, config))}")
    return {name: part for name, part in config.items() if isinstance(part, dict)}


def _count(host: ExaminedHost, variable: str) -> int | None:
    text = host.environment.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
