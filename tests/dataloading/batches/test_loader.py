"""Batches and their loaders: offsets and counts, equal results from NumPy and DALI, and the choice of a loader."""

import importlib.util
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataloading.batches.loader import Batch, Loader, NumpyLoader, Uploads, batch_of
from dataloading.batches.loader_choice import check_loader, choose_loader, fastest_turns
from dataloading.batches.plan import BatchPlan, MicroBatch, ShapeBucket, fitting
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


def test_a_batch_holds_each_sample_at_its_place() -> None:
    samples = synthetic_samples(np.array([5, 3, 9]), VOCAB_SIZE)
    batch = batch_of(samples)
    assert batch.tokens == 17
    assert batch.sequences == 3
    assert batch.max_seqlen == 9
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 17]
    assert batch.position_ids.tolist() == [*range(5), *range(3), *range(9)]
    assert batch.input_ids.tolist() == samples.input_ids.tolist()
    assert batch.segment_ids.tolist() == samples.segment_ids.tolist()
    for number in range(3):
        first, last = samples.masked_lm_offsets[number : number + 2]
        inside = batch.masked_lm_positions[first:last] - batch.cu_seqlens[number]
        assert inside.tolist() == samples.masked_lm_positions[first:last].tolist()
    assert batch.masked_lm_positions.diff().min() > 0
    assert batch.masked_lm_ids.tolist() == samples.masked_lm_ids.tolist()
    assert batch.next_sentence_labels.tolist() == samples.next_sentence_labels.tolist()
    assert batch.global_counts.tolist() == [3, len(samples.masked_lm_ids)]
    with pytest.raises(AssertionError):
        batch_of(samples, None, ShapeBucket(17, 3, 16, 9))  # no unused row is left for empty masked slots


def rank_batches(run: SmallRun, accumulation: int, rank: int) -> Callable[[int], list[MicroBatch]]:
    plan = BatchPlan(run.train.lengths, run.train.masked_counts, 24, 2, accumulation, seed=11)
    return lambda step: plan.rank_batches(step, rank)


SHAPE_BUCKETS = {
    1: [ShapeBucket(256, 12, 48, MAX_SEQ_LENGTH), ShapeBucket(320, 12, 64, MAX_SEQ_LENGTH)],
    3: [ShapeBucket(128, 4, 16, MAX_SEQ_LENGTH)],
}
"""Shape buckets by number of accumulation steps. Every bucket fits some batches, and some batches fit no bucket."""


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_dali_gives_the_same_stream_as_numpy(small_run: SmallRun, accumulation: int, padded: bool) -> None:
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    from dataloading.batches.dali import DaliLoader

    dataset = open_dataset(small_run.folder / "train")
    for rank in range(2):
        chosen = rank_batches(small_run, accumulation, rank)
        given = SHAPE_BUCKETS[accumulation] if padded else []
        loaders: list[Loader] = [loader(dataset, chosen, CPU, 2, given) for loader in (NumpyLoader, DaliLoader)]
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
        NumpyLoader(small_run.train, rank_batches(small_run, accumulation, rank), CPU, 4, some)
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


def test_nothing_is_read_before_the_first_batch_and_an_error_reaches_the_training_loop(small_run: SmallRun) -> None:
    source, chosen = Unreadable(open_dataset(small_run.folder / "train")), rank_batches(small_run, 1, 0)
    loader = NumpyLoader(source, chosen, CPU)
    assert source.reads == 0
    for step in range(2):
        (micro,) = chosen(step)
        assert_same(next(loader)[0], batch_of(small_run.train.take(micro.indices), micro))
    with pytest.raises(ValueError, match="truncated"):
        next(loader)
    loader.close()


def test_uploads_select_their_gpu_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread would use GPU 0 otherwise. On a machine without a GPU, any earlier CUDA call would raise here."""

    def select(device: torch.device) -> None:
        raise LookupError(device)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "set_device", select)
    with pytest.raises(LookupError, match="cuda:3"):
        Uploads(torch.device("cuda", 3)).start([])


CPU = torch.device("cpu")
LENGTHS = np.array([5, 40, 3, 17, 9, 30])
STEP = [MicroBatch(np.array([4, 1, 2]), 6, 16), MicroBatch(np.array([0, 5]), 6, 16)]


class Dali(NumpyLoader):
    """Stand-in for DALI's loader that counts the calls of its methods."""

    seen: list[list[Batch]] = []  # noqa: RUF012
    closed = 0
    error: str | None = None

    def __init__(self, *arguments: Any) -> None:
        if not self.error:  # the real DALI, too, fails only at the first step
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
    return choose_loader(kind, torch.device(device), lambda _: STEP, LENGTHS, 1)


def test_without_dali_or_a_gpu_it_is_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("numpy", "cuda").name == choose("auto").name == "numpy"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    choice = choose("auto", "cuda")
    assert (choice.name, choice.is_fallback) == ("numpy", False)
    assert "nvidia-dali is not installed" in choice.reason
    for check in (check_loader, choose):
        with pytest.raises(ValueError, match=r"data\.loader is dali, but nvidia-dali is not installed"):
            check("dali")


def test_dali_loads_a_step_of_the_runs_lengths_before_it_is_taken(dali: type[Dali]) -> None:
    assert choose("dali").make is dali
    assert [batch.cu_seqlens.diff().tolist() for batch in dali.seen[0]] == [[9, 40, 3], [5, 30]]
    assert dali.closed == 1


def test_a_dali_that_cannot_start_ends_a_run_that_set_it(dali: type[Dali], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dali, "error", "CUDA driver version is insufficient\nStacktrace (12 entries):\n[frame 0]: lib.so"
    )
    with pytest.raises(ValueError, match=r"data\.loader is dali.*CUDA driver version is insufficient\)") as caught:
        choose("dali")
    assert "\n" not in str(caught.value)
    choice = choose("auto", "cuda")
    assert (choice.make, choice.is_fallback) == (NumpyLoader, True)
    assert "CUDA driver version is insufficient" in choice.reason
    assert dali.closed == 2


def test_each_loader_counts_with_its_best_turn(dali: type[Dali]) -> None:
    class Slow(Dali):
        def __next__(self) -> list[Batch]:
            time.sleep(0.005)
            return super().__next__()

    arguments: tuple[Any, ...] = (None, lambda _: [], CPU, 1, ())
    fast, slow = fastest_turns([NumpyLoader(*arguments), Slow(*arguments)], CPU, 1)
    assert 0 < fast < slow
    assert slow >= 0.005
    assert (len(dali.seen), dali.closed) == (3 * (1 + 4 + 8), 1), "steps ahead are not timed"
