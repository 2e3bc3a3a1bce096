"""Compare predictions with published results that the model has not seen, or with measured step times.

    python benchmarks/prediction.py --published [--out FILE]
    sudo python benchmarks/prediction.py --measured [--out FILE]

With --published, the results of one submitter, one round, one number of accelerators, or one type of accelerator are
held out at a time; the model is fitted to the other results and predicts the held-out results.

With --measured, steps on this machine are predicted from a probe's file, the length index and the settings alone, and then
run. Hosts are network namespaces with links of several rates, which need root.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# PyTorch reads this when it is imported. Each rank gets one thread, because ranks share cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import tyro

from benchmarks.conditions import write_figures
from benchmarks.hosts import bridged_hosts, raise_priority, run_ranks, why_not
from benchmarks.inputs import flags, synthetic_vocabulary, write_synthetic_set
from bert.train import main as train
from bert.train import parse
from cluster.__main__ import main as cluster
from cluster.model.rates import rates_of_view
from cluster.model.step import predict_step
from cluster.model.work import strategy_of, work_of
from cluster.published.calibration import Held, calibrate
from cluster.published.results import Result, results_of_devices
from cluster.view import read_view
from cluster.whatif import PARTS
from compliance.log.metrics import read_metrics

PUBLISHED_LINES: tuple[tuple[str, str, Callable[[Held], bool]], ...] = (
    ("submitter", "equal system of others in the data", lambda held: bool(alike(held.result))),
    ("submitter", "accelerator and scale in the data", lambda held: held.model_seen and held.scale_seen),
    ("submitter", "all", lambda _: True),
    ("round", "all", lambda _: True),
    ("scale", "accelerator in the data", lambda held: held.model_seen),
    ("accelerator", "all", lambda _: True),
)
"""Lines to print. Each has the kind of the held-out groups, a title, and a filter for the predictions that it summarises."""

_SAMPLES, _LONGEST = 20_000, 128
_ROUNDS = 2
"""Number of training runs with each reduction. The fastest run counts, because disturbances only make a run slower."""

MODELS = {
    "2 x 128": (2, 128, 4, 512, 1024),
    "4 x 256": (4, 256, 4, 1024, 1024),
    "3 x 256, 16,384 words": (3, 256, 8, 1024, 16384),
    "6 x 320": (6, 320, 5, 1280, 2048),
}
"""Layers, hidden size, heads, intermediate size and vocabulary size of each model, by name."""


@dataclass(frozen=True)
class Case:
    """A cluster, the model that it trains, and the reductions to compare.

    ``ranks`` is the number of ranks of a host. ``rate`` limits what a host sends, as in ``tc tbf``; None means no limit.
    ``model`` is a key of `MODELS`, and ``batch`` is the global batch size.
    """

    hosts: int
    ranks: int
    rate: str | None
    model: str
    batch: int
    reductions: tuple[str, ...]
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        settings = [f"{name.rpartition('.')[2]} {value}" for name, value in self.settings]
        shape = f"{self.hosts} x {self.ranks}"
        return ", ".join([shape, self.rate or "unshaped", self.model, str(self.batch), *settings])


_DROPOUT = (("model.hidden-dropout", 0.1), ("model.attention-dropout", 0.1))
CASES = (
    Case(1, 2, None, "2 x 128", 32, ("flat", "sharded")),
    Case(2, 1, "1gbit", "3 x 256, 16,384 words", 32, ("flat", "sharded_world")),
    Case(2, 2, None, "4 x 256", 64, ("flat", "hierarchical", "sharded"), _DROPOUT),
    Case(2, 2, "300mbit", "4 x 256", 64, ("flat", "hierarchical", "sharded")),
    Case(4, 2, None, "2 x 128", 64, ("flat", "hierarchical", "sharded_world")),
    Case(4, 2, "50mbit", "2 x 128", 64, ("flat", "hierarchical", "sharded")),
    Case(4, 1, "100mbit", "2 x 128", 64, ("flat",), (("training.gradient-accumulation-steps", 4),)),
    Case(2, 2, "100mbit", "2 x 128", 64, ("flat", "hierarchical"), (("training.reduce-dtype", "bf16"),)),
    Case(2, 2, "1gbit", "6 x 320", 32, ("flat", "hierarchical"), (("training.gradient-accumulation-steps", 2),)),
)


def main(
    published: tyro.conf.FlagCreatePairsOff[bool] = False,
    measured: tyro.conf.FlagCreatePairsOff[bool] = False,
    out: Path | None = None,
) -> None:
    """Print the prediction errors.

    Args:
        published: Cross-validate on the published results, which takes half a minute.
        measured: Predict steps from a probe and run them, which takes about a minute a case. Needs root.
        out: Write the figures here as JSON.
    """
    if published == measured:
        raise SystemExit("error: give either --published or --measured")
    if measured:
        compare_steps(out)
        return
    calibration, validation = calibrate()
    figures: dict[str, dict[str, float]] = {}
    for name, title, counts in PUBLISHED_LINES:
        held = [each for each in validation[name] if counts(each)]
        inside = statistics.mean(each.is_inside(calibration) for each in held)
        figures[f"{name}: {title}"] = of_errors([each.deviation for each in held]) | {"in_interval": inside}
    print(f"{'left out: predicted':44}{'results':>8}{'median':>9}{'75 %':>8}{'90 %':>8}{'in interval':>13}")
    for title, figure in figures.items():
        errors = f"{figure['median']:9.1%}{figure['three_quarters']:8.1%}{figure['nine_tenths']:8.1%}"
        print(f"{title:44}{figure['results']:8.0f}{errors} {figure['in_interval']:12.0%}")
    if out is not None:
        write_figures(out, {"errors": figures})


def of_errors(deviations: list[float]) -> dict[str, float]:
    """Return the number of log ratios, and the median, 75 % and 90 % quantiles of their absolute values."""
    ranked = statistics.quantiles(map(abs, deviations), n=20, method="inclusive")
    return {"results": len(deviations), "median": ranked[9], "three_quarters": ranked[14], "nine_tenths": ranked[17]}


def alike(result: Result) -> list[float]:
    """Return the training times that other submitters reached with this result's system and recipe."""
    return [
        each.seconds for each in results_of_devices() if each.kind == result.kind and each.company != result.company
    ]


def compare_steps(out: Path | None) -> None:
    """Run all cases, print predicted and measured step times, and write them to ``out``."""
    if missing := why_not():
        print(f"error: {missing}", file=sys.stderr)
        raise SystemExit(2)
    raise_priority()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            found = _run(case, Path(folder) / str(number))
            rows += found
            _print(found)
            # Write after each case, so that nothing is lost if a later case fails.
            if out is not None:
                write_figures(out, {**_summary(rows), "rows": rows})
    print("  ".join(f"{name} {value:.3g}" for name, value in _summary(rows).items()))


def _run(case: Case, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    common = _settings(case, folder)
    arguments = {each: [*common, "--training.reduction", each, "--log.system", each] for each in case.reductions}
    view = folder / "cluster.json"
    measured: dict[str, list[dict[str, float]]] = {each: [] for each in arguments}
    with bridged_hosts(case.hosts, case.rate) as names:
        # The ranks are forks of this process and parse this command line.
        sys.argv = ["cluster", "probe", "--out", str(view), "--seconds", "20"]
        run_ranks(names, case.ranks, cluster, folder)
        rates = rates_of_view(read_view(view))
        configs = {each: parse(given) for each, given in arguments.items()}
        predicted = {each: predict_step(work_of(c), strategy_of(c), rates) for each, c in configs.items()}
        # Each round runs all reductions, so that a temporary slowdown of the machine affects all reductions.
        for _ in range(_ROUNDS):
            for each, given in arguments.items():
                # Each log record covers about 0.4 s, which is long compared with the time to write it.
                interval = max(1, min(20, round(0.4 / predicted[each].total)))
                given = [*given, "--log.interval-steps", str(interval)]
                run_ranks(names, case.ranks, lambda given=given: train(given), folder)
                newest = max(folder.glob(f"{each}/bert/metrics_*.jsonl"), key=lambda path: path.stat().st_mtime)
                measured[each].append(_steady(newest))
    rows = []
    for each, runs in measured.items():
        step, found = predicted[each], min(runs, key=lambda run: run["step_ms"])
        row = {"case": case.name, "reduction": each, "predicted_ms": 1000 * step.total, "measured_ms": found["step_ms"]}
        parts = {f"{name}_ms": 1000 * seconds for name, seconds in step.parts.items()}
        rows.append(row | {"predicted_parts": parts, "measured_parts": {name: found[name] for name in PARTS}})
    return rows


def _settings(case: Case, folder: Path) -> list[str]:
    """Make the data for a case, and return the arguments for `bert.train`."""
    vocabulary = synthetic_vocabulary(folder / "vocab.txt", MODELS[case.model][-1])
    for part, count in (("train", _SAMPLES), ("evaluation", 200)):
        generator = np.random.default_rng(len(part))
        # Two sequences in five are full, as in Wikipedia's data.
        lengths = np.where(generator.random(count) < 0.4, _LONGEST, generator.integers(8, _LONGEST, count))
        write_synthetic_set(folder / part, lengths, _LONGEST, vocabulary, shards=2, seed=len(part))
    settings: dict[str, object] = {f"data.{part}": folder / part for part in ("train", "evaluation")}
    shape = ("num-hidden-layers", "hidden-size", "num-attention-heads", "intermediate-size", "vocab-size")
    settings |= {f"model.{name}": size for name, size in zip(shape, MODELS[case.model], strict=True)}
    settings |= {
        "data.vocab": folder / "vocab.txt",
        "data.initial-checkpoint": None,
        "model.hidden-dropout": 0.0,
        "model.attention-dropout": 0.0,
        "training.global-batch-size": case.batch,
        "training.max-samples": 10_000_000,
        "training.max-minutes": 0.055,
        "training.seed": 1,
        "evaluation.interval-samples": 5_000_000,
        "log.results": folder,
    }
    return ["tiny_cpu", *flags(settings | dict(case.settings))]


def _steady(metrics: Path) -> dict[str, float]:
    """Return the medians over a run's records except the first record, which includes reading the first batches."""
    steps = read_metrics(metrics).steps
    kept = steps[1:] or steps
    return {name: statistics.median(getattr(each, name) for each in kept) for name in ("step_ms", *PARTS)}


def _print(rows: list[dict[str, Any]]) -> None:
    print(rows[0]["case"])
    for row in rows:
        parts = (f"{name} {row['predicted_parts'][name]:.1f}/{row['measured_parts'][name]:.1f}" for name in PARTS)
        total = f"{row['predicted_ms']:8.1f} / {row['measured_ms']:8.1f} ms"
        print(f"  {row['reduction']:14} {total}   {', '.join(parts)}", flush=True)


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the prediction errors, and the number of cases in which the predicted fastest reduction was the fastest."""
    errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows]
    cases = {row["case"]: [each for each in rows if each["case"] == row["case"]] for row in rows}
    chosen = [(min(ways, key=lambda row: row["predicted_ms"]), ways) for ways in cases.values()]
    # A reduction within 3 % of the fastest time counts as the fastest.
    right = sum(best["measured_ms"] <= 1.03 * min(row["measured_ms"] for row in ways) for best, ways in chosen)
    return {
        "configurations": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "cases": len(cases),
        "fastest_chosen": right,
    }


if __name__ == "__main__":
    tyro.cli(main)
