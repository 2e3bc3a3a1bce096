"""``run_and_time.sh`` trains, in a copy of the checkout: with data of one's own, and twice at once."""

import re
import shutil
import subprocess
from pathlib import Path

from tests.conftest import SmallRun
from tests.e2e.test_scripts import REACHED_AT_ONCE, SHORT, environment, start


def test_tiny_cpu_with_other_data_makes_none_of_its_own(checkout: Path, tmp_path: Path, small_run: SmallRun) -> None:
    arguments = ("--prepare", *small_run.arguments(tmp_path))
    done = start(checkout / "run_and_time.sh", *arguments, cwd=tmp_path, NPROC="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data of tiny_cpu" not in done.stdout
    assert f"ready, results would go to {tmp_path}" in done.stdout


def test_two_runs_at_once_in_one_folder_each_report_their_own(checkout: Path, tmp_path: Path) -> None:
    """Both find no data and make them."""
    shutil.rmtree(checkout / "data", ignore_errors=True)
    folder = tmp_path / "my results" / "tiny_cpu" / "bert"
    folder.mkdir(parents=True)
    earlier = {folder / name: f"{name} of an earlier run\n" for name in ("result_0.txt", "metrics_2.jsonl")}
    for path, text in earlier.items():
        path.write_text(text)
    settings = ("--", *SHORT, REACHED_AT_ONCE, "--log.results", str(tmp_path / "my results"))
    runs = [
        subprocess.Popen(
            [checkout / "run_and_time.sh", "tiny_cpu", "1", *settings],
            env=environment(NPROC="1", OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert all("error" not in output for output in outputs)
    logs = [re.findall(r"^log in (.*)$", output, re.M) for output in outputs]
    assert sorted(logs) == [[str(folder / "result_1.txt")], [str(folder / "result_3.txt")]]
    for output, (log,) in zip(outputs, logs, strict=True):
        assert re.findall(r"^(?:PASS|FAIL) (.*?): official", output, re.M) == [log]
        assert "end: success" in output
    assert {path: path.read_text() for path in earlier} == earlier
