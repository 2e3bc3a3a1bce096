"""The benchmark of shapes: each is run as it is predicted fastest, and the table says which won, and which was planned."""

import os
from pathlib import Path

import pytest

from benchmarks.measured_steps import metrics_of
from benchmarks.parallel import BATCH, HOSTS, RANKS, SHAPES, arguments_of, fastest, row, table
from bert.train import parse
from cluster.model.strategy import Strategy
from tests.cluster.model.test_predicted_step import TINY, rates


def test_every_shape_is_one_that_a_run_takes() -> None:
    for shape in SHAPES:
        strategy, step = fastest(TINY, rates(HOSTS, RANKS), shape)
        assert step.total > 0
        config = parse(["tiny_cpu", "--training.global-batch-size", str(BATCH), *arguments_of(strategy)])
        assert config.parallel == strategy.parallel == shape


def test_the_table_has_the_fastest_shape_first() -> None:
    slow, fast = Strategy(BATCH, pipeline=2, gradient_accumulation_steps=2), Strategy(BATCH, tensor=2)
    rows = [
        row("50mbit", slow, 90.0, 200.0, 0.0) | {"chosen_by": "planner"},
        row("50mbit", fast, 110.0, 100.0, 0.0) | {"chosen_by": ""},
    ]
    head, first, second = table(rows)
    assert head.startswith("50mbit links ")
    assert " ".join(first.split()) == "data 4 x pipeline 1 x tensor 2, 1 x 4 sequences, flat 110 100 1.10"
    assert " ".join(second.split()) == "data 4 x pipeline 2 x tensor 1, 2 x 2 sequences, flat 90 200 0.45 planner"


def test_a_run_without_metrics_is_named_with_what_its_ranks_said(tmp_path: Path) -> None:
    (tmp_path / "rank_0.txt").write_text("error: no space left on device\n")
    with pytest.raises(SystemExit, match=r"the run left no metrics in .*, and said:\nerror: no space left on device"):
        metrics_of(tmp_path, "shape0")


def test_of_several_runs_the_newest_metrics_count(tmp_path: Path) -> None:
    folder = tmp_path / "shape0" / "bert"
    folder.mkdir(parents=True)
    for run, time in enumerate((3, 1)):
        (folder / f"metrics_{run}.jsonl").touch()
        os.utime(folder / f"metrics_{run}.jsonl", (time, time))
    assert metrics_of(tmp_path, "shape0").name == "metrics_0.jsonl"
