"""Compare orders of hosts on a fat tree of three levels, in simulation: at random, by name, and as `cluster place` has them.

    python benchmarks/placement.py [--out FILE]

512 hosts with 8 network cards each, 16 hosts a leaf and 8 leaves a pod, at 1:1 and at 4:1. Of all of them, and of 128 hosts
out of those that other jobs have left free (half of them, at random), a ring all-reduce along the rails is slowed so many
times, and a group of four hosts, such as the stages of a pipeline, is spread over so many leaves. By name stands for a
scheduler that sorts: names follow the leaves. Means over 20 draws.
"""

import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from cluster.fat_tree import FatTree
from cluster.placement import Placing, place

DRAWS = 20
GROUP = 4


def main(out: Path | None = None) -> None:
    """Print the table.

    Args:
        out: Write the figures here as JSON.
    """
    print(f"{'tree':>5}{'hosts':>14}{'order':>10}{'ring slowed':>13}{'leaves a group':>16}")
    rows = []
    for oversubscription in (1, 4):
        # 4 x 8 x 16 = 512 hosts.
        tree = FatTree(pods=4, leaves_per_pod=8, hosts_per_leaf=16, oversubscription=oversubscription)
        # Where half of the hosts are free and half of those are taken, the choice among them counts as well.
        for nodes, free in ((512, 512), (128, 256)):
            for order in ("random", "by name", "place"):
                # A seed for each draw: all orders meet the same free hosts.
                slowed, leaves = zip(*(_drawn(tree, nodes, free, order, seed) for seed in range(DRAWS)), strict=True)
                row = {"oversubscription": oversubscription, "nodes": nodes, "free": free, "order": order}
                row |= {"ring_slowdown": statistics.mean(slowed), "leaves_a_group": statistics.mean(leaves)}
                rows.append(row)
                hosts = f"{nodes} of {free}"
                print(
                    f"{f'{oversubscription}:1':>5}{hosts:>14}{order:>10}{row['ring_slowdown']:13.2f}"
                    f"{row['leaves_a_group']:16.2f}",
                    flush=True,
                )
    if out:
        from benchmarks.conditions import write_figures  # brings in PyTorch, which a simulation does without

        write_figures(out, {"rows": rows}, ())
    print(f"ring of 512 hosts at 4:1: random {rows[6]['ring_slowdown']:.2f}, place {rows[8]['ring_slowdown']:.2f}")


def _drawn(tree: FatTree, nodes: int, free: int, order: str, seed: int) -> tuple[float, float]:
    """Slowdown of the ring, and leaves a group, in one order of hosts that are free."""
    paths, generator = tree.paths(), random.Random(seed)
    hosts = [paths[host] for host in generator.sample(range(len(paths)), free)]
    if order == "by name":
        hosts = sorted(hosts)[:nodes]
    elif order == "place":
        hosts = [hosts[host] for host in place(hosts, Placing(nodes, GROUP))]
    # Leaves of consecutive hosts, as a group of the ring has them.
    groups = [set(hosts[start : start + GROUP]) for start in range(0, nodes, GROUP)]
    return tree.ring_slowdown(hosts[:nodes]), statistics.mean(map(len, groups))


if __name__ == "__main__":
    tyro.cli(main)
