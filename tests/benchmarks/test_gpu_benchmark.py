"""The GPU benchmark on a machine without a GPU: the same code runs on small shapes."""

import functools
import importlib.metadata
import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kernels
import kernels.libraries.pytorch
from benchmarks import gpu
from benchmarks.gpu_parts import end_to_end, ops, peers, step
from benchmarks.gpu_parts.accuracy import largest_ratio
from benchmarks.gpu_parts.cases import cases, fp8_cases, lamb_cases, size_of, weight_gradient_cases
from benchmarks.gpu_parts.page import OURS
from benchmarks.gpu_parts.report import PartReport
from benchmarks.gpu_parts.scale import FULL, TINY, Context, micro_batches, training_flop, wikipedia_lengths
from benchmarks.gpu_parts.timing import Ceilings
from bert.configuration.sections import ModelConfig
from bert.products import weight_gradients
from compliance.log.metrics import EndRecord, EvaluationRecord, Metrics, StepRecord
from tests.benchmarks.bare_environment import BareEnvironment
from tests.bert.recording import Recording, recordable_attention
from tests.programs import python

CPU = torch.device("cpu")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(CPU, TINY, PartReport(tmp_path / "part.json", {}))


@pytest.fixture(scope="module")
def all_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all parts where only PyTorch, Triton and NumPy are installed, and return the folder of their results."""
    bare = BareEnvironment.of(tmp_path_factory.mktemp("bare"), ["torch", "triton", "numpy"])
    out = bare.folder / "out"
    # On a busy machine, the parts' default limits would cut them off.
    options = ["--device", "cpu", "--tiny", "--seconds", str(10 * gpu.SECONDS), "--part", ",".join(gpu.PARTS)]
    done = bare.run("benchmarks/gpu.py", *options, "--out", str(out))
    assert done.returncode == 1, done.stderr  # end-to-end fails, because it needs more packages
    assert (out / "report.md").read_text().startswith(done.stdout[done.stdout.index("# cpu") :].strip())
    return out


def rows(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / f"{part}.json").read_text())
    assert found["complete"], found["error"]
    assert {"commit", "date", "versions", "device", "without"} <= set(found)
    return {row["name"]: row for row in found["rows"]}


@pytest.mark.oldest_torch
def test_all_parts_but_end_to_end_complete_with_only_torch_triton_and_numpy(all_parts: Path) -> None:
    for part in gpu.PARTS:
        found = json.loads((all_parts / f"{part}.json").read_text())
        assert [row for row in found["rows"] if row["note"].startswith(("WRONG", "failed"))] == []
        assert found["complete"] == (part != "end-to-end"), found["error"]
        assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["error"].startswith("training needs packages that are not installed: mlperf-logging, ")


def test_a_ceiling_follows_from_its_shortest_time_and_memory_reports_the_largest_batch(all_parts: Path) -> None:
    found = rows(all_parts, "step")
    copy, product = found["ceiling: device copy"], found["ceiling: bf16 product"]
    assert copy["figure"] == pytest.approx(2 * TINY.copied / 1e12 / min(copy["seconds"]))
    assert product["figure"] == pytest.approx(2 * 64**3 / 1e12 / min(product["seconds"]))
    found = rows(all_parts, "memory")
    assert [found[f"{each}, most sequences that fit"]["figure"] for each in ("bf16", "fp8")] == [TINY.sequences] * 2


def test_step_reports_rates_phases_and_kernels(all_parts: Path) -> None:
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
    monkeypatch.setattr(weight_gradients, "accumulates_products", lambda *_: True)
    with recordable_attention():
        yield context


def test_every_micro_batch_of_a_measured_step_is_captured(capturing: Context) -> None:
    ceilings = Ceilings(None, None, None)
    four, _, _, one, _ = step._sizes(capturing)  # two sizes: with four micro-batches per step, and with one
    for config, micro in (four, one):
        assert step.rate(capturing, "x", config, micro, ceilings).figure
    step._losses(capturing, "bf16")


def test_the_compared_models_have_a_rate_or_report_a_missing_package(all_parts: Path) -> None:
    found = rows(all_parts, "peers")
    assert all(found[name]["figure"] > 0 for name in (*OURS.values(), "plain PyTorch varlen, unpadded"))
    for name in ("Hugging Face, padded, SDPA", "Hugging Face, padded, SDPA, torch.compile"):
        assert found[name]["note"].startswith("not usable here: ModuleNotFoundError: ")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_rate_of_hugging_faces_model_is_measured(context: Context) -> None:
    row = peers._peer_row(context, "peer", peers._hugging_face)
    assert (row.figure or 0) > 0


def test_every_op_has_a_time_or_a_reason_why_it_was_not_timed(all_parts: Path) -> None:
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


def test_fp8_steps_are_timed_and_fp8_losses_are_near_bf16_losses(all_parts: Path) -> None:
    found = rows(all_parts, "fp8")
    assert found["step in FP8"]["figure"] > 0
    assert found["step in FP8"]["note"].startswith("fp8: ")
    assert found["losses in bf16 against fp32"]["figure"] == 0  # at the tiny scale, fp32 replaces bf16
    assert 0 < found["losses in fp8 against bf16"]["figure"] < 0.05
    assert FULL.parity_steps == 200
    found = rows(all_parts, "kernels")
    of_fp8 = [name for name in found if "fp8" in name or name.startswith("scaled_matmul")]
    assert len(of_fp8) >= 16
    assert all(found[name]["figure"] > 0 for name in of_fp8 if name.endswith("reference"))


def test_timed_inputs_have_types_and_alignment_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's inputs have the types and alignment of a step's inputs, even if the vocabulary size is odd."""
    norm = kernels.libraries.pytorch.dropout_add_layer_norm
    keeping_type = lambda x, *more: norm(x, *more).to(x.dtype)  # noqa: E731, as Triton's does
    monkeypatch.setattr(kernels.libraries.pytorch, "dropout_add_layer_norm", keeping_type)
    monkeypatch.setattr(weight_gradients, "accumulates_products", lambda _device, precision: precision == "bf16")
    scale = replace(TINY, model=replace(TINY.model, vocab_size=502))
    context = Context(CPU, scale, PartReport(tmp_path / "part.json", {}))
    seen: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    # Attention by Triton or by the definition includes the FP8 casts before and after it; attention by PyTorch does not.
    for precision, attention in (("bf16", "pytorch"), ("fp8", "pytorch"), ("fp8", "reference")):
        trained = step.training_step(context, step.recipe("h100_1x1", precision=precision))
        with ExitStack() as observing:
            observing.enter_context(kernels.varlen_self_attention.using(attention))
            for op in kernels.OPS.values():
                observing.enter_context(op.observed(lambda op, args, _: seen[op.name].add(traits(*args))))
            trained(micro_batches(context, 4, 1))
            trained.refresh_copies_()  # runs the separate cast of the weights, because LAMB makes the cast in a step
            with torch.no_grad(), trained.autocast():
                trained.model(*micro_batches(context, 4, 1))
    size = size_of(scale.model, [20, 11], 7)
    made = [*cases(size, CPU, torch.bfloat16), *fp8_cases(size, CPU)]
    made += [*lamb_cases(size, CPU), *weight_gradient_cases(size, CPU)]
    for case in made:
        inputs = traits(*case.arguments)
        # Not compared: these two definitions save other tensors than Triton's kernels, or return a norm in another type.
        if case.op not in ("attention_backward_cast_fp8", "add_norm_backward_cast_fp8") and case.op in seen:
            assert any(inputs[: len(real)] == real for real in seen[case.op]), (case.title, inputs, seen[case.op])
    # On one device, a step calls ``lamb_step`` instead of these three parts of LAMB.
    assert seen.keys() == {case.op for case in made} - {"sum_of_squares", "lamb_directions", "lamb_apply"}


def traits(*arguments: object) -> tuple[object, ...]:
    return tuple(
        (value.dtype, value.ndim, isinstance(value, nn.Parameter), value.ndim > 0 and value.data_ptr() % 16)
        if isinstance(value, Tensor)
        else value
        for value in arguments
        if isinstance(value, (Tensor, torch.dtype))
    )


def test_end_to_end_rows_are_computed_from_the_metrics() -> None:
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
def test_memory_finds_the_largest_batch_that_fits(
    context: Context, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """An error that follows an out-of-memory error counts as a lack of memory. Any other error ends the search."""

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


def test_correctness_has_a_row_for_every_implementation(all_parts: Path) -> None:
    """Apart from the definition, every implementation of every op has a row with a verdict or a reason."""
    found = rows(all_parts, "correctness")
    for op in kernels.OPS.values():
        for name in op.implementations.keys() - {"reference"}:
            notes = [
                row["note"] for title, row in found.items() if re.fullmatch(f"{op.name}( (in|of) .*)?, {name}", title)
            ]
            assert notes, (op.name, name)
            assert all(note.startswith(("right", "not usable here: ")) for note in notes)


def test_correctness_fails_if_nothing_was_checked(context: Context) -> None:
    ops.correctness(replace(context, without=dict.fromkeys(kernels.OPS, "reference")))
    assert [row.note for row in context.report.rows] == ["failed: nothing was checked"]


@pytest.mark.parametrize("works", [True, False])
def test_correctness_reports_every_op_whose_kernels_do_not_run(tmp_path: Path, works: bool) -> None:
    """With Triton's interpreter, all kernels are right; if none is launched, every op is wrong."""
    program = f"""
from pathlib import Path
from triton.runtime.interpreter import GridExecutor
from benchmarks.gpu_parts import cases, ops, part
launch = GridExecutor.__call__
if not {works}: GridExecutor.__call__ = lambda *_, **__: None
ops._awkward_lengths, cases.SEGMENTS = lambda _: [16, 1, 2, 15, 0], 40  # the interpreter is slow
file = Path({str(tmp_path)!r}, "correctness.json")
raise SystemExit(part.run("benchmarks.gpu_parts.ops:correctness", file, "cpu", tiny=True))
"""
    done = python("-c", program, TRITON_INTERPRET="1", PYTHONPATH=None, OMP_NUM_THREADS=1)
    assert done.returncode == (0 if works else 1), done.stderr
    notes = {name: row["note"] for name, row in rows(tmp_path, "correctness").items() if name.endswith(", triton")}
    wrong = {name for name, note in notes.items() if not note.startswith("right")}
    assert wrong == (set() if works else set(notes))
    tested = {re.split(",| in ", name)[0] for name in notes}
    assert tested == {name for name, op in kernels.OPS.items() if "triton" in op.implementations}


def test_largest_ratio_detects_an_error_in_a_single_element() -> None:
    exact = [torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.tensor(7)]
    plain = [exact[0].bfloat16(), exact[1]]
    ratio = functools.partial(largest_ratio, plain=plain, exact=exact, tolerance=2**-7)
    assert ratio(plain)[0] < 0.5
    assert ratio([plain[0], torch.tensor(8)])[0] < 0.5  # a tie may change the count of correct predictions by one
    assert ratio([plain[0], torch.tensor(9)]) == (float("inf"), 1)
    for place, value in ((4999, float("nan")), (0, 4.0), (4999, 4.0)):
        wrong = plain[0].clone()
        wrong[place] = value
        assert ratio([wrong, plain[1]])[0] > 1, place
    assert ratio([plain[0] * 1.03, plain[1]])[0] > 1
    assert ratio([plain[0][1:], plain[1]])[0] == float("inf")
    assert ratio(plain[:1])[0] == float("inf")


def test_a_few_fp8_rounding_differences_are_accepted_but_truncation_is_not() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        plain, rounded = x.to(dtype), x.bfloat16().to(dtype)
        # Truncation instead of rounding changes half of the numbers.
        cut = (
            (x.to(torch.float16).view(torch.int16) & -256).view(torch.float16)
            if dtype == torch.float8_e5m2
            else x * 0.95
        )
        assert not torch.equal(rounded.float(), plain.float())
        assert largest_ratio([rounded], [plain], [plain], 0)[0] < 0.6
        assert largest_ratio([cut.to(dtype)], [plain], [plain], 0)[0] > 1


def test_sequence_lengths_match_wikipedia_and_a_sequence_takes_half_a_teraflop() -> None:
    lengths = wikipedia_lengths(96, 512)
    assert abs(lengths.mean() - 255.8) < 2
    assert abs((lengths.astype(float) ** 2).mean() / 98826 - 1) < 0.02
    assert np.array_equal(lengths, np.sort(lengths)[::-1])
    (batch,) = micro_batches(Context(CPU, FULL, PartReport(Path("unused"), {})), 96, 1)
    assert training_flop(ModelConfig(), batch) / 96 == pytest.approx(500e9, rel=0.02)


def test_each_micro_batch_has_the_counts_of_the_whole_global_batch(context: Context) -> None:
    batches = micro_batches(context, 4, 3)
    masked = sum(batch.masked_lm_ids.numel() for batch in batches)
    assert [batch.global_counts.tolist() for batch in batches] == [[12, masked]] * len(batches)


def test_the_plain_pytorch_model_computes_our_loss(context: Context) -> None:
    model = step.training_step(context, step.recipe("h100_1x1")).model.eval()
    (batch,) = micro_batches(context, 4, 1)
    with torch.no_grad():
        ours = sum(model(batch).mean_losses(batch))
        torch.testing.assert_close(peers.plain_loss(model, batch), ours, rtol=1e-5, atol=0)
