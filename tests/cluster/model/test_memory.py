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
from cluster.model.memory import (
    fixed_memory,
    hidden_bytes,
    memory_of_rank,
    micro_batches_in_flight,
    model_shares,
    saved_activations,
)
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
    """Record of the storages that operators create in a `with` block, to count the bytes that are still in use."""

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

    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with saving, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
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
@pytest.mark.parametrize(("layers", "tensor", "dropout"), [(3, 1, 0), (3, 1, 0.1), (4, 2, 0), (4, 2, 0.1), (6, 1, 0.1)])
def test_predicted_memory_equals_the_tensors_that_a_real_model_keeps(
    layers: int, tensor: int, dropout: float, precision: Precision, fake_group: dist.ProcessGroup
) -> None:
    """The model with six layers gets sequences so short that some have equal lengths."""
    shape = (layers, *((192, 6, 768, 1000, 40) if layers == 6 else (128, 4, 512, 1024, 128)))
    config = ModelConfig(*shape, hidden_dropout=dropout, attention_dropout=dropout)
    placement = TensorParallel(config, fake_group, Stopwatch()).placement if tensor > 1 else None
    model = BertForPreTraining(config, placement)
    initialize_(model, seed=0)
    flat = FlatParameters.of(model)
    work, samples = work_and_samples(config)
    parts = memory_of_rank(work, Strategy(SEQUENCES, precision=precision, tensor=tensor), 1, tensor)
    predicted = parts["activations"] + parts["logits"] + parts["16-bit weights"]
    kept = kept_bytes(model.train(), [flat.weights_N], samples, precision)
    # Sequences of equal length and tensor parallelism make copies that are not predicted, so the prediction is inexact.
    inexact = 0.011 * kept if tensor > 1 else 0.0045 * kept if layers == 6 else 8
    assert predicted == pytest.approx(kept, abs=inexact)
    optimizer = Lamb(flat, OptimizerConfig(1e-4, 100))
    assert parts["weights"] + parts["gradients"] == flat.weights_N.nbytes + flat.gradients_N.nbytes
    assert parts["moments"] == sum(moment.nbytes for moment in optimizer.moments())
    # Sharded LAMB, which tensor parallelism needs, also holds contiguous copies of its gradients and weights.
    assert parts["update"] == (3 if tensor > 1 else 1) * optimizer.state.update_P.nbytes


@pytest.mark.parametrize("place", [0, 1])
def test_predicted_memory_of_a_pipeline_stage_equals_its_tensors(place: int) -> None:
    config = ModelConfig(6, 128, 4, 512, 1024, 128)
    group = cast(Any, SimpleNamespace(size=lambda: 2, rank=lambda: place))
    pipeline = PipelineModel(config, group, 1, torch.zeros(config.vocab_size, config.hidden_size))
    initialize_(pipeline, seed=0)
    flat = FlatParameters.of(pipeline)
    work, samples = work_and_samples(config)
    strategy = Strategy(SEQUENCES, pipeline=2)
    held = fixed_memory(work, strategy, 1, 2, place)
    word = pipeline.embeddings.word.detach()
    assert held["weights"] == flat.weights_N.nbytes + place * word.nbytes
    [stage], given = pipeline.stages, torch.zeros(int(samples.lengths.sum()), 128, requires_grad=True)

    def forward(batch: Batch) -> object:
        return pipeline.through(stage, given if place else None, batch, pipeline.next_dropout_state())

    kept = kept_bytes(forward, [flat.weights_N, given, word], samples, "fp32")
    sizes = work.micro_batches(strategy, 2, 0)
    share = model_shares(config, 1, 2)[place]
    predicted = float(saved_activations(work, strategy, sizes, False, share).max())
    predicted += place * 4 * float(sizes.masked_AR.max()) * config.vocab_size
    # The prediction includes the first stage's output, which autograd does not save because the second stage gets it.
    assert predicted - (0 if place else given.nbytes) == pytest.approx(kept, abs=8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        sent = cast(Any, forward(batch_of(samples)))
        assert place or sent.dtype == pipeline.hidden_dtype(), "neighbours expect this type"
        assert hidden_bytes("bf16", on_gpu=False) == pipeline.hidden_dtype().itemsize


def test_each_share_of_a_model_matches_its_pipeline_stages() -> None:
    config, embeddings, layer = ModelConfig(8, 128, 4, 512, 1024, 128), 1154 * 128 + 256, 12 * 128**2 + 13 * 128
    expected = {
        (1, 1): [(True, True, 7, 0)],
        (2, 1): [(True, False, 4, 1), (False, True, 3, 1)],
        (2, 2): [(True, False, 4, 3), (False, True, 3, 3)],
        (4, 2): [(True, False, 2, 3), (False, False, 2, 4), (False, False, 2, 4), (False, True, 1, 3)],
    }
    for (pipeline, virtual), parts in expected.items():
        shares = model_shares(config, 1, pipeline, virtual)
        assert [(each.has_embeddings, each.has_last, each.inner, each.neighbours) for each in shares] == parts
        assert [each.copied for each in shares] == [0] * (pipeline - 1) + [1024 * 128 * (pipeline > 1)]
    first, last = model_shares(config, 1, 2, 2)
    ends = [embeddings + n * layer for n in range(5)]
    assert first.ends == (*ends[:3], 0, 0, *ends[3:], 0, 0)
    assert [last.ends[n + 1] - last.ends[n] for n in (3, 7)] == [layer, layer]
    # LAMB treats query, key and value as three tensors. Tensor groups replicate position and segment embeddings, norms and
    # output biases.
    assert (first.segments, first.shared) == (5 + 4 * 14, 130 * 128 + 256 + 4 * 6 * 128)


def test_each_setting_changes_its_part_of_the_fixed_memory() -> None:
    """``vector`` is the bytes of the fp32 weights. Shards divide only moments and update."""
    work, _ = work_and_samples(ModelConfig(2, 128, 4, 512, 1024, 128))
    elements = 1154 * 128 + 256 + 2 * (12 * 128**2 + 13 * 128) + 2 * 128**2 + 258 + 4 * 128 + 1024 + 14
    vector = 4.0 * (-(-elements // 128) * 128)  # padded, so that eight ranks have equal shards
    whole = {"weights": vector, "gradients": vector, "moments": 2 * vector, "update": vector}
    none = dict.fromkeys(("reduction buffers", "site exchange", "16-bit weights"), 0.0)
    # The matrices of both layers, and of the heads, have copies in 16 bits.
    sixteen_bits = 2.0 * (2 * (4 * 128**2 + 2 * 128 * 512) + 2 * 128**2 + 1024 * 128 + 2 * 128)
    bucket, alone = 4 * 128 * 100, {name: 4.0 * elements * n for name, n in zip(whole, (1, 1, 2, 3), strict=True)}
    for changes, nodes, expected in (
        ({}, 2, {}),
        ({"reduction": "hierarchical"}, 2, {}),
        ({"reduction": "sharded"}, 2, {"moments": vector / 2, "update": 3 * vector / 4}),
        ({"reduction": "sharded_world"}, 2, {"moments": vector / 4, "update": 3 * vector / 8}),
        ({"reduce_dtype": "bf16"}, 2, {"reduction buffers": vector}),
        ({"reduce_dtype": "bf16", "bucket_bytes": bucket}, 2, {"reduction buffers": bucket}),
        ({"shard_gradients": True, "bucket_bytes": bucket}, 2, {"gradients": 2 * bucket}),
        ({"site_steps": 2}, 2, {"site exchange": 12.0 * elements}),
        ({"precision": "bf16"}, 2, {"16-bit weights": sixteen_bits}),
        ({"reduce_dtype": "bf16", "shard_gradients": True, "reduction": "sharded_world"}, 0, alone),
    ):
        strategy = replace(Strategy(16, bucket_bytes=2**30), **cast(Any, changes))
        held = fixed_memory(work, strategy, max(1, nodes), 4 if nodes else 1)
        assert held == pytest.approx(whole | none | expected), changes
    apart, share = Strategy(16, reduction="sharded", pipeline=2), model_shares(work.model, 1, 2)[0]
    assert fixed_memory(work, apart, 4, 1)["moments"] == 8 * share.padded(2), "a node has no second copy to share with"


def test_predicted_memory_assumes_that_the_largest_micro_batches_are_in_flight() -> None:
    ways = {(1, 1, 8, 0): 1, (4, 1, 8, 0): 4, (4, 1, 8, 3): 1, (4, 1, 2, 0): 2, (4, 2, 8, 3): 2.5}
    for (stages, virtual, steps, place), at_once in ways.items():
        assert micro_batches_in_flight(Strategy(64, steps, pipeline=stages, virtual_stages=virtual), place) == at_once
    work, _ = work_and_samples(ModelConfig(8, 128, 4, 512, 1024, 128))
    for virtual, at_once, messages in ((1, 2, 1), (2, 2.5, 3)):
        strategy = Strategy(SEQUENCES, 4, tensor=2, pipeline=2, virtual_stages=virtual)
        assert micro_batches_in_flight(strategy, 0) == at_once
        share, whole = model_shares(work.model, 2, 2, virtual)[0], -int(-at_once // 1)
        steps = [work.micro_batches(strategy, 4, step) for step in range(16)]
        kept = [np.sort(saved_activations(work, strategy, sizes, False, share)[:, 0])[-whole:].sum() for sizes in steps]
        found = memory_of_rank(work, strategy, 1, 4)
        assert (found["activations"], found["logits"]) == (pytest.approx(max(kept) * at_once / whole), 0)
        tokens = max(float(sizes.tokens_AR.max()) for sizes in steps)
        assert found["stage buffers"] == 4 * messages * tokens / 2 * 128 * hidden_bytes("fp32", on_gpu=True)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_gpu_activation_bytes_equal_a_count_by_hand(precision: Precision, size: int) -> None:
    """Add up by hand what a model of one layer keeps on a GPU, in elements of a hidden state and bytes of statistics."""
    work, _ = work_and_samples(ModelConfig(1, 64, 4, 256, 1024, 128))
    sizes, [share] = work.micro_batches(Strategy(SEQUENCES), 1, 0), model_shares(work.model)
    tokens, masked, hidden = float(sizes.tokens_AR[0, 0]), float(sizes.masked_AR[0, 0]), 64 * size
    # Both terms of the embeddings' sum, their norm, and the last layer's keys and values.
    by_token = 5 * hidden + 8
    # Query, positions of the row, two outputs and the statistics of attention, two norms, one norm's output, GELU's input
    # and output of four hidden sizes each, and the heads' rows.
    by_row = 2 * hidden + 16 + 2 * hidden + 4 * 4 + 2 * (2 * hidden + 8) + hidden + 8 * hidden + hidden
    by_masked, by_sequence = 3 * hidden + 8, hidden + 8
    expected = by_token * tokens + by_row * (SEQUENCES + masked) + by_masked * masked + by_sequence * SEQUENCES
    strategy = Strategy(SEQUENCES, precision=precision)
    assert float(saved_activations(work, strategy, sizes, True, share).sum()) == expected
    # A rank of a tensor group holds the whole inputs of the last layer's and the decoder's products, and half of the rest.
    inputs = hidden * (tokens + 2 * (SEQUENCES + masked) + masked)
    halved = saved_activations(work, replace(strategy, tensor=2), sizes, True, share)
    assert float(halved.sum()) == (expected + inputs) / 2


def test_unsharded_lamb_on_gpus_keeps_16_bit_copies_of_all_weights() -> None:
    config = ModelConfig(2, 128, 4, 512, 1024, 128)
    work, _ = work_and_samples(config)
    copies = WeightCopies.of(config, torch.device("cpu")).copies_P
    assert copies is not None
    heads = 2 * (2 * 128 * 128 + 1024 * 128 + 2 * 128)
    strategy = Strategy(SEQUENCES, precision="bf16")
    by_autocast = fixed_memory(work, strategy, 1, 1)["16-bit weights"]
    assert fixed_memory(work, strategy, 1, 1, on_gpu=True)["16-bit weights"] == copies.nbytes + heads > by_autocast
    for other in (replace(strategy, reduction="sharded"), replace(strategy, precision="fp8")):
        assert fixed_memory(work, other, 1, 1, on_gpu=True)["16-bit weights"] == by_autocast


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predicted_savings_of_recomputation_equal_those_of_a_real_model(precision: Precision) -> None:
    """Compare the differences between modes, because weights and weight copies are alive in every mode."""
    config = ModelConfig(3, 128, 4, 512, 1024, 128)
    work, samples = work_and_samples(config)
    batch = batch_of(samples)
    kept, parts = {}, {}
    for mode in get_args(Recompute):
        model = BertForPreTraining(config, recompute=mode)
        initialize_(model, seed=0)
        with Storages() as storages, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            output = model(batch)
            kept[mode] = storages.alive()
        del output
        parts[mode] = memory_of_rank(work, Strategy(SEQUENCES, precision=precision, recompute=mode), 1, 1)
    for mode in ("selective", "full"):
        saved = parts["none"]["activations"] - parts[mode]["activations"]
        assert saved == pytest.approx(kept["none"] - kept[mode], abs=16)
        assert parts[mode]["recomputed"] == pytest.approx(saved / 2), "one of two inner layers at a time"
    assert parts["none"]["recomputed"] == 0 < parts["full"]["activations"] < parts["selective"]["activations"]


def test_training_md_states_the_stored_bytes_per_layer_and_token() -> None:
    page = (REPOSITORY / "docs/training.md").read_text(encoding="utf-8").splitlines()
    columns: list[tuple[Precision, bool, int]] = [("bf16", True, 512), ("fp8", True, 512), ("fp32", False, 128)]
    for mode in get_args(Recompute):
        row = []
        for precision, on_gpu, length in columns:
            strategy, kept = Strategy(8, precision=precision, recompute=mode), []
            for layers in (3, 4):
                work = Work(ModelConfig(layers), np.full(8, length), np.ones(8, np.int64))
                (share,) = model_shares(work.model, 1, 1, 1)
                kept.append(float(saved_activations(work, strategy, work.typical(1), on_gpu, share).sum()))
            row.append(f"{(kept[1] - kept[0]) / length:,.0f}")
        assert any(line.startswith(f"| `{mode}`") and line.endswith(f"| {' | '.join(row)} |") for line in page), row
