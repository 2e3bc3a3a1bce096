"""Captured and eager steps give equal weights bit for bit. Values that change between steps are not frozen into graphs.

A function captured by ``replay_of`` does not disturb later captures, draws or replays, even if its capture fails.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bert.captured_step import CapturedStep
from bert.execution import cuda_graphs
from bert.execution.cuda_graphs import BatchGraphs, CudaCapturer, replay_of
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from dataloading.batches.loader import Batch, batch_of, inert_batch
from dataloading.batches.sampler import MicroBatch, ShapeBucket
from kernels import OPS, cast_fp8
from kernels.tuning import autotune
from tests.bert.recording import CaptureError, Recording, recordable_attention
from tests.bert.small_models import CPU, OF_SMALL_RUN, assert_same, state_of, step_config, take_steps, training_step
from tests.conftest import MAX_SEQ_LENGTH, SmallRun
from tests.kernels.test_registry import attention_call

pytestmark = pytest.mark.oldest_torch


@pytest.fixture(autouse=True)
def recordable() -> Iterator[None]:
    with recordable_attention():
        yield


SHAPE_BUCKETS = [ShapeBucket(96, 8, 16, MAX_SEQ_LENGTH), ShapeBucket(128, 8, 32, MAX_SEQ_LENGTH)]
LARGER = ShapeBucket(160, 8, 48, MAX_SEQ_LENGTH)
"""Shape bucket that is not captured."""


def step_of(
    precision: Literal["fp32", "fp8"] = "fp32", mesh: Mesh = CPU, capturer: CudaCapturer | None = None
) -> TrainingStep:
    model = replace(OF_SMALL_RUN, hidden_dropout=0.1, attention_dropout=0.1)
    return training_step(step_config(model, precision=precision), mesh, capturer)


def global_batches(run: SmallRun, count: int) -> list[list[Batch]]:
    """Make global batches of two micro-batches with changing shape buckets. One in five has no captured bucket."""
    kinds = [SHAPE_BUCKETS[0], SHAPE_BUCKETS[1], SHAPE_BUCKETS[1], LARGER, SHAPE_BUCKETS[0]]
    short = np.argsort(run.train.lengths)[:48]  # any eight of these fit the smallest bucket
    batches = []
    for number in range(2 * count):
        chosen = short[np.arange(number, number + 8) % len(short)]
        samples = run.train.take(chosen)
        # The counts change, as they do at the end of an epoch, so they must not be captured.
        micro = MicroBatch(chosen, 16, 2 * len(samples.masked_lm_ids) + number)
        batches.append(batch_of(samples, micro, kinds[number % len(kinds)]))
    return [batches[start : start + 2] for start in range(0, 2 * count, 2)]


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
@pytest.mark.slow
def test_replayed_steps_equal_eager_steps(small_run: SmallRun, precision: Literal["fp32", "fp8"]) -> None:
    """Compare losses and state over steps with changing shape buckets. One bucket is not captured."""
    results = []
    for capturer in (None, Recording()):
        step = step_of(precision, capturer=capturer)
        batches = global_batches(small_run, 5)
        torch.manual_seed(9)
        step.warm_up(batches[0], 1, SHAPE_BUCKETS)
        if capturer is not None:
            capturer.replays.clear()  # drop the replays that calibrated the FP8 scales
        torch.manual_seed(9)
        results.append(take_steps(step, batches))
        if capturer is not None:
            # Graph 0 is for the larger shape bucket, 1 for the smaller one, and 2 for the update.
            assert capturer.replays == [1, 0, 2, 0, 2, 1, 1, 2, 0, 0, 2, 1, 2]
            assert isinstance(step, CapturedStep)
            assert step.uncaptured_batches == 2
    assert_same(*results)
    assert 4 < results[0]["means"][0][0] < 7, "the masked-LM loss"


@pytest.mark.parametrize("capturer", [None, Recording()], ids=["run", "captured"])
def test_fp8_scales_after_the_warm_up_fit_the_initial_weights(
    small_run: SmallRun, capturer: CudaCapturer | None
) -> None:
    """Scales fit the initial weights and real gradients, although the warm-up trains and uses empty batches."""
    step = step_of("fp8", capturer=capturer)
    step.warm_up(global_batches(small_run, 1)[0], 3, SHAPE_BUCKETS)
    state = step.fp8
    assert state is not None
    for dense in state.denses:
        expected = cast_fp8(dense.weight, dense.weight_scaling.scale, torch.zeros(()), torch.float8_e4m3fn)
        assert torch.equal(dense.weight_NK.float(), expected.float())
        assert 64 < dense.weight.abs().max() * dense.weight_scaling.scale <= 448
        assert dense.gradient_scaling.scale > 2**10, "gradients are small"


@pytest.mark.parametrize("capturer", [None, Recording()], ids=["run", "captured"])
def test_warming_up_restores_all_state(small_run: SmallRun, capturer: CudaCapturer | None) -> None:
    step = step_of(capturer=capturer)
    before = state_of(step)
    step.warm_up(global_batches(small_run, 1)[0], 2, SHAPE_BUCKETS)
    assert_same(state_of(step), before)
    assert not step.flat.gradients_P.any()
    assert step.statistics.fetch() == (dict.fromkeys(step.statistics.NAMES, 0.0), False, [0.0])


def test_graphs_are_captured_largest_first_and_share_buffers() -> None:
    """Batches are copied to shared buffers, where values of a larger batch may remain. A graph must ignore them."""
    seen: list[Batch] = []

    def function(batch: Batch) -> None:
        seen.append(batch)
        batch.input_ids.clone()

    graphs, capturer = BatchGraphs(function), Recording()
    order = [SHAPE_BUCKETS[0], LARGER, SHAPE_BUCKETS[1]]
    graphs.prepare([inert_batch(shape_bucket) for shape_bucket in order], capturer)
    capturer.capture()
    assert [batch.shape_bucket for batch in seen] == [LARGER, SHAPE_BUCKETS[1], SHAPE_BUCKETS[0]] * 2
    for name, largest in seen[0].tensors.items():
        assert {batch.tensors[name].data_ptr() for batch in seen} == {largest.data_ptr()}
    batches = [inert_batch(shape_bucket) for shape_bucket in (*order, SHAPE_BUCKETS[0])]
    static = {batch.shape_bucket: batch for batch in seen}
    seen.clear()
    for number, batch in enumerate(batches):
        filled = replace(batch, input_ids=batch.input_ids + number + 1)
        assert graphs(filled)
        for name, value in filled.tensors.items():
            assert torch.equal(static[batch.shape_bucket].tensors[name], value), name
    assert seen == [], "replays run no Python"
    assert capturer.replays == [2, 0, 1, 2]
    other = inert_batch(replace(SHAPE_BUCKETS[0], max_seqlen=MAX_SEQ_LENGTH - 1))
    assert not graphs(other), "another longest sequence is another shape of launches"
    assert seen[-1] is other
    capturer.close()
    with pytest.raises(CaptureError, match="a replay of a graph that is empty"):
        graphs(batches[0])


@pytest.mark.parametrize("captured", [True, False])
def test_ops_are_chosen_and_run_before_the_first_capture(small_run: SmallRun, captured: bool) -> None:
    """All eager runs come before the first capture, so that the memory of both is not needed at the same time.

    During measurements and captures, implementations that cannot be captured are rejected.
    """
    op, events = OPS["varlen_attention"], list[tuple[str, bool]]()
    with FakeTensorMode():
        call = attention_call(64, "cuda")

    def look(event: str) -> None:
        reasons = op.unsupported_reasons(op.implementations["pytorch"], *call)
        events.append((event, "CUDA graph" in " ".join(reasons)))

    capturer = Recording(look) if captured else None
    step = step_of(capturer=capturer)
    batch = global_batches(small_run, 1)[0]
    with step.rehearsal():
        with autotune.observed() as requests:
            step(batch)
        look("choose")
    assert {request.op for request in requests} >= {"dense_gelu", "lamb_step", "masked_lm_loss", op.name}
    step.warm_up(batch, 0, [*SHAPE_BUCKETS, LARGER])
    look("warm")
    # Four graphs: three shape buckets and the update.
    expected = ["choose", *(["run"] * 4 + ["capture"] if captured else [])]
    assert events == [*((event, captured) for event in expected), ("warm", False)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
def test_captured_steps_on_a_gpu_agree_with_eager_steps_and_do_not_synchronize(small_run: SmallRun) -> None:
    """Repeat the CPU tests with real graphs, and check that the loop never synchronizes.

    The results are only close, because terms are added in a different order.
    """
    device = torch.device("cuda")
    results = []
    for capturer in (None, CudaCapturer(device)):
        step = step_of(mesh=Mesh(0, 1, 0, device), capturer=capturer)
        batches = [[batch.to(device) for batch in micro] for micro in global_batches(small_run, 5)]
        step.model.seed_dropout(5)
        step.warm_up(batches[0], 2, SHAPE_BUCKETS)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for micro_batches in batches:
                step(micro_batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append((step.flat.weights_P.clone(), step.statistics.fetch()[0]))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-3, atol=1e-4)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-3)


DEVICE = torch.device("cpu")


def nothing(*_: object) -> None:
    pass


class FakeCuda:
    """Stand-ins for ``torch.cuda`` with the state that a failed capture leaves in PyTorch 2.11."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams = 0
        self.waits: list[tuple[object, object]] = []
        """Streams that have waited, each with the stream that it has waited for."""
        self.resets = 0
        self.default = self.current = self._stream()
        self.draws_fail = False
        self.used: list[object] = []
        """Streams of the captures, in their order."""
        patch.setattr(cuda_graphs, "_spare_streams", {})
        patch.setattr(cuda_graphs, "_failed", [])
        for name, stand_in in {
            "Stream": self.new_stream,
            "current_stream": lambda _: self.current,
            "stream": self.on,
            "graph": self.capture,
            "graph_pool_handle": nothing,
            "CUDAGraph": lambda: SimpleNamespace(reset=self.reset, replay=nothing),
        }.items():
            patch.setattr(torch.cuda, name, stand_in)

    def new_stream(self, _: torch.device = DEVICE, priority: int = 0) -> SimpleNamespace:
        assert priority < 0, "streams of the default priority belong to training"
        self.streams += 1
        return self._stream()

    def _stream(self) -> SimpleNamespace:
        stream = SimpleNamespace(device=DEVICE)
        stream.wait_stream = lambda other: self.waits.append((stream, other))
        return stream

    def reset(self) -> None:
        self.resets += 1

    def on(self, stream: object) -> AbstractContextManager[object]:
        return mock.patch.object(self, "current", stream)

    @contextmanager
    def capture(self, _: object, stream: object, **__: object) -> Iterator[None]:
        self.used.append(stream)
        before, self.current, self.draws_fail = self.current, stream, True
        yield  # an error in the block leaves the stream current
        self.current, self.draws_fail = before, False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_random_numbers_can_be_drawn_after_a_failed_capture(cuda: FakeCuda) -> None:
    def synchronize() -> None:
        if cuda.draws_fail:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        replay_of(DEVICE, synchronize)
    assert not cuda.draws_fail
    assert cuda.current is cuda.default
    assert (cuda.resets, len(cuda_graphs._failed)) == (1, 1), "PyTorch still refers to the graph"
    cuda.waits.clear()
    replay_of(DEVICE, nothing)
    assert cuda.streams == 1, "the stream is used again"
    assert cuda.waits == [(cuda.used[0], cuda.default), (cuda.default, cuda.used[0])]


def test_replays_need_different_streams_only_if_they_exist_at_the_same_time(cuda: FakeCuda) -> None:
    """Streams keep memory, so they are reused. But PyTorch 2.13 frees a stream's memory with any graph captured on it."""
    for _ in range(3):
        replay_of(DEVICE, nothing)()
    assert cuda.streams == 1
    replays = [replay_of(DEVICE, nothing) for _ in range(2)]
    assert cuda.used[-1] is not cuda.used[-2]
    del replays[0]
    replays.append(replay_of(DEVICE, nothing))
    assert cuda.used[-1] is cuda.used[-3]
    assert cuda.streams == 2
