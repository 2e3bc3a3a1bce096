"""Train on hosts in the order of `cluster place`, in that of their names, and at random, over a network of two leaves.

    sudo python benchmarks/training/placed_hosts.py [--steps N] [--out FILE]

Four network namespaces stand for hosts. Two are on one bridge and two on another, a leaf each, and the link between the
leaves is a tenth as fast as the hosts' own. Names alternate between the leaves, as where hosts are numbered along the front
of racks. The probe finds the leaves by measuring; the file of `place` says the ranks. A ring over the hosts crosses between
the leaves once each way where the order follows them, and twice where it alternates. Ranks are one a host, over gloo, with
an 8 MB gradient; of each training the median interval counts.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tyro

from benchmarks.conditions import write_figures
from benchmarks.training.collectives import Case, Network, ip, on_host, why_not

HOSTS = 4
NAMES = [f"h{host}" for host in range(HOSTS)]
BETWEEN_HOSTS, BETWEEN_LEAVES = "1gbit", "100mbit"
DRAWS = 3
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


class TwoLeaves(Network):
    """The hosts with even numbers on one bridge, the others on another, and a slow link between the bridges."""

    def __init__(self) -> None:
        super().__init__(Case(HOSTS, 1, "block", BETWEEN_HOSTS, 0, 0))

    def __enter__(self) -> list[str]:
        names = super().__enter__()
        switch = ("-n", self.switch)
        try:
            ip(*switch, "link", "add", "br1", "type", "bridge")
            ip(*switch, "link", "add", "up0", "type", "veth", "peer", "name", "up1")
            for host in range(1, HOSTS, 2):
                ip(*switch, "link", "set", f"p{host}", "master", "br1")
            for leaf in range(2):
                ip(*switch, "link", "set", f"up{leaf}", "master", f"br{leaf}")
                for device in (f"up{leaf}", f"br{leaf}"):
                    ip(*switch, "link", "set", device, "up")
                shape = ("qdisc", "add", "dev", f"up{leaf}", "root", "tbf", "rate", BETWEEN_LEAVES)
                ip("netns", "exec", self.switch, "tc", *shape, "burst", "256kb", "latency", "50ms")
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
    if missing := why_not():
        print(f"error: {missing}", file=sys.stderr)
        raise SystemExit(2)
    generator = random.Random(0)
    with TwoLeaves() as namespaces, tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        _python("dataloading", "demo", "--out", str(data), "--vocab", "bert/artifacts/tiny_cpu/vocab.txt")
        cluster, hosts = Path(folder) / "cluster.json", Path(folder) / "hosts.txt"
        _on_all(namespaces, NAMES, ["cluster", "probe", "--out", str(cluster), "--seconds", "6"])
        print(_python("cluster", "place", str(cluster), "--out", str(hosts)), end="")
        orders = {"placed": hosts.read_text().split(), "by name": NAMES}
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
    """Command line of a training of so many steps, from the module on."""
    settings = MODEL | {"data.train": f"{data}/train", "data.evaluation": f"{data}/evaluation"}
    settings |= {"log.results": str(results), "training.max-samples": str(8 * steps)}
    return ["bert.train", "tiny_cpu", *(f"--{name}={value}" for name, value in settings.items())]


def median_step_seconds(results: Path) -> float:
    """Of the intervals of a training but the first."""
    (metrics,) = results.glob("*/bert/metrics_0.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return (
        statistics.median(record["step_ms"] for record in records if record["event"] == "step" and record["step"] > 2)
        / 1e3
    )


def _step_seconds(namespaces: Sequence[str], order: Sequence[str], data: Path, results: Path, steps: int) -> float:
    _on_all(namespaces, order, training(data, results, steps))
    return median_step_seconds(results)


def environment_of(rank: int, order: Sequence[str]) -> dict[str, str]:
    """What a launcher would set on the host with that place in the order."""
    first = NAMES.index(order[0]) + 1
    place = {"RANK": rank, "WORLD_SIZE": HOSTS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
    place |= {"MASTER_ADDR": f"10.77.0.{first}", "MASTER_PORT": 29600, "GLOO_SOCKET_IFNAME": "v0"}
    return {name: str(value) for name, value in place.items()}


def _on_all(namespaces: Sequence[str], order: Sequence[str], module: Sequence[str]) -> None:
    """Run a module on every host; RuntimeError unless all end with 0, or with 1, which says that a target was missed."""
    ranks = [
        subprocess.Popen(
            [*on_host(namespaces[NAMES.index(host)], host), sys.executable, "-m", *module],
            env=os.environ | environment_of(rank, order),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(order)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode not in (0, 1) for rank in ranks):
        raise RuntimeError(f"{module[0]} failed: {outputs}")


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, "-m", *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    tyro.cli(main)
