"""``python -m bert.evaluate``: what a checkpoint knows before any training, and whether that is what was expected."""

import re
from pathlib import Path

import pytest
import torch

from bert.checkpoints.weights import load_weights, save_weights
from bert.configuration.config import ModelConfig
from bert.evaluator import Evaluator
from bert.model import BertForPreTraining, initialize_
from bert.parallel.mesh import Mesh
from dataloading.dataset.folder import open_dataset
from tests.conftest import MAX_SEQ_LENGTH, VOCAB_SIZE, SmallRun
from tests.distributed.ranks import Ranks, torchrun
from tests.programs import PATIENCE_S, Program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that predicts some tokens right by chance."""
    model = BertForPreTraining(ModelConfig(2, 32, 2, 64, VOCAB_SIZE, MAX_SEQ_LENGTH))
    initialize_(model, torch.Generator().manual_seed(3))
    path = tmp_path_factory.mktemp("checkpoint") / "weights.safetensors"
    save_weights(model, path)
    return path


@pytest.fixture(scope="module")
def accuracy(small_run: SmallRun, checkpoint: Path) -> float:
    """By the evaluator alone."""
    model = BertForPreTraining(ModelConfig(2, 32, 2, 64, VOCAB_SIZE, MAX_SEQ_LENGTH))
    load_weights(model, checkpoint)
    dataset = open_dataset(small_run.folder / "evaluation")
    plain = torch.autocast("cpu", enabled=False)
    return Evaluator(dataset, Mesh(0, 1, 0, torch.device("cpu")), 16)(model, plain).value


def arguments(small_run: SmallRun, results: Path, checkpoint: Path | None, *more: object) -> list[str]:
    settings = small_run.arguments(results, data__initial_checkpoint=checkpoint, evaluation__batch_size=8)
    return [*settings, *map(str, more)]


def evaluated(small_run: SmallRun, results: Path, checkpoint: Path | None, *more: object) -> tuple[int, str]:
    """The exit status and what it said; it leaves nothing behind."""
    process = Program("bert.evaluate", arguments(small_run, results, checkpoint, *more))
    status = process.wait(PATIENCE_S)
    assert not results.exists()
    assert "Traceback" not in process.output
    return status, process.output


def test_the_accuracy_of_a_checkpoint(small_run: SmallRun, tmp_path: Path, checkpoint: Path, accuracy: float) -> None:
    assert 0 < accuracy < 1
    status, said = evaluated(small_run, tmp_path / "r", checkpoint)
    assert status == 0
    assert f"masked-LM accuracy {accuracy:.5f}: " in said
    shares = [int(share) for share in re.findall(r"(\d+) % of 50 samples", said)]
    assert shares == sorted(set(shares))
    assert shares[-1] == 100


def test_training_data_need_not_be_there(small_run: SmallRun, tmp_path: Path, checkpoint: Path) -> None:
    assert evaluated(small_run, tmp_path / "r", checkpoint, "--data.train", tmp_path / "nowhere")[0] == 0


@pytest.mark.parametrize(("difference", "tolerance", "status"), [(0, 1e-5, 0), (0.02, 0.03, 0), (0.02, 0.01, 1)])
def test_the_exit_status_says_whether_it_is_as_expected(
    small_run: SmallRun,
    tmp_path: Path,
    checkpoint: Path,
    accuracy: float,
    difference: float,
    tolerance: float,
    status: int,
) -> None:
    expected = f"{accuracy + difference:.5f}"
    more = ("--expect", expected, "--tolerance", tolerance)
    found, said = evaluated(small_run, tmp_path / "r", checkpoint, *more)
    assert found == status
    assert said.splitlines()[-1].startswith(
        f"as expected: {expected}" if status == 0 else f"expected {expected} within {tolerance}, found "
    )


def test_what_is_wrong_is_named(small_run: SmallRun, tmp_path: Path, checkpoint: Path) -> None:
    for more, words in (
        (("--expect", "34.085"), "--expect is 34.085: expected a share from 0 to 1"),
        (("--expect", "nan"), "--expect is nan: expected a share from 0 to 1"),
        (("--expect", "0.3", "--tolerance", "-1"), "--tolerance is -1.0: expected"),
        (("--data.evaluation", tmp_path / "nowhere"), "nowhere"),
        (("--data.initial-checkpoint", tmp_path / "none"), "none"),
        (("--data.initial-checkpoint", "None"), "data.initial_checkpoint is not set: name the file"),
        (("--model.hidden-size", "64"), "the model section asks for"),
        (("--evaluation.batchsize", "64"), "there is no setting --evaluation.batchsize"),
    ):
        status, said = evaluated(small_run, tmp_path / "r", checkpoint, *more)
        assert (status, said.count("\n")) == (2, 1), said
        assert said.startswith("error: ")
        assert words in said


def test_help_names_the_options() -> None:
    process = Program("bert.evaluate", ["--help"])
    assert process.wait(PATIENCE_S) == 0
    assert "--expect" in process.output
    process = Program("bert.evaluate", ["tiny_cpu", "--help"])
    assert process.wait(PATIENCE_S) == 0
    assert "usage: python -m bert.evaluate tiny_cpu" in process.output


def test_ranks_share_the_work(small_run: SmallRun, tmp_path: Path, checkpoint: Path, accuracy: float) -> None:
    wanted = arguments(small_run, tmp_path / "r", checkpoint, "--expect", f"{accuracy:.5f}", "--tolerance", "1e-5")
    with Ranks(wanted, 3, "bert.evaluate") as ranks:
        assert ranks.ends() == [0, 0, 0], ranks.output
        assert ranks.output.count("masked-LM accuracy ") == 1
    other = arguments(small_run, tmp_path / "r", checkpoint, "--expect", 0.99)
    with Ranks(other, 2, "bert.evaluate") as ranks:
        assert ranks.ends() == [1, 1]


def test_under_torchrun_a_difference_is_seen(small_run: SmallRun, tmp_path: Path, checkpoint: Path) -> None:
    process = torchrun(2, arguments(small_run, tmp_path / "r", checkpoint, "--expect", "0.99"), module="bert.evaluate")
    said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 1, said
    assert "expected 0.99 within 0.001, found " in said
