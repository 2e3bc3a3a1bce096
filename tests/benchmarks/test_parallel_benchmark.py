"""The benchmark of shapes: each is run as it is predicted fastest, and the table says which won, and which was planned."""

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
