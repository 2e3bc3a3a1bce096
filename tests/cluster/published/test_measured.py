"""Comparison of measured minutes, a number or a synthetic results folder, with their prediction."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.devices import describe_machine, device_named
from cluster.published.cost_model import TimedRun
from cluster.published.measured import Measured, compare, read_measured
from cluster.published.prediction import Prediction, predict
from tests.cluster.conftest import Command, Refused
from tests.compliance.result_folders import write_log, write_series
from tests.compliance.run_logs import without_chain

H100 = ("--accelerator", "H100-SXM", "--batch", "768")
HEADER = {"accelerator": "NVIDIA H100 80GB HBM3", "processes": "8 x 1 threads, data 8"}
EVALUATIONS = (17, 15, 16, 16, 16)


def prediction(name: str = "H100-SXM") -> Prediction:
    return predict(TimedRun(describe_machine(device_named(name), 1, 8), 768))


def write_runs(folder: Path, evaluations: tuple[int, ...] = EVALUATIONS, **options: Any) -> list[Path]:
    """Write logs of eight H100s with a batch size of 768, whose evaluations are 20 s and 150,000 samples apart."""
    options = {"global_batch_size": 768, "step_ms": 4000, "header": HEADER} | options
    return write_series(folder, evaluations, **options)


def measured(evaluations: float, note: str, **changes: Any) -> Measured:
    """Return the expected content of logs of `write_runs`, whose first evaluation is after 32 s."""
    minutes, samples = pytest.approx((20 * evaluations + 12) / 60), pytest.approx(150_000 * evaluations, rel=2e-4)
    notes = (f"mean of {note}; 0 with metrics of the run",)
    stated = {"minutes": minutes, "accelerator": "H100-SXM-80GB", "ranks": 8, "samples": samples, "notes": notes}
    return Measured(batch=768, **stated | changes)


def test_minutes_are_judged_by_the_interval_and_by_published_results() -> None:
    expected = prediction()
    low, high = expected.low, expected.high
    verdicts = {
        0.999 * low: "faster than normal",
        low: "faster than most",
        expected.minutes: "normal",
        high: "slower than most",
        1.001 * high: "slower than normal",
    }
    found = {minutes: compare(Measured(minutes), expected) for minutes in verdicts}
    assert {minutes: each["verdict"] for minutes, each in found.items()} == verdicts
    assert [each["ratio"] for each in found.values()] == pytest.approx([each / expected.minutes for each in verdicts])
    ranks = [each["slower_than"] for each in found.values()]
    assert ranks == sorted(ranks)
    assert 0 <= ranks[0] < ranks[-1] <= 1
    assert found[low]["causes"] == {}, "a fast run needs no explanation"


def test_a_device_with_few_results_is_compared_with_its_chip_or_all_devices() -> None:
    among = {"H100": ("H100", 59), "GH200": ("the chip GH100", 76), "B200": ("B200", 12)}
    among["Gaudi2"] = ("any accelerator", 201)
    for name, expected in among.items():
        found = compare(Measured(10.0), prediction(name))
        assert (found["compared_with"], found["results"]) == expected


def test_machine_samples_and_time_are_read_from_a_results_folder(tmp_path: Path, cluster: Command) -> None:
    """The mean covers three runs with 16 evaluations. It leaves out the fastest run (15) and the slowest run (17)."""
    write_runs(tmp_path / "SYSTEM" / "bert")
    found, expected = read_measured(str(tmp_path / "SYSTEM")), prediction()
    assert found == measured(16, "3 of 5 runs, without the fastest and the slowest")
    document = json.loads(cluster("predict", "--json", "--measured", tmp_path / "SYSTEM").stdout)["measured"]
    assert document == json.loads(json.dumps(compare(found, expected)))
    assert document["samples_ratio"] == pytest.approx(2_400_000 / expected.time.samples)
    assert document["samples_ratio"] * document["speed_ratio"] == pytest.approx(document["ratio"], rel=0.01)
    causes = [(each["predicted"], each["alone"] - each["predicted"]) for each in document["causes"].values()]
    assert [alone for _, alone in causes] == pytest.approx([5.5333333 * (1 - 1 / document["speed_ratio"])] * 5)
    assert causes == sorted(causes, reverse=True), "the likeliest comes first"
    for gpus, nodes in ((8, 1), (4, 2), (1, 8)):
        done = cluster("predict", "--json", "--measured", tmp_path / "SYSTEM", "--gpus-per-node", gpus)
        assert json.loads(done.stdout)["nodes"] == nodes


def test_the_mean_drops_the_fastest_and_slowest_of_five_or_more_runs(tmp_path: Path) -> None:
    """A run that missed the target is dropped as the slowest of five, so the run of 17 evaluations counts in the mean."""
    write_runs(tmp_path / "failed", (16, 17, 16, 15, 20), failed=(4,))
    notes = measured(0, "3 of 5 runs, without the fastest and the slowest").notes
    found = measured(49 / 3, "", notes=(*notes, "result_4.txt: did not reach 0.720"))
    assert read_measured(str(tmp_path / "failed")) == found
    write_runs(tmp_path / "two", (16, 17, 20, 20, 20), failed=(2, 3, 4))
    assert read_measured(str(tmp_path / "two")).minutes == measured(33 / 2, "").minutes
    for name, evaluations in (("three", (15, 16, 20)), ("four", (15, 16, 20, 17))):
        write_runs(tmp_path / name, evaluations)
        count = len(evaluations)
        expected = measured(sum(evaluations) / count, f"{count} of {count} runs")
        assert read_measured(str(tmp_path / name)) == expected


def write_metrics(log: Path, seconds: float) -> None:
    """Write metrics of 100 steps, which wait 150 s in sum for data and compute for the other seconds."""
    step = {"event": "step", "step": 100, "samples": 76800, "time_s": seconds, "reduce_ms": 0.0, "update_ms": 0.0}
    step |= {"data_wait_ms": 1500.0, "forward_backward_ms": 10 * (seconds - 150)}
    log.with_name(log.name.replace("result", "metrics")).with_suffix(".jsonl").write_text(json.dumps(step) + "\n")


def test_the_largest_excess_over_a_prediction_comes_first(tmp_path: Path, cluster: Command) -> None:
    [log] = write_runs(tmp_path, (16,), step_ms=6000)  # takes 498 s
    write_metrics(log, 498)
    lines = cluster("predict", "--measured", log).stdout.splitlines()
    place = lines.index("measured 8.30 min, 53.6% above the prediction, outside its 80% interval: slower than normal")
    assert lines[place + 2 : place + 8] == [
        "mean of 1 of 1 run; 1 with metrics of the run",
        "convergence: 2.40 million samples, 1.6% below the prediction",
        "speed: the time for these samples is 56.1% above the prediction",
        "",
        "                         predicted    measured",
        "data wait                 0.00 min    2.50 min             storage; cores that load data",
    ]
    assert lines[-1] == "evaluations              0.101 min    0.00 min     0.00 x"
    parts = {"data wait": 2.5, "forward backward": pytest.approx(5.8), "start and other": 0.0}
    assert read_measured(str(log)).parts == dict.fromkeys(("reduce", "update", "evaluations"), 0.0) | parts
    # Metrics are ignored as those of another run if the times differ by more than 1 s plus 2 %.
    for seconds, metrics in ((509.1, 1), (509.3, 0), (487.3, 1), (487.1, 0)):
        write_metrics(log, seconds)
        assert bool(read_measured(str(log)).parts) == metrics, seconds


def test_logs_of_other_software_need_options_for_the_machine(
    tmp_path: Path, cluster: Command, refused: Refused
) -> None:
    [log] = write_runs(tmp_path, (16,), header={})
    log.write_text(without_chain(log.read_text()))
    assert "no --accelerator given" in refused("predict", "--measured", log)
    assert read_measured(str(log)) == measured(16, "1 of 1 run", accelerator=None, ranks=None)
    assert cluster("predict", "--measured", log, "--accelerator", "H100-SXM").returncode == 0


def test_options_that_contradict_the_logs_are_refused(tmp_path: Path, refused: Refused) -> None:
    [log] = write_runs(tmp_path, (16,))
    for options in (("--accelerator", "A100"), ("--nodes", 2), ("--gpus-per-node", 3), ("--batch", 1536)):
        assert options[0] in refused("predict", "--measured", log, *options)


def test_measured_refuses_texts_that_are_neither_minutes_nor_a_folder(refused: Refused) -> None:
    for text in ("0", "-3", "nan", "inf", "6,1", "6.1 min", "1e9", "no/such/folder", "٣"):
        assert "--measured" in refused("predict", *H100, "--measured", text)


def test_a_folder_without_a_finished_run_of_the_benchmark_is_refused(tmp_path: Path, refused: Refused) -> None:
    for name in ("empty", "open", "failed", "cut", "two", "mixed"):
        (tmp_path / name).mkdir()
    write_log(tmp_path / "open" / "result_0.txt", 0, division="open")
    write_runs(tmp_path / "failed", (5,), failed=(0,))
    [first, second] = write_runs(tmp_path / "two", (5, 6))
    lines = first.read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "result_0.txt").write_text("".join(line for line in lines if '"run_stop"' not in line))
    first.write_text(first.read_text() + second.read_text())
    second.write_text("nothing\n")
    write_runs(tmp_path / "mixed", (16,))
    write_log(tmp_path / "mixed" / "result_1.txt", 1, global_batch_size=1536, header=HEADER)
    for name, said in {
        "empty": "no finished run: there is no result_N.txt in it",
        "open": "division open, benchmark bert, sequences of 512; expected a closed run of BERT-Large",
        "failed": "no finished run: result_0.txt: did not reach 0.720",
        "cut": "no finished run: result_0.txt: has not ended, or has no valid times",
        "two": "no finished run: result_0.txt: has no run_start, or several; result_1.txt: ",
        "mixed": "runs with different batch sizes, accelerators or ranks: (1536, 'H100-SXM-80GB', 8) and (768, ",
    }.items():
        assert said in refused("predict", *H100[:2], "--measured", tmp_path / name)
