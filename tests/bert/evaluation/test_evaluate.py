"""``python -m bert.evaluate`` measures a checkpoint's accuracy without training and compares it with an expected value."""

import re
from pathlib import Path

import pytest

from bert import evaluate
from bert.checkpoints.weights import save_weights
from bert.evaluation import Evaluator
from dataloading.dataset.folder import open_dataset
from dataloading.text.vocabulary import Vocabulary
from tests.bert.small_models import CPU, OF_SMALL_RUN, PLAIN, drawn_model
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random model, which predicts some tokens correctly by chance."""
    path = tmp_path_factory.mktemp("checkpoint") / "weights.safetensors"
    save_weights(drawn_model(OF_SMALL_RUN, 3), path)
    return path


@pytest.fixture(scope="module")
def accuracy(small_run: SmallRun) -> float:
    """Return the accuracy that ``Evaluator`` computes, to compare with the command's."""
    dataset = open_dataset(small_run.folder / "evaluation")
    return Evaluator(dataset, CPU, 16)(drawn_model(OF_SMALL_RUN, 3), PLAIN).value


@pytest.fixture
def settings(small_run: SmallRun, tmp_path: Path, checkpoint: Path) -> list[str]:
    return small_run.arguments(tmp_path / "r", data__initial_checkpoint=checkpoint, evaluation__batch_size=8)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("difference", "tolerance", "status"), [(0, 1e-5, 0), (-0.005, 0.006, 0), (0.02, 0.01, 1)])
def test_the_accuracy_of_a_checkpoint_and_whether_it_is_as_expected(
    settings: list[str],
    tmp_path: Path,
    accuracy: float,
    capsys: pytest.CaptureFixture[str],
    difference: float,
    tolerance: float,
    status: int,
) -> None:
    """The command needs no training data and leaves no files behind."""
    assert 0 < accuracy < 1
    expected = f"{accuracy + difference:.5f}"
    options = ["--expect", expected, "--tolerance", str(tolerance), "--data.train", str(tmp_path / "nowhere")]
    assert evaluate.main([*settings, *options]) == status
    said = capsys.readouterr().out
    assert re.search(
        rf"^masked-LM accuracy {accuracy:.5f}: \d of 173 masked tokens of 50 samples, in 7.0 s$", said, re.M
    )
    shares = (10, 20, 40, 50, 70, 80, 100)  # after each of seven batches
    assert said.splitlines()[:7] == [f"    7.0 s  {share} % of 50 samples" for share in shares]
    assert said.splitlines()[7].startswith("perplexity 2")
    wanted = f"{float(expected)} within {tolerance}"
    verdict = f"as expected: {wanted}" if status == 0 else f"expected {wanted}, found {accuracy:.5f}: check "
    assert said.splitlines()[-1].startswith(verdict)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_the_samples(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([*settings, "--dry-run"]) == 0
    assert capsys.readouterr().out == "tiny_cpu: ready, 50 samples would be evaluated\n"


def test_unknown_tokens_may_be_left_out(
    settings: list[str], small_run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = small_run.evaluation.masked_lm_ids
    known = int((labels != Vocabulary.from_file(small_run.folder / "vocab.txt").ids["[UNK]"]).sum())
    assert known < len(labels)
    for option, counts in (("", f"{len(labels)} masked tokens"), ("no-", f"{known} masked tokens")):
        assert evaluate.main([*settings, f"--evaluation.{option}unknown-tokens"]) == 0
        said = capsys.readouterr().out
        assert f" of {counts} of 50 samples" in said
        assert ("without [UNK]" in said) == bool(option)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--expect 34.085", "--expect is 34.085: expected a share from 0 to 1"),
        ("--expect 0.3 --tolerance -1", "--tolerance is -1: expected"),
        ("--data.evaluation nowhere", "nowhere"),
        ("--data.initial-checkpoint None", "data.initial_checkpoint is not set: name the file"),
        ("--model.hidden-size 64", "model.hidden_size is 64"),
        ("--evaluation.batchsize 64", "--evaluation.batchsize"),
    ],
)
def test_what_is_wrong_is_named(
    settings: list[str], options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([*settings, *options.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.slow
def test_ranks_share_the_work(settings: list[str], accuracy: float) -> None:
    with Ranks([*settings, "--expect", f"{accuracy:.5f}", "--tolerance", "1e-5"], 3, "bert.evaluate") as ranks:
        assert ranks.ends() == [0, 0, 0], ranks.output
        assert ranks.output.count("masked-LM accuracy ") == 1
