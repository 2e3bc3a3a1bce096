"""Evaluations whose result is read one step later. The run, its verdict and the log checks stay the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from compliance.check.checker import check_file
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks, result_of
from tests.distributed.runs.captured import captured


def run(
    small_run: SmallRun, results: Path, ranks: int = 1, mode: str | None = "recorded", **changes: object
) -> list[dict[str, Any]]:
    arguments = small_run.arguments(results, **changes)
    with Ranks([mode, *arguments], ranks, captured) if mode else Ranks(arguments, ranks) as started:
        assert set(started.ends()) <= {0, 1}, started.output
    lines = result_of(results).with_name("metrics_0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def events(records: list[dict[str, Any]], event: str, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in names) for record in records if record["event"] == event]


def order(results: Path) -> list[tuple[str, int | None]]:
    """Return the log's events in order, each with its sample count."""
    text = result_of(results).read_text()
    records = [json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith(":::MLLOG")]
    return [(record["key"], record["metadata"].get("samples_count")) for record in records]


@pytest.fixture(scope="module")
def plain(small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(small_run, tmp_path_factory.mktemp("plain"), mode=None)


def test_a_run_without_success_is_the_same(small_run: SmallRun, tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    overlapped = run(small_run, tmp_path, 2)
    assert events(overlapped, "eval", "step", "samples", "correct", "count") == events(
        plain, "eval", "step", "samples", "correct", "count"
    )
    losses = [loss for (loss,) in events(plain, "step", "loss")]
    assert [loss for (loss,) in events(overlapped, "step", "loss")] == pytest.approx(losses, rel=2e-5)
    assert events(overlapped, "end", "status", "samples") == [("aborted", 160)]
    assert order(tmp_path)[order(tmp_path).index(("run_start", None)) + 1 :] == [
        ("block_start", 0),
        ("block_stop", 80),
        ("eval_start", 80),
        ("block_start", 80),
        ("eval_accuracy", 80),
        ("eval_stop", 80),
        ("block_stop", 160),
        ("eval_start", 160),  # no samples are left to train on meanwhile
        ("eval_accuracy", 160),
        ("eval_stop", 160),
        ("block_start", 160),
        ("block_stop", 160),
        ("train_samples", None),
        ("eval_samples", None),
        ("run_stop", None),
    ]


def test_success_counts_the_samples_that_were_evaluated(
    small_run: SmallRun, tmp_path: Path, plain: list[dict[str, Any]]
) -> None:
    (first,), *_ = events(plain, "eval", "masked_lm_accuracy")
    assert first > 0
    overlapped = run(small_run, tmp_path, 2, evaluation__target=first / 2)
    assert events(overlapped, "end", "status", "samples") == [("success", 80)]
    assert order(tmp_path)[-7:] == [
        ("block_start", 80),
        ("eval_accuracy", 80),
        ("eval_stop", 80),
        ("block_stop", 96),
        ("train_samples", None),
        ("eval_samples", None),
        ("run_stop", None),
    ]
    log = result_of(tmp_path)
    assert '"key": "train_samples", "value": 80' in log.read_text()
    verdict = check_file(log)
    assert verdict.passed, verdict.findings
