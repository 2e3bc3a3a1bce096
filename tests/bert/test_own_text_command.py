"""From own text to a model in one command: interrupted and continued, refused, and what it says about the model."""

import re
import signal
import time
from pathlib import Path

import pytest

from bert.checkpoints.trained import stated_evaluation
from bert.checkpoints.training_state import checkpoint_folders
from bert.export import examples_of, outlook
from bert.predict import GapFiller
from compliance.log.records import EvaluationRecord
from dataloading.dataset.folder import open_dataset
from dataloading.options import OwnText
from dataloading.preparation.own_text import write_own_text
from dataloading.text.vocabulary import Vocabulary
from tests.programs import PATIENCE_S, Program

WORDS = ["river", "water", "stone", "bridge", "forest", "garden", "mountain", "valley", "island", "meadow"]
DATA = ["--vocab-size", "100", "--max-seq-length", "48", "--dupe-factor", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    documents = [
        f"the {WORDS[a]} lies near the {WORDS[b]} .\nthe {WORDS[b]} is behind the {WORDS[a]} ."
        for a in range(10)
        for b in range(10)
    ]
    path.write_text("\n\n".join(documents))
    return path


def run(*arguments: object) -> Program:
    return Program("bert.own_text", [str(argument) for argument in arguments], NPROC=1, OMP_NUM_THREADS=1)


@pytest.mark.slow
def test_one_command_makes_a_model_and_continues_after_an_interruption(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = text, "--out", out, "--minutes", "100", *DATA
    first = run(*arguments)
    while "step " not in first.output and first.poll() is None:
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    assert first.wait(PATIENCE_S) == 130, first.output
    assert "to go on: the same command" in first.output
    checkpoint = checkpoint_folders(out / "checkpoints")[0]
    # The rest would take 100 minutes.
    settings, steps = out / "run.toml", int(checkpoint.name.removeprefix("step_"))
    planned = re.search(r"training\.max_samples = (\d+)\n", settings.read_text())
    assert planned
    schedule = f"optimizer.num_warmup_steps = 100\noptimizer.learning_rate_training_steps = {int(planned[1]) // 32}\n"
    shorter = f"training.max_samples = {32 * (steps + 40)}\n{schedule}"
    settings.write_text(settings.read_text().replace(planned[0], shorter))
    other = run(text, "--out", out, "--minutes", "100")
    assert other.wait(PATIENCE_S) == 2, other.output
    assert f"error: {out} was made from other text or with other settings" in other.output
    second = run(*arguments)
    assert second.wait(PATIENCE_S) == 0, second.output
    assert "\n40 steps of 32 sequences, " in second.output
    assert second.output.count("the text has: ") == 3
    found = stated_evaluation(out / "trained.safetensors")
    assert found is not None
    assert 32 * steps < found.samples <= 32 * (steps + 40)
    assert f"{found.masked_lm_accuracy:.1%} (± {found.error:.1%}) of the masked tokens right" in second.output
    assert "pipeline_tag: fill-mask" in (out / "model" / "README.md").read_text()
    (best,) = GapFiller(out / "model", None)("the [MASK] lies near the river .", 3)
    assert len(best) == 3
    third = run(*arguments)
    assert third.wait(PATIENCE_S) == 2
    assert "so this training is complete" in third.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text.txt"], "--out"),
        (["--out", "new"], "no text is named"),
        (["absent.txt", "--out", "new"], "absent.txt: there is no such file"),
        (["text.txt", "--out", "new", "--minutes", "0"], "--minutes is 0"),
        (["text.txt", "--out", "new", "--minutes", "nan"], "--minutes is nan"),
        (["text.txt", "--out", "new", "--start", "bert-base-uncased"], "--start bert-base-uncased: expected tiny_cpu"),
        (["text.txt", "--out", "."], "is not empty and not from this command"),
    ],
)
@pytest.mark.slow
def test_wrong_commands_make_nothing(text: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    places = [str(tmp_path / each) if each in ("text.txt", "new", ".", "absent.txt") else each for each in arguments]
    program = run(*places)
    assert program.wait(PATIENCE_S) == 2, program.output
    assert message in program.output
    assert list(tmp_path.iterdir()) == [text]


def test_examples_are_held_out_text_with_a_gap(text: Path, tmp_path: Path) -> None:
    options = OwnText(vocab_size=100, max_seq_length=48, dupe_factor=2)
    made = write_own_text((text,), options, tmp_path / "data")
    vocabulary = Vocabulary.read(tmp_path / "data" / "vocab.txt")
    examples = list(examples_of(open_dataset(tmp_path / "data" / "evaluation"), vocabulary))
    held_out = [" ".join(document) for document in made.split.evaluation]
    assert len({gap for gap, _ in examples}) == 3
    for gap, word in examples:
        assert word in WORDS
        assert any(gap.replace("[MASK]", word) in document for document in held_out)


def evaluations(*accuracies: float) -> list[EvaluationRecord]:
    return [
        EvaluationRecord(step, 100 * step, masked_lm_accuracy=accuracy, count=10_000)
        for step, accuracy in enumerate(accuracies, 1)
    ]


@pytest.mark.parametrize(
    ("accuracies", "best", "said"),
    [
        ((0.1, 0.2, 0.3, 0.35), 4, "brought 15.0 points"),
        ((0.1, 0.3, 0.25, 0.2), 2, "best after 200: longer training would not help"),
        ((0.1, 0.3, 0.302, 0.301), 3, "no measurable gain"),
        ((0.3,), 1, "too short to tell"),
    ],
)
def test_the_outlook_follows_the_held_out_accuracy(accuracies: tuple[float, ...], best: int, said: str) -> None:
    records = evaluations(*accuracies)
    assert said in outlook(records, records[best - 1], samples=200)
