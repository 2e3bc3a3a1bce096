"""``python -m bert.evaluate`` measures a checkpoint's accuracy without training and compares it with an expected value."""

from pathlib import Path

import pytest
import torch

from bert import evaluate
from bert.checkpoints.weights import save_weights
from bert.evaluation import Accuracy, Evaluator
from bert.guards import triton
from bert.model import BertForPreTraining
from dataloading.dataset.folder import open_dataset
from dataloading.text.vocabulary import Vocabulary
from tests.bert.small_models import CPU, OF_SMALL_RUN, PLAIN, drawn_model
from tests.conftest import SmallRun
from tests.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def model() -> BertForPreTraining:
    """Return a random model that predicts some tokens correctly by chance, and whose perplexity would differ in bf16."""
    model = drawn_model(OF_SMALL_RUN, 3)
    with torch.no_grad():
        model.embeddings.word.mul_(20)
    return model


@pytest.fixture
def settings(
    small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, model: BertForPreTraining,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:  # fmt: skip
    monkeypatch.setattr(triton, "require_private_cache", None)  # only Triton on a GPU needs it
    path = tmp_path_factory.mktemp("checkpoint") / "weights.safetensors"
    save_weights(model, path)
    return small_run.arguments(tmp_path / "r", data__initial_checkpoint=path, evaluation__batch_size=2)


@pytest.fixture(scope="module")
def accuracy(small_run: SmallRun, model: BertForPreTraining) -> Accuracy:
    """Return the accuracy that ``Evaluator`` computes, to compare with the command's."""
    return Evaluator(open_dataset(small_run.folder / "evaluation"), CPU, 16)(model, PLAIN)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("difference", "tolerance", "status"), [(0, "1e-5", 0), (-0.005, "0.006", 0), (0.02, "0.01", 1), (None, "1", 0)]
)
def test_the_command_prints_the_accuracy_and_fails_if_it_is_outside_the_tolerance(
    settings: list[str],
    tmp_path: Path,
    accuracy: Accuracy,
    capsys: pytest.CaptureFixture[str],
    difference: float | None,
    tolerance: str,
    status: int,
) -> None:
    """The command needs no training data and leaves no files behind. It prints its progress every 10 %."""
    expected = "0" if difference is None else f"{accuracy.value + difference:.5f}"
    options = ["--expect", expected, "--tolerance", tolerance, "--data.train", str(tmp_path / "nowhere")]
    assert evaluate.main([*settings, *options]) == status
    counts = f"{accuracy.correct} of 173 masked tokens of 50 samples, in 7.0 s"
    wanted = f"{float(expected)} within {float(tolerance)}"
    remedy = "check data.initial_checkpoint, and run python -m dataloading verify on data.evaluation"
    assert capsys.readouterr().out.splitlines() == [
        *(f"    7.0 s  {share} % of 50 samples" for share in range(10, 101, 10)),
        f"perplexity {accuracy.perplexity:.1f}",
        f"masked-LM accuracy {accuracy.value:.5f}: {counts}",
        f"expected {wanted}, found {accuracy.value:.5f}: {remedy}" if status else f"as expected: {wanted}",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_number_of_evaluation_samples(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([*settings, "--dry-run", "--expect", "0.5"]) == 0
    assert capsys.readouterr().out == "tiny_cpu: ready, 50 samples would be evaluated\n"
    assert evaluate.main(["--help"]) == 0
    assert "--expect ACCURACY     the expected accuracy" in capsys.readouterr().out


def test_the_setting_no_unknown_tokens_excludes_unknown_tokens(
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
        ("--expect 1.001", "--expect is 1.001: expected a share from 0 to 1"),
        ("--expect 0.3 --tolerance -0.1", "--tolerance is -0.1: expected"),
        ("--data.evaluation nowhere", "nowhere"),
        ("--data.initial-checkpoint None", "data.initial_checkpoint is not set: set it to the file"),
        ("--model.hidden-size 64", "model.hidden_size is 64"),
        ("--evaluation.batchsize 64", "--evaluation.batchsize"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(
    settings: list[str], options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([*settings, *options.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.slow
def test_several_ranks_find_the_same_accuracy(settings: list[str], accuracy: Accuracy) -> None:
    with Ranks([*settings, "--expect", f"{accuracy.value:.5f}", "--tolerance", "1e-5"], 3, "bert.evaluate") as ranks:
        assert ranks.ends() == [0, 0, 0], ranks.output
        assert ranks.output.count("masked-LM accuracy ") == 1
