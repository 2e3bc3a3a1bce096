"""Schedules: batches with hyperparameters that reached the target, and published results near a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES
from cluster.devices import describe_machine, device_named
from cluster.published.cost_model import TimedRun
from cluster.published.results import _distance, closed_rows, machine_of_row, results, results_of_devices, usual_batches
from cluster.published.schedules import schedules
from tests.programs import REPOSITORY


def test_samples_are_the_median_of_finished_runs_with_equal_settings(tmp_path: Path) -> None:
    """Only runs that reached the target with the same settings count. The median of two runs is their mean."""
    config = RECIPES["tiny_cpu"]()
    log = (REPOSITORY / "results/cpu_2cores/bert/result_1.txt").read_text()
    (tmp_path / "mine/bert").mkdir(parents=True)
    own = replace(config, log=replace(config.log, results=tmp_path))
    texts = [
        "not a log\n",
        log.replace("# config.optimizer.base_learning_rate: 0.005", ""),
        log.replace('"status": "success"', '"status": "aborted"'),
        log,
        log.replace("38400", "44800"),
    ]
    found = []
    for number, text in enumerate(texts):
        (tmp_path / f"mine/bert/result_{number}.txt").write_text(text)
        (schedule,) = schedules(own)
        found.append((schedule.samples, schedule.note))
    where = f"of tiny_cpu in {tmp_path}"
    limit = (None, f"its limit, because no run {where} has reached the target")
    median = "to the target, the median of"
    assert found == [limit] * 3 + [(38_400, f"{median} 1 run {where}"), (41_600, f"{median} 2 runs {where}")]


def test_the_benchmark_has_schedules_from_recipes_and_published_results() -> None:
    found = schedules(RECIPES["h100_1x8"]())
    assert [each.global_batch_size for each in found] == sorted({each.global_batch_size for each in found})
    assert len(found) == 23
    stated = {each.global_batch_size: (each.source, each.samples, each.max_samples) for each in found}
    expected = {
        92: ("recipe dgxa100_1x1", 4_080_043, 4_500_000),
        176: ("Dell v4.0, R760xax4L40S", 2_300_359, 4_500_000),
        448: ("Baidu v2.0, XMan4.0_1_node_8_A100_PaddlePaddle and 14 others", 2_460_236, 4_500_000),
        480: ("Supermicro v3.0, SYS-421GU-TNXR and 1 other", 2_628_882.5, 4_500_000),
        768: ("the recipe's own", 2_436_616.5, 4_500_000),
        4096: ("recipe dgxa100_128x8", 2_786_615, 7_000_000),
        6912: ("Graphcore v2.0, ipu-pod256-POPART-closed", 3_486_503, 4_500_000),
        16384: ("recipe dgxa100_512x8", 5_468_895, 12_000_000),
    }
    assert {batch: stated[batch] for batch in expected} == expected
    [row] = [row for row in closed_rows() if row["system"] == "R760xax4L40S" and row["global_batch_size"] == "176"]
    known = found[1].optimizer
    assert (known.base_learning_rate, known.learning_rate_training_steps) == (3e-4, 13_900)
    assert (known.beta_1, known.beta_2) == (float(row["opt_lamb_beta_1"]), float(row["opt_lamb_beta_2"]))
    assert (known.weight_decay_rate, known.num_warmup_steps) == (0.01, 0)


def test_published_results_have_seconds_samples_and_companies() -> None:
    assert (len(results()), len(results_of_devices())) == (206, 201)
    assert {each.run.machine.device.model for each in results() if each.samples is None} == {"Gaudi2"}
    first = results()[0]
    assert (first.seconds, first.samples, first.run.batch, first.company) == (60 * 25.0759, 2_655_206, 448, "ASUSTEK")
    assert {each.company for each in results() if each.submitter.upper() == "GIGACOMPUTING"} == {"GIGABYTE"}


def test_usual_batches_come_from_the_next_smaller_and_larger_scale() -> None:
    expected = {1: (92,), 2: (448, 512), 16: (384, 448, 768, 1536, 2048), 100: (3072, 4608, 6144), 4096: (16384,)}
    assert {count: usual_batches(count) for count in expected} == expected
    assert usual_batches(100_000) == (100_000,), "no published batch is large enough"


def test_the_distance_between_runs_depends_on_devices_then_on_doublings() -> None:
    a100, h100, pcie = (device_named(name) for name in ("A100-SXM", "H100-SXM", "A100-PCIe-80GB"))
    old = TimedRun(describe_machine(a100, 1, 8), 448, "v2.0")
    # Four times the accelerators, nodes and batch, and newer software.
    assert _distance(old, TimedRun(describe_machine(a100, 4, 8), 1792, "v2.1")) == (0, 2 + 1 + 1 + 0.25)
    assert _distance(old, TimedRun(describe_machine(a100, 2, 2), 224, "v1.1")) == (0, 1 + 0.5 + 0.5)
    assert [_distance(old, TimedRun(describe_machine(each, 1, 8), 448, "v2.0"))[0] for each in (pcie, h100)] == [1, 2]


def test_recipes_have_the_hyperparameters_of_published_results() -> None:
    names = (
        "base_learning_rate",
        "lamb_beta_1",
        "lamb_beta_2",
        "learning_rate_training_steps",
        "lamb_weight_decay_rate",
    )
    columns = ("global_batch_size", *(f"opt_{name}" for name in names))
    published = {tuple(float(row[column]) for column in columns) for row in closed_rows()}
    for config in (recipe() for recipe in RECIPES.values()):
        own, [first, *more] = config.optimizer, schedules(config)
        if config.log.division == "open":
            assert (first.optimizer, more) == (own, []), "nothing is published of another model"
            continue
        key = config.training.global_batch_size, own.base_learning_rate, own.beta_1, own.beta_2
        # Some logs state 0 instead of the weight decay, so accept both.
        keys = {(*key, own.learning_rate_training_steps, decay) for decay in (own.weight_decay_rate, 0)}
        assert keys & published, config.recipe


def test_a_row_without_accelerators_describes_nodes_with_two_cpus() -> None:
    rows = {("N/A", 0): 2, ("", 0): 2, ("CPU", 4): 4, ("", 4): "unknown", ("A100", 0): "accelerators per node is 0"}
    for (name, per_node), expected in rows.items():
        row = {"accelerator": name, "accelerators_per_node": str(per_node), "nodes": "3"}
        row |= {"accelerator_interconnect": "", "host_networking": ""}
        if isinstance(expected, int):
            machine = machine_of_row(row)
            assert (machine.device.form, machine.nodes, machine.per_node) == ("CPU", 3, expected)
        else:
            with pytest.raises(ValueError, match=expected):
                machine_of_row(row)
