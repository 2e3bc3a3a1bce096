"""Files that hold a log: plain text, gzip by its content, standard input, each bounded; UTF-16 is named as what it is."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compliance.check.checker import check_file, check_log
from compliance.convergence.standing import standing
from compliance.log import file as log_file
from compliance.log.reader import read_log
from compliance.log.record import TOKEN
from compliance.report.results import load_results
from compliance.submission.check import check_paths
from tests.compliance import run_logs
from tests.compliance.command import run
from tests.compliance.submission.submission_trees import benchmark_folder, write_submission

CHECK = [sys.executable, "-m", "compliance", "check", "-"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid open log in results/vm/bert."""
    folder = tmp_path_factory.mktemp("log") / "results" / "vm" / "bert"
    folder.mkdir(parents=True)
    run_logs.write_run(folder / "result_0.txt", "open")
    return folder / "result_0.txt"


def packed(log: Path, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(log.read_bytes()))
    return path


# gzip


@pytest.mark.parametrize("name", ["result_0.txt.gz", "result_0.txt", "anything"])
def test_a_log_in_gzip_is_read_by_its_content(log: Path, tmp_path: Path, name: str) -> None:
    path = packed(log, tmp_path / name)
    plain, read = read_log(log), read_log(path)
    assert (read.records, read.header, read.size) == (plain.records, plain.header, plain.size)
    assert (plain.packed, read.packed) == (False, True)
    verdict = check_log(read)
    assert (verdict.official, verdict.ours) == ("pass", "pass")
    assert ["packed in gzip" in finding.found for finding in verdict.findings] == [True]
    shutil.copy(log, path)  # a name that says gzip makes no gzip
    assert not read_log(path).packed


def test_a_folder_of_packed_logs_is_checked_and_summed_up(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "vm" / "bert"
    packed(log, folder / "result_0.txt.gz")
    verdicts = {verdict.path.name: verdict for verdict in check_paths([tmp_path / "results"])}
    assert verdicts["result_0.txt.gz"].official == "pass"
    assert all(verdict.passed for verdict in verdicts.values())
    assert [(run.number, run.outcome) for run in load_results(folder).runs] == [(0, "valid")]
    assert standing(folder, "5.0.0").runs[0].status == "converged"
    shutil.copy(log, folder)  # and of a log and its packed copy the log counts
    assert [run.log.path.name for run in load_results(folder).runs] == ["result_0.txt"]
    assert "result_0.txt.gz" not in [verdict.path.name for verdict in check_paths([folder])]


def test_a_submission_takes_no_packed_log(tmp_path: Path) -> None:
    write_submission(tmp_path, 5)
    folder = benchmark_folder(tmp_path)
    packed(folder / "result_3.txt", folder / "result_3.txt")
    packed(folder / "result_4.txt", folder / "result_4.txt.gz")
    (folder / "result_4.txt").unlink()
    verdicts = {verdict.path.name: verdict for verdict in check_paths([tmp_path])}
    assert ["packed in gzip" in finding.found for finding in verdicts["result_3.txt"].errors] == [True]
    assert "result_4.txt.gz" not in verdicts
    assert any("result_4.txt.gz is not counted" in finding.found for finding in verdicts["bert"].errors)


@pytest.mark.parametrize("damage", ["cut", "flipped", "trailing"])
def test_damaged_gzip_is_one_finding(log: Path, tmp_path: Path, damage: str) -> None:
    content = gzip.compress(log.read_bytes())
    middle = len(content) // 2
    path = tmp_path / "result_0.txt.gz"
    changed = {
        "cut": content[:middle],
        "flipped": content[:middle]
        + bytes(byte ^ 255 for byte in content[middle : middle + 40])
        + content[middle + 40 :],
        "trailing": content + b"\x1f\x8b garbage",
    }
    path.write_bytes(changed[damage])
    verdict = check_file(path)
    (finding,) = verdict.findings
    assert (verdict.official, verdict.ours) == ("fail", "fail")
    assert "gzip data that are damaged or cut off" in finding.found
    assert "gzip --test" in finding.remedy


def test_a_gzip_bomb_is_refused_in_bounded_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_LOG_BYTES", 2**20)
    path = tmp_path / "result_0.txt.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(8):
            file.write(b"\0" * 2**20)
    assert path.stat().st_size < 2**14
    (finding,) = check_file(path).findings
    assert "more than 1 MiB when unpacked" in finding.found
    assert not read_log(path).records


# UTF-16


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named_in_one_finding(log: Path, tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_bytes(log.read_text().encode(encoding))
    verdict = check_file(path)
    (finding,) = verdict.findings
    assert (verdict.official, verdict.ours) == ("fail", "fail")
    assert "UTF-16" in finding.found
    assert "iconv -f UTF-16" in finding.remedy


def test_a_log_that_only_begins_like_utf_16_is_read(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    record = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": "seed", "value": 1, "metadata": {}}
    path.write_bytes(b"\xff\xfe\x00\n" + (TOKEN + json.dumps(record)).encode())
    log = read_log(path)
    assert (len(log.records), log.given_up) == (1, "")


# Standard input


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch):
    """Give bytes on standard input."""
    return lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_log_is_read_from_standard_input(log: Path, given, pack: type[bytes]) -> None:
    given(pack(log.read_bytes()))
    status, said = run("check", "-")
    assert status == 0
    assert said.startswith("PASS -: official pass, ours pass")


def test_a_bad_log_on_standard_input_fails(log: Path, given) -> None:
    given(log.read_bytes().replace(b'"key": "eval_accuracy"', b'"key": "eval_accurac"'))
    status, said = run("check", "-", "--json")
    assert (status, {entry["file"] for entry in json.loads(said)}) == (1, {"-"})


def test_standard_input_is_read_once() -> None:
    assert run("check", "-", "-") == (
        2,
        "error: -: given 2 times, expected once: standard input can be read only once\n",
    )


def test_standard_input_that_is_closed_is_an_error() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *CHECK], capture_output=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard input is closed, expected a log")


def test_standard_input_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_LOG_BYTES", 2**20)
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        (finding,) = check_file(Path("-")).findings
    assert "more than 1 MiB on standard input" in finding.found


def test_a_file_named_like_standard_input_is_reached_by_its_folder(log: Path, tmp_path: Path) -> None:
    shutil.copy(log, tmp_path / "-")
    assert check_file(tmp_path / "-").passed
