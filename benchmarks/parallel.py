"""Comparison of shapes of ranks: copies of a model on 2 hosts of 4 ranks, whole, by heads and columns, in stages, or both.

    sudo python benchmarks/parallel.py [--links unshaped 50mbit] [--steps 12] [--out FILE]

Hosts are network namespaces of this machine whose links have the given rates, so all ranks share its processors: tensor
groups and stages save memory and bytes here, never time of computing. Each shape is run as it is predicted fastest from a
probe alone, of all ways to reduce and numbers of micro-batches in fp32, and stands beside what was predicted. So does what
the planner chose of all that it knows, bf16 and sizes of buckets among it.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported: of ranks that share few cores

import tyro

from benchmarks.conditions import write_figures
from benchmarks.hosts import BridgedHosts, go_first, require_hosts
from benchmarks.inputs import flags
from benchmarks.measured_steps import ClusterCase, metrics_of, run_together, settings_for, steady
from bert.configuration.sections import ParallelConfig
from bert.train import main as train
from bert.train import parse
from cluster.__main__ import main as cluster
from cluster.model.rates import Rates
from cluster.model.step import PredictedStep, predict_step
from cluster.model.strategy import Strategy
from cluster.model.work import Work, work_of
from cluster.plan.search import REDUCTIONS, search
from cluster.plan.target import target_of

HOSTS, RANKS = 2, 4
# Shapes that divide two hosts of four ranks; (4, 2) is one copy over all of them.
SHAPES = tuple(
    ParallelConfig(tensor, pipeline) for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
)
# 16 sequences: two for each rank where all have copies of their own.
MODEL, BATCH = "4 x 256", 16


def main(
    links: tuple[str, ...] = ("unshaped", "50mbit"), steps: int = 12, seconds: float = 15.0, out: Path | None = None
) -> None:
    """Print a table for each rate of links. Needs root.

    Args:
        links: Rates of hosts' links, as ``tc`` writes them, or ``unshaped``.
        steps: Of each training; the first is not counted.
        seconds: About how long a probe takes.
        out: Write the figures here as JSON.
    """
    require_hosts()
    if steps < 2:
        raise SystemExit(f"error: --steps is {steps}, expected at least 2: the first is not counted")
    # The scheduler is to prefer what is measured.
    go_first()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for link in links:
            found = measured(link, Path(folder) / link, steps, seconds)
            rows += found
            for line in table(found):
                print(line, flush=True)
            if out is not None:
                write_figures(out, {"rows": rows}, ("torch", "numpy", "scipy"))


def measured(link: str, folder: Path, steps: int, seconds: float) -> list[dict[str, Any]]:
    """Probe the hosts, and train on them in every shape, and as the planner chooses; returns a row for each."""
    case = ClusterCase(HOSTS, RANKS, None if link == "unshaped" else link, MODEL, BATCH, ("flat",))
    folder.mkdir()
    # Each step is a record; one evaluation at the end, whose time is in none.
    own = {"training.max-steps": steps, "evaluation.interval-samples": steps * BATCH, "log.interval-steps": 1}
    own |= {"training.max-minutes": 10}
    common = settings_for(case, folder) + flags(own)
    view = folder / "cluster.json"
    rows = []
    with BridgedHosts(HOSTS, case.rate) as names:
        # The command line of the ranks, which are forks of this process.
        sys.argv = ["cluster", "probe", "--out", str(view), "--seconds", str(seconds)]
        run_together(names, case, cluster, folder)
        config, target = parse(common), target_of("tiny_cpu", view, None)
        work, rates = work_of(config), target.rates["fp32"]
        # The planner's own choice, for comparison, among all that it knows.
        chosen = search(config, work, target).best[0]
        ways = [(*fastest(work, rates, shape), "") for shape in SHAPES]
        for number, (strategy, predicted, by) in enumerate([*ways, (chosen.strategy, chosen.step, "planner")]):
            arguments = [*common, *arguments_of(strategy), "--log.system", f"shape{number}"]
            others = run_together(names, case, lambda arguments=arguments: train(arguments), folder)
            milliseconds = steady(metrics_of(folder, f"shape{number}"))["step_ms"]
            rows.append(row(link, strategy, 1000 * predicted.total, milliseconds, others) | {"chosen_by": by})
    return rows


def fastest(work: Work, rates: Rates, shape: ParallelConfig) -> tuple[Strategy, PredictedStep]:
    """Return the way to reduce and the number of micro-batches that are predicted fastest in a shape."""
    # Sequences of a copy in a step: what can be divided into micro-batches.
    share = BATCH * shape.copy_ranks // rates.world_size
    ways = [
        replace(Strategy(BATCH, many, reduction=reduction), tensor=shape.tensor, pipeline=shape.pipeline)
        for reduction in REDUCTIONS
        # At least as many micro-batches as stages, which 1F1B needs.
        for many in range(shape.pipeline, share + 1)
        if share % many == 0
    ]
    predicted = [(predict_step(work, each, rates), each) for each in ways]
    step, strategy = min(predicted, key=lambda each: each[0].total)
    return strategy, step


def arguments_of(strategy: Strategy) -> list[str]:
    """Return settings of a run in that way."""
    settings = {
        "parallel.tensor": strategy.tensor,
        "parallel.pipeline": strategy.pipeline,
        "parallel.virtual-stages": strategy.virtual_stages,
        "training.precision": strategy.precision,
        "training.reduce-dtype": strategy.reduce_dtype,
        "training.bucket-bytes": strategy.bucket_bytes,
        "training.recompute": strategy.recompute,
        "training.reduction": strategy.reduction,
        "training.gradient-accumulation-steps": strategy.gradient_accumulation_steps,
    }
    return flags(settings)


def described(strategy: Strategy) -> str:
    """Name a shape, with its micro-batches, the way to reduce, and types where they are not fp32."""
    data = HOSTS * RANKS // strategy.copy_ranks
    shape = f"data {data} x pipeline {strategy.stages} x tensor {strategy.tensor}"
    sequences = strategy.sequences(HOSTS * RANKS)
    types = [strategy.precision] * (strategy.precision != "fp32")
    types += [f"sums in {strategy.reduce_dtype}"] * (strategy.reduce_dtype != "fp32")
    way = f"{strategy.gradient_accumulation_steps} x {sequences} sequences, {strategy.reduction}"
    return ", ".join([shape, way, *types])


def row(link: str, strategy: Strategy, predicted_ms: float, measured_ms: float, others: float) -> dict[str, Any]:
    """Return the figures of a shape; ``others``: share of the processors' work that was somebody else's."""
    return {
        "link": link,
        "shape": described(strategy),
        "predicted_ms": predicted_ms,
        "measured_ms": measured_ms,
        "ratio": predicted_ms / measured_ms,
        "others_share": others,
    }


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return the lines of one rate of links, the fastest measured shape first."""
    yield f"{rows[0]['link'] + ' links':<86}{'predicted':>10}{'measured':>10}{'ratio':>7}"
    for each in sorted(rows, key=lambda each: each["measured_ms"]):
        figures = f"{each['predicted_ms']:10.0f}{each['measured_ms']:10.0f}{each['ratio']:7.2f}"
        yield f"  {each['shape']:<84}{figures}  {each['chosen_by']}".rstrip()


if __name__ == "__main__":
    tyro.cli(main)
