"""Machines that a run is planned for: how many, and what they can do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import Precision
from cluster.devices import Device, device_named
from cluster.model.rates import Rates, rates_of_machine, rates_of_view
from cluster.model.work import Work, wikipedia_work, work_of
from cluster.published.machine import describe_machine
from cluster.view import View, read_view
from console.text import counted

_ACCELERATORS = {"h100": "H100-SXM-80GB", "dgxa100": "A100-SXM-80GB", "bert_3_9b": "A100-SXM-40GB"}
"""Names of devices by the first words of a recipe's."""
# Only the benchmark's own data may be absent: its histogram is shipped.
_BENCHMARK_DATA = RECIPES["h100_1x1"]().data.train
_SIZED = re.compile(r"([a-z0-9_]+)_(\d+)x(\d+)")
"""Name of a recipe: devices, nodes, and devices of each."""


@dataclass(frozen=True)
class Target:
    """Ranks to be planned for.

    Attributes:
        device: name of theirs.
        rates: by precision, of those that they have.
        missing: why there are none of a precision.
        on_gpu: whether they compute on devices of their own.
    """

    device: str
    nodes: int
    ranks_per_node: int
    rates: Mapping[Precision, Rates]
    missing: Mapping[Precision, str]
    on_gpu: bool

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node


def target_of(
    recipe: str, cluster: Path | None, gpus: int | None, accelerator: str | None = None, networking: str = ""
) -> Target:
    """Return the target that a view describes, or else a number of devices by their facts; by default those of the recipe.

    Raises:
        ValueError: the view is of another number of ranks, the device is unknown, or nothing says which it is.
    """
    if cluster is not None:
        # A view names devices and links; anything said beside it could only contradict it.
        if accelerator is not None or networking:
            raise ValueError("--cluster says what there is: leave --accelerator and --networking out")
        return _measured(read_view(cluster), cluster, gpus)
    device, per_node = device_of(recipe, accelerator)
    sized = _SIZED.fullmatch(recipe)
    # The recipe's name states nodes and devices where nothing else is said.
    count = gpus if gpus is not None else int(sized[2]) * int(sized[3]) if sized else per_node
    return described(device, count, per_node, networking)


def device_of(recipe: str, accelerator: str | None) -> tuple[Device, int]:
    """Return the device that a recipe is for, or the named one, and how many are in a node.

    Raises:
        ValueError: the device is unknown, or nothing says which it is.
    """
    sized = _SIZED.fullmatch(recipe)
    name = accelerator or (_ACCELERATORS.get(sized[1]) if sized else None)
    if name is None:
        raise ValueError(f"{recipe} names no device: give --cluster, which `python -m cluster probe` measures")
    return device_named(name), max(8, int(sized[3])) if sized else 8  # a recipe of fewer has a part of such a node


def described(device: Device, count: int, per_node: int, networking: str = "") -> Target:
    """Return so many devices by their facts, in whole nodes. Raises ``ValueError`` where they make none."""
    if count < 1:
        raise ValueError(f"--gpus is {count}, expected at least 1")
    # Fewer than a node are a part of one.
    per_node = min(count, per_node)
    if count % per_node:
        raise ValueError(f"--gpus is {count:,}, expected whole nodes of {per_node}")
    machine = describe_machine(device, count // per_node, per_node, networking=networking)
    rates: dict[Precision, Rates] = {"bf16": rates_of_machine(machine, "bf16")}
    missing: dict[Precision, str] = {"fp32": f"the facts of {device.name} have no rate of it"}
    if device.fp8_tflops is None:
        missing["fp8"] = f"{device.name} has none"
    else:
        rates["fp8"] = rates_of_machine(machine, "fp8")
    return Target(device.name, machine.nodes, per_node, rates, missing, device.form != "CPU")


def _measured(view: View, path: Path, gpus: int | None) -> Target:
    ranks = len(view.ranks)
    # Contention and collectives were measured with all ranks at once: they say nothing of another number.
    if gpus not in (None, ranks):
        raise ValueError(
            f"{path} is of {counted(ranks, 'rank')}, but --gpus is {gpus}: probe as many as are planned for"
        )
    rates = rates_of_view(view)
    found: dict[Precision, Rates] = {}
    missing: dict[Precision, str] = {}
    for precision in ("fp32", "bf16", "fp8"):
        if f"linear {precision}" in rates.costs:
            found[precision] = rates
        else:
            missing[precision] = f"{path} has no rate of it"
    hosts = len(view.hosts)
    return Target(view.ranks[0].device, hosts, ranks // hosts, found, missing, view.backend == "nccl")


def work_for(config: Config) -> Work:
    """Return a configuration's work: by its length index, or, of the benchmark without one, by Wikipedia's histogram."""
    # Data that are there are planned by their own lengths, also where they are the benchmark's.
    if config.data.train.is_dir() or config.data.train != _BENCHMARK_DATA:
        return work_of(config)
    work = wikipedia_work(config.model)
    if config.log.division == "closed":
        return work
    return replace(work, samples=float(config.training.sample_limit))
