"""Compare ways to sum gradients across hosts: bytes sent, times, and the choice made at start-up.

    sudo python benchmarks/training/collectives.py [--out FILE]

Network namespaces simulate hosts that are connected by a bridge; ``tc tbf`` limits the rate of each link. Ranks communicate
over gloo. Bytes are read from the host's interface counter. Sharded strategies include the all-gather of the weights, but
not LAMB.
"""

import itertools
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import tyro
from torch import nn

from benchmarks.conditions import write_figures
from benchmarks.hosts import bridged_hosts, require_hosts, run_ranks
from bert.configuration.sections import ReduceDtype, ReductionStrategy
from bert.optimizer import FlatParameters
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.parallel.reduction.choice import measured_choice
from bert.parallel.reduction.gradients import Communicators, Reduction
from kernels import LambSegments

LAYERS = 16
MEGABYTES = 64
ROUNDS = 2
STRATEGIES: tuple[ReductionStrategy, ...] = ("flat", "hierarchical", "sharded", "sharded_world")


@dataclass(frozen=True)
class HostLayout:
    """Hosts, ranks and links of one measurement."""

    hosts: int
    local_size: int
    order: str
    """Order of ranks: "block" numbers them host by host. In "cyclic" order, neighbouring ranks are on different hosts."""
    rate: str | None
    """Rate of each host's link in the notation of ``tc``, or None for no limit."""
    reduce_dtype: ReduceDtype = "fp32"
    """Type in which gradients are sent; weights are gathered in fp32."""


def main(out: Path | None = None) -> None:
    """Print a line for each case, then the ratios. Needs root.

    Args:
        out: Write the figures here as JSON.
    """
    require_hosts()
    rates = (None, "1gbit", "300mbit")
    # In cyclic order, every hop of a ring goes from one host to another.
    cases = [HostLayout(2, 4, order, rate) for rate in rates for order in ("block", "cyclic")]
    cases += [HostLayout(2, 4, "block", rate, "bf16") for rate in rates]
    cases.append(HostLayout(4, 2, "block", None))
    figures = []
    for _, alike in itertools.groupby(cases, lambda case: (case.hosts, case.rate)):
        for figure in measure(list(alike)):
            figures.append(figure)
            print(_line(figure), flush=True)
    ratios = _ratios(figures)
    if out:
        write_figures(out, {"cases": figures, "ratios": ratios})
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")


def measure(cases: list[HostLayout]) -> list[dict[str, Any]]:
    """Run cases that share the number of hosts and the link rate, one after another in newly made namespaces."""
    figures = []
    with bridged_hosts(cases[0].hosts, cases[0].rate) as names, tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        for case in cases:
            order = [*range(case.hosts)] * case.local_size
            if case.order == "block":
                order.sort()
            run_ranks(names, order, partial(_rank, case, found), Path(folder), limit_s=300)
            figures.append(case.__dict__ | json.loads(found.read_text()))
    return figures


def _rank(case: HostLayout, found: Path) -> int:
    # Use one thread per rank, because the ranks share the cores.
    torch.set_num_threads(1)
    mesh = join_mesh("cpu")
    communicators = Communicators.create(mesh)
    # 250,000 fp32 numbers are a megabyte.
    size = MEGABYTES * 250_000 // LAYERS
    flat = _flat(size)
    reductions = {s: Reduction(flat, communicators, s, case.reduce_dtype) for s in STRATEGIES}
    figures: dict[str, Any] = {name: _reduced(mesh, flat, reduction) for name, reduction in reductions.items()}
    figures["choice"], _ = measured_choice(flat, communicators, case.reduce_dtype)
    if mesh.is_main:
        found.write_text(json.dumps(figures))
    dist.barrier()
    leave_mesh()
    return 0


def _flat(size: int) -> FlatParameters:
    weights, gradients = torch.zeros(LAYERS * size), torch.zeros(LAYERS * size)
    places = {}
    for number in range(LAYERS):
        place = slice(number * size, (number + 1) * size)
        parameter = nn.Parameter(weights[place])
        parameter.grad = gradients[place]
        places[parameter] = place
    segments = LambSegments((size,) * LAYERS, (True,) * LAYERS)
    return FlatParameters(weights, gradients, segments, weights, gradients, places)


def _reduced(mesh: Mesh, flat: FlatParameters, reduction: Reduction) -> dict[str, Any]:
    seconds, counts = [], []

    def communicate() -> None:
        reduction.finish()
        if reduction.strategy in ("sharded", "sharded_world"):
            # Sharded strategies also all-gather the weights, as training does before the next forward pass.
            for bucket in reduction.buckets:
                reduction.gather(flat.weights_N, bucket)

    # The first call is not measured, because it opens the connections.
    communicate()
    dist.barrier()
    for _ in range(ROUNDS):
        # All ranks start together, and the slowest rank determines the time.
        dist.barrier()
        begin, before = time.perf_counter(), sent_bytes()
        communicate()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        counts.append(sent_bytes() - before)
    sent = torch.zeros(mesh.world_size, dtype=torch.float64)
    sent[mesh.rank] = min(counts)  # higher counts include retransmissions
    dist.all_reduce(sent)
    reduction.close()
    return {"seconds": min(seconds), "megabytes_per_host": sent.max().item() / 1e6}


def sent_bytes() -> int:
    """Return the bytes sent by this network namespace's interface. (/sys would show the interfaces of the machine.)"""
    [line] = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.lstrip().startswith("v0:"))
    return int(line.partition(":")[2].split()[8])


def _line(figure: dict[str, Any]) -> str:
    place = f"{figure['hosts']} hosts x {figure['local_size']}, {figure['order']:<6} {figure['rate'] or 'unshaped':<9}"
    ways = (f"{s} {figure[s]['seconds']:.2f} s {figure[s]['megabytes_per_host']:.1f} MB" for s in STRATEGIES)
    return f"{place} {figure['reduce_dtype']} {', '.join(ways)}; chosen {figure['choice']}"


def _ratios(figures: list[dict[str, Any]]) -> dict[str, float]:
    ratios = {}
    for figure in figures:
        rate, dtype = figure["rate"] or "unshaped", figure["reduce_dtype"]
        place = f"{figure['hosts']}x{figure['local_size']} {figure['order']} {rate} {dtype}"
        # Each host must send at least as many bytes as in a ring all-reduce.
        bound = 2 * (figure["hosts"] - 1) / figure["hosts"] * MEGABYTES / (2 if dtype == "bf16" else 1)
        for strategy in STRATEGIES:
            ratios[f"{place}, {strategy} bytes over the bound"] = figure[strategy]["megabytes_per_host"] / bound
        flat, hierarchical = (figure[strategy]["seconds"] for strategy in ("flat", "hierarchical"))
        ratios[f"{place}, time of flat over hierarchical"] = flat / hierarchical
    return ratios


if __name__ == "__main__":
    tyro.cli(main)
