"""Checks before a run. Both the dry run and the run itself find problems before the run writes a log."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bert.guards.preflight import check
from bert.model import BertForPreTraining
from bert.train import parse
from tests.conftest import SmallRun, write_small_dataset


def refusal(small_run: SmallRun, results: Path, **changes: object) -> str:
    """Return the error of a dry run with these settings, which must leave no files behind."""
    before = sorted(results.rglob("*")) if results.is_dir() else None
    with pytest.raises(ValueError, match=r".") as caught:
        check(parse([*small_run.arguments(results, **changes), "--dry-run"]), 1)
    assert (sorted(results.rglob("*")) if results.is_dir() else None) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_places_that_cannot_be_written(small_run: SmallRun, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, why in (
        (file, f"({file}: Not a directory)"),
        (Path("/proc/here"), "(/proc: No such file or directory)"),
    ):
        said = refusal(small_run, place)
        assert said.endswith(f"cannot be written {why}: set log.results to another place")
        said = refusal(small_run, tmp_path / "r", checkpoint__folder=place)
        assert said == f"{place} cannot be written {why}: set checkpoint.folder to another place"
        said = refusal(small_run, tmp_path / "r", save_checkpoint=place / "weights.safetensors")
        assert said == f"{place} cannot be written {why}: set save_checkpoint to another place"
    assert "is a folder: set save_checkpoint to a file" in refusal(small_run, tmp_path / "r", save_checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"resume": "nowhere"}, "no whole checkpoint"),
        ({"data__train": "nowhere"}, "nowhere"),
        ({"model__vocab_size": 300}, "model.vocab_size is 300"),
        ({"model__max_position_embeddings": 16}, "model.max_position_embeddings is 16"),
        (
            {"data__train": "no/train", "data__vocab": "no/vocab.txt", "data__initial_checkpoint": "no.safetensors"},
            "missing: data.train no/train, data.vocab no/vocab.txt, data.initial_checkpoint no.safetensors",
        ),
        ({"training__max_samples": 160, "evaluation__interval_samples": 161}, "training.max_samples 160 ends"),
        ({"training__max_steps": 4}, "training.max_steps 4 ends the run before its first evaluation, after 80 samples"),
        (
            {"training__site_steps": 4, "evaluation__interval_samples": 160},
            "training.site_steps is 4, which does not divide the 10 steps between evaluations: set it to 2, or "
            "evaluation.interval_samples 160 to a multiple of 64",
        ),
        ({"training__site_steps": 3, "evaluation__interval_samples": 112}, "divide the 7 steps .*: set it to 1, or"),
        (
            {"evaluation__target": None, "training__max_samples": 170},
            "evaluation.target is None, but with evaluation.interval_samples 80 no evaluation comes after the last of 176",
        ),
    ],
)
def test_what_would_stop_a_run_is_named(
    small_run: SmallRun, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    assert re.search(said, refusal(small_run, tmp_path / "r", **change))


def test_data_that_do_not_belong_together_or_have_nothing_to_predict(small_run: SmallRun, tmp_path: Path) -> None:
    other = tmp_path / "vocab.txt"
    other.write_text((small_run.folder / "vocab.txt").read_text().replace("word7\n", "other\n"))
    assert "vocabulary" in refusal(small_run, tmp_path / "r", data__vocab=other)
    data = shutil.copytree(small_run.folder / "train", tmp_path / "train")
    shard = sorted(data.glob("part_*"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shard.name in refusal(small_run, tmp_path / "r", data__train=data)
    shard.unlink()
    assert "missing" in refusal(small_run, tmp_path / "r", data__train=data)
    samples, none = small_run.evaluation, np.zeros(0, np.int64)
    unmasked = replace(
        samples, masked_lm_positions=none, masked_lm_ids=none, masked_lm_offsets=0 * samples.masked_lm_offsets
    )
    write_small_dataset(tmp_path / "none", unmasked, small_run.folder / "vocab.txt")
    assert "none: no token is masked" in refusal(small_run, tmp_path / "r", data__evaluation=tmp_path / "none")


def test_an_existing_result_file_is_not_overwritten(small_run: SmallRun, tmp_path: Path) -> None:
    result = tmp_path / "tiny_cpu" / "bert" / "result_3.txt"
    result.parent.mkdir(parents=True)
    result.touch()
    assert "result_3.txt exists already" in refusal(small_run, tmp_path, log__run=3)


def test_a_disk_that_would_be_full_is_found_before(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, results = tmp_path / "disk", tmp_path / "results"
    config = parse(small_run.arguments(results, checkpoint__folder=folder))
    size = 12 * sum(parameter.numel() for parameter in BertForPreTraining(config.model).parameters())
    # The logs need 16 MiB. Two kept checkpoints and a new one need a byte more than is free.
    free = {results.parent: 16 << 20, folder: 3 * size - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    folder.mkdir()
    said = refusal(small_run, results, checkpoint__folder=folder)
    assert said.startswith(f"{folder} needs {3 * size / 1e6:.1f} MB, but {3 * size / 1e6:.1f} MB are free there: ")
    assert "set checkpoint.folder" in said
    check(parse(small_run.arguments(results, checkpoint__folder=folder, checkpoint__keep=1)), 1)
    free[results.parent] -= 1
    assert "set log.results to another place" in refusal(small_run, results)
