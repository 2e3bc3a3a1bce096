"""Machines that a run is planned for: their number and their rates."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bert.configuration.config import Config
from bert.configuration.recipes import RECIPES
from bert.configuration.sections import Precision
from cluster.devices import Device, describe_machine, device_named
from cluster.model.rates import Rates, rates_of_machine, rates_of_view
from cluster.model.work import Work, wikipedia_work, work_of
from cluster.view import read_view
from console.text import counted

_ACCELERATORS = {"h100": "H100-SXM-80GB", "dgxa100": "A100-SXM-80GB", "bert_3_9b": "A100-SXM-40GB"}
"""Device names by the first words of a recipe's name."""
_SIZED = re.compile(r"([a-z0-9_]+)_(\d+)x(\d+)")
"""Pattern of a recipe's name: device, number of nodes, and devices per node."""


@dataclass(frozen=True)
class Target:
    """Ranks to plan for, with their device's name.

    ``missing`` has the reason for each precision without rates. ``on_gpu`` tells whether each rank has its own device.
    """

    device: str
    nodes: int
    ranks_per_node: int
    rates: Mapping[Precision, Rates]
    missing: Mapping[Precision, str]
    on_gpu: bool

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def target_of(
    recipe: str, cluster: Path | None, gpus: int | None, accelerator: str | None = None, networking: str = ""
) -> Target:
    """Return the target that a probe measured. Without a probe, use the data sheet of the named or the recipe's device.

    Raises ``ValueError`` if the probe's number of ranks is not ``gpus``, or if the device is unknown.
    """
    if cluster is not None:
        if accelerator is not None or networking:
            raise ValueError("--cluster describes the machines: omit --accelerator and --networking")
        return _measured(cluster, gpus)
    device, per_node = device_of(recipe, accelerator)
    sized = _SIZED.fullmatch(recipe)
    count = gpus if gpus is not None else int(sized[2]) * int(sized[3]) if sized else per_node
    return described(device, count, per_node, networking)


def device_of(recipe: str, accelerator: str | None) -> tuple[Device, int]:
    """Return the named or the recipe's device, and the number per node. Raises ``ValueError`` if the device is unknown."""
    sized = _SIZED.fullmatch(recipe)
    name = accelerator or (_ACCELERATORS.get(sized[1]) if sized else None)
    if name is None:
        raise ValueError(f"{recipe} names no device: give --cluster, the file of `python -m cluster probe`")
    return device_named(name), max(8, int(sized[3])) if sized else 8  # a smaller recipe uses part of a node


def described(device: Device, count: int, per_node: int, networking: str = "") -> Target:
    """Return a target of ``count`` devices with data-sheet rates. Raises ``ValueError`` if they do not fill whole nodes."""
    if count < 1:
        raise ValueError(f"--gpus is {count}, expected at least 1")
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


def _measured(path: Path, gpus: int | None) -> Target:
    view = read_view(path)
    ranks, hosts = len(view.ranks), len(view.hosts)
    # Contention and collectives were measured on all ranks at once, so they do not apply to another number of ranks.
    if gpus not in (None, ranks):
        raise ValueError(f"{path} has {counted(ranks, 'rank')}, but --gpus is {gpus}: probe as many as you plan for")
    rates = rates_of_view(view)
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp8")
    found: dict[Precision, Rates] = {each: rates for each in precisions if f"linear {each}" in rates.costs}
    missing: dict[Precision, str] = {each: f"{path} has no rate of it" for each in precisions if each not in found}
    return Target(view.ranks[0].device, hosts, ranks // hosts, found, missing, view.backend == "nccl")


def work_for(config: Config) -> Work:
    """Return a configuration's work from its length index, or from Wikipedia's histogram if the benchmark data is absent."""
    if config.data.train.is_dir() or config.data.train != RECIPES["h100_1x1"]().data.train:
        return work_of(config)
    work = wikipedia_work(config.model)
    if config.log.division == "closed":
        return work
    return replace(work, samples=float(config.training.sample_limit))
