"""Predictions as people, programs and tables get them."""

import csv
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.devices import device_named, devices
from cluster.published.cost_model import TimedRun
from cluster.published.machine import describe_machine
from cluster.published.prediction import PARTS, predict, usual_run
from cluster.published.prediction_table import ADDED, COLUMNS, MOST_BYTES, MOST_ROWS, predict_table
from cluster.published.probed import machine_of
from cluster.published.results import TABLE, results
from cluster.view import Link, Rank, View, write_view
from tests.cluster.conftest import Command
from tests.cluster.test_view import made_up


@given(
    st.sampled_from(devices()),
    st.sampled_from([1, 2, 8, 64, 434, 1024]),
    st.sampled_from([1, 2, 4, 8, 72]),
    st.sampled_from([None, "v2.0", "v5.0"]),
)
def test_an_interval_holds_its_prediction(device, nodes, per_node, round) -> None:
    prediction = predict(usual_run(describe_machine(device, nodes, per_node), round))
    assert 0 < prediction.low < prediction.minutes < prediction.high < math.inf
    assert prediction.run.batch >= nodes * per_node


def test_an_interval_is_wider_for_what_is_known_by_its_data_sheet_alone() -> None:
    def width(name: str) -> float:
        found = predict(TimedRun(describe_machine(device_named(name), 1, 8), 768))
        return math.log(found.high / found.low)

    assert max(width("H100-SXM"), width("A100-SXM")) < min(map(width, ("H200", "B200", "GB200", "MI300X")))


def test_what_is_extrapolated_is_said() -> None:
    assert predict(TimedRun(describe_machine(device_named("H100"), 1, 8), 768)).extrapolates == ()
    assert "data sheet alone" in predict(TimedRun(describe_machine(device_named("B200"), 1, 8), 768)).extrapolates[0]
    largest = predict(TimedRun(describe_machine(device_named("H100"), 1, 8), 32768))
    assert "batch size above 16,384" in largest.extrapolates[0]
    assert (
        "more than 4,096" in predict(TimedRun(describe_machine(device_named("H100"), 1024, 8), 16384)).extrapolates[0]
    )


def test_the_nearest_result_of_a_published_system_is_one_of_its_kind() -> None:
    for result in results():
        near = predict(TimedRun(result.run.machine, result.run.batch, result.run.round)).near[0]
        assert near.run.machine.device.model == result.run.machine.device.model
        assert near.run.machine.accelerators == result.run.machine.accelerators


def test_among_equal_neighbours_the_newest_is_first() -> None:
    near = predict(TimedRun(describe_machine(device_named("H100"), 1, 8), 768)).near
    assert {result.run.round for result in near} == {"v3.1"}


def test_predict_shows_minutes_parts_and_neighbours(cluster: Command) -> None:
    done = cluster("predict", "--accelerator", "H100-SXM", "--nodes", "8", "--gpus-per-node", "8", "--batch", "4608")
    assert done.status == 0, done.err
    for text in (
        "64 x H100-SXM-80GB, 8 nodes, global batch size 4,608, FP8",
        "80% between",
        *PARTS.values(),
        "dgxh100_n8",
    ):
        assert text in done.out


def test_json_is_what_the_lines_say(cluster: Command) -> None:
    done = cluster("predict", "--accelerator", "A100-SXM", "--nodes", "8", "--batch", "3072", "--json")
    document = json.loads(done.out)
    assert document["low"] < document["minutes"] < document["high"]
    assert set(document["parts"]) == set(PARTS)
    assert sum(document["parts"].values()) == pytest.approx(document["minutes"])
    assert document["minutes"] == predict(TimedRun(describe_machine(device_named("A100-SXM"), 8, 8), 3072)).minutes
    assert len(document["nearest"]) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--accelerator", "NVIDIA Z9000"), "accelerator 'NVIDIA Z9000' is unknown; nearest:"),
        (("--accelerator", "H100", "--nodes", "0"), "nodes: 0, expected 1 to"),
        (("--accelerator", "H100", "--gpus-per-node", "-4"), "GPUs per node: -4, expected 1 to"),
        (("--accelerator", "H100", "--batch", "4"), "global batch size 4 on 8 accelerators"),
        (("--accelerator", "H100", "--batch", "many"), "many"),
        (("--accelerator", "H100", "--nodes", "1000000"), "expected at most 1,048,576 GPUs"),
        (("--accelerator", "H100", "--round", "3"), "round is '3', expected one such as v3.1"),
        ((), "no --accelerator given"),
        (("--table", "a.csv"), "--table and --out belong together"),
        (("--table", "missing.csv", "--out", "out.csv"), "missing.csv: No such file"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: tuple[str, ...], said: str, refused: Callable[..., str]
) -> None:
    assert said in refused("predict", *arguments)


def test_the_published_table_is_predicted_and_kept(tmp_path: Path, cluster: Command) -> None:
    out = tmp_path / "out.csv"
    done = cluster("predict", "--table", TABLE, "--out", out)
    assert done.status == 0, done.err
    with TABLE.open(newline="") as before, out.open(newline="") as after:
        given, found = list(csv.DictReader(before)), list(csv.DictReader(after))
    assert [{name: row[name] for name in given[0]} for row in found] == given
    predicted = [row for row in found if row["predicted_minutes"]]
    assert len(predicted) + done.err.count("is left empty") == len(found)
    assert f"{len(predicted)} of {len(found)} rows predicted" in done.out
    for row in predicted:
        assert float(row["low_minutes"]) < float(row["predicted_minutes"]) < float(row["high_minutes"])
    assert all(
        row["accelerator"].startswith(("TPU", "Graphcore", "Habana Gaudi")) for row in found if row not in predicted
    )


def test_a_predicted_table_can_be_predicted_again(tmp_path: Path) -> None:
    once, twice = tmp_path / "once.csv", tmp_path / "twice.csv"
    predict_table(TABLE, once)
    predict_table(once, twice)
    assert once.read_bytes() == twice.read_bytes()


HEADER = ",".join(COLUMNS)
GOOD = "H100-SXM,8,8,NVLink,8x NDR 400Gb/s,4608"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "in.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_needs_only_its_columns_and_may_leave_the_batch_open(tmp_path: Path) -> None:
    source = write(tmp_path, HEADER, GOOD, "NVIDIA H200,1.0,8.0,,,", "NVIDIA H200,1,8,,,768.0")
    rows = predict_table(source, tmp_path / "out.csv")
    assert [row.prediction.run.batch for row in rows if row.prediction] == [4608, 768, 768]
    header = (tmp_path / "out.csv").read_text().splitlines()[0]
    assert header == ",".join([*COLUMNS, *ADDED])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("Unknown 9,8,8,,,4608", "accelerator 'Unknown 9' is unknown"),
        ("H100,nan,8,,,4608", "nodes is 'nan', expected a whole number"),
        ("H100,inf,8,,,4608", "nodes is 'inf'"),
        ("H100,1e3,8,,,4608", "nodes is '1e3'"),
        ("H100,-1,8,,,4608", "nodes is '-1'"),
        ("H100,0,8,,,4608", "nodes: 0, expected 1 to"),
        ("H100,8,8,,,NaN", "global_batch_size is 'NaN'"),
        ("H100,8,8,,,3", "global batch size 3 on 64 accelerators"),
        (f"H100,{'9' * 5000},8,,,4608", "nodes is '9999"),
        ("H100,\u0663,8,,,4608", "expected a whole number"),
        ("H100,8,0,,,4608", "GPUs per node: 0"),
        ("H100,8", "accelerators_per_node is ''"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_left_empty_and_named(row: str, said: str, tmp_path: Path) -> None:
    source = write(tmp_path, HEADER, GOOD, row)
    good, bad = predict_table(source, tmp_path / "out.csv")
    assert good.prediction is not None
    assert bad.prediction is None
    assert said in bad.reason
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["predicted_minutes"] != "" for row in csv.DictReader(file)] == [True, False]
    with pytest.raises(ValueError, match="no row can be predicted"):
        predict_table(write(tmp_path, HEADER, row), tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "column accelerator is missing"),
        (b"\xff\xfe\x00\x01" * 100, "no text in UTF-8"),
        (b"\x7fELF\x00\x00" * 100, "expected"),
        (b"accelerator,nodes\nH100,8\n", "column accelerators_per_node is missing"),
        (f"{HEADER}\n".encode(), "it has none"),
        (f"{HEADER}\n{GOOD},more,and,more\n".encode(), "row 1 has more cells than the header"),
        (f'{HEADER}\n"H100,8,8\n'.encode(), "expected a CSV file"),
        (f"{HEADER}\n{'x' * 200_000},8,8,,,4608\n".encode(), "expected a CSV file"),
        (f"{HEADER}\n".encode() + f"{GOOD}\n".encode() * (MOST_ROWS + 1), "more than 20,000 rows"),
        (b"x" * (MOST_BYTES + 1), "expected at most"),
    ],
    ids=["empty", "bytes", "program", "columns", "no rows", "long row", "quote", "long cell", "rows", "size"],
)  # fmt: skip
def test_what_is_no_table_is_refused_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        predict_table(source, out)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500 + len(str(source))
    assert not out.exists()


def test_a_hostile_name_is_shown_harmlessly(tmp_path: Path, cluster: Command) -> None:
    source = write(tmp_path, HEADER, GOOD, "\x1b[2J::error::,8,8,,,4608")
    done = cluster("predict", "--table", source, "--out", tmp_path / "out.csv")
    assert done.status == 0
    assert "\x1b" not in done.err
    assert "row 2 is left empty" in done.err


def probed(
    device: str = "NVIDIA H100 80GB HBM3",
    hosts: int = 4,
    ranks: int = 8,
    gbit_s: float = 300.0,
) -> View:
    """A view of hosts with a card for each rank."""
    made = made_up(hosts, 1)
    every = [Rank(h, r, device, 80 << 30, f"mlx5_{r}", ()) for h in range(hosts) for r in range(ranks)]
    pairs = [(a, b) for a in range(0, hosts * ranks, ranks) for b in range(0, hosts * ranks, ranks) if a != b]
    links = [Link(a, b, 1e-5, 8e-9 / gbit_s) for a, b in pairs] + [Link(0, 1, 1e-6, 1e-12)]
    return dataclasses.replace(made, ranks=tuple(every), links=tuple(links), collectives=(), outliers=())


def test_a_probed_machine_has_its_devices_and_its_measured_network() -> None:
    machine = machine_of(probed())
    assert (machine.device.name, machine.nodes, machine.per_node) == ("H100-SXM-80GB", 4, 8)
    assert machine.network.ports == 8
    assert not machine.network.is_assumed
    described = describe_machine(machine.device, 4, 8, networking="8x IB NDR 400Gb/s")
    fast, usual, slow = (
        predict(TimedRun(each, 3072)).minutes
        for each in (machine_of(probed(gbit_s=390)), described, machine_of(probed(gbit_s=20)))
    )
    assert fast < usual * 1.02 < 1.2 * usual < slow
    assert machine_of(probed(hosts=1)).network.is_assumed


def test_probes_of_what_nothing_is_published_for_are_refused(
    tmp_path: Path, cluster: Command, refused: Callable[..., str]
) -> None:
    file = tmp_path / "cluster.json"
    for name in ("CPU", "AMD EPYC", "Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz"):
        with pytest.raises(ValueError, match="of which the facts file knows nothing"):
            machine_of(probed(name))
    known = machine_of(probed("Intel(R) Xeon(R) Platinum 8480+", ranks=4))
    assert (known.device.name, known.per_node) == ("Xeon-8480+", 2)
    write_view(made_up(), file)
    assert "the device of the probe is 'CPU'" in refused("predict", "--cluster", file)
    write_view(probed(), file)
    assert "omit --accelerator" in refused("predict", "--cluster", file, "--accelerator", "H100")
    done = cluster("predict", "--cluster", file)
    assert done.out.startswith("32 x H100-SXM-80GB, 4 nodes"), done.err
    uneven = probed()
    for ranks in (uneven.ranks[:-1], (*uneven.ranks[:-1], dataclasses.replace(uneven.ranks[-1], device="NVIDIA H200"))):
        with pytest.raises(ValueError, match="the hosts of the probe differ"):
            machine_of(dataclasses.replace(uneven, ranks=ranks))
