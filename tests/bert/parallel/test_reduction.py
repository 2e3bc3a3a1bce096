"""Sums of gradients over ranks: rounding errors, the choice of a strategy, buckets and their order."""

import threading
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import ModelConfig, ReduceDtype, ReductionStrategy
from bert.optimizer import FlatParameters
from bert.parallel.mesh import Mesh
from bert.parallel.reduction import gradients
from bert.parallel.reduction.gradients import (
    CommunicationStream,
    Communicators,
    Reduction,
    add_contributions,
    bucket_slices,
    choose,
)
from bert.parallel.reduction.sharded_lamb import segment_spans
from tests.bert.parallel.forked import on_ranks, trains_in_forks
from tests.bert.small_models import drawn_model
from tests.distributed.worker import regrouped

MODEL = ModelConfig(2, 32, 2, 64, 60, 40)
TRAINING = tiny_cpu().training


def flat_parameters(shards: int) -> FlatParameters:
    return FlatParameters.of(drawn_model(MODEL, 1), shards)


def contribution(rank: int, size: int) -> torch.Tensor:
    """Return one rank's gradient, fp32 [size], with magnitudes that differ by factors of up to 2^8."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * torch.exp2(-8 * torch.rand(size, generator=generator))


def error_of(reduction: Reduction, flat: FlatParameters, mesh: Mesh) -> float:
    """Reduce the ranks' contributions, check that all ranks have equal sums, and return their relative error."""
    contributions = [contribution(rank, len(flat.gradients_N)) for rank in range(mesh.world_size)]
    exact = torch.stack(contributions).double().sum(0)
    flat.gradients_N.copy_(contributions[mesh.rank])
    reduction.finish()
    reduction.close()
    if reduction.strategy.startswith("sharded"):
        for bucket in reduction.buckets:
            reduction.gather(flat.gradients_N, bucket)
    everyones = [torch.empty_like(flat.gradients_N) for _ in range(mesh.world_size)]
    dist.all_gather(everyones, flat.gradients_N)
    assert all(torch.equal(everyones[0], other) for other in everyones)
    return float((flat.gradients_N - exact).norm() / exact.norm())


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_contributions_of_4096_ranks_are_added_in_fp32(spread: float) -> None:
    """With spread 0, all terms are 1 and a bf16 sum would stop at 256. With spread 1, terms have both signs."""
    generator = torch.Generator().manual_seed(3)
    contributions_RW = (1 + 3 * spread * torch.randn(4096, 400, generator=generator)).bfloat16()
    whole_W = torch.full((402,), torch.nan)
    add_contributions(contributions_RW, whole_W[1:401])
    exact_W = contributions_RW.double().sum(0)
    assert (whole_W[1:401] - exact_W).norm() < 1e-6 * exact_W.norm()
    assert whole_W[[0, -1]].isnan().all()


@pytest.mark.slow
def test_gradients_in_bf16_are_rounded_a_fixed_number_of_times() -> None:
    """Check sums over four ranks, on nodes of 1, 2 and 4 ranks.

    One rounding gives a relative error of 0.17 % in the norm. A rounding at every hop would give more.
    """
    bounds = {0: (0, 1e-7), 1: (1.5e-3, 1.8e-3), 2: (2.2e-3, 2.5e-3), 3: (2.7e-3, 3.1e-3)}

    def check_sums(joined: Mesh) -> None:
        for local_size in (1, 2, 4):
            mesh = regrouped(joined, "cyclic", local_size)
            groups, flat = Communicators.create(mesh), flat_parameters(mesh.world_size)
            assert (groups.shards, groups.between, groups.everyone) == (4, None, None)
            for strategy, dtype in product(get_args(ReductionStrategy), get_args(ReduceDtype)):
                reduction = Reduction(flat, groups, strategy, dtype, bucket_bytes=50_000)
                roundings = {"flat": 2, "sharded_world": 1}.get(strategy, 2 if local_size in (1, 4) else 3)
                if strategy == "sharded" and local_size == 4:  # the fp32 sums are not sent on
                    roundings = 1
                least, most = bounds[roundings if dtype == "bf16" else 0]
                assert least <= error_of(reduction, flat, mesh) < most, (strategy, dtype, local_size)

    on_ranks(4, check_sums)


@pytest.mark.slow
def test_gradients_are_summed_over_sites_of_unequal_size() -> None:
    sites = ("one", "two", "two", "three", "three", "three")

    def check_sums(joined: Mesh) -> None:
        mesh = replace(joined, nodes=tuple((rank,) for rank in range(6)), sites=sites)
        flat_groups, groups = Communicators.create(mesh, is_flat=True), Communicators.create(mesh)
        assert (flat_groups.between, flat_groups.shards) == (None, 6), "as without sites"
        assert groups.between is not None
        # The largest site has three ranks, so there are three pieces. Buckets must divide by ranks, pieces and sites.
        assert (groups.between.pieces, groups.shards) == (3, 6 * 3 * 3)
        assert list(groups.between.owned) == [[0, 1, 2], [0, 2], [1], [0], [1], [2]][mesh.rank]
        everyone = Communicators.create(mesh.own_site).everyone
        assert (everyone and everyone.size()) == [None, 2, 2, 3, 3, 3][mesh.rank], "a site by itself"
        flat = flat_parameters(groups.shards)
        for dtype, bound in zip(get_args(ReduceDtype), (1e-7, 4e-3), strict=True):
            reduction = Reduction(flat, groups, "hierarchical", dtype, bucket_bytes=50_000)
            assert error_of(reduction, flat, mesh) < bound, dtype
        choice, reason = choose(TRAINING, flat, groups)
        assert (choice in ("flat", "hierarchical"), " ms, hierarchical " in reason) == (True, True), "they differ here"

    on_ranks(6, check_sums)


@pytest.mark.slow
def test_all_ranks_choose_the_strategy_that_is_fastest_on_the_slowest_rank() -> None:
    """Only rank 3's simulated clock is slow. A strategy's best round counts, and no round begins after 3 s."""

    def check_choices(joined: Mesh) -> None:
        all_reduce, clock = dist.all_reduce, [0.0]
        slow: dist.ProcessGroup | None = None
        delays: list[float] = []

        def delayed(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
            if keywords.get("group") is slow and tensor.dtype == torch.float32:
                delay = delays.pop(0)
                clock[0] += delay if joined.rank == 3 else 0.0
            all_reduce(tensor, *arguments, **keywords)

        dist.all_reduce = delayed
        gradients.time = SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]
        mesh = regrouped(joined, "cyclic", 2)
        groups = Communicators.create(mesh)
        flat = flat_parameters(groups.shards)
        for name, fastest, times, best, left in (
            ("data", "hierarchical", [0.4, 0.2, 0.3, 0.3, 9.0], 200, 1),
            ("rail", "flat", [1.5, 1.5, 1.25, 9.0], 1250, 1),
            ("rail", "flat", [1.0, 2.5, 9.0], 1000, 1),
        ):
            slow, delays[:] = getattr(groups, name), times
            flat.gradients_N.fill_(1.0)
            shown = {"flat": 0, "hierarchical": 0} | {"flat" if name == "data" else "hierarchical": best}
            reason = ", ".join(f"{strategy} {ms:.1f} ms" for strategy, ms in shown.items())
            assert choose(TRAINING, flat, groups) == (fastest, reason)
            assert (len(delays), bool(flat.gradients_N.any())) == (left, False)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in flat.places), "no hooks are left"
        slow = None
        for strategy in ("flat", "sharded"):
            assert choose(replace(TRAINING, reduction=strategy), flat, groups) == (strategy, "as set")
        for local_size, why in ((1, "one rank a host"), (4, "one host")):
            assert choose(TRAINING, flat, Communicators.create(regrouped(joined, "block", local_size))) == ("flat", why)
        assert choose(TRAINING, flat, Communicators(None, None, None, 1)) == ("flat", "one rank")

    on_ranks(4, check_choices)


@trains_in_forks
def test_buckets_start_in_order_during_the_last_backward_pass() -> None:
    """A bucket that is complete early waits for earlier buckets. Incomplete buckets start after the backward pass."""

    def check_order(mesh: Mesh) -> None:
        flat = flat_parameters(mesh.world_size)
        reduction = Reduction(flat, Communicators.create(mesh), "flat", bucket_bytes=20_000)
        run, started = reduction.stream.run, list[slice]()
        sums: list[list[float]] = []

        def noted(work: Any) -> Any:
            started.append(work.__defaults__[0])
            return run(work)

        reduction.stream.run = noted
        parameters, count = list(flat.places), len(reduction.buckets)
        assert count > 3
        for last, part, early in (
            (False, parameters, 0),
            (True, parameters, count),
            (True, parameters[1:], count - 1),  # the missing word table is in the last bucket only
            (True, parameters[:-1], 0),
            (True, parameters, count),
        ):
            started.clear()
            with reduction.overlapped(last):
                torch.stack([(1 + mesh.rank) * parameter.sum() for parameter in part]).sum().backward()
            assert len(started) == early
            if last:
                reduction.finish()
                assert started == reduction.buckets, "from the vector's end"
                sums.append(flat.gradients_N[[0, flat.places[parameters[-1]].start]].tolist())
                flat.gradients_N.zero_()
        assert sums == [[6, 6], [0, 3], [3, 0], [3, 3]], (
            "of one rank's 1 and the other's 2, the first ones of two passes"
        )

    on_ranks(2, check_order)


def test_buckets_cover_the_vector_from_its_end_in_equal_and_aligned_pieces() -> None:
    """A bucket has a multiple of 16 elements per shard, and at least 16."""
    for (size, shards, bytes_), stops in {
        (1024, 8, 4): range(1024, 0, -128),
        (192, 2, 4 * 64): (192, 128, 64),
        (192, 2, 4 * 64 - 1): (192, 160, 128, 96, 64, 32),
        (160, 2, 4 * 95): (160, 96, 32),
        (384, 3, 10**9): (384,),
        (112, 1, 4 * 48): (112, 64, 16),
    }.items():
        expected = [slice(start, stop) for stop, start in zip(stops, (*stops[1:], 0), strict=True)]
        assert bucket_slices(size, shards, bytes_) == expected


def test_a_shard_is_divided_into_spans_at_the_ends_of_segments() -> None:
    spans = segment_spans((5, 1, 6), [(8, 10), (3, 7)])
    assert spans == [(2, 0, 2), (0, 2, 4), (1, 4, 5), (2, 5, 6)]
    assert segment_spans((5,), [(6, 8)]) == []  # the shard holds only padding


def test_a_communication_stream_runs_work_in_order_and_raises_its_errors() -> None:
    stream, order, held = CommunicationStream(torch.device("cpu")), [], threading.Event()
    stream.run(lambda: order.append(held.wait(30)))
    done = stream.run(lambda: order.append(2))
    assert order == [], "beside what is computed"
    held.set()
    done()
    assert order == [True, 2]
    failed = stream.run(Mock(side_effect=RuntimeError("a link is gone")))
    for wait in (failed, stream.join):
        with pytest.raises(RuntimeError, match="a link is gone"):
            wait()
    stream.run(lambda: order.append(3))
    stream.join()
    assert order == [True, 2, 3]
