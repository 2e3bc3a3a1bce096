"""Checks before a run. Both the dry run and the run itself find problems before the run writes a log."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert.checkpoints.weights import save_weights, text_metadata
from bert.configuration.run_plan import RunPlan, settings_of, write_plan
from bert.execution.phases import PHASES
from bert.guards import preflight
from bert.guards.preflight import check
from bert.model import BertForPreTraining
from bert.train import parse
from dataloading.options import Normalization
from tests.bert.checkpoints.tf_bundles.expected import BUNDLES
from tests.bert.small_models import OF_SMALL_RUN, drawn_model
from tests.conftest import SmallRun, write_small_dataset


def refusal(small_run: SmallRun, results: Path, **changes: object) -> str:
    """Return the error of a dry run with these settings, which must leave no files behind."""
    before = sorted(results.rglob("*")) if results.is_dir() else None
    with pytest.raises(ValueError, match=r".") as caught:
        check(parse([*small_run.arguments(results, **changes), "--dry-run"]), 1)
    assert (sorted(results.rglob("*")) if results.is_dir() else None) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_that_cannot_be_written_are_refused(small_run: SmallRun, tmp_path: Path) -> None:
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


FIRST = "ends the run before its first evaluation, after"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"resume": "nowhere"}, "no complete checkpoint in nowhere: set resume to a folder of checkpoints"),
        ({"data__train": "nowhere"}, r"missing: data.train nowhere\. `./run_and_time.sh tiny_cpu` makes its data"),
        ({"model__vocab_size": 300}, "vocab.txt has 200 entries, but model.vocab_size is 300: set data.vocab or model"),
        ({"model__max_position_embeddings": 47}, "sequences of up to 48 .*max_position_embeddings is 47"),
        (
            {"data__train": "no/train", "data__vocab": "no/vocab.txt", "data__initial_checkpoint": "no.safetensors"},
            "missing: data.train no/train, data.vocab no/vocab.txt, data.initial_checkpoint no.safetensors",
        ),
        ({"data__initial_checkpoint": BUNDLES / "tf1"}, "does not say how many attention heads there are"),
        ({"evaluation__interval_samples": 161}, f"training.max_samples 160 {FIRST} 161 samples: raise it, or lower"),
        ({"training__max_steps": 4}, f"training.max_steps 4 {FIRST} 80 samples"),
        (
            {"evaluation__interval_samples": 15},
            "interval_samples is 15, less than training.global_batch_size 16: raise the interval",
        ),
        ({"evaluation__interval_samples": 16}, None),
        (
            {"training__site_steps": 4, "evaluation__interval_samples": 160},
            "training.site_steps is 4, which does not divide the 10 steps between evaluations: set it to 2, or set "
            "evaluation.interval_samples to a multiple of 64",
        ),
        ({"training__site_steps": 3, "evaluation__interval_samples": 112}, "divide the 7 steps .*: set it to 1, or"),
        ({"training__site_steps": 2, "evaluation__interval_samples": 120}, "divide the 7.5 steps .*: set it to 1, or"),
        ({"training__site_steps": 2, "evaluation__interval_samples": 160}, None),
        (
            {"evaluation__target": None, "training__max_samples": 170},
            "evaluation.target is None, but with evaluation.interval_samples 80 no evaluation comes after the last of "
            "176 samples: set evaluation.interval_samples to a divisor of 176",
        ),
        ({"evaluation__target": None}, None),
        (
            {"training__gradient_accumulation_steps": 3},
            "16 does not divide over 1 copies of the model x 3 .* a multiple of 3",
        ),
        (
            {"parallel__pipeline": 2, "training__gradient_accumulation_steps": 2},
            "pipeline is 2, but 1 host of 1 rank do",
        ),
        ({"training__device": "cuda"}, "training.device is cuda, but this machine has no compiler; no headers"),
        ({"training__implementations": "dense_gelu unknown"}, "training.implementations: "),
    ],
)
def test_invalid_settings_and_missing_inputs_are_refused_before_the_run(
    small_run: SmallRun, tmp_path: Path, change: dict[str, object], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases with None in place of a message are valid."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "missing_build_tools", lambda: ["no compiler", "no headers"])
    if said is None:
        check(parse(small_run.arguments(tmp_path / "r", **change)), 1)
    else:
        assert re.search(said, refusal(small_run, tmp_path / "r", **change))


def test_a_plan_for_a_different_number_of_nodes_or_ranks_is_refused(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic run whose number of ranks has changed keeps the plan's settings, but not its predicted times."""
    arguments = small_run.arguments(tmp_path / "r")
    settings, seconds = settings_of(parse(arguments)), dict.fromkeys((*PHASES, "other"), 1.0)
    plan = RunPlan("tiny_cpu", "CPU", 1, 2, settings, "", seconds, 60.0)
    write_plan(plan, tmp_path / "plan.json")
    config = parse([*arguments, "--plan", str(tmp_path / "plan.json")])
    assert check(config, 2).run_plan == plan
    for ranks, on_this_node, found in ((1, 0, "1 rank"), (4, 2, "4 ranks, 2 a node"), (2, 1, "2 ranks, 1 a node")):
        with pytest.raises(ValueError, match=f"is a plan for 1 node of 2 ranks, but the run has {found}: make another"):
            check(config, ranks, on_this_node)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert [check(config, ranks).run_plan for ranks in (1, 2)] == [None, plan]


def test_the_normalizations_of_the_inputs_must_agree(small_run: SmallRun, tmp_path: Path) -> None:
    vocab = Path(shutil.copy(small_run.folder / "vocab.txt", tmp_path))
    start, stated = tmp_path / "start.safetensors", Normalization(False, False)
    save_weights(drawn_model(OF_SMALL_RUN, 0), start, text_metadata(None, stated))
    places: dict[str, object] = {"data__vocab": vocab, "data__initial_checkpoint": start}
    for lower in (False, True):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
        if lower:
            said = refusal(small_run, tmp_path / "r", **places)
            kinds = f"{vocab}: {Normalization()}; {start}: {stated}"
            assert said.startswith(
                f"the text of these inputs was normalized in different ways ({kinds}): make the samples"
            )
        else:
            assert check(parse(small_run.arguments(tmp_path / "r", **places)), 1).normalization == stated


def test_incompatible_or_incomplete_data_are_refused(small_run: SmallRun, tmp_path: Path) -> None:
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


def test_the_number_of_an_existing_result_file_is_refused(small_run: SmallRun, tmp_path: Path) -> None:
    result = tmp_path / "tiny_cpu" / "bert" / "result_3.txt"
    result.parent.mkdir(parents=True)
    result.touch()
    assert "result_3.txt exists already" in refusal(small_run, tmp_path, log__run=3)


def test_a_run_is_refused_if_a_disk_has_too_little_free_space(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, results, weights = tmp_path / "disk", tmp_path / "results", tmp_path / "weights" / "last.safetensors"
    config = parse(small_run.arguments(results))
    size = 4 * sum(parameter.numel() for parameter in BertForPreTraining(config.model).parameters())
    # The logs need 16 MiB, the weights 4 bytes per parameter, and each of three checkpoints 12 bytes per parameter.
    free = {tmp_path: 16 << 20, folder: 9 * size, weights.parent: size}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    folder.mkdir()
    weights.parent.mkdir()
    places: dict[str, object] = {"checkpoint__folder": folder, "save_checkpoint": weights}

    def fits(**more: object) -> None:
        check(parse(small_run.arguments(results, **places, **more)), 1)

    fits()
    for place, setting in {
        folder: "checkpoint.folder",
        weights.parent: "save_checkpoint",
        tmp_path: "log.results",
    }.items():
        free[place] -= 1
        need = f"{(free[place] + 1) / 1e6:.1f} MB"
        said = refusal(small_run, results, **places)
        assert f" needs {need}, but {need} are free there: make room, or set {setting} to another place" in said
        free[place] += 1
    free[folder] = 6 * size
    fits(checkpoint__keep=1)
    for number, needed in enumerate((6, 3, 3, 3), 1):  # existing checkpoints need no further space
        (folder / f"step_{number:08}").mkdir()
        free[folder] = needed * size
        fits(resume=folder)
        free[folder] -= 1
        with pytest.raises(ValueError, match=r"set checkpoint\.folder to another place"):
            fits(resume=folder)
