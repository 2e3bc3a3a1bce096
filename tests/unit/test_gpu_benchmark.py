"""The GPU benchmark, as far as it can be shown without one: the same code on small shapes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kernels
import kernels.pytorch
from benchmarks import gpu, gpu_end_to_end, gpu_kernels
from benchmarks.gpu_cases import cases
from benchmarks.gpu_fp8 import fp8_cases
from benchmarks.gpu_peers import plain_loss
from benchmarks.gpu_scale import FULL, TINY, Context, micro_batches, training_flop, wikipedia_lengths
from benchmarks.gpu_step import training_step
from benchmarks.gpu_timing import NotUsableError, Report, Row
from bert.config import ModelConfig

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "gpu.py"), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(CPU, TINY, Report(tmp_path / "part.json", "part", CPU))


@pytest.fixture(scope="module")
def all_parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("gpu")
    return folder, command("--device", "cpu", "--tiny", "--out", str(folder))


def rows(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / f"{part}.json").read_text())
    assert found["complete"], found["error"]
    assert {"commit", "date", "versions", "device"} <= set(found)
    return {row["name"]: row for row in found["rows"]}


def test_every_part_runs_and_the_table_comes_last(all_parts: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = all_parts
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in folder.iterdir()} == set(gpu.PARTS)
    assert done.stdout.splitlines()[-1].startswith("└")
    assert all(part in done.stdout for part in gpu.PARTS)
    assert "not complete" not in done.stdout


def test_ceilings_are_rates(all_parts: tuple[Path, object]) -> None:
    found = rows(all_parts[0], "ceilings")
    copy, product = found["device copy"], found["bf16 64 x 64 x 64"]
    assert copy["figure"] == pytest.approx(2 * TINY.copied / 1e12 / (copy["milliseconds"] / 1e3))
    assert product["figure"] == pytest.approx(2 * 64**3 / 1e12 / (product["milliseconds"] / 1e3))
    assert product["seconds"]


def test_the_step_is_split_into_parts_that_add_up(all_parts: tuple[Path, object]) -> None:
    found = rows(all_parts[0], "step")
    split = {name: row for name, row in found.items() if name.startswith("split, bf16: ")}
    assert {"split, bf16: attention", "split, bf16: LAMB", "split, bf16: matrix products, encoder and heads"} <= set(
        split
    )
    assert sum(row["share"] for row in split.values()) > 0.5
    assert sum(row["unit"] == "sequences/s" for row in found.values()) == 4


def test_peers_take_a_step(all_parts: tuple[Path, object]) -> None:
    found = rows(all_parts[0], "peers")
    assert found["plain PyTorch varlen, unpadded"]["figure"] > 0
    if importlib.util.find_spec("transformers") is not None:
        for name in ("Hugging Face, padded, SDPA", "Hugging Face, padded, SDPA, torch.compile"):
            assert found[name]["figure"] > 0, found[name]["note"]


def test_every_op_is_timed_and_what_cannot_be_says_why(all_parts: tuple[Path, object]) -> None:
    found = rows(all_parts[0], "kernels")
    for op in (op for op in gpu_kernels.OPS if not op.startswith(("lamb_", "scaled_")) and not op.endswith("fp8")):
        assert found[f"{op} forward, reference"]["milliseconds"] > 0
        assert found[f"{op} both ways, reference"]["milliseconds"] > 0
    assert found["lamb_step, reference"]["milliseconds"] > 0
    assert all(row["note"] for row in found.values() if row["milliseconds"] is None)


def test_fp8_is_timed_and_learns_as_fp32(all_parts: tuple[Path, object]) -> None:
    found = rows(all_parts[0], "fp8")
    assert found["step in FP8"]["figure"] > 0
    assert found["step in FP8"]["note"].startswith("fp8: ")
    assert found["losses in bf16 against fp32"]["figure"] == 0  # fp32 on both sides where it is tiny: the same losses
    assert 0 < found["losses in fp8 against fp32"]["figure"] < 0.05


def test_the_fp8_ops_are_timed_and_right(all_parts: tuple[Path, object]) -> None:
    for part in ("kernels", "correctness"):
        found = rows(all_parts[0], part)
        of_fp8 = [name for name in found if "fp8" in name or name.startswith("scaled_matmul")]
        assert len(of_fp8) >= 12
        assert all(found[name]["figure"] > 0 for name in of_fp8 if name.endswith("reference"))


def test_an_fp8_cast_with_another_transpose_is_wrong() -> None:
    case = next(case for case in fp8_cases(TINY.model, 20, torch.bfloat16, CPU) if case.op == "cast_transpose_fp8")

    def swapped(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = kernels.cast_transpose_fp8(*arguments)
        return rows, columns.roll(1, 0)

    with pytest.raises(ValueError, match="another tensor"):
        case.results(swapped)


def test_all_parts_take_less_than_nine_minutes():
    assert sum(seconds for _, seconds in gpu.PARTS.values()) <= 530


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    done = command("--device", "cpu", "--tiny", "--part", "end-to-end", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path, "end-to-end")
    assert found["log"]["note"].startswith("PASS"), found["log"]
    assert found["inside the clock"]["figure"] > 0
    assert 0 <= found["host waiting for data"]["share"] < 1
    assert 0.2 < found["last quarter of the steps against the first"]["figure"] < 5


def test_drift_and_waiting_come_from_the_steps() -> None:
    steps = [
        {"event": "step", "step_ms": ms, "data_wait_ms": ms / 10, "sequences_per_s": 1e3 / ms}
        for ms in (10, 10, 10, 10, 20, 20, 30, 30)
    ]
    others = [
        {"event": "eval", "eval_s": 0.5, "count": 7},
        {"event": "end", "samples": 100, "time_s": 4.0},
    ]
    found = {row.name: row for row in gpu_end_to_end.rows_of(steps + others)}
    assert found["last quarter of the steps against the first"].figure == 3
    assert found["host waiting for data"].share == pytest.approx(0.1)
    assert found["inside the clock"].figure == 25
    assert found["evaluation"].milliseconds == 500


def test_memory_ends_with_what_fits(all_parts: tuple[Path, object]) -> None:
    assert rows(all_parts[0], "memory")["largest micro-batch that fits"]["figure"] == TINY.sequences


def test_a_wrong_op_fails_the_part_that_checks(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.pytorch.dropout_add_layer_norm
    monkeypatch.setattr(kernels.pytorch, "dropout_add_layer_norm", lambda *arguments: right(*arguments) * 1.01)
    monkeypatch.setattr(
        gpu_kernels, "cases", lambda *sizes: [case for case in cases(*sizes) if case.op == right.__name__]
    )
    with pytest.raises(RuntimeError, match="wrong: dropout_add_layer_norm, pytorch, float32"):
        gpu_kernels.correctness(context)


def test_not_a_number_is_wrong() -> None:
    exact = [torch.ones(3, dtype=torch.float64)] * 2
    plain, ours = [torch.ones(3)] * 2, [torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])]
    assert gpu_kernels._judged("x", exact, plain, ours, torch.float32).note.startswith("WRONG, worst in the result 1")
    assert gpu_kernels._judged("x", exact, plain, plain, torch.float32).note.startswith("right")


@no_gpu
def test_without_a_gpu_the_message_is_clear() -> None:
    done = command("--part", "step")
    assert done.returncode == 2
    assert done.stderr == "error: needs a CUDA device, and PyTorch sees none here\n"


@pytest.mark.parametrize("more", [[], ["--tiny"], ["--out", "x"]])
def test_a_cpu_gives_no_figures(more: list[str], capsys: pytest.CaptureFixture) -> None:
    assert gpu.main(["--device", "cpu", *more]) == 2
    assert capsys.readouterr().err.startswith("error: --device cpu only tests the program")


def test_a_part_that_fails_leaves_its_rows_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def failing(context: Context) -> None:
        context.report.add(Row("one figure", figure=3.0))
        raise RuntimeError("device on fire\nand more")

    monkeypatch.setattr(gpu_kernels, "kernels", failing)
    assert gpu.main(["--part", "kernels", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert not found["complete"]
    assert found["error"] == "RuntimeError: device on fire"
    assert [row["figure"] for row in found["rows"]] == [3.0]
    assert "not complete" in capsys.readouterr().out


def test_one_part_that_is_cut_short_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    parts = {"memory": ("gpu_step", 0), "fp8": ("gpu_step", 100)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "memory: TimeoutExpired" in captured.err
    assert "cut short or never started" in captured.out
    assert "losses in fp8 against fp32" in captured.out


def test_a_row_that_fails_leaves_the_others(context: Context) -> None:
    def failing() -> Row:
        raise RuntimeError("no such kernel")

    def missing() -> Row:
        raise NotUsableError("not installed")

    for name, measure in (("a", failing), ("b", missing), ("c", lambda: Row("c", figure=1.0))):
        context.report.attempt(name, measure)
    notes = [row.note for row in context.report.rows]
    assert notes == ["failed: RuntimeError: no such kernel", "not usable here: not installed", ""]


def test_lengths_are_those_of_wikipedia() -> None:
    lengths = wikipedia_lengths(96, 512)
    assert abs(lengths.mean() - 255.8) < 2
    assert abs((lengths.astype(float) ** 2).mean() / 98826 - 1) < 0.02
    assert np.array_equal(lengths, np.sort(lengths)[::-1])


def test_the_work_of_a_sequence_is_half_a_teraflop() -> None:
    context = Context(CPU, FULL, Report(Path("unused"), "step", CPU))
    (batch,) = micro_batches(context, 96, 1)
    assert training_flop(ModelConfig(), batch) / 96 == pytest.approx(500e9, rel=0.02)


def test_micro_batches_are_one_global_batch(context: Context) -> None:
    batches = micro_batches(context, 4, 3)
    masked = sum(batch.masked_lm_ids.numel() for batch in batches)
    assert [batch.global_counts.tolist() for batch in batches] == [[12, masked]] * len(batches)


def test_the_plain_peer_is_the_same_model(context: Context) -> None:
    model = training_step(context).model.eval()
    (batch,) = micro_batches(context, 4, 1)
    with torch.no_grad():
        ours = sum(model(batch).mean_losses(batch))
        torch.testing.assert_close(plain_loss(model, batch), ours, rtol=1e-5, atol=0)
