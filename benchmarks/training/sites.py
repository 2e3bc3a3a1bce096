"""Compare ways to train ``tiny_cpu`` on two sites with a slow link between them, by the time to its target.

    sudo python benchmarks/training/sites.py [--hosts 1 2] [--rates 20mbit 200mbit] [--seeds 1 2 3 4 5] [--out FILE]

Hosts are network namespaces with one rank each. All ranks of a site share one core, so that one site alone has as much of
the machine as each of two sites. Each site's uplink has the given rate and no added latency. All ways evaluate after every
128 steps.

- alone: one site with all hosts of its own, which needs no link
- flat fp32, hierarchical bf16: all ranks take every step together, with these settings of the reduction
- sites 8, 32, 128: training.site_steps

Times of "alone" and of sites are measured in full runs. With the other ways, a step on a slow link takes seconds, but the
number of samples does not depend on the link. Full runs without a limit of rate therefore give the number of steps and
evaluations, a short run on each link gives the time of each, and the time to the target is computed from them.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before PyTorch is imported, because ranks share few cores

import tyro

from benchmarks.conditions import write_figures
from benchmarks.hosts import bridged_hosts, run_ranks, sent_between_sites, why_not
from benchmarks.inputs import flags
from bert.configuration.recipes import tiny_cpu
from bert.parallel.environment import SITE
from bert.train import main as train
from compliance.log.records import Metrics, read_metrics
from dataloading.preparation.demo import write_demo

SYNCHRONOUS = {"flat fp32": ("flat", "fp32"), "hierarchical bf16": ("hierarchical", "bf16")}
"""Reduction and type of the gradients of each way in which all ranks take every step together."""
STEPS = 128
"""Number of steps between evaluations, which all numbers of site steps divide."""
TIMED_STEPS, INTERVAL = 60, 5
"""Steps of a run that measures the time of a step, and steps of each of its records. The first record does not count."""
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Row:
    """Figures of one training. Bytes are sent between sites in a step, both directions together."""

    hosts: int
    """Number of hosts of each site."""
    way: str
    rate: str | None
    """Rate of each site's uplink; None for one site alone."""
    seed: int
    samples: int | None
    """Samples until the target, or None if the training missed it."""
    seconds: float | None
    """Time to the target with all evaluations, measured in this training or computed."""
    is_computed: bool
    steps: int
    step_ms: float
    evaluation_s: float
    accuracy: float
    site_wait_ms: float
    link_bytes: float
    """Bytes that the uplinks sent in the whole run with its start, with the headers of packets, divided by the steps."""
    site_bytes: float
    """Bytes that the ranks count in their metrics; 0 if they take every step together."""

    @property
    def key(self) -> tuple[object, ...]:
        return self.hosts, self.way, self.rate, self.seed


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
            given |= {"training.site-steps": way.split()[1]}
        arguments = ["tiny_cpu", *flags(given | settings)]
        cores = sorted(os.sched_getaffinity(0))

        def rank() -> int:
            site = int(os.environ["RANK"]) // self.hosts
            os.environ[SITE] = f"site{site}"
            os.sched_setaffinity(0, {cores[site]})
            return train(arguments)

        hosts = self.sites * self.hosts
        with bridged_hosts(hosts, self.rate, self.sites) as names:
            run_ranks(names, range(hosts), rank, self.folder, _LIMIT_S)
            sent = sent_between_sites(names)
        newest = max(self.folder.glob("tiny_cpu/bert/metrics_*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        return read_metrics(newest), sent

    def full(self, way: str, seed: int) -> Row:
        """Return the figures of a training until the target."""
        metrics, sent = self.train(way, seed)
        steps, end = metrics.steps, metrics.end
        if end is None or not metrics.evaluations:
            raise SystemExit(f"error: {way}, seed {seed}: the metrics have no end, see {self.folder}")
        count, reached = steps[-1].step, end.status == "success"
        return Row(
            self.hosts,
            way,
            self.rate,
            seed,
            end.samples if reached else None,
            end.time_s if reached else None,
            False,
            count,
            statistics.median(each.step_ms for each in steps),
            statistics.median(each.eval_s for each in metrics.evaluations),
            end.masked_lm_accuracy,
            statistics.mean(each.site_wait_ms for each in steps),
            sent / count,
            sum(each.site_bytes for each in steps) / count,
        )

    def times(self, way: str) -> tuple[float, float]:
        """Return the median milliseconds of a step, and the seconds of an evaluation, in a short run on this link."""
        samples = TIMED_STEPS * tiny_cpu().training.global_batch_size
        lengths = {"training.max-samples": samples, "evaluation.interval-samples": samples}
        metrics, _ = self.train(way, 1, **lengths, **{"log.interval-steps": INTERVAL})
        return statistics.median(each.step_ms for each in metrics.steps[1:]), metrics.evaluations[-1].eval_s


def trainings(
    folder: Path, hosts: int, rates: Sequence[str], ways: Sequence[str], seeds: Sequence[int]
) -> Iterable[Row]:
    """Train in all ways, and yield the figures of each training and link."""
    for way in ways:
        if way in SYNCHRONOUS:
            found = {rate: Cluster(folder, 2, hosts, rate).times(way) for rate in rates}
            for seed in seeds:
                row = Cluster(folder, 2, hosts).full(way, seed)
                yield row
                for rate, (step_ms, evaluation_s) in found.items():
                    computed = replace(row, rate=rate, is_computed=True, step_ms=step_ms, evaluation_s=evaluation_s)
                    if row.samples is not None:
                        evaluations = row.steps // STEPS
                        computed = replace(computed, seconds=row.steps * step_ms / 1000 + evaluations * evaluation_s)
                    yield computed
            continue
        for seed in seeds:
            if way == "alone":
                yield Cluster(folder, 1, hosts).full(way, seed)
            else:
                yield from (Cluster(folder, 2, hosts, rate).full(way, seed) for rate in rates)


def main(
    hosts: tuple[int, ...] = (1,),
    rates: tuple[str, ...] = ("20mbit", "200mbit"),
    site_steps: tuple[int, ...] = (8, 32, 128),
    others: tuple[str, ...] = ("alone", *SYNCHRONOUS),
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    out: Path | None = None,
) -> None:
    """Print the time of each training until the target, then the medians.

    Args:
        hosts: Numbers of hosts of each site.
        rates: Rates of the link, as for ``tc tbf``.
        site_steps: Numbers of steps that sites take by themselves.
        others: Ways to train without such steps.
        seeds: Seeds of the trainings.
        out: JSON file for the figures; they are added to the figures that it already contains.
    """
    if missing := why_not():
        raise ValueError(missing)
    if len(os.sched_getaffinity(0)) < 2:
        raise ValueError("this process may use one core, expected one for each of two sites")
    rows: dict[tuple[object, ...], Row] = {}
    if out is not None and out.exists():
        rows = {row.key: row for row in (Row(**each) for each in json.loads(out.read_text())["rows"])}
    ways = [*others, *(f"sites {steps}" for steps in site_steps)]
    with tempfile.TemporaryDirectory() as folder:
        write_demo(Path(folder, "data"), tiny_cpu().data.vocab)
        for count in hosts:
            for row in trainings(Path(folder), count, rates, ways, seeds):
                rows[row.key] = row
                took = "missed the target" if row.seconds is None else f"{row.seconds:.1f} s, {row.samples:,} samples"
                print(f"{count} x {row.way}, {row.rate or 'no limit'}, seed {row.seed}: {took}", flush=True)
                # Write after each training, so that nothing is lost if a later one fails.
                if out is not None:
                    figures = {"medians": medians(rows.values()), "rows": [asdict(each) for each in rows.values()]}
                    write_figures(out, figures)
    for each in medians(rows.values()):
        print("  ".join(f"{name} {value}" for name, value in each.items()))


def medians(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the medians over the seeds that reached the target, with the speed relative to one site alone."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key[:-1], []).append(row)
    seconds = {key: [row.seconds for row in group if row.seconds is not None] for key, group in groups.items()}
    found = []
    for key, group in groups.items():
        each: dict[str, Any] = {"hosts": group[0].hosts, "way": group[0].way, "rate": group[0].rate}
        each |= {"seeds": len(group), "reached": len(seconds[key])}
        if seconds[key]:
            each["seconds"] = round(statistics.median(seconds[key]), 1)
            each["samples"] = statistics.median(row.samples for row in group if row.samples is not None)
            if alone := seconds.get((group[0].hosts, "alone", None)):
                each["times_as_fast_as_alone"] = round(statistics.median(alone) / each["seconds"], 2)
        for name in ("step_ms", "site_wait_ms", "link_bytes", "site_bytes"):
            each[name] = round(statistics.median(getattr(row, name) for row in group), 1)
        found.append(each)
    return found


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
