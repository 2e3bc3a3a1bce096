"""Numbering of result files when one run starts alone or several runs start at once."""

import importlib.metadata
import threading
from pathlib import Path

import pytest
import torch

from bert.configuration.recipes import tiny_cpu
from bert.log.result_files import choose_files, create_log, provenance
from bert.parallel.mesh import Mesh


def made(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("earlier\n")
    return folder


def test_the_lowest_free_number_is_chosen_and_nothing_created(tmp_path: Path) -> None:
    folder = made(tmp_path / "bert", "result_0.txt", "metrics_1.jsonl", "result_3.txt")
    (folder / "result_2.txt").symlink_to("nowhere")
    for _ in range(2):
        assert choose_files(folder, None) == (folder / "result_4.txt", folder / "metrics_4.jsonl")
    assert choose_files(tmp_path / "absent", None).result.name == "result_0.txt"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("there", ["result_5.txt", "metrics_5.jsonl"])
def test_a_wanted_number_that_is_taken_is_refused(tmp_path: Path, there: str) -> None:
    made(tmp_path, there)
    for take in (choose_files, create_log):
        with pytest.raises(ValueError, match=f"{there} exists already"):
            take(tmp_path, 5)
    assert (tmp_path / there).read_text() == "earlier\n"


def test_runs_that_start_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    """In every round, all runs look at the folder before any of them creates its log."""
    folder = made(tmp_path, "result_0.txt", "result_2.txt")
    runs, rounds = 8, 5
    barrier, numbers = threading.Barrier(runs), []

    def run() -> None:
        for _ in range(rounds):
            barrier.wait()
            log, files = create_log(folder, None)
            log.close()
            numbers.append(int(files.result.stem.removeprefix("result_")))

    threads = [threading.Thread(target=run) for _ in range(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, *range(3, 2 + runs * rounds)]
    assert (folder / "result_0.txt").read_text() == (folder / "result_2.txt").read_text() == "earlier\n"


def test_the_header_names_the_run_and_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of NCCL matter only on GPUs."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    mesh = Mesh(0, 4, 0, torch.device("cpu"), ((0, 1), (2, 3)), tensor=2)
    head = provenance(tiny_cpu(), mesh, 11)
    assert head["note"] == "not an MLPerf result: unverified, not reviewed by MLCommons"
    assert (head["recipe"], head["seed"], head["accelerator"], "nccl" in head) == ("tiny_cpu", 11, "none", False)
    assert head["processes"] == f"4 x {torch.get_num_threads()} threads, data 2 x tensor 2"
    assert (head["torch"], head["config.training.global_batch_size"]) == (importlib.metadata.version("torch"), 32)
