"""The data loader that is built before a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from bert import setup
from bert.log.mllog import MLLog
from bert.train import parse
from dataloading.batches.loader import NumpyLoader
from dataloading.batches.loader_choice import LoaderChoice
from dataloading.dataset.folder import open_dataset
from tests.bert.small_models import CPU
from tests.conftest import SmallRun


def test_one_rank_of_each_host_warns_if_the_preferred_loader_cannot_start(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse(small_run.arguments(tmp_path))
    train = open_dataset(config.data.train)
    for is_fallback, local_rank, warns in ((True, 0, True), (True, 1, False), (False, 0, False)):
        choice = LoaderChoice(NumpyLoader, "numpy", "DALI cannot start", is_fallback)
        monkeypatch.setattr(setup, "choose_loader", lambda *_, made=choice: made)
        path = tmp_path / f"{local_rank}{is_fallback}.txt"
        with MLLog(path) as log:
            loader = setup.build_loader(config, train, replace(CPU, local_rank=local_rank), 7, [], 0, log)
        loader.close()
        assert capsys.readouterr().err == (f"warning: {choice}\n" if warns else "")
        assert f"# {choice}\n" in path.read_text()
