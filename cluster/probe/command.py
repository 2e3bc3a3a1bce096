"""The probe from arrival to file: measure in turns, compare, look a second time at what is suspicious, write the view."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bert.parallel.collectives import agreed_integer
from bert.parallel.launch import Launch
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from cluster.probe.arrival import meet
from cluster.probe.collectives import WrongResult, measure_collectives
from cluster.probe.computations import measure_computations, measure_contention
from cluster.probe.computing import cells_of, gather_numbers, measure_rates
from cluster.probe.findings import SCREENING, Measured, find_leaves, find_outliers, sentence
from cluster.probe.links import Paths, measure_paths
from cluster.probe.machine import Facts, facts_of
from cluster.probe.others import processor_seconds, watch_others
from cluster.probe.schedule import Pairs, rounds_of_pairs
from cluster.view import Collective, ComputationTime, Contention, Link, Rate, View, write_view
from console.program import complain, say
from console.version import commit

TURNS = 5
"""Of measuring; as many again where something is suspicious, which all count then."""

SHARES = {
    "devices": 0.25,
    "paths in hosts": 0.1,
    "paths between hosts": 0.15,
    "contention": 0.1,
    "computations": 0.2,
    "collectives": 0.2,
}
"""Of the seconds that are asked for, what each kind of measuring is to take: all of them together."""


@dataclass(frozen=True)
class _Together:
    """Measurements of all ranks at once."""

    computations: tuple[ComputationTime, ...]
    contention: Contention
    collectives: tuple[Collective, ...]
    wrong: tuple[WrongResult, ...]


def probe(
    out: Path, data: Path | None = None, seconds: float = 30.0, limit: float = 60.0, hosts: Sequence[str] = ()
) -> int:
    """Measure, write the view, and say what is slow; returns the exit status: 1 where something is.

    Args:
        data: folder of which reading is timed.
        seconds: about how long measuring may take; a second look takes as long again as devices and links took.
        limit: seconds within which all ranks must have come.
        hosts: names of the hosts in the order of nodes, to name those that do not come.

    Raises:
        ValueError: the launch does not fit, ranks do not come, or one is lost on the way.
    """
    launch = Launch.from_environment()
    # Only rank 0 writes; the others may not even have that folder.
    if launch.rank == 0 and not out.absolute().parent.is_dir():
        raise ValueError(f"--out is {out}: there is no folder {out.absolute().parent}")
    if seconds < 1 or limit < 1:
        raise ValueError(f"--seconds is {seconds:g} and --limit {limit:g}, expected at least 1 of each")
    store = meet(launch, limit, hosts)
    try:
        # A collective may wait for the slowest rank: at least a minute.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = join_mesh(device, timeout=timedelta(seconds=max(60.0, 4 * seconds)))
        view = _measure(mesh, seconds, TURNS, data)
        status = 0
        if view is not None:
            write_view(view, out)
            for line in report(view):
                say(line)
            say(out)
            status = 1 if view.outliers else 0
        # All ranks end with rank 0's status, so that any launcher sees it.
        return agreed_integer(status, mesh)
    # Such errors have many lines, of which the first says what happened.
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"rank {launch.rank}: another rank was lost, or the device failed ({reason})") from None
    finally:
        leave_mesh()
        del store  # last of all: rank 0 serves it to the others


def report(view: View) -> list[str]:
    """Lines that say what was found."""
    many = len(view.ranks)
    lines = [f"{len(view.hosts)} host(s), {many} rank(s), {view.backend}, measured in {view.seconds:.0f} s"]
    lines += [sentence(outlier) for outlier in view.outliers]
    if not view.outliers:
        lines.append("no part is slower than the others" if many > 2 else "too few parts to compare with one another")
    return lines


# Computations that need gradients enable them by themselves.
@torch.no_grad()
def _measure(mesh: Mesh, seconds: float, turns: int, data: Path | None = None) -> View | None:
    """The view, on rank 0; None on the others."""
    start = time.perf_counter()
    # Facts go to all ranks, since each computes the same schedule from them; as bytes, so that nothing is unpickled.
    facts = np.frombuffer(bytearray(facts_of(mesh).encoded()), np.uint8)
    every = [Facts.decoded(row.tobytes()) for row in gather_numbers(facts, mesh)]
    # A launch that knows no nodes is one node.
    nodes = mesh.nodes or (tuple(range(mesh.world_size)),)
    host_of = [next(host for host, ranks in enumerate(nodes) if rank in ranks) for rank in range(mesh.world_size)]
    sharers = _sharers(mesh, every)
    cells = cells_of(mesh.device, data)
    in_hosts, between = _schedules(nodes, every)
    seconds_for = {kind: share * seconds for kind, share in SHARES.items()}

    def once() -> Measured:
        rates_TC = measure_rates(mesh, cells, sharers, _slots(mesh, every), turns, seconds_for["devices"])
        return Measured(
            every,
            host_of,
            cells,
            gather_numbers(rates_TC, mesh),
            measure_paths(mesh, in_hosts, turns, seconds_for["paths in hosts"]) if in_hosts else None,
            measure_paths(mesh, between, turns, seconds_for["paths between hosts"]) if between else None,
        )

    before = processor_seconds()
    # Devices and paths; where rank 0 finds something suspicious, it has all ranks measure them once more.
    measured = once()
    suspicious = False
    if mesh.is_main:
        # Screening has a limit of its own, much lower: a second look costs time, a missed fault more.
        suspicious = bool(find_outliers(measured, find_leaves(measured)[0], chance=SCREENING))
    # Every rank takes part in this agreement, whether suspicious or not: else the others would wait for ever.
    if agreed_integer(int(suspicious), mesh):
        measured = _all_turns(measured, once())
    contention = measure_contention(mesh, _processors(every), seconds_for["contention"])
    computations = measure_computations(mesh, _processors(every), seconds_for["computations"])
    for line in watch_others(mesh, before, every):
        if mesh.is_main:
            complain(line, "warning")
    collectives: list[Collective] = []
    wrong: list[WrongResult] = []
    if mesh.world_size > 1:
        collectives, wrong = measure_collectives(mesh, seconds_for["collectives"])
    if not mesh.is_main:
        return None
    together = _Together(tuple(computations), contention, tuple(collectives), tuple(wrong))
    return _view(mesh, nodes, measured, together, time.perf_counter() - start)


def _sharers(mesh: Mesh, every: Sequence[Facts]) -> list[int]:
    """The ranks that share this one's cores, or itself alone where each has a GPU. Hosts may be parts of one machine."""
    if mesh.device.type == "cuda":
        return [mesh.rank]
    return [rank for rank, facts in enumerate(every) if facts.machine == every[mesh.rank].machine]


def _processors(every: Sequence[Facts]) -> int:
    # Each machine once, however many hosts are on it.
    return sum({facts.machine: facts.cores for facts in every}.values())


def _slots(mesh: Mesh, every: Sequence[Facts]) -> int:
    """Ranks that measure at a time: hardware threads share cores, hence half of them."""
    return max(1, every[mesh.rank].cores // 2 // torch.get_num_threads())


def _schedules(nodes: Sequence[Sequence[int]], every: Sequence[Facts]) -> tuple[list[Pairs], list[Pairs]]:
    """Rounds of pairs of ranks: within the hosts, all hosts at once; and between hosts, all network cards at once.

    Ranks that share a card would measure each other, so the first at each card stands for it.
    """
    # Hosts have equally many ranks, so one schedule of places fits all of them.
    place_rounds = rounds_of_pairs(len(nodes[0]))
    within = [[_ordered(ranks[a], ranks[b]) for ranks in nodes for a, b in pairs] for pairs in place_rounds]
    # In the order of names, which leaves follow: neighbours in it are among the pairs at every distance.
    by_name = sorted(nodes, key=lambda ranks: _natural(every[ranks[0]].host))
    # Reversed: of a card's ranks the first one stays.
    at_cards = [list({every[rank].card: rank for rank in reversed(ranks)}.values())[::-1] for ranks in by_name]
    rails = list(zip(*at_cards, strict=False))  # as many as every host has cards
    between = [
        [_ordered(rail[a], rail[b]) for rail in rails for a, b in pairs] for pairs in rounds_of_pairs(len(by_name))
    ]
    return within, between


# The lower rank first: it sends first, which both sides of a pair must agree on.
def _ordered(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _natural(name: str) -> list[tuple[int, str]]:
    """Order of names in which node9 comes before node10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def _all_turns(first: Measured, second: Measured) -> Measured:
    """Join the turns of two measurements."""

    def paths(one: Paths | None, other: Paths | None) -> Paths | None:
        if one is None or other is None:
            return None
        return replace(
            one,
            latency_TE=np.concatenate([one.latency_TE, other.latency_TE]),
            seconds_per_byte_TE=np.concatenate([one.seconds_per_byte_TE, other.seconds_per_byte_TE]),
        )

    return replace(
        first,
        rates_RTC=np.concatenate([first.rates_RTC, second.rates_RTC], axis=1),
        in_hosts=paths(first.in_hosts, second.in_hosts),
        between_hosts=paths(first.between_hosts, second.between_hosts),
    )


def _view(
    mesh: Mesh,
    nodes: Sequence[Sequence[int]],
    measured: Measured,
    together: _Together,
    seconds: float,
) -> View:
    switches, source = find_leaves(measured)
    outliers = find_outliers(measured, switches, together.wrong)
    hosts = [
        replace(measured.facts[ranks[0]].as_host(), switches=path) for ranks, path in zip(nodes, switches, strict=True)
    ]
    ranks = []
    for rank, (facts, host) in enumerate(zip(measured.facts, measured.host_of, strict=True)):
        rates = [
            Rate(cell.quantity, cell.dtype, cell.size, float(np.median(times_T)), _spread(times_T))
            for cell, times_T in zip(measured.cells, measured.rates_RTC[rank].T, strict=True)
        ]
        ranks.append(replace(facts.as_rank(host, nodes[host].index(rank)), rates=tuple(rates)))
    links = [
        Link(int(one), int(other), float(np.median(latency_T)), float(np.median(times_T)), _spread(times_T))
        for paths in (measured.in_hosts, measured.between_hosts)
        if paths is not None
        for one, other, latency_T, times_T in zip(
            paths.source_E, paths.target_E, paths.latency_TE.T, paths.seconds_per_byte_TE.T, strict=True
        )
    ]
    return View(
        datetime.now(UTC).isoformat(timespec="seconds"),
        commit(),
        torch.__version__,
        "none" if mesh.world_size == 1 else dist.get_backend(),
        seconds,
        source,
        tuple(hosts),
        tuple(ranks),
        tuple(links),
        together.collectives,
        together.computations,
        together.contention,
        tuple(outliers),
    )


def _spread(times_T: NDArray[np.float64]) -> float:
    """The relative standard deviation of repeated times, from the median absolute deviation of their logarithms."""
    # Logarithms, so that twice and half are equally far; 1.4826 as in `cluster.outliers`.
    logarithms = np.log(times_T)
    return float(1.4826 * np.median(np.abs(logarithms - np.median(logarithms))))
