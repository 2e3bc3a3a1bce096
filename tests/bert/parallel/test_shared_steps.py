"""Steps of several ranks: weights arrive before use, and stages, CUDA graphs and sites do not change the results."""

import threading
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bert.captured_step import CapturedStep
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from dataloading.batches.loader import batch_of
from dataloading.batches.sampler import ShapeBucket
from dataloading.shards.samples import synthetic_samples
from kernels import cast_fp8
from tests.bert.parallel.forked import on_ranks, trains_in_forks
from tests.bert.recording import Recording, recordable_attention
from tests.bert.small_models import assert_same, take_steps, training_step
from tests.distributed.shapes import MODEL, alone, config, global_batches, require_same_training, train

pytestmark = trains_in_forks


def test_a_pipeline_of_two_stages_trains_like_one_rank() -> None:
    """The slow tests in ``tests/distributed/test_shapes.py`` compare many more shapes."""
    shape = "1,2,1,flat,block,2,2,3,fp64"
    [one] = on_ranks(1, lambda mesh: train(mesh, alone(shape)))
    for found in on_ranks(2, lambda mesh: train(mesh, shape)):
        require_same_training(shape, one, found)


def hold_weights_back(step: TrainingStep) -> list[slice]:
    """Deliver each bucket of weights only after the forward pass has begun the part just before the part that needs it.

    If a part waited for a bucket that only a later part needs, the wait would time out. Returns the delayed buckets.
    """
    gather, held = step.gather, list[slice]()
    assert gather is not None
    parts = [step.model.embeddings, *step.model.layers[:-1]]
    ends = [max(step.flat.places[parameter].stop for parameter in part.parameters()) for part in parts]
    began = [threading.Event() for _ in parts]
    for part, event in zip(parts, began, strict=True):
        part.register_forward_pre_hook(lambda *_, event=event: event.set())
    start, arrive = gather.start, gather._gather

    def started() -> None:
        for event in began:
            event.clear()
        start()

    def arriving(bucket: slice) -> None:
        if before := sum(end <= bucket.start for end in ends):  # number of parts whose weights precede the bucket
            assert began[before - 1].wait(20), bucket
            held.append(bucket)
        arrive(bucket)

    gather.start, gather._gather = started, arriving  # type: ignore[method-assign]
    return held


def test_each_part_of_the_model_waits_only_for_its_own_weights() -> None:
    """A part that did not wait would use the last step's weights, so results would differ from those of early gathering."""
    chosen = config("1,1,1,sharded,block,2,1,3,fp32")
    steps = 3

    def weights(mesh: Mesh, *, hold: bool) -> Tensor:
        step = training_step(chosen, mesh)
        held = hold_weights_back(step) if hold else []
        assert step.gathers_in_forward
        step.gathers_in_forward = hold
        phases: set[str] = set()
        step.model.embeddings.register_forward_pre_hook(lambda *_: phases.add(step.stopwatch.tracker.phase))
        for micro_batches in global_batches(mesh, 1, False, steps):
            step(micro_batches)
        if hold:
            assert len(held) >= 3 * steps, "the layers have buckets of their own"
            del vars(step.gather)["_gather"]
        step.gather_weights()
        assert phases == {"forward_backward"}
        return step.flat.weights_P.clone()

    for early, late in on_ranks(2, lambda mesh: [weights(mesh, hold=hold) for hold in (False, True)]):
        assert torch.equal(early, late)


def test_fp8_weights_are_casts_of_the_gathered_weights() -> None:
    chosen = config("1,1,1,sharded,block,2,1,2,fp8")

    def require_casts(mesh: Mesh) -> Tensor:
        step = training_step(chosen, mesh)
        assert step.fp8 is not None
        scale_S = step.fp8.scale_S.clone()
        for micro_batches in global_batches(mesh, 1, False, 2):
            step(micro_batches)
        assert not torch.equal(step.fp8.scale_S, scale_S), "scales follow the largest magnitudes"
        assert not step.gathers_in_forward, "the next forward pass has nothing left to gather"
        for dense in step.fp8.denses:
            expected = cast_fp8(dense.weight.detach(), dense.weight_scaling.scale, torch.zeros(()), torch.float8_e4m3fn)
            assert torch.equal(dense.weight_NK.float(), expected.float())
        return step.flat.weights_P.clone()

    assert torch.equal(*on_ranks(2, require_casts))


def test_captured_and_eager_steps_give_equal_results_on_ranks_with_shards() -> None:
    """A step has separate graphs for its first, middle and last micro-batches, and one for the update."""
    chosen = config("1,1,1,sharded,block,2,3,3,fp32")
    buckets = ShapeBucket(160, 8, 64, 32), ShapeBucket(170, 8, 64, 32)
    samples = synthetic_samples(np.full(64, 20), MODEL.vocab_size)

    def trained(mesh: Mesh, capturer: Recording | None) -> dict[str, Tensor]:
        step = training_step(chosen, mesh, capturer)
        starts = range(32 * mesh.rank, 32 * mesh.rank + 24, 4)
        batches = [batch_of(samples.slice(start, start + 4), None, buckets[start == starts[4]]) for start in starts]
        step.warm_up(batches[:3], 1, buckets[:1])
        if capturer is not None:
            assert isinstance(step, CapturedStep)
            assert (step.uncaptured_batches, capturer.replays) == (0, [])
        found = take_steps(step, (batches[:3], batches[3:]))
        if capturer is not None:
            # Graphs 0 to 3: last, middle and first micro-batch, and update. The fifth micro-batch is too large for a graph.
            assert (capturer.replays, vars(step)["uncaptured_batches"]) == ([2, 1, 0, 3, 2, 0, 3], 1)
        step.gather_weights()
        return found | {"weights": step.flat.weights_P.clone()}

    def compare(mesh: Mesh) -> None:
        with recordable_attention():
            assert_same(trained(mesh, Recording()), trained(mesh, None))

    on_ranks(2, compare)


def test_sites_reach_one_state_after_separate_steps() -> None:
    """Moments become means over the sites. A site that has skipped a step takes over the other site's step count."""
    chosen = config("1,1,1,flat,block,1,1,3,fp32")
    chosen = replace(chosen, training=replace(chosen.training, site_steps=2))

    def train_apart(mesh: Mesh) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        step, first = training_step(chosen, mesh), torch.empty(0)
        for number, micro_batches in enumerate(global_batches(mesh, 1, False, 3), 1):
            step(micro_batches)
            step.meet_sites(number)
            first = first if len(first) else step.flat.weights_P.clone()
        moments = [moment_P.clone() for moment_P in step.optimizer.moments()]
        step.optimizer.steps -= mesh.rank
        state = [tensor_P.clone() for tensor_P in step.settled_state()]
        assert all(map(torch.equal, (step.flat.weights_P, *step.optimizer.moments()), state[:3]))
        assert step.optimizer.steps == 3
        return first, moments, state

    one, other = on_ranks(2, train_apart, ("h0", "h1"), ("a", "b"))
    assert not torch.equal(one[0], other[0])
    assert [torch.equal(*pair) for pair in zip(one[2], other[2], strict=True)] == [True] * 4
    for place in (0, 1):
        torch.testing.assert_close(one[2][1 + place], (one[1][place] + other[1][place]) / 2)
