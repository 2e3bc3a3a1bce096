"""The exchange of weights between sites that take several steps by themselves."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from bert.configuration.recipes import tiny_cpu
from bert.configuration.sections import SiteDtype
from bert.execution.phases import SITE_WAIT
from bert.execution.stopwatch import Stopwatch
from bert.parallel.mesh import Mesh, process_group
from bert.parallel.sites import BLOCK, SiteExchange, decoded, encoded
from tests.bert.parallel.forked import on_ranks

SITES = ("one", "two", "two", "three", "three", "three")
SIZE, STEPS, APART, DELAY = 1500, 9, 4, 2
SHARES = (1 / 6, 2 / 6, 3 / 6)


def test_encoded_weight_changes_are_rounded_to_the_chosen_dtype() -> None:
    """In int8, a block's largest magnitude has the code 127 or -127, and other elements get the nearest code."""
    change_K = torch.cat([0.5 * torch.arange(-127, 129), torch.zeros(BLOCK), torch.full((BLOCK,), 3.0)])
    change_K[254:256] = torch.tensor([0.24, -0.26])
    expected_K = change_K.clone()
    expected_K[254:256] = torch.tensor([0.0, -0.5])
    code_C = encoded(change_K, "int8")
    assert code_C.dtype == torch.uint8
    codes = [*range(-127, 127), 0, -1, *[0] * BLOCK, *[127] * BLOCK]
    assert code_C[: 3 * BLOCK].view(torch.int8).tolist() == codes
    assert code_C[3 * BLOCK :].view(torch.float32).tolist() == pytest.approx([0.5, 0.0, 3 / 127])
    torch.testing.assert_close(decoded(code_C, "int8"), expected_K, rtol=1e-6, atol=0)
    wide: dict[SiteDtype, tuple[int, list[float]]] = {"fp32": (4, [1 + 2**-9, -3.0]), "bf16": (2, [1.0, -3.0])}
    for dtype, (size, rounded) in wide.items():
        code_C = encoded(torch.tensor([1 + 2**-9, -3.0]), dtype)
        assert (code_C.dtype, len(code_C)) == (torch.uint8, 2 * size)
        assert (decoded(code_C, dtype).dtype, decoded(code_C, dtype).tolist()) == (torch.float32, rounded)


def start() -> Tensor:
    return torch.linspace(-1, 1, SIZE)


def own_step(site: int, step: int, weights: Tensor) -> Tensor:
    """Return a change of the weights that depends on the weights, as in training."""
    noise = torch.randn(len(weights), generator=torch.Generator().manual_seed(100 * site + step), dtype=torch.float64)
    return 0.01 * (noise - weights.double() + site)


def independent(lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """Compute weights and momentum after ``STEPS`` steps and a last exchange in fp64, with all sites in one process."""
    shared = start().double()
    velocity = torch.zeros_like(shared)
    weights = [shared.clone() for _ in SHARES]
    sent: list[Tensor] = []

    def begin() -> None:
        nonlocal shared
        sent[:] = [each.clone() for each in weights]
        mean = sum(share * (shared - each) for share, each in zip(SHARES, sent, strict=True))
        velocity.mul_(momentum).add_(mean)
        shared = shared - lr * (mean + momentum * velocity)

    def apply() -> None:
        for place, before in enumerate(sent):
            weights[place] += shared - before

    for step in range(1, STEPS + 1):
        for place, each in enumerate(weights):
            each += own_step(place, step, each)
        if step > APART and step % APART == DELAY:
            apply()
        if step % APART == 0:
            begin()
    for act in (apply, begin, apply):
        act()
    return weights[0], velocity


def exchanged(joined: Mesh) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Return weights, momentum and the bytes that all ranks have sent, for each dtype of the exchange."""
    mesh = replace(joined, nodes=tuple((rank,) for rank in range(len(SITES))), sites=SITES)
    site = list(dict.fromkeys(SITES)).index(SITES[mesh.rank])
    config = replace(tiny_cpu().training, site_steps=APART, site_learning_rate=0.8, site_momentum=0.6)
    if mesh.rank == 0:  # sites must meet although rank 0 has one more process group
        process_group([0], alone=True)
    found = {}
    for dtype in get_args(SiteDtype):
        chosen, stopwatch, weights_P = replace(config, site_dtype=dtype), Stopwatch(), start()
        exchange = SiteExchange(weights_P, chosen, mesh, stopwatch)
        assert torch.equal(weights_P, start())
        assert not exchange.settle(), "nothing has changed"
        stopwatch.reset()
        changed = []
        for step in range(1, STEPS + 1):
            weights_P += own_step(site, step, weights_P).float()
            changed.append(exchange.after_step(step))
        assert changed == [step == APART + DELAY for step in range(1, STEPS + 1)]
        assert (exchange.settle(), exchange.settle()) == (True, False)
        assert stopwatch.take()[SITE_WAIT] > 0
        sent, momentum_P = exchange.take_bytes(), exchange.momentum().clone()
        found[dtype] = weights_P.clone(), momentum_P, sent
        # Between exchanges, sites keep only the momentum, and no rounding errors.
        resumed_P = weights_P.clone()
        resumed = SiteExchange(resumed_P, chosen, mesh, stopwatch)
        resumed.restore_(momentum_P)
        for each, own_P in ((exchange, weights_P), (resumed, resumed_P)):
            own_P += own_step(site, 99, own_P).float()
            assert not each.after_step(2 * APART)
            assert (each.settle(), each.settle()) == (True, False), "the exchange was still in progress"
        assert torch.equal(resumed_P, weights_P)
        # Reduce-scatter and all-gather of 3 x 512 fp32 elements: each sends them 3 - 1 times over a ring of three sites.
        exchange.take_bytes()
        assert exchange.mean(torch.full((SIZE,), 6.0 * (1 + site))).unique().tolist() == [6 * (1 + 4 + 9) / 6]
        assert (exchange.take_bytes(), exchange.take_bytes()) == (2 * (3 - 1) * 3 * 512 * 4, 0)
    return found


@pytest.mark.slow
def test_sites_of_unequal_size_agree_with_an_independent_computation() -> None:
    ranks = on_ranks(len(SITES), exchanged)
    exact_P, velocity_P = independent(0.8, 0.6)
    bounds = {"fp32": 1e-6, "bf16": 2e-3, "int8": 4e-3}
    for dtype, bound in bounds.items():
        weights_P, momentum_P, sent = ranks[0][dtype]
        assert (weights_P - exact_P).norm() <= bound * exact_P.norm(), dtype
        assert (momentum_P - velocity_P).norm() <= 10 * bound * velocity_P.norm(), dtype
        # In each of three exchanges, each of three pieces has three owners, who send 512 elements to the two others.
        assert sent == 3 * 3 * 3 * 2 * {"fp32": 4 * 512, "bf16": 2 * 512, "int8": 512 + 2 * 4}[dtype]
        for others in ranks[1:]:
            assert all(map(torch.equal, others[dtype][:2], ranks[0][dtype][:2])), dtype
