"""The GPU benchmark on a machine without a GPU: the same code runs on small shapes."""

import functools
import importlib.metadata
import importlib.util
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bert.build
import kernels
import kernels.libraries.pytorch
from benchmarks import gpu
from benchmarks.gpu_parts import end_to_end, ops, peers, step
from benchmarks.gpu_parts.cases import cases, drawn_model, fp8_cases
from benchmarks.gpu_parts.report import PartReport, page
from benchmarks.gpu_parts.scale import FULL, TINY, Context, micro_batches, training_flop, wikipedia_lengths
from benchmarks.gpu_parts.timing import Ceilings
from bert.configuration.sections import ModelConfig
from compliance.log.records import EndRecord, EvaluationRecord, Metrics, StepRecord
from tests.bert.recording import Recording, recordable_attention
from tests.programs import REPOSITORY, python

CPU = torch.device("cpu")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(CPU, TINY, PartReport(tmp_path / "part.json", {}))


def other_packages() -> list[str]:
    """Return import names of packages that the project requires and the benchmark must not need."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    # PyTorch requires Jinja2.
    wanted = {re.split(r"[^\w.-]", line)[0].lower() for line in lines} - {"torch", "triton", "numpy", "jinja2"}
    installed = importlib.metadata.packages_distributions()
    return [name for name, owners in installed.items() if wanted & {owner.lower() for owner in owners}]


@pytest.fixture(scope="module")
def all_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all parts in one process, to save time, and return the folder of their results."""
    folder = tmp_path_factory.mktemp("gpu")
    program = f"""
import sys; from pathlib import Path
sys.modules |= dict.fromkeys({other_packages()!r})  # importing them fails
from benchmarks import gpu; from benchmarks.gpu_parts import part
for name, its in gpu.PARTS.items():
    file = Path({str(folder)!r}, f"{{name}}.json")
    assert part.run(f"benchmarks.gpu_parts.{{its.function}}", file, "cpu", tiny=True) == (name in gpu.ALONE), name
"""
    done = python("-c", program, TRITON_INTERPRET=None, PYTHONPATH=None, OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr
    return folder


def rows(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / f"{part}.json").read_text())
    assert found["complete"], found["error"]
    assert {"commit", "date", "versions", "device"} <= set(found)
    return {row["name"]: row for row in found["rows"]}


def test_all_parts_run_with_torch_triton_and_numpy_alone(all_parts: Path) -> None:
    table = page(all_parts, list(gpu.PARTS)).splitlines()
    assert len(table) < 100
    assert all(line.startswith("|") for line in table)
    for part in gpu.PARTS:
        ending = " NOT COMPLETE: " if part in gpu.ALONE else " complete: "
        assert any(line.startswith(f"| {part} ") and ending in line for line in table)
    error = json.loads((all_parts / "end-to-end.json").read_text())["error"]
    assert error == f"not installed, which training needs: {', '.join(end_to_end.NEEDS)}"


def test_ceilings_are_rates_and_memory_ends_with_what_fits(all_parts: Path) -> None:
    found = rows(all_parts, "ceilings")
    copy, product = found["ceiling: device copy"], found["ceiling: bf16 product"]
    assert copy["figure"] == pytest.approx(2 * TINY.copied / 1e12 / min(copy["seconds"]))
    assert product["figure"] == pytest.approx(2 * 64**3 / 1e12 / min(product["seconds"]))
    found = rows(all_parts, "memory")
    assert [found[f"{each}, most sequences that fit"]["figure"] for each in ("bf16", "fp8")] == [TINY.sequences] * 2


def test_the_step_is_split_into_phases_and_kernels_that_add_up(all_parts: Path) -> None:
    found = rows(all_parts, "step")
    split = {name: row for name, row in found.items() if name.startswith("split, bf16: ")}
    assert "split, bf16: idle: launches, host" in split
    assert sum(row["share"] for row in split.values()) > 0.5
    assert sum(row["unit"] == "sequences/s" for row in found.values()) == 5
    names = [name for name in found if not name.startswith("ceiling")]
    assert names[:3] == ["stopwatch: forward_backward", "stopwatch: update", "8 sequences as 4 x 2, h100_1x1, bf16"]
    assert 0 < found["stopwatch: update"]["milliseconds"] < found["stopwatch: forward_backward"]["milliseconds"]


@pytest.fixture
def capturing(context: Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """Replace CUDA graphs by recordings, and make products add weight gradients themselves, as on a GPU."""
    monkeypatch.setattr(Context, "capturer", lambda _: Recording())
    monkeypatch.setattr(bert.build, "accumulates_products", lambda *_: True)
    with recordable_attention():
        yield context


def test_every_micro_batch_of_a_measured_step_is_captured(capturing: Context) -> None:
    ceilings = Ceilings(None, None, None)
    four, _, _, one, _ = step._sizes(capturing)  # sizes with four micro-batches and with one per step
    for config, micro in (four, one):
        assert step.rate(capturing, "x", config, micro, ceilings).figure
    step._losses(capturing, "bf16")


def test_peers_take_a_step(all_parts: Path) -> None:
    found = rows(all_parts, "peers")
    ours, plain = found["this repository, unpadded"], found["plain PyTorch varlen, unpadded"]
    against = found["ours against the fastest peer"]
    assert against["peer"] == pytest.approx(ours["figure"] / plain["figure"])
    for name in ("Hugging Face, padded, SDPA", "Hugging Face, padded, SDPA, torch.compile"):
        assert found[name]["note"].startswith("not usable here: ModuleNotFoundError: ")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_faces_model_takes_a_step(context: Context) -> None:
    row = peers._peer_row(context, "peer", peers._hugging_face)
    assert row.figure is not None
    assert row.figure > 0


def test_every_op_is_timed_and_what_cannot_be_says_why(all_parts: Path) -> None:
    found = rows(all_parts, "kernels")
    others = "lamb_", "scaled_", "sum_", "accumulate_"
    for op in (op for op in kernels.OPS if not op.startswith(others) and not op.endswith("fp8")):
        for direction in ("forward", "both ways"):
            assert found[f"{op} {direction}, reference"]["milliseconds"] > 0
            assert found[f"{op} {direction}"]["peer"] or op == "varlen_attention"
            assert found[f"{op} {direction}, triton"]["note"].startswith("not usable here: ")
    compared = found["varlen_self_attention both ways"]
    other = found["varlen_self_attention both ways, reference"]
    assert compared["peer"] == pytest.approx(other["milliseconds"] / compared["milliseconds"])
    assert found["lamb_step, reference"]["milliseconds"] > 0
    assert all(row["note"] for row in found.values() if row["milliseconds"] is None)


def test_fp8_is_timed_and_right_and_learns_as_fp32(all_parts: Path) -> None:
    found = rows(all_parts, "fp8")
    assert found["step in FP8"]["figure"] > 0
    assert found["step in FP8"]["note"].startswith("fp8: ")
    assert found["losses in bf16 against fp32"]["figure"] == 0  # both are fp32 for tiny models
    assert 0 < found["losses in fp8 against bf16"]["figure"] < 0.05
    assert FULL.parity_steps == 200
    for part in ("kernels", "correctness"):
        found = rows(all_parts, part)
        of_fp8 = [name for name in found if "fp8" in name or name.startswith("scaled_matmul")]
        assert len(of_fp8) >= 16
        assert all(found[name]["figure"] > 0 for name in of_fp8 if name.endswith("reference"))


def test_an_fp8_cast_with_another_transpose_is_wrong() -> None:
    model = drawn_model(TINY.model, CPU)
    case = next(case for case in fp8_cases(model, 20) if case.op == "cast_transpose_fp8")

    def swapped(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = kernels.cast_transpose_fp8(*arguments)
        return rows, columns.roll(1, 0)

    with pytest.raises(ValueError, match="another tensor"):
        case.results(swapped)


def test_inputs_are_those_of_training_by_type_and_alignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's inputs have the types and alignment of a step's inputs, even if the vocabulary size is odd."""
    norm = kernels.libraries.pytorch.dropout_add_layer_norm
    keeping_type = lambda x, *more: norm(x, *more).to(x.dtype)  # noqa: E731, as Triton's does
    monkeypatch.setattr(kernels.libraries.pytorch, "dropout_add_layer_norm", keeping_type)
    monkeypatch.setattr(bert.build, "accumulates_products", lambda _device, precision: precision == "bf16")
    scale = replace(TINY, model=replace(TINY.model, vocab_size=502))
    context = Context(CPU, scale, PartReport(tmp_path / "part.json", {}))
    seen: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for precision in ("bf16", "fp8"):
        trained = step.training_step(context, step.recipe("h100_1x1", precision=precision))
        with ExitStack() as observing:
            for op in kernels.OPS.values():
                observing.enter_context(op.observed(lambda op, args, _: seen[op.name].add(traits(*args))))
            trained(micro_batches(context, 4, 1))
            trained.refresh_copies_()  # this casts weights, which LAMB does in a step
            with torch.no_grad(), trained.autocast():
                trained.model(*micro_batches(context, 4, 1))
    model = drawn_model(scale.model, CPU)
    made = [*cases(model, [20, 11], 7, torch.bfloat16), *fp8_cases(model, 32)]
    for case in made:
        assert any(traits(*case.arguments)[: len(real)] == real for real in seen[case.op]), (case.op, seen[case.op])


def traits(*arguments: object) -> tuple[object, ...]:
    return tuple(
        (value.dtype, value.ndim, isinstance(value, nn.Parameter), value.ndim > 0 and value.data_ptr() % 16)
        if isinstance(value, Tensor)
        else value
        for value in arguments
        if isinstance(value, (Tensor, torch.dtype))
    )


def test_drift_and_waiting_come_from_the_steps() -> None:
    steps = [
        StepRecord(1, 8, time_s=1, step_ms=ms, data_wait_ms=ms / 10, sequences_per_s=1e3 / ms)
        for ms in (10, 10, 10, 10, 20, 20, 30, 30)
    ]
    evaluations, end = [EvaluationRecord(1, 8, eval_s=0.5, count=7)], EndRecord("success", time_s=4.0, samples=100)
    found = {row.name: row for row in end_to_end.rows_of(Metrics(None, steps, evaluations, end=end))}
    assert found["last quarter of the steps against the first"].figure == 3
    assert found["host waiting for data"].share == pytest.approx(0.1)
    assert found["inside the clock"].figure == 25
    assert found["evaluation"].milliseconds == 500
    assert end_to_end.rows_of(Metrics()) == []


@pytest.mark.parametrize("limit", [1, 139, 10_000])
def test_the_search_for_memory_finds_the_limit(context: Context, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """An out-of-memory error counts even if the capture replaces it by another error. Other errors end the search."""

    def train(_context: object, precision: str, sequences: int) -> None:
        if precision == "fp8":
            raise RuntimeError("no such kernel")
        try:
            if sequences > limit:
                raise torch.OutOfMemoryError
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    monkeypatch.setattr(step, "_train", train)
    step.memory(replace(context, scale=FULL))
    *_, found, failed = context.report.rows
    assert found.name == "bf16, most sequences that fit"
    assert found.figure is not None
    assert min(limit, 1536) - max(8, limit / 8) <= found.figure <= limit
    assert failed.note == "failed: RuntimeError: no such kernel"


def test_a_wrong_op_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.libraries.pytorch.dropout_add_layer_norm
    model = drawn_model(TINY.model, CPU)
    case = next(case for case in cases(model, [20, 11], 7, torch.bfloat16) if case.op == right.__name__)
    assert not ops._error_row("x", case, "pytorch", torch.bfloat16).failed
    monkeypatch.setattr(kernels.libraries.pytorch, "dropout_add_layer_norm", lambda *given: right(*given) * 1.02)
    assert ops._error_row("x", case, "pytorch", torch.bfloat16).failed


def test_not_a_number_is_wrong() -> None:
    exact = [torch.ones(3, dtype=torch.float64)] * 2
    plain, ours = [torch.ones(3)] * 2, [torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])]
    judged = functools.partial(ops.judged, "x", exact, plain)
    assert judged(ours, torch.float32).note.startswith("WRONG, worst in the result 1")
    assert judged(plain, torch.float32).note.startswith("right")


def test_lengths_are_those_of_wikipedia_and_a_sequence_is_half_a_teraflop() -> None:
    lengths = wikipedia_lengths(96, 512)
    assert abs(lengths.mean() - 255.8) < 2
    assert abs((lengths.astype(float) ** 2).mean() / 98826 - 1) < 0.02
    assert np.array_equal(lengths, np.sort(lengths)[::-1])
    (batch,) = micro_batches(Context(CPU, FULL, PartReport(Path("unused"), {})), 96, 1)
    assert training_flop(ModelConfig(), batch) / 96 == pytest.approx(500e9, rel=0.02)


def test_micro_batches_are_one_global_batch(context: Context) -> None:
    batches = micro_batches(context, 4, 3)
    masked = sum(batch.masked_lm_ids.numel() for batch in batches)
    assert [batch.global_counts.tolist() for batch in batches] == [[12, masked]] * len(batches)


def test_the_plain_peer_is_the_same_model(context: Context) -> None:
    model = step.training_step(context, step.recipe("h100_1x1")).model.eval()
    (batch,) = micro_batches(context, 4, 1)
    with torch.no_grad():
        ours = sum(model(batch).mean_losses(batch))
        torch.testing.assert_close(peers.plain_loss(model, batch), ours, rtol=1e-5, atol=0)
