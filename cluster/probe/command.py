"""Measure in turns, search for outliers, measure a second time if any are suspected, and write the view."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from bert.parallel.environment import Launch
from bert.parallel.mesh import Mesh, agreed_integer, join_mesh, leave_mesh
from cluster.display import site_rows
from cluster.probe.collectives import measure_collectives
from cluster.probe.computations import measure_computations, measure_contention
from cluster.probe.computing import busy_machines, cells_of, gather_numbers, measure_rates, processor_seconds
from cluster.probe.findings import SCREENING, Measurements, find_leaves, find_outliers
from cluster.probe.links import Pairs, measure_paths, rounds_of_pairs
from cluster.probe.machine import Facts, facts_of
from cluster.view import Link, Rank, Rate, View, write_view
from console.files import require_writable
from console.program import complain, say
from console.text import counted
from console.version import commit

TURNS = 5
"""Number of turns of a measurement. A second measurement adds as many turns."""

_FACTS_BYTES = 4096

_DEVICES, _PATHS_IN_HOSTS, _PATHS_BETWEEN, _CONTENTION, _COMPUTATIONS, _COLLECTIVES = 0.25, 0.1, 0.15, 0.1, 0.2, 0.2
"""Share of the requested seconds for each measurement."""


def probe(out: Path, seconds: float = 30.0, limit: float = 60.0) -> int:
    """Measure for about ``seconds``, write the view, and print what is slow or broken. Returns 1 if something is.

    Raises ``ValueError`` if the launcher's variables are invalid, if ranks do not connect within ``limit`` seconds, or if a
    rank is lost.
    """
    launch = Launch.from_environment()
    if launch.rank == 0:
        require_writable(out)
    if not (seconds >= 1 and limit >= 1):
        raise ValueError(f"--seconds is {seconds:g} and --limit is {limit:g}, expected at least 1 each")
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # A rank may have to wait this long for the slowest rank.
        timeout = timedelta(seconds=max(60.0, 4 * seconds))
        mesh = join_mesh(device, timeout, arrival=timedelta(seconds=limit))
        view = _measure(mesh, seconds)
        if view is not None:
            write_view(view, out)
            hosts, ranks = counted(len(view.hosts), "host"), counted(len(view.ranks), "rank")
            say(f"{hosts}, {ranks}, {view.backend}, measured in {view.seconds:.0f} s")
            nothing = "no part is slower than the others" if len(view.ranks) > 2 else "too few parts to compare"
            for line in [outlier.sentence for outlier in view.outliers] or [nothing]:
                say(line)
            for name, text in site_rows(view):
                say(f"{name}: {text}")
            say(out)
        return agreed_integer(int(view is not None and len(view.outliers) > 0), mesh)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(
            f"rank {launch.rank}: another rank was lost, or the device failed ({reason}): read the other ranks' messages"
        ) from None
    finally:
        leave_mesh()


# Measurements that need gradients enable gradients themselves.
@torch.no_grad()
def _measure(mesh: Mesh, seconds: float) -> View | None:
    """Return the view on rank 0, and None on the other ranks."""
    start = time.perf_counter()
    every = gather_facts(facts_of(mesh), mesh)
    host_of = [next(host for host, ranks in enumerate(mesh.nodes) if rank in ranks) for rank in range(mesh.world_size)]
    # Several hosts, such as containers, may share one machine. Count its processors once.
    processors = sum({facts.machine: facts.host.cores for facts in every}.values())
    own = every[mesh.rank]
    # Two hardware threads share a core, so at most half of the hardware threads measure at the same time.
    slots = max(1, own.host.cores // 2 // torch.get_num_threads())
    place = sum(facts.machine == own.machine for facts in every[: mesh.rank])
    group = place // slots if mesh.device.type == "cpu" else 0
    cells = cells_of(mesh.device)
    in_hosts, between = _schedules(mesh.nodes, every)

    def once() -> Measurements:
        rates_TC = measure_rates(mesh, cells, group, TURNS, _DEVICES * seconds)
        return Measurements(
            every,
            host_of,
            cells,
            gather_numbers(rates_TC, mesh),
            measure_paths(mesh, in_hosts, TURNS, _PATHS_IN_HOSTS * seconds) if in_hosts else None,
            measure_paths(mesh, between, TURNS, _PATHS_BETWEEN * seconds) if between else None,
        )

    before = processor_seconds()
    measured = once()
    suspicious = mesh.is_main and bool(find_outliers(measured, find_leaves(measured)[0], chance=SCREENING))
    if agreed_integer(int(suspicious), mesh):
        measured = _join_turns(measured, once())
    contention = measure_contention(mesh, processors, _CONTENTION * seconds)
    computations = measure_computations(mesh, processors, _COMPUTATIONS * seconds)
    spent_R3 = gather_numbers(processor_seconds() - before, mesh)
    collectives, wrong = measure_collectives(mesh, _COLLECTIVES * seconds) if mesh.world_size > 1 else ([], [])
    if not mesh.is_main:
        return None
    for host, share in busy_machines(spent_R3, every).items():
        complain(
            f"host {host} is busy: other programs took {share:.0%} of its processors during the probe, so its measured "
            "rates are too low. Probe again when it is idle",
            "warning",
        )
    switches, source = find_leaves(measured)
    return View(
        datetime.now(UTC).isoformat(timespec="seconds"),
        commit(),
        str(torch.__version__),
        "none" if mesh.world_size == 1 else dist.get_backend(),
        time.perf_counter() - start,
        source,
        tuple(
            replace(host, switches=path, site=site)
            for host, path, site in zip(measured.hosts, switches, measured.sites, strict=True)
        ),
        _ranks(measured, mesh.nodes),
        _links(measured),
        tuple(collectives),
        tuple(computations),
        contention,
        tuple(find_outliers(measured, switches, wrong)),
        sites_stated=any(facts.host.site for facts in every),
    )


def gather_facts(own: Facts, mesh: Mesh) -> list[Facts]:
    """Return the facts of all ranks. All ranks must call this function at the same time."""
    # Pad with spaces, because the ranks gather arrays of equal size.
    content = msgspec.json.encode(own).ljust(_FACTS_BYTES)
    rows = gather_numbers(np.frombuffer(bytearray(content), np.uint8), mesh)
    return [msgspec.json.decode(row.tobytes(), type=Facts) for row in rows]


def _schedules(nodes: Sequence[Sequence[int]], every: Sequence[Facts]) -> tuple[list[Pairs], list[Pairs]]:
    """Return the rounds of rank pairs within hosts and between hosts. A round keeps all hosts and all network cards busy.

    Between hosts, the first rank at each network card represents the card.
    """
    # All hosts have the same number of ranks, so the rounds of one host are the rounds of all.
    within = [[(ranks[a], ranks[b]) for ranks in nodes for a, b in pairs] for pairs in rounds_of_pairs(len(nodes[0]))]
    # The rounds pair neighbours in this order. Hosts with neighbouring names often share a leaf switch.
    by_name = sorted(nodes, key=lambda ranks: _natural(every[ranks[0]].host.name))
    # The last entry of a key stays in a dictionary, so iterate in reverse to keep the first rank at each card.
    at_cards = [list({every[rank].card: rank for rank in reversed(ranks)}.values())[::-1] for ranks in by_name]
    rails = list(zip(*at_cards, strict=False))
    rounds = rounds_of_pairs(len(by_name))
    return within, [[(rail[a], rail[b]) for rail in rails for a, b in pairs] for pairs in rounds]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a natural sort key, which puts node9 before node10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def _join_turns(first: Measurements, second: Measurements) -> Measurements:
    return replace(
        first,
        rates_RTC=np.concatenate([first.rates_RTC, second.rates_RTC], axis=1),
        in_hosts=first.in_hosts and first.in_hosts.joined(second.in_hosts),
        between_hosts=first.between_hosts and first.between_hosts.joined(second.between_hosts),
    )


def _ranks(measured: Measurements, nodes: Sequence[Sequence[int]]) -> tuple[Rank, ...]:
    ranks, seconds_RC = [], np.median(measured.rates_RTC, axis=1).tolist()
    for rank, (facts, host) in enumerate(zip(measured.facts, measured.host_of, strict=True)):
        cells = zip(measured.cells, seconds_RC[rank], strict=True)
        rates = [Rate(cell.quantity, cell.dtype, cell.size, seconds) for cell, seconds in cells]
        ranks.append(Rank(host, nodes[host].index(rank), facts.device, facts.device_memory, facts.card, tuple(rates)))
    return tuple(ranks)


def _links(measured: Measurements) -> tuple[Link, ...]:
    return tuple(
        Link(one, other, latency, seconds)
        for paths in measured.layers
        for one, other, latency, seconds in zip(
            paths.source_E.tolist(),
            paths.target_E.tolist(),
            np.median(paths.latency_TE, axis=0).tolist(),
            np.median(paths.seconds_per_byte_TE, axis=0).tolist(),
            strict=True,
        )
    )
