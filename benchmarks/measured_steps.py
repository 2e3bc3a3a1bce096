"""Predicted steps beside measured ones: hosts that are network namespaces, a probe of them, and real training on them.

Every configuration's prediction knows the probe's file, the length index and the settings, and nothing of the run.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import write_figures
from benchmarks.hosts import BridgedHosts, block, go_first, require_hosts, run_ranks, said_by_ranks
from benchmarks.inputs import flags, made_up_vocabulary, write_made_up_set
from bert.configuration.sections import ReductionStrategy
from bert.train import main as train
from bert.train import parse
from cluster.__main__ import main as cluster
from cluster.model.rates import rates_of_view
from cluster.model.step import PredictedStep, predict_step
from cluster.model.strategy import strategy_of
from cluster.model.work import work_of
from cluster.view import read_view
from cluster.whatif import PARTS
from compliance.log.records import read_metrics

_SAMPLES, _LONGEST = 20_000, 128
_INTERVAL_S = 0.4
_ROUNDS = 2
"""Of runs in every way, in turn; the faster one counts, as what comes in between makes it slower, never faster."""
_CLOSE = 1.03
"""A strategy within so much of the fastest counts as that."""

MODELS = {
    "2 x 128": (2, 128, 4, 512, 1024),
    "4 x 256": (4, 256, 4, 1024, 1024),
    "3 x 256, 16,384 words": (3, 256, 8, 1024, 16384),
    "6 x 320": (6, 320, 5, 1280, 2048),
}
"""Layers, hidden and intermediate size, heads and words, by the first two."""


@dataclass(frozen=True)
class ClusterCase:
    """A cluster with the work that it gets, in each of some ways to reduce."""

    hosts: int
    ranks: int
    rate: str | None
    model: str
    batch: int
    reductions: tuple[ReductionStrategy, ...]
    accumulation: int = 1
    dropout: float = 0.0
    reduce_dtype: str = "fp32"

    @property
    def name(self) -> str:
        """Name the case in a line."""
        extras = [f"{self.accumulation} micro-batches"] if self.accumulation > 1 else []
        extras += [f"dropout {self.dropout:g}"] if self.dropout else []
        extras += [self.reduce_dtype] if self.reduce_dtype != "fp32" else []
        return ", ".join(
            [f"{self.hosts} x {self.ranks}, {self.rate or 'unshaped'}, {self.model}, {self.batch}", *extras]
        )


CASES = (
    ClusterCase(1, 2, None, "2 x 128", 32, ("flat", "sharded")),
    ClusterCase(2, 1, "1gbit", "3 x 256, 16,384 words", 32, ("flat", "sharded_world")),
    ClusterCase(2, 2, None, "4 x 256", 64, ("flat", "hierarchical", "sharded"), dropout=0.1),
    ClusterCase(2, 2, "300mbit", "4 x 256", 64, ("flat", "hierarchical", "sharded")),
    ClusterCase(4, 2, None, "2 x 128", 64, ("flat", "hierarchical", "sharded_world")),
    ClusterCase(4, 2, "50mbit", "2 x 128", 64, ("flat", "hierarchical", "sharded")),
    ClusterCase(4, 1, "100mbit", "2 x 128", 64, ("flat",), accumulation=4),
    ClusterCase(2, 2, "100mbit", "2 x 128", 64, ("flat", "hierarchical"), reduce_dtype="bf16"),
    ClusterCase(2, 2, "1gbit", "6 x 320", 32, ("flat", "hierarchical"), accumulation=2),
)


def measured(cases: Iterable[int], seconds: float, out: Path | None) -> None:
    """Run the cases of these numbers, print predicted and measured, and add them to the figures in ``out``."""
    require_hosts()
    # The scheduler is to prefer what is measured.
    go_first()
    # Rows of other cases in the file stay: cases can be measured one at a time.
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out is not None and out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for number in cases:
            found = _run(CASES[number], Path(folder) / str(number), seconds)
            rows = [row for row in rows if row["case"] != CASES[number].name] + found
            _print(found)
            if out is not None:
                # After each case, so that nothing is lost when a later one fails.
                write_figures(out, {**_summary(rows), "rows": rows}, ("torch", "numpy", "scipy"))
    print("  ".join(f"{name} {value:.3g}" for name, value in _summary(rows).items()))


def _run(case: ClusterCase, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Probe the case's hosts, and train on them in each of its ways."""
    folder.mkdir()
    common = settings_for(case, folder)
    view_file = folder / "cluster.json"
    # Parsed before the network is made: a wrong setting shows at once.
    ways = {way: parse(_arguments(common, way)) for way in case.reductions}
    with BridgedHosts(case.hosts, case.rate) as names:
        # The command line of the ranks, which are forks of this process.
        sys.argv = ["cluster", "probe", "--out", str(view_file), "--seconds", str(seconds)]
        others_probing = run_together(names, case, cluster, folder)
        rates = rates_of_view(read_view(view_file))
        # Before any training: the prediction knows the probe's file alone.
        predicted = {way: predict_step(work_of(each), strategy_of(each), rates) for way, each in ways.items()}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        # Rounds go over all ways, so that a slow moment of the machine meets none of them alone.
        for _ in range(_ROUNDS):
            for way in ways:
                # A record's interval is long beside what writing it takes.
                interval = max(1, min(20, round(_INTERVAL_S / predicted[way].total)))
                arguments = [*_arguments(common, way), "--log.interval-steps", str(interval)]
                others = run_together(names, case, lambda arguments=arguments: train(arguments), folder)
                found[way].append(
                    {**steady(metrics_of(folder, way)), "others": others, "others_probing": others_probing}
                )
    return [_row(case, way, predicted[way], min(found[way], key=lambda each: each["step_ms"])) for way in ways]


def _arguments(common: list[str], way: str) -> list[str]:
    return [*common, "--training.reduction", way, "--log.system", way]


def _row(case: ClusterCase, way: str, predicted: PredictedStep, found: dict[str, float]) -> dict[str, Any]:
    return {
        "case": case.name,
        "reduction": way,
        "predicted_ms": 1000 * predicted.total,
        "measured_ms": found["step_ms"],
        "ratio": 1000 * predicted.total / found["step_ms"],
        "predicted_parts": {f"{name}_ms": 1000 * each for name, each in predicted.parts.items()},
        "measured_parts": {name: found[name] for name in PARTS},
        "others_share": {"probe": found["others_probing"], "run": found["others"]},
    }


def run_together(names: list[str], case: ClusterCase, program: Callable[[], int], folder: Path) -> float:
    """Run a program on all ranks; returns the share of the processors' work that was somebody else's meanwhile."""
    before, own = _busy_seconds(), _own_seconds()
    # Each rank on a core of its own, as far as there are cores.
    run_ranks(names, block(case.hosts, case.ranks), program, folder, limit_s=120, bound=True)
    busy = _busy_seconds() - before
    return max(0.0, busy - (_own_seconds() - own)) / max(busy, 1e-9)


def _busy_seconds() -> float:
    """Seconds that programs have had the processors, or another machine had them; what the kernel does has no owner."""
    # Steal is time in which the hypervisor ran somebody else.
    user, nice, _, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    # Children count once they have been waited for: all ranks have ended by then.
    return times.user + times.children_user


def settings_for(case: ClusterCase, folder: Path) -> list[str]:
    """Arguments of `bert.train`, for data that is made here."""
    layers, hidden, heads, intermediate, words = MODELS[case.model]
    vocabulary = made_up_vocabulary(folder / "vocab.txt", words)
    for part, count in (("train", _SAMPLES), ("evaluation", 200)):
        # The seed differs for both sets.
        generator = np.random.default_rng(len(part))
        # Like the built-in default's: two in five are full, the others short.
        lengths = np.where(generator.random(count) < 0.4, _LONGEST, generator.integers(8, _LONGEST, count))
        write_made_up_set(folder / part, lengths, _LONGEST, vocabulary, shards=2, seed=len(part))
    settings: dict[str, object] = {
        "data.train": folder / "train",
        "data.evaluation": folder / "evaluation",
        "data.vocab": folder / "vocab.txt",
        "data.initial-checkpoint": None,
        "model.num-hidden-layers": layers,
        "model.hidden-size": hidden,
        "model.num-attention-heads": heads,
        "model.intermediate-size": intermediate,
        "model.vocab-size": words,
        "model.hidden-dropout": case.dropout,
        "model.attention-dropout": case.dropout,
        "training.global-batch-size": case.batch,
        "training.gradient-accumulation-steps": case.accumulation,
        "training.reduce-dtype": case.reduce_dtype,
        "training.max-samples": 10_000_000,
        # Runs end by time: a fraction of a minute has many steps of the small models.
        "training.max-minutes": 0.055,
        "training.seed": 1,
        "evaluation.interval-samples": 5_000_000,
        "log.results": folder,
    }
    return ["tiny_cpu", *flags(settings)]


def metrics_of(results: Path, system: str = "*") -> Path:
    """Return the metrics of the newest run with results for a system; what its ranks said lies beside those.

    SystemExit where no run has written any.
    """
    found = results.glob(f"{system}/bert/metrics_*.jsonl")
    newest = max(found, key=os.path.getmtime, default=None)
    if newest is None:
        raise SystemExit(
            f"error: the run left no metrics in {results}, and said:\n{said_by_ranks(results) or 'nothing'}"
        )
    return newest


def steady(metrics: Path) -> dict[str, float]:
    """Return the medians of a run's records but the first, which reads the first batches."""
    steps = read_metrics(metrics).steps
    kept = steps[1:] or steps
    return {name: statistics.median(getattr(record, name) for record in kept) for name in ("step_ms", *PARTS)}


def _print(rows: list[dict[str, Any]]) -> None:
    print(rows[0]["case"])
    for row in rows:
        parts = ", ".join(
            f"{name.removesuffix('_ms')} {row['predicted_parts'][name]:.1f}/{row['measured_parts'][name]:.1f}"
            for name in PARTS
        )
        total = f"{row['predicted_ms']:8.1f} / {row['measured_ms']:8.1f} ms = {row['ratio']:.3f}"
        print(f"  {row['reduction']:14} {total}   {parts}", flush=True)


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors over all rows, and in how many cases the strategy that is predicted fastest was, or was close to it."""
    errors = [abs(row["ratio"] - 1) for row in rows]
    cases = {row["case"]: [each for each in rows if each["case"] == row["case"]] for row in rows}
    right = 0
    for ways in cases.values():
        chosen = min(ways, key=lambda row: row["predicted_ms"])
        right += chosen["measured_ms"] <= _CLOSE * min(row["measured_ms"] for row in ways)
    return {
        "configurations": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "cases": len(cases),
        "fastest_chosen": right,
    }
