"""A machine as a probe saw it: its devices by the facts file, its network as it was measured."""

from __future__ import annotations

import statistics
from collections import Counter
from contextlib import suppress
from math import exp

from cluster.devices import Device, device_named, devices
from cluster.published.calibration import calibration
from cluster.published.machine import Machine, Network, describe_machine
from cluster.view import View


def machine_of(view: View) -> Machine:
    """Return the machine of a view.

    Raises:
        ValueError: hosts or devices differ, or the device is not in the facts file.
    """
    # The model is of equal devices in equal nodes: a mean over different ones would be neither's.
    names = sorted({rank.device for rank in view.ranks})
    ranks = Counter(rank.host for rank in view.ranks)
    if len(names) > 1 or len(set(ranks.values())) > 1:
        raise ValueError(
            f"the hosts of the probe differ ({', '.join(names[:4])}; {min(ranks.values())} to {max(ranks.values())} ranks "
            "each): a prediction is of equal hosts, so probe some that are"
        )
    device = _device(names[0])
    # Published results of CPUs count sockets, not ranks.
    per_node = view.hosts[0].sockets if device.form == "CPU" else len(view.ranks) // len(view.hosts)
    machine = describe_machine(device, len(view.hosts), per_node)
    # Cards in use: ranks may share one, and a host may have more.
    ports = len({(rank.host, rank.card) for rank in view.ranks if rank.card}) // len(view.hosts)
    rate = _measured_gbit_s(view)
    # Of one host, or without names of cards, the usual network is taken, as without a probe.
    if not ports or rate is None:
        return machine
    # The model takes a port for what it is called, of which training reaches a share; what was measured has lost it already.
    port = Network(ports, rate / exp(calibration().parameters["network_efficiency"]))
    return Machine(machine.device, machine.nodes, machine.per_node, machine.is_bridged, port)


def _device(name: str) -> Device:
    # A processor is known by its number: many have "CPU" in their names, which a person may say for the one that is known.
    for device in devices():
        if device.form == "CPU" and device.name.rpartition("-")[2] in name:
            return device
    # The message below says what a probe's device needs, and not what a name on a command line does.
    with suppress(ValueError):
        device = device_named(name)
        if device.form != "CPU":
            return device
    raise ValueError(
        f"the device of the probe is {name!r}, of which the facts file knows nothing: expected one of "
        "`python -m cluster devices`, by whose published results the model is fitted"
    )


def _measured_gbit_s(view: View) -> float | None:
    """Return the median rate of paths between hosts, one way; None of one host."""
    seconds_per_byte = [link.seconds_per_byte for link in view.links_between_hosts]
    return 8e-9 / statistics.median(seconds_per_byte) if seconds_per_byte else None
