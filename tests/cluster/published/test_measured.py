"""Measured minutes against their prediction: a number, and made-up results folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.devices import describe_machine, device_named
from cluster.published.cost_model import TimedRun
from cluster.published.prediction import Prediction, predict
from tests.cluster.conftest import Command
from tests.compliance.result_folders import write_log, write_series
from tests.compliance.run_logs import without_chain

H100 = ("--accelerator", "H100-SXM", "--batch", "768")
HEADER = {"accelerator": "NVIDIA H100 80GB HBM3", "processes": "8 x 1 threads, data 8"}
EVALUATIONS = (16, 17, 16, 15, 16)


def prediction() -> Prediction:
    return predict(TimedRun(describe_machine(device_named("H100-SXM"), 1, 8), 768))


@pytest.fixture
def measured(cluster: Command) -> Callable[..., dict[str, Any]]:
    def compare(*arguments: object) -> dict[str, Any]:
        return json.loads(cluster("predict", "--json", "--measured", *arguments).stdout)["measured"]

    return compare


def write_runs(folder: Path, evaluations: tuple[int, ...] = EVALUATIONS, **options: Any) -> list[Path]:
    """Write logs of eight H100s with a batch size of 768, whose evaluations are about 20 s apart."""
    options = {"global_batch_size": 768, "step_ms": 4000, "header": HEADER} | options
    return write_series(folder, evaluations, **options)


def write_metrics(log: Path, seconds: float, *, wait_s: float = 30.0) -> None:
    """Write metrics with 100 steps, which wait for data and then take three times as long forward and backward."""
    step = {"event": "step", "step": 100, "samples": 76800, "time_s": seconds, "reduce_ms": 0.0, "update_ms": 0.0}
    step |= {"data_wait_ms": 10 * wait_s, "forward_backward_ms": 10 * (seconds - wait_s)}
    log.with_name(log.name.replace("result", "metrics")).with_suffix(".jsonl").write_text(json.dumps(step) + "\n")


def test_minutes_are_judged_by_the_interval_and_by_published_results(measured: Callable[..., dict[str, Any]]) -> None:
    expected = prediction()
    low, high = expected.low, expected.high
    limits = (0.99 * low, 1.01 * low, expected.minutes, 0.99 * high, 1.01 * high)
    found = [measured(f"{minutes:.9f}", *H100) for minutes in limits]
    verdicts = ["faster than normal", "faster than most", "normal", "slower than most", "slower than normal"]
    assert [each["verdict"] for each in found] == verdicts
    assert [each["ratio"] for each in found] == pytest.approx([minutes / expected.minutes for minutes in limits])
    ranks = [each["slower_than"] for each in found]
    assert ranks == sorted(ranks)
    assert 0 <= ranks[0] < ranks[-1] <= 1
    assert found[0]["results"] > 50
    assert found[0]["compared_with"] == "H100"
    assert found[0]["causes"] == {}, "a fast run needs no explanation"


@pytest.mark.parametrize(("name", "among"), [("GH200", "GH100"), ("MI300X", "any"), ("H100", "H100")])
def test_a_device_with_few_results_is_compared_with_more_devices(
    name: str, among: str, measured: Callable[..., dict[str, Any]]
) -> None:
    found = measured(10, "--accelerator", name, "--batch", 768)
    assert among in found["compared_with"]
    assert found["results"] >= 10


def test_a_cause_that_explains_the_excess_alone_takes_that_much_longer(
    cluster: Command, measured: Callable[..., dict[str, Any]]
) -> None:
    minutes = 1.2 * prediction().minutes
    causes = measured(f"{minutes:.9f}", *H100)["causes"]
    for cause in causes.values():
        assert cause["alone"] - cause["predicted"] == pytest.approx(0.2 * prediction().minutes)
    times = [cause["alone"] / cause["predicted"] for cause in causes.values()]
    assert times == sorted(times), "the likeliest comes first"
    assert "cluster probe" in cluster("predict", "--measured", f"{minutes:.9f}", *H100).stdout


def test_a_folder_tells_its_machine_and_separates_convergence_from_speed(
    tmp_path: Path, measured: Callable[..., dict[str, Any]]
) -> None:
    write_runs(tmp_path / "SYSTEM" / "bert")
    found = measured(tmp_path / "SYSTEM")
    assert found == measured(tmp_path / "SYSTEM" / "bert", *H100, "--nodes", 1)
    # Without the fastest run, of 15 evaluations, and the slowest, of 17.
    [alone] = write_runs(tmp_path / "one", (16,))
    assert found["minutes"] == pytest.approx(measured(alone)["minutes"])
    assert found["samples_ratio"] == pytest.approx(found["samples"] / prediction().time.samples)
    assert found["samples_ratio"] * found["speed_ratio"] == pytest.approx(found["ratio"], rel=0.01)


def test_a_run_that_missed_the_target_is_the_slowest(tmp_path: Path, measured: Callable[..., dict[str, Any]]) -> None:
    write_runs(tmp_path, (16, 17, 16, 15, 20), failed=(4,))
    [alone] = write_runs(tmp_path / "one", (16,))
    found = measured(tmp_path)
    assert found["minutes"] > measured(alone)["minutes"], "the run of 17 evaluations counts, and the fastest does not"
    assert any("result_4.txt" in note for note in found["notes"])
    assert any("mean of 3 of 5" in note for note in found["notes"])


def test_fewer_than_five_runs_all_count(tmp_path: Path, measured: Callable[..., dict[str, Any]]) -> None:
    logs = write_runs(tmp_path, (15, 16, 20))
    each = [measured(log)["minutes"] for log in logs]
    assert measured(tmp_path)["minutes"] == pytest.approx(sum(each) / 3)


def test_metrics_name_the_part_that_exceeds_its_prediction_most(
    tmp_path: Path, measured: Callable[..., dict[str, Any]], cluster: Command
) -> None:
    [log] = write_runs(tmp_path, (16,), step_ms=6000)
    assert "alone" in measured(log)["causes"]["forward backward"], "without metrics"
    seconds = 60 * measured(log)["minutes"]
    write_metrics(log, seconds, wait_s=150)
    causes = measured(log)["causes"]
    assert next(iter(causes)) == "data wait"
    assert causes["data wait"] == {"predicted": 0, "measured": pytest.approx(2.5)}
    assert sum(each["measured"] for each in causes.values()) == pytest.approx(seconds / 60)
    assert "storage" in cluster("predict", "--measured", log).stdout
    write_metrics(log, 2 * seconds)  # of another run
    assert "alone" in measured(log)["causes"]["forward backward"]


def test_a_log_of_other_software_needs_the_options_for_its_machine(
    tmp_path: Path, measured: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    [log] = write_runs(tmp_path, (16,), header={})
    log.write_text(without_chain(log.read_text()))
    assert "--accelerator" in refused("predict", "--measured", log)
    assert measured(log, "--accelerator", "H100-SXM")["samples"] > 2e6


def test_options_that_contradict_the_logs_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    [log] = write_runs(tmp_path, (16,))
    for options in (("--accelerator", "A100"), ("--nodes", 2), ("--gpus-per-node", 3), ("--batch", 1536)):
        assert options[0] in refused("predict", "--measured", log, *options)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "6,1", "6.1 min", "1e9", "no/such/folder", "٣"])
def test_no_minutes_are_refused(text: str, refused: Callable[..., str]) -> None:
    assert "--measured" in refused("predict", *H100, "--measured", text)


def test_a_folder_without_a_finished_run_of_the_benchmark_is_refused(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    for name in ("empty", "open", "failed", "cut", "two"):
        (tmp_path / name).mkdir()
    write_log(tmp_path / "open" / "result_0.txt", 0, division="open")
    write_runs(tmp_path / "failed", (5,), failed=(0,))
    [first, second] = write_runs(tmp_path / "two", (5, 6))
    lines = first.read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "result_0.txt").write_text("".join(line for line in lines if '"run_stop"' not in line))
    first.write_text(first.read_text() + second.read_text())
    second.write_text("nothing\n")
    said = {
        name: refused("predict", *H100, "--measured", tmp_path / name) for name in ("empty", "open", "failed", "cut")
    }
    assert "result_N.txt" in said["empty"]
    assert "open" in said["open"]
    assert "0.720" in said["failed"]
    assert "has not ended" in said["cut"]
    both = refused("predict", *H100, "--measured", tmp_path / "two")
    assert "result_0.txt" in both
    assert "result_1.txt" in both


def test_runs_of_different_settings_have_no_mean(tmp_path: Path, refused: Callable[..., str]) -> None:
    write_runs(tmp_path, (16,))
    write_log(tmp_path / "result_1.txt", 1, global_batch_size=1536, header=HEADER)
    said = refused("predict", "--measured", tmp_path)
    assert "768" in said
    assert "1536" in said
