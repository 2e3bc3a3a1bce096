"""Compare ways to train ``tiny_cpu`` on two sites with a slow link between them, by the time to its target.

    sudo python benchmarks/training/sites.py [--parts samples links checks] [--out FILE]

Hosts are network namespaces with one rank each. All ranks of a site share one core, so that one site alone has as much of
the machine as each of two sites. The link has the given rate and no added latency. The ways are:

- alone: train on one site only, which needs no link
- flat fp32, hierarchical bf16: all ranks take every step together; the gradient reduction has these settings
- sites 8, 32, 128: each site takes this number of steps (training.site_steps) between two exchanges

With every way, training evaluates after every 128 steps. If all ranks take every step together, a step takes seconds on a
slow link, but the number of samples to the target does not depend on the link. Therefore the part "samples" trains to the
target without a rate limit, with one host a site, and the part "links" measures the times of a step and of an evaluation
on each link. The time to the target is computed from both parts. One site alone needs as many samples as "flat fp32", up to
rounding errors. To check the computed time, the part "checks" trains "sites 32" to the target on each link. Other programs
may run at the same time only during "samples".
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# PyTorch reads this when it is imported. Each rank gets one thread, because ranks share cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tyro

from benchmarks.conditions import write_figures
from benchmarks.hosts import bridged_hosts, run_ranks, sent_between_sites, why_not
from benchmarks.inputs import flags
from bert.configuration.recipes import tiny_cpu
from bert.parallel.environment import SITE
from bert.train import main as train
from compliance.log.metrics import Metrics, read_metrics
from dataloading.preparation.demo import write_demo

Row = dict[str, Any]

SYNCHRONOUS = {"flat fp32": ("flat", "fp32"), "hierarchical bf16": ("hierarchical", "bf16")}
"""Ways in which all ranks take every step together. Each has a reduction and a type for the reduced gradients."""
APART = ("sites 8", "sites 32", "sites 128")
STEPS = 128
"""Number of steps between evaluations, a multiple of all numbers of site steps."""
CHECKED = "sites 32"
HOSTS = (1, 2)
"""Numbers of hosts per site, which are measured one after another."""
RATES = ("20mbit", "200mbit")
"""Rates of the link, as for ``tc tbf``."""
SEEDS = range(1, 6)
PARTS = "samples", "links", "checks"
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Cluster:
    """Where trainings run: ``sites`` sites of ``hosts`` hosts."""

    folder: Path
    sites: int
    hosts: int
    rate: str | None = None

    def train(self, way: str, seed: int, **settings: object) -> tuple[Metrics, int]:
        """Train with these settings, and return the metrics and the bytes that sites sent to each other."""
        recipe = tiny_cpu()
        given: dict[str, object] = {f"data.{part}": self.folder / "data" / part for part in ("train", "evaluation")}
        given |= {"log.results": self.folder, "training.seed": seed}
        given |= {"evaluation.interval-samples": STEPS * recipe.training.global_batch_size}
        if way in SYNCHRONOUS:
            given |= dict(zip(("training.reduction", "training.reduce-dtype"), SYNCHRONOUS[way], strict=True))
        elif way != "alone":
            given |= {"training.site-steps": period(way)}
        arguments = ["tiny_cpu", *flags(given | settings)]
        cores = sorted(os.sched_getaffinity(0))

        def rank() -> int:
            site = int(os.environ["RANK"]) // self.hosts
            os.environ[SITE] = f"site{site}"
            os.sched_setaffinity(0, {cores[site]})
            return train(arguments)

        hosts = self.sites * self.hosts
        with bridged_hosts(hosts, self.rate, self.sites) as names:
            run_ranks(names, 1, rank, self.folder, _LIMIT_S)
            sent = sent_between_sites(names)
        newest = max(self.folder.glob("tiny_cpu/bert/metrics_*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        return read_metrics(newest), sent

    def to_target(self, way: str, seed: int) -> Row:
        """Train to the target, and return the samples and seconds that it took, both None if it was missed."""
        metrics, _ = self.train(way, seed)
        end = metrics.end
        if end is None or not metrics.evaluations:
            raise SystemExit(f"error: {way}, seed {seed}: the metrics lack evaluations or the end; see {self.folder}")
        reached = end.status == "success"
        return {
            "samples": end.samples if reached else None,
            "seconds": end.time_s if reached else None,
            "accuracies": [round(each.masked_lm_accuracy, 4) for each in metrics.evaluations],
        }

    def times(self, way: str) -> Row:
        """Return the times of steps and of an evaluation on this link, and the bytes between sites in a step.

        The times are from the second half of the steps, in which at least one exchange of the sites is applied.
        ``link_bytes`` come from the kernel's counters. They include both directions and packet headers, but not start-up.
        ``site_bytes`` come from the ranks' own records.
        """
        half = max(32, period(way))
        samples = half * tiny_cpu().training.global_batch_size
        lengths = {"evaluation.interval-samples": samples, "log.interval-steps": half}
        found, sent = zip(
            *(self.train(way, 1, **lengths, **{"training.max-samples": n * samples}) for n in (1, 2)), strict=True
        )
        step, evaluation = found[1].steps[-1], found[1].evaluations[-1]
        return {
            "step_ms": step.step_ms,
            "site_wait_ms": step.site_wait_ms,
            "evaluation_s": evaluation.eval_s,
            "link_bytes": (sent[1] - sent[0]) / half,
            "site_bytes": step.site_bytes / half,
        }


def period(way: str) -> int:
    """Return the number of steps between two exchanges of the sites; 1 if all ranks take every step together."""
    return int(way.removeprefix("sites ")) if way.startswith("sites ") else 1


def measured(folder: Path, parts: Collection[str]) -> Iterator[tuple[str, Row]]:
    """Run the trainings of these parts, and yield the part and the figures of each training."""
    if "links" in parts:
        for hosts in HOSTS:
            for way, rate in [("alone", None), *product((*SYNCHRONOUS, *APART), RATES)]:
                cluster = Cluster(folder, 1 if rate is None else 2, hosts, rate)
                yield "links", {"hosts": hosts, "way": way, "rate": rate, **cluster.times(way)}
    if "checks" in parts:
        for hosts, rate in product(HOSTS, RATES):
            found = Cluster(folder, 2, hosts, rate).to_target(CHECKED, 1)
            yield "checks", {"hosts": hosts, "way": CHECKED, "rate": rate, "seed": 1, **found}
    if "samples" in parts:
        for seed, way in product(SEEDS, (*SYNCHRONOUS, *APART)):
            found = Cluster(folder, 2, 1).to_target(way, seed)
            yield "samples", {"way": way, "seed": seed, **found, "seconds": None}


def summary(figures: dict[str, list[Row]]) -> list[Row]:
    """Return each way's median time to the target, and its ratios to "alone" and to the faster way in `SYNCHRONOUS`."""
    rows: list[Row] = []
    for link in figures["links"]:
        way = "flat fp32" if link["way"] == "alone" else link["way"]
        group = [each for each in figures["samples"] if each["way"] == way]
        reached = [each["samples"] for each in group if each["samples"] is not None]
        row: Row = {name: link[name] for name in ("hosts", "way", "rate")} | {
            "seeds": len(group),
            "reached": len(reached),
        }
        if reached:
            samples = statistics.median(reached)
            steps = samples / tiny_cpu().training.global_batch_size
            seconds = steps * link["step_ms"] / 1000 + steps / STEPS * link["evaluation_s"]
            row |= {"samples": samples, "seconds": round(seconds, 1), "link_bytes": round(link["link_bytes"])}
        rows.append(row)
    for row in rows:
        others = [each for each in rows if each["hosts"] == row["hosts"] and each["rate"] in (None, row["rate"])]
        alone = [each for each in others if each["way"] == "alone" and "seconds" in each]
        together = [each for each in others if each["way"] in SYNCHRONOUS and "seconds" in each]
        if "seconds" in row and alone and together:
            best = min(together, key=lambda each: each["seconds"])
            row["times_as_fast_as_alone"] = round(alone[0]["seconds"] / row["seconds"], 2)
            row["times_as_fast_as_synchronous"] = round(best["seconds"] / row["seconds"], 2)
            row["samples_of_synchronous"] = round(row["samples"] / best["samples"], 3)
            row["times_fewer_bytes"] = round(best["link_bytes"] / row["link_bytes"], 1) if row["rate"] else None
    return rows


def main(parts: tuple[str, ...] = PARTS, out: Path | None = None) -> None:
    """Print the figures of each training, and the times to the target.

    Args:
        parts: Parts of the benchmark: samples, links, checks.
        out: JSON file for the figures. Figures of other parts in this file are kept.
    """
    if missing := why_not():
        raise ValueError(missing)
    if len(os.sched_getaffinity(0)) < 2:
        raise ValueError("this process may use only one core; let it use at least two, one for each site")
    if unknown := set(parts) - {*PARTS}:
        raise ValueError(f"--parts: there is no part {', '.join(sorted(unknown))}; use some of {', '.join(PARTS)}")
    old = json.loads(out.read_text()) if out is not None and out.exists() else {}
    figures: dict[str, list[Row]] = {part: [] if part in parts else old.get(part, []) for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        write_demo(Path(folder, "data"), tiny_cpu().data.vocab)
        for part, row in measured(Path(folder), parts):
            print(part, *(f"{name} {value}" for name, value in row.items()), flush=True)
            figures[part].append(row)
            if out is not None:  # write after each training, so that nothing is lost if a later one fails
                write_figures(out, figures | {"summary": summary(figures)})
    for row in summary(figures):
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
