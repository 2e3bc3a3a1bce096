"""``run_and_time.sh`` on one node: two simultaneous runs, missing GPUs, and binding to cores."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import SmallRun
from tests.e2e.test_scripts import REACHED_AT_ONCE, SHORT, begin, start
from tests.programs import PATIENCE_S


def test_two_simultaneous_runs_in_one_folder_get_different_numbers(
    checkout: Path, demo_data: Path, tmp_path: Path
) -> None:
    """Both runs have to make the data first. They evaluate on few samples, to save time."""
    shutil.rmtree(checkout / "data", ignore_errors=True)
    folder = tmp_path / "my results" / "tiny_cpu" / "bert"
    folder.mkdir(parents=True)
    earlier = {folder / name: f"{name} of an earlier run\n" for name in ("result_0.txt", "metrics_2.jsonl")}
    for path, text in earlier.items():
        path.write_text(text)
    settings = ("--", *SHORT, REACHED_AT_ONCE, "--log.results", str(tmp_path / "my results"))
    settings += ("--data.evaluation", str(demo_data / "few/evaluation"))
    script, one = checkout / "run_and_time.sh", {"NPROC": "1", "OMP_NUM_THREADS": "1"}
    (temporary := tmp_path / "temporary").mkdir()
    runs = [begin(script, "tiny_cpu", "1", *settings, cwd=tmp_path, TMPDIR=str(temporary), **one) for _ in range(2)]
    outputs = [run.communicate(timeout=PATIENCE_S)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert all("error" not in output for output in outputs)
    logs = [re.findall(r"^log in (.*)$", output, re.M) for output in outputs]
    assert sorted(logs) == [[str(folder / "result_1.txt")], [str(folder / "result_3.txt")]]
    for output, (log,) in zip(outputs, logs, strict=True):
        assert re.findall(r"^(?:PASS|FAIL) (.*?): official", output, re.M) == [log]
        assert "end: success" in output
    assert {path: path.read_text() for path in earlier} == earlier
    assert [*temporary.iterdir()] == []


def test_a_run_on_absent_gpus_is_refused_before_it_starts(checkout: Path, tmp_path: Path, small_run: SmallRun) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    recipe, *settings = small_run.arguments(tmp_path / "results", training__device="cuda")
    script = checkout / "run_and_time.sh"
    done = start(script, recipe, "1", "--", *settings, cwd=tmp_path, NPROC="2")
    assert done.returncode == 2, done.stdout + done.stderr
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: training.device is cuda, but PyTorch sees no GPU here: set training.device to cpu")
    assert not (tmp_path / "results").exists()
    # A dry run needs no GPUs, because it may check data and settings for another machine.
    done = start(script, recipe, "1", "--", *settings, "--dry-run", cwd=tmp_path, NPROC="2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ranks_are_bound_to_cores_only_if_there_are_gpus(checkout: Path, tmp_path: Path, small_run: SmallRun) -> None:
    module = checkout / "bert/launch/binding.py"
    original = module.read_text()
    note = f'print(launch.local_rank, "of", launch.local_size, file=open({str(tmp_path / "bound")!r}, "a"))'
    try:
        module.write_text(original.replace("    os.execv(", f"    {note}\n    os.execv("))
        (tmp_path / "nvidia-smi").symlink_to("/bin/true")
        for path in (os.environ["PATH"], f"{tmp_path}:{os.environ['PATH']}"):
            assert not (tmp_path / "bound").exists()
            arguments = ("tiny_cpu", "1", "--", *small_run.arguments(tmp_path / "results")[1:])
            done = start(checkout / "run_and_time.sh", *arguments, cwd=tmp_path, NPROC="2", PATH=path)
            assert done.returncode == 1, done.stdout + done.stderr  # 1 because the run misses its target
            assert "end: aborted after 160 samples" in done.stdout
            assert f"FAIL {tmp_path}/results/tiny_cpu/bert/result_" in done.stdout
    finally:
        module.write_text(original)
    assert sorted((tmp_path / "bound").read_text().splitlines()) == ["0 of 2", "1 of 2"]
