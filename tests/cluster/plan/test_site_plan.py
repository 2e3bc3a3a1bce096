"""Plans for hosts in several sites: many steps between exchanges if the link is slow, and one step if it is fast."""

from dataclasses import replace
from pathlib import Path

import pytest

from bert.configuration.recipes import RECIPES
from bert.configuration.run_plan import read_plan
from cluster.model.memory import model_shares
from cluster.model.rates import Target
from cluster.model.work import BUCKET_BYTES
from cluster.plan.search import Candidate, Found, search
from cluster.plan.sites import choose_site_steps, rates_in_site
from cluster.view import write_view
from tests.cluster.conftest import Command
from tests.cluster.model.test_predicted_step import TINY, rates
from tests.cluster.test_view import view_of

INSIDE = 1e-9
"""Seconds per byte within a site."""
FAST = {kind: tuple(cost / 1000 for cost in costs) for kind, costs in rates().costs.items()}
BATCH = 32


def target_of(hosts: int, slower: float, ranks: int = 1) -> Target:
    """Return a target whose collectives are as slow as the paths between sites."""
    return Target("CPU", hosts, ranks, {"fp32": rates(hosts, ranks, INSIDE * slower, costs=FAST)}, {}, False)


def chosen(sites: str, slower: float, steps: int = 128, recipe: str = "tiny_cpu") -> tuple[Found, Candidate, str]:
    """Plan for one rank per host, with an evaluation every ``steps`` steps. Each letter of ``sites`` is a host's site."""
    work, target = replace(TINY, interval_samples=BATCH * steps), target_of(len(sites), slower)
    found = search(RECIPES["tiny_cpu"](), work, target)
    view = view_of(sites, INSIDE * slower, INSIDE)
    best, lines = choose_site_steps(RECIPES[recipe](), work, target, found, view)
    return found, best, "\n".join(lines)


PIECES = {"ab": 1, "aabb": 1 / 2, "aaaabbcc": 2 * 1 / 2, "aaabbccc": 2 * 2 / 3, "aaaaaaab": 1}
"""Part of the model that a host of the smallest site sends."""


@pytest.mark.parametrize("sites", PIECES)
def test_site_steps_hide_the_exchange_over_a_slow_link(sites: str) -> None:
    [share] = model_shares(TINY.model)
    for slower in (50, 100, 400):
        found, best, said = chosen(sites, slower)
        seconds = 1.015625 * share.elements * PIECES[sites] * INSIDE * slower
        enough = [each for each in (2, 4, 8, 16, 32, 64, 128) if max(1, each // 2) * best.step.total >= seconds]
        assert best.strategy.site_steps == enough[0]
        assert best.step.total < found.best[0].step.total / 1.1
        assert best.run.total < found.best[0].run.total
        assert f"training.site_steps {enough[0]}" in said


def test_closed_runs_fast_links_and_evaluation_intervals_limit_site_steps() -> None:
    found, best, said = chosen("aaaabbbb", 1.01)
    assert (best, best.strategy.site_steps) == (found.best[0], 1)
    step = f"{1000 * best.step.total:.2f} ms"
    assert said.startswith(f"2 sites: a step over all ranks takes {step}, a step within a site ")
    assert said.endswith("training.site_steps stays 1")
    found, best, said = chosen("aabb", 100, recipe="h100_1x8")
    assert best == found.best[0]
    assert said.endswith("training.site_steps stays 1, because larger values need the open division")
    _, best, said = chosen("aabb", 400, steps=4 * 25)
    assert best.strategy.site_steps == 4
    assert f"only if evaluation.interval_samples is a multiple of 32 x {BATCH}" in said
    assert "longer than 2 steps" in said
    found, best, said = chosen("aabb", 400, steps=25)
    assert best == found.best[0]
    assert said.endswith("training.site_steps stays 1")


def test_a_site_of_one_host_uses_the_collectives_measured_within_a_host() -> None:
    alone, apart = rates(1, 4), rates(3, 4)
    slow = {key: curve for key, curve in rates(3, 4, 1e-6).collectives.items() if key[1] != "node"}
    found = rates_in_site(replace(apart, collectives={**apart.collectives, **slow}), view_of("abc", ranks=4))
    assert (found.nodes, found.ranks) == (1, 4)
    for size in (1e4, 1e8):
        assert found.collective("all-reduce", "world", size) == alone.collective("all-reduce", "node", size)


def test_a_site_of_several_hosts_uses_rings_over_its_own_paths() -> None:
    """A ring of two hosts sends 1/2 of a vector and waits once for the latency of 10 us; a ring of three, 2/3 and twice."""
    measured = rates(6, 1, 1e-6)
    for sites, share, waits in (("aabb", 1 / 2, 1), ("aaabbb", 2 / 3, 2)):
        found = rates_in_site(measured, view_of(sites, between=1e-6, inside=1e-8))
        ring = BUCKET_BYTES * 1e-8 * share + waits * 1e-5
        assert found.collective("all-gather", "world", BUCKET_BYTES)[0] == pytest.approx(ring)
        assert found.nodes == len(sites) / 2
    # Each host has two ranks with a card each, so two rings run along rails at once. A ring of four sends 3/4 of a vector.
    found = rates_in_site(rates(4, 2, 1e-6), view_of("aabb", between=1e-6, inside=1e-8, ranks=2))
    for scope, share in (("world", 3 / 4 / 2), ("rail", 1 / 2)):
        ring = BUCKET_BYTES * 1e-8 * share + 1e-5
        assert found.collectives["all-gather", scope].seconds(BUCKET_BYTES) == pytest.approx(ring)  # type: ignore[index]


def test_plans_get_no_site_steps_if_model_copies_span_sites() -> None:
    work, target = replace(TINY, interval_samples=BATCH * 128), target_of(4, 400)
    found = search(RECIPES["tiny_cpu"](), work, target)
    spread = replace(found, ranked=tuple(each for each in found.ranked if each.strategy.pipeline == 2))
    best, lines = choose_site_steps(RECIPES["tiny_cpu"](), work, target, spread, view_of("aaab"))
    assert (best, lines[0].endswith("every plan spreads model copies over sites")) == (found.best[0], True)


def test_the_plan_file_contains_site_steps(tmp_path: Path, cluster: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(TINY, interval_samples=BATCH * 128)
    monkeypatch.setattr("cluster.model.work.work_to_plan", lambda _: work)
    monkeypatch.setattr("cluster.model.rates.rates_of_view", lambda _: target_of(4, 400).rates["fp32"])
    for sites, steps in (("aabb", "32"), ("aaaa", "1")):
        write_view(replace(view_of(sites, 400 * INSIDE, INSIDE), sites_stated=False), tmp_path / "c.json")
        done = cluster("plan", "tiny_cpu", "--cluster", tmp_path / "c.json", "--out", tmp_path / "plan.json")
        plan = read_plan(tmp_path / "plan.json")
        assert (done.returncode, plan.settings["training.site_steps"]) == (0, steps)
        assert ("set MLPERF_BERT_SITE on each host to its site" in done.stdout) == (sites == "aabb")
