"""Predicted memory of a rank, compared with the tensors that a real model and its optimizer keep."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert.checkpoints.initial_model import initialize_
from bert.configuration.sections import ModelConfig, OptimizerConfig, Precision, Recompute
from bert.execution.stopwatch import Stopwatch
from bert.model import BertForPreTraining
from bert.optimizer import FlatParameters, Lamb
from bert.parallel.pipeline.stages import PipelineModel
from bert.parallel.tensor.shards import TensorParallel
from bert.products.weight_gradients import WeightCopies
from cluster.model.memory import held_by_rank, hidden_bytes, kept_by_forward, memory_of_rank, model_shares, under_way
from cluster.model.work import Strategy, Work
from dataloading.batches.loader import Batch, batch_of
from dataloading.shards.samples import Samples, synthetic_samples
from tests.programs import REPOSITORY

SEQUENCES = 16


def work_and_samples(model: ModelConfig) -> tuple[Work, Samples]:
    lengths = np.random.default_rng(0).integers(8, model.max_position_embeddings + 1, SEQUENCES)
    samples = synthetic_samples(-np.sort(-lengths), model.vocab_size)
    counts = samples.masked_counts.astype(np.uint16)
    return Work(model, samples.lengths.astype(np.uint16), counts), samples


class Storages(TorchDispatchMode):
    """Record of the storages that operators create in the block, to count the bytes that are still in use."""

    def __init__(self) -> None:
        super().__init__()
        # Weak references, because the record must not keep storages alive.
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        storages = [each.untyped_storage() for each in tree_leaves(returned) if isinstance(each, Tensor)]
        self._made += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
        return returned

    def alive(self) -> int:
        return sum({made.cdata: size for made, size in self._made if not made.expired()}.values())


def kept_bytes(forward: Callable[[Batch], object], known: list[Tensor], samples: Samples, precision: Precision) -> int:
    """Return the bytes of all storages that autograd saves, except those of ``known`` tensors and of the batch."""
    batch = batch_of(samples)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        forward(batch)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*known, *batch.tensors.values()]}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for address, size in storages.items() if address not in own)


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    """Yield rank 0's fake process group of two ranks, whose collectives return arbitrary values."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "tensor", "dropout"),
    [
        *(((3, 128, 4, 512, 1024, 128), 1, dropout) for dropout in (0.0, 0.1)),
        *(((4, 128, 4, 512, 1024, 128), 2, dropout) for dropout in (0.0, 0.1)),
        ((6, 192, 6, 768, 1000, 40), 1, 0.1),
    ],
)
def test_a_real_model_keeps_what_is_predicted(
    shape: tuple[int, ...], tensor: int, dropout: float, precision: Precision, fake_group: dist.ProcessGroup
) -> None:
    config = ModelConfig(*shape, hidden_dropout=dropout, attention_dropout=dropout)
    whole = BertForPreTraining(config)
    model = (
        whole if tensor == 1 else BertForPreTraining(config, TensorParallel(config, fake_group, Stopwatch()).placement)
    )
    initialize_(model, torch.Generator().manual_seed(0))
    flat = FlatParameters.of(model)
    work, samples = work_and_samples(config)
    parts = memory_of_rank(work, Strategy(SEQUENCES, precision=precision, tensor=tensor), 1, tensor)
    predicted = parts["activations"] + parts["logits"] + parts["16-bit weights"]
    kept = kept_bytes(model.train(), [flat.weights_N], samples, precision)
    assert predicted == pytest.approx(kept, rel=0.02 if tensor == 1 else 0.05)
    optimizer = Lamb(flat, OptimizerConfig(1e-4, 100))
    assert parts["weights"] + parts["gradients"] == flat.weights_N.nbytes + flat.gradients_N.nbytes
    assert parts["moments"] == sum(moment.nbytes for moment in optimizer.moments())
    # Sharded LAMB, which tensor parallelism needs, also holds contiguous copies of its gradients and weights.
    assert parts["update"] == (3 if tensor > 1 else 1) * optimizer.state.update_P.nbytes


@pytest.mark.parametrize("place", [0, 1])
def test_a_stage_keeps_what_is_predicted(place: int) -> None:
    config = ModelConfig(6, 128, 4, 512, 1024, 128)
    group = cast(Any, SimpleNamespace(size=lambda: 2, rank=lambda: place))
    pipeline = PipelineModel(config, group, 1, torch.zeros(config.vocab_size, config.hidden_size))
    initialize_(pipeline, torch.Generator().manual_seed(0))
    flat = FlatParameters.of(pipeline)
    work, samples = work_and_samples(config)
    strategy = Strategy(SEQUENCES, pipeline=2)
    held = held_by_rank(work, strategy, 1, 2, place)
    word = pipeline.embeddings.word.detach()
    assert held["weights"] == flat.weights_N.nbytes + place * word.nbytes
    [stage], given = pipeline.stages, torch.zeros(int(samples.lengths.sum()), 128, requires_grad=True)

    def forward(batch: Batch) -> object:
        return pipeline.through(stage, given if place else None, batch, pipeline.next_dropout_state())

    kept = kept_bytes(forward, [flat.weights_N, given, word], samples, "fp32")
    sizes = work.micro_batches(strategy, 2, 0)
    share = model_shares(config, 1, 2)[place]
    predicted = float(kept_by_forward(work, strategy, sizes, False, share).max())
    predicted += place * 4 * float(sizes.masked_AR.max()) * config.vocab_size
    assert predicted - place * given.nbytes == pytest.approx(kept, rel=0.03)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert place or cast(Any, forward(batch_of(samples))).dtype == pipeline.hidden_dtype(), (
            "which neighbours expect"
        )
        assert hidden_bytes("bf16", on_gpu=False) == pipeline.hidden_dtype().itemsize
    two = memory_of_rank(work, replace(strategy, gradient_accumulation_steps=2), 1, 2)
    assert two["stage buffers"] > 0
    assert under_way(replace(strategy, gradient_accumulation_steps=8), 0) == 2


def test_what_is_divided_and_what_is_not() -> None:
    work, _ = work_and_samples(ModelConfig(2, 128, 4, 512, 1024, 128))
    ways = ("flat", "hierarchical", "sharded", "sharded_world")
    flat, hierarchical, sharded, world = (
        memory_of_rank(work, Strategy(16, reduction=way), nodes=2, ranks=4) for way in ways
    )
    assert flat == hierarchical
    assert sharded["moments"] == pytest.approx(flat["moments"] / 4)
    assert world["moments"] + world["update"] == pytest.approx(20 / 4 * world["weights"] / 8)
    accumulated = memory_of_rank(work, Strategy(16, 2), nodes=2, ranks=4)
    assert accumulated["activations"] < flat["activations"]
    assert memory_of_rank(work, Strategy(16, reduce_dtype="bf16"), 2, 4)["reduction buffers"] > 0


def test_on_gpus_whole_updates_leave_copies_of_all_weights_and_heads_are_cast_besides() -> None:
    config = ModelConfig(2, 128, 4, 512, 1024, 128)
    work, _ = work_and_samples(config)
    copies = WeightCopies.of(config, torch.device("cpu")).copies_P
    assert copies is not None
    heads = 2 * (2 * 128 * 128 + 1024 * 128 + 2 * 128)
    strategy = Strategy(SEQUENCES, precision="bf16")
    by_autocast = held_by_rank(work, strategy, 1, 1)["16-bit weights"]
    assert held_by_rank(work, strategy, 1, 1, on_gpu=True)["16-bit weights"] == copies.nbytes + heads > by_autocast
    for other in (replace(strategy, reduction="sharded"), replace(strategy, precision="fp8")):
        assert held_by_rank(work, other, 1, 1, on_gpu=True)["16-bit weights"] == by_autocast


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputation_keeps_what_is_predicted(precision: Precision) -> None:
    """Compare the differences between modes, because weights and weight copies are alive in every mode."""
    config = ModelConfig(3, 128, 4, 512, 1024, 128)
    work, samples = work_and_samples(config)
    batch = batch_of(samples)
    kept, parts = {}, {}
    for mode in get_args(Recompute):
        model = BertForPreTraining(config, recompute=mode)
        initialize_(model, torch.Generator().manual_seed(0))
        with Storages() as storages, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            output = model(batch)
            kept[mode] = storages.alive()
        del output
        parts[mode] = memory_of_rank(work, Strategy(SEQUENCES, precision=precision, recompute=mode), 1, 1)
    for mode in ("selective", "full"):
        saved = parts["none"]["activations"] - parts[mode]["activations"]
        assert saved == pytest.approx(kept["none"] - kept[mode], rel=0.02)
        assert parts[mode]["recomputed"] == pytest.approx(saved / 2), "one of two inner layers at a time"
    assert parts["none"]["recomputed"] == 0 < parts["full"]["activations"] < parts["selective"]["activations"]


def test_the_page_states_the_bytes_that_a_layer_keeps_for_a_token() -> None:
    page = (REPOSITORY / "docs/training.md").read_text(encoding="utf-8").splitlines()
    columns: list[tuple[Precision, bool, int]] = [("bf16", True, 512), ("fp8", True, 512), ("fp32", False, 128)]
    for mode in get_args(Recompute):
        row = []
        for precision, on_gpu, length in columns:
            strategy, kept = Strategy(8, precision=precision, recompute=mode), []
            for layers in (3, 4):
                work = Work(ModelConfig(layers), np.full(8, length), np.ones(8, np.int64))
                (share,) = model_shares(work.model, 1, 1, 1)
                kept.append(float(kept_by_forward(work, strategy, work.typical(1), on_gpu, share).sum()))
            row.append(f"{(kept[1] - kept[0]) / length:,.0f}")
        assert any(line.startswith(f"| `{mode}`") and line.endswith(f"| {' | '.join(row)} |") for line in page), row
