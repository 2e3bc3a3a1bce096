"""Train on hosts in the order of `cluster place`, in that of their names, and at random, over a network of two leaves.

    sudo python benchmarks/training/placed_hosts.py [--steps N] [--out FILE]

Four network namespaces stand for hosts. Two are on one bridge and two on another, a leaf each, and the link between the
leaves is a tenth as fast as the hosts' own. Names alternate between the leaves, as where hosts are numbered along the front
of racks. The probe finds the leaves by measuring; the file of `place` says the ranks. A ring over the hosts crosses between
the leaves once each way where the order follows them, and twice where it alternates. Ranks are one a host, over gloo, with
an 8 MB gradient; of each training the median interval counts.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported: of ranks that share few cores

import tyro

from benchmarks.conditions import write_figures
from benchmarks.hosts import BridgedHosts, ip, require_hosts, run_ranks, shape
from benchmarks.measured_steps import metrics_of, steady
from bert.train import main as train
from cluster.__main__ import main as cluster

HOSTS = 4
NAMES = [f"h{host}" for host in range(HOSTS)]
BETWEEN_HOSTS, BETWEEN_LEAVES = "1gbit", "100mbit"
DRAWS = 3
# Small batches of a wide model: the reduction is most of a step.
MODEL = {
    "data.initial-checkpoint": "None",
    "model.hidden-size": "256",
    "model.num-attention-heads": "4",
    "model.intermediate-size": "1024",
    "training.global-batch-size": "8",
    "evaluation.interval-samples": "8",
    "training.seed": "1",
    "log.interval-steps": "2",
}


class TwoLeaves(BridgedHosts):
    """The hosts with even numbers on one bridge, the others on another, and a slow link between the bridges."""

    def __init__(self) -> None:
        super().__init__(HOSTS, BETWEEN_HOSTS)

    def __enter__(self) -> list[str]:
        names = super().__enter__()
        switch = ("-n", self.switch)
        try:
            # A second bridge in the same namespace: both leaves are one machine's, joined by the slow cable.
            ip(*switch, "link", "add", "br1", "type", "bridge")
            ip(*switch, "link", "add", "up0", "type", "veth", "peer", "name", "up1")
            for host in range(1, HOSTS, 2):
                ip(*switch, "link", "set", f"p{host}", "master", "br1")
            for leaf in range(2):
                ip(*switch, "link", "set", f"up{leaf}", "master", f"br{leaf}")
                for device in (f"up{leaf}", f"br{leaf}"):
                    ip(*switch, "link", "set", device, "up")
                # Each end shapes what it sends: both directions are slow.
                shape(self.switch, f"up{leaf}", BETWEEN_LEAVES)
        except BaseException:
            self.__exit__()
            raise
        return names


def main(steps: int = 12, out: Path | None = None) -> None:
    """Print seconds a step by order, and ratios. Needs root.

    Args:
        steps: Of each training.
        out: Write the figures here as JSON.
    """
    require_hosts()
    generator = random.Random(0)
    with TwoLeaves() as namespaces, tempfile.TemporaryDirectory() as folder:
        # Data for all trainings are made once.
        data = Path(folder) / "data"
        _python("dataloading", "demo", "--out", str(data), "--vocab", "bert/artifacts/tiny_cpu/vocab.txt")
        view, hosts = Path(folder) / "cluster.json", Path(folder) / "hosts.txt"
        # The probe's ranks are forks, and read this command line.
        sys.argv = ["cluster", "probe", "--out", str(view), "--seconds", "6"]
        run_ranks(namespaces, range(HOSTS), cluster, Path(folder), limit_s=300)
        print(_python("cluster", "place", str(view), "--out", str(hosts)), end="")
        orders = {"placed": hosts.read_text().split(), "by name": NAMES}
        # Draws from a fixed seed, so that figures can be repeated.
        orders |= {f"random {draw}": generator.sample(NAMES, HOSTS) for draw in range(DRAWS)}
        rows = []
        for label, order in orders.items():
            seconds = _step_seconds(namespaces, order, data, Path(folder) / label, steps)
            rows.append({"label": label, "order": order, "step_seconds": seconds})
            print(f"{label:9} {' '.join(order)}: {seconds:.3f} s a step", flush=True)
    placed, by_name, *drawn = (row["step_seconds"] for row in rows)
    ratios = {
        "step by name over placed": by_name / placed,
        "step at random (mean) over placed": statistics.mean(drawn) / placed,
    }
    if out:
        write_figures(out, {"between_hosts": BETWEEN_HOSTS, "between_leaves": BETWEEN_LEAVES, "rows": rows, **ratios})
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")


def training(data: Path, results: Path, steps: int) -> list[str]:
    """Arguments of a training of so many steps."""
    settings = MODEL | {"data.train": f"{data}/train", "data.evaluation": f"{data}/evaluation"}
    settings |= {"log.results": str(results), "training.max-samples": str(8 * steps)}
    return ["tiny_cpu", *(f"--{name}={value}" for name, value in settings.items())]


def median_step_seconds(results: Path) -> float:
    """Return the median over the intervals of a training but the first."""
    return steady(metrics_of(results))["step_ms"] / 1e3


def _step_seconds(namespaces: Sequence[str], order: Sequence[str], data: Path, results: Path, steps: int) -> float:
    # A folder for each order, so that results do not mix.
    results.mkdir()
    program = partial(train, training(data, results, steps))
    # Names of hosts are their numbers in this network.
    run_ranks(namespaces, [NAMES.index(host) for host in order], program, results, limit_s=300)
    return median_step_seconds(results)


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, "-m", *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    tyro.cli(main)
