"""Predictions for a CSV table of machines."""

import csv
import io
from pathlib import Path

import pytest

from cluster.devices import describe_machine, device_named
from cluster.published.prediction import predict, usual_run
from cluster.published.results import TABLE, results
from tests.cluster.conftest import Command, Refused

HEADER = "accelerator,nodes,accelerators_per_node"


def rows_of(text: str, separator: str = ",") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator))


def test_every_known_device_of_the_published_results_gets_a_prediction(cluster: Command) -> None:
    done = cluster("predict", "--table", TABLE)
    before, after = rows_of(TABLE.read_text(encoding="utf-8")), rows_of(done.stdout)
    assert [{name: row[name] for name in before[0]} for row in after] == before
    unknown = [row for row in after if row["reason"]]
    assert len(after) - len(unknown) >= len(results())
    assert done.returncode == bool(unknown)
    assert f"{len(unknown)} of {len(after)} rows" in done.stderr
    for row in after:
        if not row["reason"]:
            minutes = float(row["predicted_minutes"])
            assert float(row["ratio"]) == pytest.approx(float(row["minutes"]) / minutes, rel=1e-4)
            assert float(row["low_minutes"]) < minutes < float(row["high_minutes"])


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


REASONS = {
    "Z9000,1,8,,,": "accelerator 'Z9000' is unknown",
    "H100,x,8,,,": "nodes is 'x', expected a whole number",
    "H100,,8,,,": "nodes is '', expected a whole number",
    "H100,1,0,,,": "the number of accelerators per node is 0, expected 1 to 1,048,576",
    "H100,1,8,4,,": "global batch size 4 on 8 accelerators: expected at least one sequence on each",
    "H100,1,8,,2023,": "round is '2023', expected one such as v3.1",
    "H100,1,8,,,-2": "minutes is '-2', expected minutes such as 6.1",
    "H100,1,8,,,nan": "minutes is 'nan', expected minutes such as 6.1",
    "H100,1,8,,,1,more": "the row has 7 cells, expected 6",
}
"""Reason in the output for each row without a prediction."""


def test_a_row_without_a_prediction_is_kept_with_its_reason(tmp_path: Path, cluster: Command) -> None:
    source = tmp_path / "table.csv"
    source.write_text("\n".join((f"{HEADER},global_batch_size,round,minutes", *REASONS, "H100,1,8", "")))
    done = cluster("predict", "--table", source)
    said = f'error: {source}: no prediction for 9 of 10 rows; the column "reason" says why\n'
    assert (done.returncode, done.stderr) == (1, said)
    *refused, last = csv.reader(done.stdout.splitlines()[1:])
    assert [",".join(row[:6] + row[11:]) for row in refused] == [*REASONS], "cells beyond the header are kept"
    for row, reason in zip(refused, REASONS.values(), strict=True):
        assert (row[6:10], row[10].startswith(reason)) == ([""] * 4, True), row
    minutes = predict(usual_run(describe_machine(device_named("H100"), 1, 8))).minutes
    assert (last[6], last[9:]) == (f"{minutes:.6g}", ["", ""])


FAULTS = {
    b"": "no column accelerator",
    HEADER.encode() + b"\n\n": "no rows below the header",
    b"accelerators,nodes,accelerators_per_node\nH100,1,8\n": "no column accelerator; did you mean accelerators?",
    f"{HEADER},nodes\nH100,1,8,2\n".encode(): "the output would have two columns named nodes",
    f"{HEADER},reason\nH100,1,8,x\n".encode(): "the output would have two columns named reason",
    f'{HEADER}\n"H100,1,8\n'.encode(): "unexpected end of data",
    f"{HEADER}\nH100,1,8\n".encode("utf-16"): "binary data, or text in UTF-16",
    f"{HEADER}\nH100 Zürich,1,8\n".encode("latin-1"): "'utf-8' codec can't decode byte 0xfc",
    b"a" * ((16 << 20) + 1): "16,777,217 bytes, expected at most 16,777,216",
}


def test_malformed_tables_and_needless_options_are_refused(tmp_path: Path, refused: Refused, cluster: Command) -> None:
    source = tmp_path / "table.csv"
    for content, said in FAULTS.items():
        source.write_bytes(content)
        line = refused("predict", "--table", source)
        assert line.startswith(f"error: {source}: {said}")
        assert line.endswith("expected a CSV file in UTF-8 with the columns of cluster/published/published_results.csv")
    source.write_text(f"{HEADER}\nH100,1,8\n")
    assert cluster("predict", "--table", source).stdout.count("\n") == 2
    for options in ("--accelerator H100", "--nodes 2", "--batch 8", "--measured 6", "--json", "--round v3.1"):
        assert "--table describes the machines" in refused("predict", "--table", TABLE, *options.split())
