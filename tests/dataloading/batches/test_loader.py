"""Batches and their loaders: offsets and counts, equal results from NumPy and DALI, and the choice of a loader."""

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataloading.batches import loader_choice
from dataloading.batches.loader import Batch, Loader, NumpyLoader, Prefetcher, Uploads, batch_of, inert_batch
from dataloading.batches.loader_choice import check_loader, choose_loader, fastest_turns
from dataloading.batches.sampler import BatchSampler, MicroBatch, ShapeBucket, fitting
from dataloading.dataset.folder import Dataset, open_dataset
from dataloading.shards.samples import Samples, synthetic_samples
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE, SmallRun

pytestmark = pytest.mark.oldest_torch

CPU = torch.device("cpu")


def assert_same(one: Batch, other: Batch) -> None:
    assert one.shape_bucket == other.shape_bucket
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name


def test_batches_hold_concatenated_samples_or_only_empty_slots() -> None:
    samples = synthetic_samples(np.array([5, 3, 9]), VOCAB_SIZE)
    batch = batch_of(samples)
    assert (batch.shape_bucket, batch.max_seqlen) == (ShapeBucket(17, 3, len(samples.masked_lm_ids), 9), 9)
    starts = np.repeat([0, 5, 8], samples.masked_counts)
    for name, expected in {
        "cu_seqlens": np.array([0, 5, 8, 17]),
        "position_ids": np.array([*range(5), *range(3), *range(9)]),
        "masked_lm_positions": samples.masked_lm_positions + starts,
        "global_counts": np.array([3, len(samples.masked_lm_ids)]),
        **{
            name: getattr(samples, name)
            for name in ("input_ids", "segment_ids", "masked_lm_ids", "next_sentence_labels")
        },
    }.items():
        assert batch.tensors[name].tolist() == expected.tolist(), name
    with pytest.raises(AssertionError):
        # Empty masked slots need an unused row, but the 17 tokens fill all 17 rows.
        batch_of(samples, None, ShapeBucket(17, 3, 16, 9))
    empty = inert_batch(ShapeBucket(64, 2, 16, 9))
    assert (empty.shape_bucket, empty.global_counts.tolist()) == (ShapeBucket(64, 2, 16, 9), [1, 1])
    assert empty.cu_seqlens.tolist() == [0, 0, 0]


def rank_batches(run: SmallRun, accumulation: int, rank: int) -> Callable[[int], list[MicroBatch]]:
    sampler = BatchSampler(run.train.lengths, run.train.masked_counts, 24, 2, accumulation, seed=11)
    return lambda step: sampler.rank_batches(step, rank)


SHAPE_BUCKETS = {
    1: [ShapeBucket(256, 12, 48, MAX_SEQ_LENGTH), ShapeBucket(320, 12, 64, MAX_SEQ_LENGTH)],
    3: [ShapeBucket(128, 4, 16, MAX_SEQ_LENGTH)],
}
"""Shape buckets by number of accumulation steps. Every bucket fits some batches, and some batches fit no bucket."""


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_dali_and_numpy_load_equal_batches(small_run: SmallRun, accumulation: int, padded: bool) -> None:
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    from dataloading.batches.dali import DaliLoader

    dataset = open_dataset(small_run.folder / "train")
    for rank in range(2):
        chosen = rank_batches(small_run, accumulation, rank)
        given = SHAPE_BUCKETS[accumulation] if padded else []
        loaders: list[Loader] = [loader(dataset, chosen, CPU, given) for loader in (NumpyLoader, DaliLoader)]
        for _ in range(25):  # 600 samples, more than two epochs of 250
            ours, theirs = (next(loader) for loader in loaders)
            assert len(ours) == len(theirs) == accumulation
            for one, other in zip(ours, theirs, strict=True):
                assert_same(one, other)
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_loaders_pad_to_the_smallest_shape_bucket_that_holds_the_batch_of_every_rank(
    small_run: SmallRun, accumulation: int
) -> None:
    """All ranks choose the same bucket, because NCCL requires all ranks to replay the same graph, or none."""
    given, seen, ranks_differ = SHAPE_BUCKETS[accumulation], set(), False
    loaders = [
        NumpyLoader(small_run.train, rank_batches(small_run, accumulation, rank), CPU, some)
        for rank in (0, 1)
        for some in ([], given)
    ]
    for _ in range(20):
        for batches in zip(*map(next, loaders), strict=True):
            plain, padded = batches[::2], batches[1::2]
            tokens, masked = (
                max(getattr(each, name).numel() for each in plain) for name in ("input_ids", "masked_lm_ids")
            )
            needed = ShapeBucket.around(tokens, plain[0].sequences, masked, MAX_SEQ_LENGTH)
            assert {each.shape_bucket for each in padded} == {fitting(needed, given)}
            seen.add(padded[0].shape_bucket)
            own = [ShapeBucket.around(each.tokens, each.sequences, each.masked_lm_ids.numel(), 0) for each in plain]
            ranks_differ |= own[0] != own[1]
            for pair in zip(padded, plain, strict=True):
                assert_padded(*pair)
    assert seen - set(given)
    assert seen >= set(given)
    assert ranks_differ
    for loader in loaders:
        loader.close()


def assert_padded(padded: Batch, plain: Batch) -> None:
    """Check that padding changes no existing value, and that added values have no effect on training."""
    empty = {
        "cu_seqlens": plain.tokens,
        "masked_lm_positions": plain.tokens,
        "masked_lm_ids": -1,
        "next_sentence_labels": -1,
    }
    assert padded.tensors.keys() == plain.tensors.keys()
    for name, values in padded.tensors.items():
        real = plain.tensors[name]
        assert values.dtype == real.dtype
        assert torch.equal(values[: len(real)], real), name
        assert (values[len(real) :] == empty.get(name, 0)).all(), name
    assert padded.tokens > plain.tokens
    assert padded.tokens % 64 == padded.masked_lm_ids.numel() % 16 == 0


class Unreadable:
    """Sample source whose third read fails."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.reads = dataset, 0

    def take(self, indices: np.ndarray) -> Samples:
        self.reads += 1
        if self.reads == 3:
            raise ValueError("part_00001: truncated")
        return self.dataset.take(indices)


def test_reading_starts_at_the_first_batch_and_next_raises_read_errors(small_run: SmallRun) -> None:
    source, chosen = Unreadable(open_dataset(small_run.folder / "train")), rank_batches(small_run, 1, 0)
    loader = NumpyLoader(source, chosen, CPU)
    assert source.reads == 0
    for step in range(2):
        (micro,) = chosen(step)
        assert_same(next(loader)[0], batch_of(small_run.train.take(micro.indices), micro))
    with pytest.raises(ValueError, match="truncated"):
        next(loader)
    loader.close()
    items = Prefetcher(itertools.count(), 3)
    assert (next(items), [ahead.result() for ahead in items._ahead]) == (0, [1, 2, 3])
    items.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        next(items)


def test_uploads_select_their_gpu_before_other_cuda_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the selection, a new thread would use GPU 0. If there is no GPU, earlier CUDA calls raise other errors."""

    def select(device: torch.device) -> None:
        raise LookupError(device)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "set_device", select)
    with pytest.raises(LookupError, match="cuda:3"):
        Uploads(torch.device("cuda", 3)).start([])


LENGTHS = np.array([5, 40, 3, 17, 9, 30])
STEP = [MicroBatch(np.array([4, 1, 2]), 6, 16), MicroBatch(np.array([0, 5]), 6, 16)]


class Dali(NumpyLoader):
    """Stand-in for DALI's loader that counts the calls of its methods."""

    seen: list[list[Batch]] = []  # noqa: RUF012
    closed = 0
    error: str | None = None

    def __init__(self, *arguments: Any) -> None:
        if not self.error:  # like the real DALI, fail only at the first step
            super().__init__(*arguments)

    def __next__(self) -> list[Batch]:
        if self.error:
            raise RuntimeError(self.error)
        self.seen.append(super().__next__())
        return self.seen[-1]

    def close(self) -> None:
        Dali.closed += 1
        if not self.error:
            super().close()


@pytest.fixture
def dali(monkeypatch: pytest.MonkeyPatch) -> type[Dali]:
    Dali.seen, Dali.closed = [], 0
    module: Any = ModuleType("dali")
    module.DaliLoader = Dali
    monkeypatch.setitem(sys.modules, "dataloading.batches.dali", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    return Dali


def choose(kind: str, device: str = "cpu") -> Any:
    return choose_loader(kind, torch.device(device), lambda _: STEP, LENGTHS)


def test_auto_chooses_numpy_without_dali_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(choose("numpy", "cuda")) == "loader: numpy (as set)"
    assert str(choose("auto")) == "loader: numpy (no GPU)"
    for missing in ("nvidia", "nvidia.dali"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, missing=missing: None if name == missing else 1)
        choice = choose("auto", "cuda")
        assert (str(choice), choice.is_fallback) == ("loader: numpy (nvidia-dali is not installed)", False)
        for check in (check_loader, choose):
            with pytest.raises(ValueError, match=r"data\.loader is dali, but nvidia-dali is not installed"):
                check("dali")


def test_dali_loads_a_synthetic_step_with_the_runs_lengths_before_it_is_chosen(dali: type[Dali]) -> None:
    choice = choose("dali")
    assert (choice.make, str(choice)) == (dali, "loader: dali (as set)")
    assert [batch.cu_seqlens.diff().tolist() for batch in dali.seen[0]] == [[9, 40, 3], [5, 30]]
    assert dali.closed == 1


def test_if_dali_cannot_start_kind_dali_raises_and_kind_auto_chooses_numpy(
    dali: type[Dali], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dali, "error", f"CUDA driver version is insufficient{300 * '.'}\n[frame 0]: lib.so")
    why = f"RuntimeError: CUDA driver version is insufficient{265 * '.'}"
    assert len(why) == 14 + 300
    with pytest.raises(ValueError, match=re.escape(f"data.loader is dali, but DALI cannot start here ({why}): repair")):
        choose("dali")
    choice = choose("auto", "cuda")
    assert (choice.make, choice.is_fallback) == (NumpyLoader, True)
    assert choice.reason == f"DALI is installed but cannot start: {why}"
    assert dali.closed == 2


def test_on_a_gpu_dali_is_chosen_if_it_is_clearly_faster(dali: type[Dali], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "__next__", lambda _: [])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    for seconds, made in ((0.1939, dali), (0.194, NumpyLoader)):
        monkeypatch.setattr(loader_choice, "fastest_turns", lambda *_, taken=seconds: [0.2, taken])
        choice = choose("auto", "cuda")
        assert (choice.make, choice.reason) == (made, f"numpy 200.00 ms a step, dali {1e3 * seconds:.2f} ms")


class Taking:
    """Loader whose steps advance a fake clock. In each turn, eight steps are not timed, and then eight steps are timed."""

    now = 0.0

    def __init__(self, *turns: float) -> None:
        self.left = [seconds for turn in turns for seconds in [9.0] * 8 + [turn] * 8]

    def __next__(self) -> list[Batch]:
        Taking.now += self.left.pop(0)
        return []

    def close(self) -> None:
        assert not self.left
        self.left = [0.0]


def test_loaders_are_compared_by_their_fastest_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_choice, "time", SimpleNamespace(perf_counter=lambda: Taking.now))
    loaders = [Taking(4.0, 2.0, 3.0), Taking(5.0, 5.0, 1.0)]
    assert fastest_turns(loaders, CPU) == [2.0, 1.0]
    assert [loader.left for loader in loaders] == [[0.0], [0.0]]  # set by close()
