"""Fixtures for runs of ``python -m dataloading wikipedia`` on small replacements for MLCommons' downloads."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataloading import jobs
from dataloading.preparation import wikipedia
from tests.dataloading.preparation.stand_in import StandIn, arguments, child, results, write_stand_in


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """Downloads without a checkpoint, whose conversion takes most of the command's time."""
    return write_stand_in(tmp_path_factory.mktemp("stand-in"), checkpoints=False)


@pytest.fixture
def own(stand_in: StandIn, tmp_path: Path) -> StandIn:
    """Copy of the downloads for a test that damages files."""
    files, text = (shutil.copytree(each, tmp_path / each.name) for each in (stand_in.files, stand_in.text))
    return StandIn(files, text, stand_in.checksums)


@pytest.fixture(scope="session")
def whole(stand_in: StandIn, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Results of a run without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert child(*arguments(stand_in, out)) == 1  # status 1, because no checkpoint is given
    return results(out)


@pytest.fixture
def same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock stand still, and make few evaluation samples: all 10,000 take most of the command's time."""
    monkeypatch.setattr(wikipedia, "EVALUATION_SAMPLES", 300)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7_000_000))
