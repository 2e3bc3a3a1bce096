"""Runs whose sites take several steps by themselves."""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bert.guards.preflight import check
from bert.parallel.environment import SITE
from bert.train import main, parse
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks, compare_steps, free_port, program, records, train
from tests.programs import Program


def at_sites(sites: Sequence[str], arguments: Sequence[object]) -> Ranks:
    """Start a run with one rank for each name in ``sites``, at that site; "" stands for a rank that states no site."""
    port, ranks = free_port(), []
    for rank, site in enumerate(sites):
        place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(sites), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, SITE: site}
        ranks.append(Program(*program(on_host, [f"h{rank}", *arguments]), **place))
    return Ranks.of(ranks, port)


def on_host(host: str, *arguments: str) -> int:
    """Run ``bert.train`` under a host name that only this process knows."""
    socket.gethostname = lambda: host
    return main(arguments)


def settings(**changes: object) -> dict[str, object]:
    sizes = {"training__site_steps": 4, "training__max_samples": 16 * 20, "evaluation__interval_samples": 16 * 8}
    return {**sizes, **changes}


def run_at(sites: tuple[str, ...], run: SmallRun, results: Path, **changes: object) -> str:
    with at_sites(sites, run.arguments(results, **settings(**changes))) as ranks:
        assert ranks.ends() == [1] * len(sites), ranks.output
        return ranks.output


@pytest.mark.slow
def test_repeated_and_resumed_runs_are_bit_identical(small_run: SmallRun, tmp_path: Path) -> None:
    """A checkpoint in the middle of a period gives all sites equal states, from which a run can resume."""
    sites = ("far", "near", "near", "near")
    keep = {"checkpoint__every_steps": 6, "checkpoint__keep": 9, "model__hidden_dropout": 0.1}
    for name in ("one", "other"):
        output = run_at(sites, small_run, tmp_path / name, checkpoint__folder=tmp_path / name / "kept", **keep)
        assert "sites: far (1 rank), near (3 ranks), each by itself for 4 steps, then int8" in output
    (tmp_path / "start").mkdir()
    shutil.copytree(tmp_path / "one/kept/step_00000006", tmp_path / "start/step_00000006")
    again = {"resume": tmp_path / "start", "checkpoint__folder": tmp_path / "resumed/kept", "training__seed": None}
    run_at(sites, small_run, tmp_path / "resumed", **keep | again)
    steps = {name: records(tmp_path / name, "step") for name in ("one", "other", "resumed")}
    compare_steps(steps["one"], steps["other"], rel=0, abs=0)
    compare_steps(steps["one"][6:], steps["resumed"], rel=0, abs=0)
    for name in ("model", "momentum", "variance", "site_momentum"):
        file = f"kept/step_00000018/{name}.safetensors"
        assert len({(tmp_path / run / file).read_bytes() for run in steps}) == 1, name
        assert any(tensor.any() for tensor in load_file(tmp_path / "one" / file).values()), name
    # A run without sites saves no site momentum, so a later run with sites begins without it.
    again |= keep | {"checkpoint__folder": tmp_path / "alone/kept", "training__site_steps": 1}
    assert len(train(small_run, tmp_path / "alone", 1, **settings(**again))) == 14
    again |= {"resume": tmp_path / "alone/kept", "checkpoint__folder": None, "training__site_steps": 4}
    run_at(sites, small_run, tmp_path / "back", **again)
    assert [record["step"] for record in records(tmp_path / "back", "step")] == [19, 20]


def test_metrics_record_the_bytes_sent_between_sites(small_run: SmallRun, tmp_path: Path) -> None:
    run_at(("a", "b"), small_run, tmp_path)
    steps = records(tmp_path, "step")
    assert [step["step"] for step in steps if step["site_bytes"]] == [4, 8, 12, 16, 20]
    [run] = records(tmp_path, "run")
    parameters = run["parameters"]
    for step in steps[3::4]:
        assert 1.01 * parameters < step["site_bytes"] / 2 < 1.05 * parameters


def test_site_steps_must_divide_evaluation_intervals_and_need_the_open_division(
    small_run: SmallRun, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"site_steps is 3, which does not divide the 8 steps .* set it to 2, .* multiple of 48"
    ):
        check(parse(small_run.arguments(tmp_path, **settings(training__site_steps=3))), 2)
    with pytest.raises(ValueError, match=r"training\.site_steps is set in the closed division"):
        parse(["dgxa100_8x8", "--training.site-steps", "8"])
