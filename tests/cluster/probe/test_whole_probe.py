"""A whole probe by ranks of a real gloo group. Clocks, facts and loads are synthetic, so that all results are exact."""

import contextlib
import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cluster.probe import collectives, command, computations, computing, links
from cluster.probe.machine import Facts
from cluster.view import ComputationTime, Contention, Host, Link, Operation, Outlier, Rank, Rate, read_view
from tests.cluster.probe.clocks import clock
from tests.cluster.test_view import made_up
from tests.forks import on_forks

STEPS = (1 / 32, 1 / 32, 1 / 32, 1 / 16)
"""Step of each rank's clock. Rank 3 seems to take twice as long for everything."""
SITES = (("h10", "a", "s0"), ("h9", "b", "s1"))
HOSTS = tuple(Host(name, 2, 1 << 33, ("v0",), ("top", leaf), site) for name, leaf, site in SITES)
FACTS = [Facts(host.name, host, "CPU", 1 << 32, "v0") for host in HOSTS for _ in range(2)]


def probe(rank: int, out: Path, patch: pytest.MonkeyPatch) -> tuple[int, list[str], list[str], list[Any], list[Any]]:
    """Run a probe on a rank, and return its status, output and errors.

    Also return the sizes of the measurements that were searched for outliers, and the numeric arguments of each
    measurement. There is time for all turns of the paths between hosts, and only for three turns within hosts.
    """
    shared = clock(STEPS[rank])
    for module in (command, computing, computations, collectives, links):
        patch.setattr(module, "time", shared if module in (computing, computations) else clock(STEPS[rank]))
    patch.setitem(links._LARGEST_BYTES, "cpu", 2**20)
    patch.setattr(command, "_PATHS_BETWEEN", 20.0)
    loads = iter(([0.0, 0.0, 0.0], [10.0, 10.0, 2.0 + rank]))
    patch.setattr(command, "processor_seconds", lambda: np.array(next(loads)))
    patch.setattr(command, "facts_of", lambda _: FACTS[rank])
    patch.setattr(
        computations, "trials_of", lambda _: [computations.ComputationTrial("gelu", (1.0, 8.0), list, times=2)]
    )
    all_reduce, search, searched = dist.all_reduce, command.find_outliers, []

    def wrong(tensor: torch.Tensor, *arguments: Any, **named: Any) -> None:
        all_reduce(tensor, *arguments, **named)
        if rank == 1 and tensor.nbytes == 2**20 and named["group"].size() == 4:
            tensor[:7] += 1

    def find_outliers(measured: Any, *arguments: Any, **named: Any) -> list[Outlier]:
        searched.append((measured.rates_RTC.shape, *(len(paths.latency_TE) for paths in measured.layers)))
        return search(measured, *arguments, **named)

    called: list[list[Any]] = []

    def record(name: str) -> None:
        real = getattr(command, name)

        def measure(*given: Any) -> Any:
            called.append([name, *(each for each in given if isinstance(each, int | float))])
            return real(*given)

        patch.setattr(command, name, measure)

    for name in ("rates", "paths", "contention", "computations", "collectives"):
        record(f"measure_{name}")
    patch.setattr(dist, "all_reduce", wrong)
    patch.setattr(command, "find_outliers", find_outliers)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = command.probe(out, seconds=2.0, limit=60.0)
    return status, said.getvalue().splitlines(), errors.getvalue().splitlines(), searched, called


@pytest.mark.slow
def test_a_probe_of_four_ranks_writes_exact_times_and_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cluster.json"
    main, *others = on_forks(["h10", "h10", "h9", "h9"], lambda rank: probe(rank, out, monkeypatch))
    view, per_byte = read_view(out), [1 / 32 / (0.75 * 2**20)] * 3 + [1 / 16 / (0.75 * 2**18)]
    # A rank's step has 28 TFLOP, LAMB's 30 bytes for each of 336.2 million weights, and a ring of two hosts.
    product, copy, ring = 28e12 / (2 * 512**3 * 32), 30 * 336.2e6 / (2 * 2**25 * 32), 4 * 336.2e6 * per_byte[0]
    share, path = product / (product + copy + ring), 7 * ring / (product + copy + ring)
    found = ["rank 1 on host h10 got 7 wrong elements from all-reduce (world)", "rank 3 on host h9"]
    # Rank 3 times shorter messages by a slower clock, so they seem eight times as slow. A rank half as fast explains less.
    found.append("path from rank 2 on host h9 to rank 3 on host h9")
    assert view.outliers == (
        Outlier(found[0], "wrong result", 0.0, 0.0, 0.0, (1,)),
        Outlier(found[1], "product fp32 512^3", 2.0, 1e6, pytest.approx(share), (3,)),  # type: ignore[arg-type]
        Outlier(found[2], "bandwidth", pytest.approx(8), 1e6, pytest.approx(path), (2, 3)),  # type: ignore[arg-type]
    )
    called = []
    for rank in range(4):  # the two ranks of a host measure in different groups, in five turns
        parts = [["rates", rank % 2, 5, 0.5], ["paths", 5, 0.2], ["paths", 5, 40.0]] * 2
        parts += [["contention", 4, 0.2], ["computations", 4, 0.4], ["collectives", 0.4]]
        called.append([[f"measure_{name}", *numbers] for name, *numbers in parts])
    slower = "time 100 % above the others (more than 999 deviations"
    said = [
        "2 hosts, 4 ranks, gloo, measured in 0 s",
        f"BROKEN  {found[0]}",
        f"SLOW  {found[1]}: product fp32 512^3, {slower}, {100 * share:.1f} % of a step)",
        f"SLOW  {found[2]}: bandwidth, {slower.replace('100', '700')}, {100 * path:.1f} % of a step)",
        "2 sites as stated: s0 (h10 (!)), s1 (h9 (!)); 25.2 MB/s between them",
        str(out),
    ]
    took = "other programs took 50% of its processors during the probe"
    warning = f"warning: host h10 is busy: {took}, so its measured rates are too low. Probe again when it is idle"
    assert main == (1, said, [warning], [((4, 5, 2), 5, 3), ((4, 10, 2), 10, 6)], called[0])
    assert others == [(1, [], [], [], called[rank]) for rank in (1, 2, 3)]
    assert (view.backend, view.seconds, view.switches_from, view.sites_stated) == ("gloo", 1 / 32, "slurm", True)
    assert view.hosts == HOSTS
    for place, (rank, step) in enumerate(zip(view.ranks, STEPS, strict=True)):
        rates = (Rate("product", "fp32", 512, step), Rate("copy", "fp32", 2**25, step))
        assert rank == Rank(place // 2, place % 2, "CPU", 1 << 32, "v0", rates)
    # The host h9 precedes h10. The first rank of a pair measures the latency, and the receiver the rate.
    pairs = [(2, 0), (0, 2), (0, 1), (1, 0), (2, 3), (3, 2)]
    assert view.links == tuple(Link(one, other, 1 / 64, per_byte[other]) for one, other in pairs)
    kinds = [(each.operation, each.scope, each.ranks) for each in view.collectives]
    scopes = ((scope, ranks) for scope, ranks in (("world", 4), ("node", 2), ("rail", 2)))
    assert kinds == [(operation, *scope) for scope, operation in itertools.product(scopes, get_args(Operation))]
    for each in view.collectives:
        np.testing.assert_allclose(each.points, [(size, 1 / 16, 8 * sum(STEPS)) for size in (2**16, 2**18, 2**20)])
    assert view.computations == (ComputationTime("gelu", (1.0, 8.0), sum(STEPS) / 4 / 2),)
    # A window spans three steps of a rank's clock, and work that is done once spans one step.
    assert view.contention == Contention(4, 1, 1 / 32, 3 * sum(STEPS) / 4, sum(STEPS) / 4, 1 / 16)


def test_a_probe_prints_its_result_or_raises_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cluster.json"
    for hosts, said in ((2, "too few parts to compare"), (3, "no part is slower than the others")):
        view = replace(made_up(hosts, 1), outliers=())
        monkeypatch.setattr(command, "_measure", lambda *_, view=view: view)
        assert command.probe(out, seconds=1.0, limit=1.0) == 0
        lines = [f"{hosts} hosts, {hosts} ranks, gloo, measured in 12 s", said, str(out)]
        assert (capsys.readouterr().out.splitlines(), read_view(out)) == (lines, view)

    def lost(*_: object) -> None:
        raise RuntimeError("c" * 201 + "\nand more")

    monkeypatch.setattr(command, "_measure", lost)
    said = r"^rank 0: another rank was lost, or the device failed \(c{200}\): read the other"
    with pytest.raises(ValueError, match=said):
        command.probe(out, seconds=1.0, limit=1.0)
    for seconds, limit in ((0.99, 60.0), (60.0, 0.99)):
        with pytest.raises(ValueError, match=f"--seconds is {seconds:g} and --limit is {limit:g}, expected at least 1"):
            command.probe(out, seconds, limit)
