"""Ways to sum a gradient between hosts: bytes on the wire, times, the choice at start-up, and overlap with backward.

    sudo python benchmarks/training/collectives.py [--quick] [--out FILE]

Network namespaces with host names of their own stand for hosts, joined by a bridge; ``tc tbf`` shapes what each sends. Ranks
talk over gloo. Bytes are those that the interface counted. Sharded ways count the weights that are gathered, not LAMB.

The overlap figures are of a step that computes as long as it communicates. Once the computation is a wait: as that of an
accelerator it takes no core from the communication. Once it is matrix products, one thread a rank, one rank a host, on the
cores that gloo's threads need as well; what they slow it down by counts as exposed.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from benchmarks.conditions import write_figures
from benchmarks.hosts import BridgedHosts, block, require_hosts, run_ranks
from bert.configuration.sections import ReduceDtype, ReductionStrategy
from bert.optimizer import FlatParameters
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.parallel.reduction.choice import measured_choice
from bert.parallel.reduction.gradients import Communicators, Reduction
from kernels import LambSegments

LAYERS = 16
STRATEGIES: tuple[ReductionStrategy, ...] = ("flat", "hierarchical", "sharded", "sharded_world")


@dataclass(frozen=True)
class HostLayout:
    """Hosts, ranks and links of one measurement."""

    hosts: int
    local_size: int
    order: str
    rate: str | None
    """Of each host's link, as ``tc`` writes it; None: not shaped."""
    megabytes: int
    rounds: int
    computation: Literal["", "wait", "products"] = ""
    """Of the step whose exposed communication is measured, if that is what is measured."""
    reduce_dtype: ReduceDtype = "fp32"
    """In which gradients travel; weights that are gathered travel in fp32."""


def main(quick: bool = False, out: Path | None = None) -> None:
    """Print a line a case, and last the ratios. Needs root.

    Args:
        quick: Small messages, unshaped links and few rounds: whether it works, and bytes.
        out: Write the figures here as JSON.
    """
    require_hosts()
    if quick:
        cases = [HostLayout(2, 2, "block", None, 4, 2), HostLayout(2, 2, "cyclic", None, 4, 2)]
        cases += [
            HostLayout(2, 2, "block", None, 4, 2, reduce_dtype="bf16"),
            HostLayout(2, 1, "block", "300mbit", 4, 1, "products"),
        ]
    else:
        # Unshaped and at two rates, in block and in cyclic order, which makes every hop of a ring go between hosts.
        cases = [HostLayout(2, 4, o, r, 64, 2) for r in (None, "1gbit", "300mbit") for o in ("block", "cyclic")]
        cases += [HostLayout(2, 4, "block", rate, 64, 2, reduce_dtype="bf16") for rate in (None, "1gbit", "300mbit")]
        cases += [HostLayout(4, 2, "block", None, 64, 2), HostLayout(2, 2, "block", "300mbit", 64, 2, "wait")]
        cases += [HostLayout(2, 1, "block", rate, 64, 3, "products") for rate in ("300mbit", "1gbit")]
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
    """Run cases of as many hosts and the same links one after another, on namespaces of their own."""
    figures = []
    with BridgedHosts(cases[0].hosts, cases[0].rate) as names, tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        for case in cases:
            order = block(case.hosts, case.local_size)
            if case.order == "cyclic":
                # Cyclic: neighbouring ranks are on different hosts, as some launchers place them.
                order = [*range(case.hosts)] * case.local_size
            run_ranks(names, order, partial(_rank, case, found), Path(folder), limit_s=300)
            figures.append(case.__dict__ | json.loads(found.read_text()))
    return figures


class _Layer(torch.autograd.Function):
    """Layer that hands its input on; its backward computes and gives the weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, compute: Callable[[], None]) -> Tensor:
        ctx.weight, ctx.compute = weight, compute
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.compute()
        return gradients[0], torch.ones(()).expand_as(ctx.weight), None


def _rank(case: HostLayout, found: Path) -> int:
    # Ranks share the cores.
    torch.set_num_threads(1)
    mesh = join_mesh("cpu")
    communicators = Communicators.create(mesh)
    # 250,000 fp32 numbers are a megabyte.
    size = case.megabytes * 250_000 // LAYERS
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(LAYERS))
    flat = _flat(model, size)
    figures: dict[str, Any]
    if case.computation:
        figures = _exposed(case, model, flat, communicators)
    else:
        reductions = {s: Reduction(flat, communicators, s, case.reduce_dtype) for s in STRATEGIES}
        figures = {strategy: _reduced(case, mesh, flat, reduction) for strategy, reduction in reductions.items()}
        choice = measured_choice(flat, communicators, rounds=2, reduce_dtype=case.reduce_dtype)
        figures["choice"] = str(choice.way)
    if mesh.is_main:
        found.write_text(json.dumps(figures))
    dist.barrier()
    leave_mesh()
    return 0


def _flat(model: nn.ParameterList, size: int) -> FlatParameters:
    weights, gradients = torch.zeros(LAYERS * size), torch.zeros(LAYERS * size)
    places = {parameter: slice(number * size, (number + 1) * size) for number, parameter in enumerate(model)}
    for parameter, place in places.items():
        parameter.data, parameter.grad = weights[place], gradients[place]
    segments = LambSegments((size,) * LAYERS, (True,) * LAYERS)
    return FlatParameters(weights, gradients, segments, weights, gradients, places)


def _reduced(case: HostLayout, mesh: Mesh, flat: FlatParameters, reduction: Reduction) -> dict[str, Any]:
    seconds, counts = [], []

    def communicate() -> None:
        reduction.finish()
        if reduction.strategy in ("sharded", "sharded_world"):
            # Sharded ways owe the weights, which training gathers before the next forward pass.
            for bucket in reduction.buckets:
                reduction.gather(flat.weights_N, bucket)

    # Once unmeasured: connections are made at the first use.
    communicate()
    dist.barrier()
    for _ in range(case.rounds):
        # All begin together, and the end is that of the slowest.
        dist.barrier()
        begin, before = time.perf_counter(), sent_bytes()
        communicate()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        counts.append(sent_bytes() - before)
    sent = torch.zeros(mesh.world_size, dtype=torch.float64)
    sent[mesh.rank] = min(counts)  # more is what a busy host had to send twice
    dist.all_reduce(sent)
    reduction.close()
    return {"seconds": min(seconds), "megabytes_per_host": sent.max().item() / 1e6}


def sent_bytes() -> int:
    """Return the bytes that this host's interface has sent so far; /sys would be that of the machine."""
    [line] = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.lstrip().startswith("v0:"))
    return int(line.partition(":")[2].split()[8])


def _exposed(
    case: HostLayout, model: nn.ParameterList, flat: FlatParameters, communicators: Communicators
) -> dict[str, Any]:
    """Seconds of a step beyond its computation alone, which is made as long as its communication alone."""
    # Small buckets, so that reduction begins early in the backward pass.
    reduction = Reduction(flat, communicators, "hierarchical", bucket_bytes=4_000_000)

    def step(compute: Callable[[], None], reduced: bool = True, overlapped: bool = False) -> float:
        dist.barrier()
        begin = time.perf_counter()
        x = torch.zeros(1, requires_grad=True)
        for parameter in model:
            x = _Layer.apply(x, parameter, compute)
        if overlapped:
            with reduction.overlapped():
                x.sum().backward()
        else:
            x.sum().backward()
        if reduced:
            reduction.finish()
        dist.barrier()
        seconds = time.perf_counter() - begin
        # The next step's gradients must not be added to these.
        flat.gradients_N.zero_()
        return seconds

    def slowest(*steps: Callable[[], float]) -> list[float]:
        """The best round of each kind of step, on the rank where it is longest; rounds alternate."""
        rounds = [[one() for one in steps] for _ in range(case.rounds)]
        seconds = torch.tensor(rounds, dtype=torch.float64).amin(0)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.tolist()

    # Connections are made, and memory is allocated.
    step(_nothing)
    communication = slowest(lambda: step(_nothing))[0]
    compute = _computation(case.computation, communication / LAYERS)
    alone, off, on = slowest(
        lambda: step(compute, reduced=False), lambda: step(compute), lambda: step(compute, overlapped=True)
    )
    return {
        "communication_seconds": communication,
        "computation_seconds": alone,
        "exposed_off": off - alone,
        "exposed_on": on - alone,
    }


def _nothing() -> None:
    pass


def _computation(kind: str, seconds: float) -> Callable[[], None]:
    """Build a function that takes about ``seconds``, on every rank at once."""
    if kind == "wait":
        return lambda: time.sleep(seconds)
    one, other = torch.randn(2, 256, 256)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < 0.5:
        torch.mm(one, other)
        count += 1
    # Ranks that got more of the cores while counting would compute for longer.
    counts = torch.tensor([max(1, round(count * seconds / 0.5))])
    dist.all_reduce(counts, dist.ReduceOp.MIN)

    def products() -> None:
        for _ in range(int(counts)):
            torch.mm(one, other)

    return products


def _line(figure: dict[str, Any]) -> str:
    place = (
        f"{figure['hosts']} hosts x {figure['local_size']}, {figure['order']:<6} {figure['rate'] or 'unshaped':<9} "
        f"{figure['reduce_dtype']}"
    )
    if figure["computation"]:
        off, on, kind = figure["exposed_off"], figure["exposed_on"], figure["computation"]
        return f"{place} {kind}: exposed communication {off:.2f} s without overlap, {on:.2f} s with"
    ways = (f"{s} {figure[s]['seconds']:.2f} s {figure[s]['megabytes_per_host']:.1f} MB" for s in STRATEGIES)
    return f"{place} {', '.join(ways)}; chosen {figure['choice']}"


def _ratios(figures: list[dict[str, Any]]) -> dict[str, float]:
    ratios = {}
    for figure in figures:
        rate, dtype = figure["rate"] or "unshaped", figure["reduce_dtype"]
        place = f"{figure['hosts']}x{figure['local_size']} {figure['order']} {rate} {dtype}"
        if figure["computation"]:
            name = f"{place}, {figure['computation']}, exposed communication with overlap over without"
            ratios[name] = figure["exposed_on"] / figure["exposed_off"]
            continue
        # What a host must send at least: as much as each of a ring of hosts does.
        bound = 2 * (figure["hosts"] - 1) / figure["hosts"] * figure["megabytes"] / (2 if dtype == "bf16" else 1)
        for strategy in STRATEGIES:
            ratios[f"{place}, {strategy} bytes over the bound"] = figure[strategy]["megabytes_per_host"] / bound
        ratios[f"{place}, time of flat over hierarchical"] = (
            figure["flat"]["seconds"] / figure["hierarchical"]["seconds"]
        )
    return ratios


if __name__ == "__main__":
    tyro.cli(main)
