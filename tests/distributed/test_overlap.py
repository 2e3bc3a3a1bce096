"""Training steps on several ranks over gloo give the same results in every order of computation and communication.

Gradients are reduced after or during the backward pass, with or without CUDA graphs. Weights are gathered after the
update or during the next forward pass.
"""

import contextlib
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bert.configuration.config import Config
from bert.configuration.sections import Recompute, ReductionStrategy
from bert.parallel.mesh import Mesh
from bert.products import weight_gradients
from bert.step import TrainingStep
from dataloading.batches.loader import Batch, batch_of
from dataloading.batches.plan import BatchPlan, MicroBatch, ShapeBucket
from kernels import cast_fp8
from tests.bert.recording import Recording, recordable_attention
from tests.bert.small_models import step_config, training_step
from tests.convergence.test_golden_losses import MODEL, predictable_samples
from tests.distributed.ranks import run_on_ranks
from tests.distributed.worker import end_groups, on_all, regrouped

STEPS = 4
BUCKET_BYTES = 60_000
"""Small enough for this small model to have several buckets."""


def config(strategy: ReductionStrategy, accumulation: int, **training: Any) -> Config:
    model = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
    training |= {"gradient_accumulation_steps": accumulation, "bucket_bytes": BUCKET_BYTES}
    return step_config(model, reduction=strategy, **training)


@cache
def global_batches(mesh: Mesh, accumulation: int) -> tuple[list[list[Batch]], list[ShapeBucket]]:
    """Make this rank's micro-batches in two sizes, and every seventh in a third size. Return the first two sizes too."""
    samples = predictable_samples()
    longest = int(samples.lengths.max())
    kinds = [ShapeBucket(size, 8, 128, longest) for size in (288, 320, 352)]
    plan = BatchPlan(samples.lengths, samples.masked_counts, 8, mesh.world_size, accumulation, 2)
    numbers = itertools.count()

    def batch(micro: MicroBatch) -> Batch:
        number = next(numbers)
        return batch_of(samples.take(micro.indices), micro, kinds[2 if number % 7 == 6 else number % 2])

    batches = [[batch(micro) for micro in plan.rank_batches(step, mesh.rank)] for step in range(STEPS)]
    return batches, kinds[:2]


def train(
    mesh: Mesh, strategy: ReductionStrategy, order: str, accumulation: int, recompute: Recompute = "none"
) -> dict[str, Any]:
    """Train in an order, and return losses, final weights and moments, and how many buckets started during backward."""
    end_groups()
    chosen = config(strategy, accumulation, recompute=recompute)
    capturer = Recording() if order == "captured" else None
    step = training_step(chosen, mesh, capturer)
    reduction, early = step.reduction, []
    assert reduction is not None
    finish = reduction.finish

    def noted() -> None:
        early.append(reduction._started)
        finish()

    reduction.finish = noted
    held = hold_weights_back(step) if order == "held" else []
    if order == "after":
        reduction.overlapped = contextlib.nullcontext  # type: ignore[method-assign]
        gather_after_update(step)
    elif order == "one message":
        reduction.overlapped = contextlib.nullcontext  # type: ignore[method-assign]
        reduction.finish = lambda: dist.all_reduce(step.flat.gradients_P)  # type: ignore[assignment]
    batches, shape_buckets = global_batches(mesh, accumulation)
    torch.manual_seed(9 + mesh.rank)
    step.model.seed_dropout(9 + mesh.rank)
    step.warm_up(batches[0], 1, shape_buckets)
    if capturer is None:
        early.clear()  # drop the warm-up; a captured run has only its counts, as replays call no Python
    torch.manual_seed(9 + mesh.rank)
    means = []
    for micro_batches in batches:
        step(micro_batches)
        means.append(step.statistics.fetch()[0])
    if held:  # no forward pass follows that would end the delay
        del vars(step.gather)["_gather"]
    step.gather_weights()
    found = {
        "held": sum(isinstance(one, slice) for one in held),
        "phases": sorted({one for one in held if isinstance(one, str)}),
        "means": means,
        "weights": step.flat.weights_P.clone(),
        "moments": [moment_P.clone() for moment_P in step.optimizer.moments()],
        "early": early,
        "buckets": len(reduction.buckets),
        "graphs": len(capturer.graphs) if capturer else 0,
        "replays": len(capturer.replays) if capturer else 0,
    }
    reduction.close()
    return found


def gather_after_update(step: TrainingStep) -> None:
    """Gather the weights right after the update instead of during the next forward pass."""
    step.gathers_in_forward = False


def hold_weights_back(step: TrainingStep) -> list[slice | str]:
    """Delay each bucket of weights: it arrives while the forward pass is one part before the part that needs it.

    The test hangs if a part waits for buckets that only a later part needs. A part that does not wait for its buckets
    uses old weights and gives wrong results. Returns a list to which each forward pass appends the watchdog's phase
    and the delayed buckets.
    """
    gather = step.gather
    assert gather is not None
    parts = [step.model.embeddings, step.model.layers[0]]
    assert len(step.model.layers) == 2
    began = [threading.Event() for _ in parts]
    for part, event in zip(parts, began, strict=True):
        part.register_forward_pre_hook(lambda *_, event=event: event.set())
    start, arrive, held = gather.start, gather._gather, []
    step.model.embeddings.register_forward_pre_hook(lambda *_: held.append(step.stopwatch.tracker.phase))
    ends = [max(step.flat.places[parameter].stop for parameter in part.parameters()) for part in parts]

    def started() -> None:
        for event in began:
            event.clear()
        start()

    def arriving(bucket: slice) -> None:
        # Number of parts whose weights all lie before the bucket. The next part is the first that needs it.
        before = sum(end <= bucket.start for end in ends)
        if before:
            assert began[before - 1].wait(60), bucket
            held.append(bucket)
        arrive(bucket)

    gather.start, gather._gather = started, arriving  # type: ignore[method-assign]
    return held


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Fail unless two runs have bit-identical losses, weights and moments on every rank."""
    pairs = zip([one["weights"], *one["moments"]], [other["weights"], *other["moments"]], strict=True)
    assert on_all(one["means"] == other["means"] and all(torch.equal(*pair) for pair in pairs))


def require_current_fp8_weights(mesh: Mesh, strategy: ReductionStrategy) -> None:
    """Fail unless, after some steps, the FP8 copies are casts of the gathered weights."""
    step = training_step(config(strategy, 1, precision="fp8"), mesh)
    batches, _ = global_batches(mesh, 1)
    for micro_batches in batches[:2]:
        step(micro_batches)
    step.gather_weights()
    assert step.fp8 is not None
    assert not step.gathers_in_forward, "the next forward pass has nothing left to gather"
    for dense in step.fp8.denses:
        expected = cast_fp8(dense.weight.detach(), dense.weight_site.scale, torch.zeros(()), torch.float8_e4m3fn)
        assert torch.equal(dense.weight_NK.float(), expected.float())
    assert step.reduction is not None
    step.reduction.close()


def compare_orders(joined: Mesh, micro_batches: str, *strategies: ReductionStrategy) -> None:
    """Train with each strategy in every order, on simulated nodes of two ranks, and compare the results."""
    mesh, accumulation = regrouped(joined, "cyclic", 2), int(micro_batches)
    with recordable_attention():
        # In this run and in the flat and sharded runs below, products add weight gradients themselves, as on a GPU. In
        # the other runs, the word table's gradient is added up in another order, so they differ by rounding.
        weight_gradients.accumulates_products = lambda *_: True
        whole = train(mesh, "flat", "one message", accumulation)
        for strategy in strategies:
            weight_gradients.accumulates_products = lambda *_, chosen=strategy: chosen in ("flat", "sharded")
            compare_with(whole, mesh, strategy, accumulation)


def compare_with(whole: dict[str, Any], mesh: Mesh, strategy: ReductionStrategy, accumulation: int) -> None:
    after, last, captured = (train(mesh, strategy, each, accumulation) for each in ("after", "overlapped", "captured"))
    require_same(after, last)
    require_same(after, captured)
    # By the end of backward, all buckets have started if reduction overlaps with it, and none otherwise.
    buckets = after["buckets"]
    assert buckets > 5
    assert (after["early"], last["early"], set(captured["early"])) == ([0] * STEPS, [buckets] * STEPS, {buckets})
    # Each of two sizes has one graph for a step's last micro-batch and, with accumulation, one for the first. The
    # update has a graph too. One micro-batch has a third size, which has no graph.
    assert captured["graphs"] == 2 * accumulation + 1
    assert captured["replays"] == (STEPS if accumulation == 1 else 2 * STEPS - 1) + STEPS
    order = "overlapped"
    if strategy.startswith("sharded"):
        order = "held"
        held = train(mesh, strategy, order, accumulation)
        require_same(after, held)
        # In the warm-up step and all steps, the buckets of all parts but the embeddings arrived while an earlier part
        # of the model was computed.
        assert (STEPS + 1) * buckets / 2 <= held["held"] < (STEPS + 1) * buckets
        assert held["phases"] == ["forward_backward"]
        require_current_fp8_weights(mesh, strategy)
    # Test each recomputation mode once and on few ranks, because its imports take longer than the training.
    if accumulation == 2:
        mode = "full" if strategy == "flat" else "selective"
        require_same(after, train(mesh, strategy, order, accumulation, mode))
    # On two ranks, even a single all-reduce is bit-identical, because a sum of two numbers has only one order.
    if mesh.world_size == 2 and strategy == "flat":
        require_same(whole, after)
    assert (whole["weights"] - after["weights"]).norm() < 1e-6 * whole["weights"].norm()
    losses, expected = ([means["masked_lm_loss"] for means in run["means"]] for run in (captured, whole))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] != losses[-1]


@pytest.mark.parametrize(
    ("ranks", "accumulation", "strategies"),
    [(2, 2, ("flat", "sharded")), (4, 1, ("hierarchical", "sharded", "sharded_world"))],
)
def test_every_order_of_the_step_gives_the_same_weights(
    tmp_path: Path, ranks: int, accumulation: int, strategies: Sequence[str]
) -> None:
    """Two ranks are on one simulated node, four ranks on two nodes. Micro-batches have several shapes."""
    run_on_ranks(tmp_path, ranks, compare_orders, accumulation, *strategies)
