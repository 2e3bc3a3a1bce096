"""Predictions for a CSV table of machines."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.devices import describe_machine, device_named
from cluster.published.prediction import predict, usual_run
from cluster.published.results import TABLE, results
from tests.cluster.conftest import Command

HEADER = "accelerator,nodes,accelerators_per_node"


def rows_of(text: str, separator: str = ",") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator))


def test_the_table_of_published_results_is_predicted(cluster: Command) -> None:
    done = cluster("predict", "--table", TABLE)
    before, after = rows_of(TABLE.read_text(encoding="utf-8")), rows_of(done.stdout)
    assert [{name: row[name] for name in before[0]} for row in after] == before
    unknown = [row for row in after if row["reason"]]
    assert len(after) - len(unknown) >= len(results())
    assert all(bool(row["reason"]) != bool(row["predicted_minutes"]) for row in after)
    assert done.returncode == bool(unknown)
    assert f"{len(unknown)} of {len(after)} rows" in done.stderr
    for row in after:
        if not row["reason"]:
            assert float(row["ratio"]) == pytest.approx(
                float(row["minutes"]) / float(row["predicted_minutes"]), rel=1e-4
            )
            assert float(row["low_minutes"]) < float(row["predicted_minutes"]) < float(row["high_minutes"])


def test_the_export_of_a_spreadsheet_is_read_and_its_cells_are_kept(tmp_path: Path, cluster: Command) -> None:
    source = tmp_path / "export.csv"
    rows = ['H100-SXM;1;8.0;6,1;"=1+1; +2"', ";;;;", 'B200;2;8;;"Zürich\r\n@x"', ""]
    text = "\r\n".join([f"{HEADER.replace(',', ';')};minutes;note", *rows])
    source.write_bytes(b"\xef\xbb\xbf" + text.encode())
    done = cluster("predict", "--table", source)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = rows_of(done.stdout, ";")
    assert (first["note"], second["note"]) == ("=1+1; +2", "Zürich\r\n@x")
    expected = predict(usual_run(describe_machine(device_named("H100-SXM"), 1, 8))).minutes
    assert float(first["predicted_minutes"]) == pytest.approx(expected, rel=1e-5)
    assert float(first["ratio"]) == pytest.approx(6.1 / expected, rel=1e-5)
    assert second["ratio"] == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("Z9000,1,8,,,", "Z9000"),
        ("H100,x,8,,,", "nodes"),
        ("H100,,8,,,", "nodes"),
        ("H100,1,0,,,", "GPUs per node"),
        ("H100,1,8,4,,", "global batch size 4"),
        ("H100,1,8,,2023,", "round"),
        ("H100,1,8,,,-2", "minutes"),
        ("H100,1,8,,,nan", "minutes"),
        ("H100,1,8,,,1,more", "7 cells"),
    ],
)
def test_a_row_without_a_prediction_stays_with_its_reason(
    row: str, reason: str, tmp_path: Path, cluster: Command
) -> None:
    source = tmp_path / "table.csv"
    source.write_text(f"{HEADER},global_batch_size,round,minutes\n{row}\nH100,1,8\n")
    done = cluster("predict", "--table", source)
    assert done.returncode == 1
    assert "1 of 2 rows" in done.stderr
    first, second = csv.reader(done.stdout.splitlines()[1:])
    assert first[:6] == row.split(",")[:6]
    assert first[11:] == row.split(",")[6:], "cells beyond the header are kept"
    assert reason in first[10]
    assert second[6]
    assert not second[10]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "accelerator"),
        (HEADER.encode() + b"\n\n", "no rows"),
        (b"accelerators,nodes,accelerators_per_node\nH100,1,8\n", "did you mean accelerators?"),
        (f"{HEADER},nodes\nH100,1,8,2\n".encode(), "nodes would be there twice"),
        (f"{HEADER},reason\nH100,1,8,x\n".encode(), "reason"),
        (f'{HEADER}\n"H100,1,8\n'.encode(), "end of data"),
        (f"{HEADER}\nH100,1,8\n".encode("utf-16"), "UTF-16"),
        (f"{HEADER}\nH100 Zürich,1,8\n".encode("latin-1"), "UTF-8"),
        (b"\x7fELF\0\0", "binary"),
        (b"a" * (16 << 20) + b"\n", "16,777,216"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_table_is_refused(
    content: bytes, said: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    source = tmp_path / "table.csv"
    source.write_bytes(content)
    assert said in refused("predict", "--table", source)


@pytest.mark.parametrize("options", ["--accelerator H100", "--nodes 2", "--measured 6", "--json", "--round v3.1"])
def test_a_table_excludes_the_options_for_one_machine(options: str, refused: Callable[..., str]) -> None:
    assert "--table" in refused("predict", "--table", TABLE, *options.split())
