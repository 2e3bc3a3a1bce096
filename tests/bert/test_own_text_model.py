"""The command that trains a model on a user's own text: interruption, invalid arguments, and its report on the model.

The recipe derives settings from the data, and explicit settings override them.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bert.checkpoints.sources import open_source
from bert.checkpoints.trained import stated_evaluation
from bert.checkpoints.weights import save_weights, text_metadata
from bert.configuration.recipes import RECIPES
from bert.convert import convert
from bert.derived_settings import affordable_samples
from bert.export import examples_of, outlook
from bert.fill_mask import GapFiller, fill_mask
from bert.guards.preflight import check
from bert.launch.supervision import Supervisor
from bert.model import BertForPreTraining
from bert.own_text import _starting_point, own_text
from bert.run import run as train
from bert.train import parse
from compliance.log.metrics import EvaluationRecord
from console.commands import run_program
from dataloading.dataset.folder import Dataset, open_dataset
from dataloading.options import Normalization, OwnText
from dataloading.preparation.own_text import write_own_text
from dataloading.shards.samples import SampleBuilder
from dataloading.text.tokenization import Tokenizer
from dataloading.text.vocabulary import Vocabulary
from tests.bert.checkpoints.test_initial import save_pretrained
from tests.bert.conftest import Clock
from tests.bert.small_models import drawn_model
from tests.conftest import write_small_dataset

WORDS = ["river", "water", "stone", "bridge", "forest", "garden", "mountain", "valley", "island", "meadow"]


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


@pytest.fixture
def in_process(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., object]]:
    """Train in this process and start no other program.

    For each run, append a function to the returned list. It is called before each update.
    """
    acts: list[Callable[..., object]] = []
    cached = cache(lambda *words: parse(words))  # parse once, because parsing takes longer than these runs

    def run(supervisor: Supervisor, command: list[str], variables: dict[str, str] | None = None, **_: object) -> int:
        words = command[3:]
        if command[2] != "bert.train" or words[-1] == "--dry-run":
            return 0
        clock.begin(acts.pop(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", variables or os.environ)
            status = train(cached(*words), words)
        gc.collect()  # otherwise data of this run are still open when the next one begins
        for each in Path("/proc/self/fd").iterdir():
            if each.exists() and each.readlink() == tmp_path / "out/checkpoints/.lock":  # unlock as an exit would
                os.close(int(each.name))
        supervisor.status = status if status > 128 else 0
        return status

    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr("bert.own_text.parse", lambda words: cached(*words))
    monkeypatch.setattr("bert.run.drop_lost_output", lambda _: None)
    monkeypatch.setattr("bert.launch.series.await_orphans", lambda: None)  # it would wait for other tests' processes
    for name in ("NPROC", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    return acts


@pytest.mark.slow
def test_one_command_makes_a_model_and_continues_after_an_interruption(
    text: Path, tmp_path: Path, in_process: list[Callable[..., object]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of 32 samples takes 3 s. An evaluation and 145 samples fit into 15 s, so the run has 4 whole steps."""
    out, own = tmp_path / "out", OwnText(vocab_size=100, max_seq_length=48, dupe_factor=2)
    lines, texts = text.read_text().splitlines(keepends=True), tuple(tmp_path / f"text{n}.txt" for n in range(5))
    for number, path in enumerate(texts):
        path.write_text("".join(lines[60 * number : 60 * number + 60]))
    in_process += [
        lambda *_: None,
        lambda _, number: number == 1 and signal.raise_signal(signal.SIGINT),
        lambda *_: None,
    ]
    with pytest.raises(SystemExit) as ended:
        own_text(texts, out, 0.25, None, own)
    assert ended.value.code == 130
    data = out / "data"
    places = {"data.train": data / "train", "data.evaluation": data / "evaluation", "data.vocab": data / "vocab.txt"}
    results = {"log.results": out / "results", "checkpoint.folder": out / "checkpoints"}
    names = {"recipe": "own_text_cpu"} | places | results | {"save_checkpoint": out / "trained.safetensors"}
    numbers = {"training.seed": own.seed, "training.max_samples": 128, "log.interval_steps": 2}
    lines = [f'{name} = "{value}"' for name, value in names.items()] + [f"{name} = {n}" for name, n in numbers.items()]
    assert sorted((out / "run.toml").read_text().splitlines()) == sorted(lines)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"to continue, run the same command again ({out})"
    assert "end: aborted after 128 samples and 12.0 s" in said  # the trial ends at its first report after 9 s
    assert said.count("==> short trial, to measure the speed") == 1
    with pytest.raises(ValueError, match=r"out was made from other text or with other settings: name another --out"):
        own_text(texts, out, 0.26, None, own)
    own_text(texts, out, 0.25, None, own)
    said = capsys.readouterr().out.splitlines()
    assert "2 steps of 32 sequences, 1 evaluation of 77: about 0:07" in said
    assert not in_process
    found = stated_evaluation(out / "trained.safetensors")
    assert found is not None
    assert found.samples == 128
    share = f"{found.masked_lm_accuracy:.1%} (± {found.error:.1%}) of the masked tokens right"
    assert f"held-out text: {share}, perplexity {found.perplexity:.1f}" in said
    assert said[-1].startswith("The training took each of its 276 samples 0.5 times. It was too short to tell")
    assert [line.count("%") for line in said if "; the text has: " in line] == [3, 3, 3]
    card = (out / "model" / "README.md").read_text()
    assert "A BERT with 2 layers of 128, trained on 128 samples from 5 files.\n" in card
    assert (
        f"| masked tokens filled in correctly | {share.partition(')')[0].replace('(', '')} of {found.count:,} |\n"
        in card
    )
    assert f"| perplexity of masked tokens | {found.perplexity:.1f} |\n" in card
    example = said[said.index(f"held-out text: {share}, perplexity {found.perplexity:.1f}") + 1].strip()
    assert f'print(fill("{example}"))\n' in card
    asked, filler = "the [MASK] lies near the [MASK] .", GapFiller(out / "model", None)
    gaps, whole = filler(asked, 2), filler("[MASK] " + "the " * 45, 1000)
    assert ([len(gap) for gap in whole], sum(share for _, share in whole[0])) == (
        [filler.vocabulary.size],
        pytest.approx(1),
    )
    with pytest.raises(ValueError, match="the text has 49 tokens, but the model has 48 positions"):
        filler("[MASK] " + "the " * 46, 1)
    capsys.readouterr()
    fill_mask(out / "model", asked, top=2)
    words = [", ".join(f"{word} {100 * share:.1f} %" for word, share in gap) for gap in gaps]
    filled = f"the {gaps[0][0][0]} lies near the {gaps[1][0][0]} ."
    assert capsys.readouterr().out.splitlines()[1:] == [f"gap 1: {words[0]}", f"gap 2: {words[1]}", filled]
    for wrong, top, message in ((asked, 0, "--top is 0: expected at least 1"), ("the", 1, "no gap: write")):
        with pytest.raises(ValueError, match=message):
            fill_mask(out / "model", wrong, top=top)
    with pytest.raises(ValueError, match=r"model exists, so this training is complete: name another --out"):
        own_text(texts, out, 0.25, None, own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("text.txt", "--out"),
        ("--out new", "no text is named"),
        ("absent.txt --out new --minutes 0.01", "absent.txt: there is no such file"),
        ("text.txt --out new --minutes 0", "--minutes is 0: expected more than 0 and at most 100,000"),
        ("text.txt --out new --minutes 100001", "--minutes is 100001"),
        ("text.txt --out new --minutes nan", "--minutes is nan"),
        ("text.txt --out new --start bert-base-uncased", "--start bert-base-uncased: expected tiny_cpu, or the folder"),
        ("text.txt --out .", "is not empty, and this command did not make it"),
    ],
)
@pytest.mark.usefixtures("clock")
def test_an_invalid_command_is_refused_and_leaves_no_files(
    text: Path, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(text.parent)
    monkeypatch.setattr(sys, "argv", ["own_text", *words.split()])
    assert run_program(own_text, "python -m bert.own_text") == 2
    assert message in capsys.readouterr().err
    assert list(text.parent.iterdir()) == [text]


def test_starting_from_a_model_selects_its_vocabulary_unless_one_is_set(tmp_path: Path) -> None:
    own, data = OwnText(), RECIPES["tiny_cpu"]().data
    assert _starting_point(None, own) == (None, own)
    assert _starting_point("tiny_cpu", own) == (data.initial_checkpoint, replace(own, vocab=data.vocab))
    assert _starting_point(str(tmp_path), own) == (tmp_path, replace(own, vocab=tmp_path))
    chosen = replace(own, vocab=tmp_path / "mine.txt")
    assert _starting_point("tiny_cpu", chosen) == (data.initial_checkpoint, chosen)


def held_out(folder: Path, texts: list[str]) -> tuple[Dataset, Vocabulary]:
    """Write texts of tokens as samples whose first token is masked."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = dict.fromkeys(token for text in texts for token in text.split() if token not in special)
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*special, *words]))
    vocabulary, builder = Vocabulary.from_file(folder / "vocab.txt"), SampleBuilder()
    for text in texts:
        first, *ids = (vocabulary.ids[token] for token in f"{text} [SEP]".split())
        row = [vocabulary.ids["[CLS]"], vocabulary.ids["[MASK]"], *ids]
        columns = (row, "<u2"), ([0] * len(row), "u1"), ([1], "<u2"), ([first], "<u2")
        builder.add(*(np.array(column, kind).tobytes() for column, kind in columns), next_sentence_label=0)
    write_small_dataset(folder / "data", builder.samples(), folder / "vocab.txt")
    return open_dataset(folder / "data"), vocabulary


LINE = " ".join(letter * 9 for letter in "abcdefg")
"""Seven words that fill a line of 70 characters, with a space after each."""


@pytest.mark.parametrize(
    ("texts", "examples"),
    [
        (["the [UNK] lies near it", "four words are few", "12 34 56 78 90"], []),
        (
            ["the river flow ##s past 1234567 .", "##ing is near two stones"],
            [("the [MASK] flows past 1234567 .", "river"), ("ing is near two [MASK]", "stones")],
        ),
        ([f"{LINE} h", f"{LINE} ##h", LINE], [(f"[MASK] {LINE[10:]}", "a" * 9), (f"[MASK] {LINE[10:-10]}", "a" * 9)]),
        ([f"{word} b c d eight" for word in "efgh"], [(f"{word} b c d [MASK]", "eight") for word in "efg"]),
    ],
)
def test_examples_are_held_out_texts_with_one_word_masked(
    texts: list[str], examples: list[tuple[str, str]], tmp_path: Path
) -> None:
    """An example has a gap for one whole word and fits on a line. At most three different examples are shown."""
    assert list(examples_of(*held_out(tmp_path / "made", texts))) == examples


@pytest.mark.parametrize(
    ("accuracies", "best", "times", "said"),
    [
        ((0.1, 0.2, 0.3, 0.35), 4, 2.0, "Its second half brought 15.0 points: longer training should bring more."),
        ((0.1, 0.3, 0.25, 0.2), 2, 2.0, "It was best after 200: longer training would not help, more text would."),
        ((0.1, 0.3, 0.302, 0.301), 3, 2.0, "Its second half brought no measurable gain: longer tr"),
        ((0.3,), 1, 0.5, "It was too short to tell what longer training would bring."),
        ((), 1, 0.0, "It was too short to tell what longer training would bring."),
    ],
)
def test_the_report_says_whether_longer_training_would_help(
    accuracies: tuple[float, ...], best: int, times: float, said: str
) -> None:
    records = [
        EvaluationRecord(step, 100 * step, masked_lm_accuracy=accuracy, count=10_000)
        for step, accuracy in enumerate(accuracies, 1)
    ]
    samples = 200 if records else 1
    found = outlook(records, (records or [EvaluationRecord(1, 100)])[best - 1], samples)
    assert found.startswith(f"The training took each of its {samples} samples {times:.1f} times. {said}")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    documents = [" ".join(words[place % 10 :] + words[: place % 7]) + f" item {place}." for place in range(60)]
    (folder / "text.txt").write_text("\n\n".join(f"{document}\nThe end of {document}" for document in documents))
    write_own_text((folder / "text.txt",), OwnText(vocab_size=100, max_seq_length=48, dupe_factor=3), folder / "data")
    return folder / "data"


def arguments(own: Path, *more: object) -> list[str]:
    places = {"train": "train", "evaluation": "evaluation", "vocab": "vocab.txt"}
    return ["own_text_cpu", *(f"--data.{name}={own / place}" for name, place in places.items()), *map(str, more)]


@pytest.mark.parametrize(
    ("given", "samples", "interval", "steps", "warmup", "hidden", "rate"),
    [
        ("", 32_000, 1600, 1000, 100, 128, 0.01),
        # All evaluations together take at most about a tenth of the time.
        ("--training.max-samples=960 --model.hidden-size=64", 960, 320, 30, 3, 64, 0.01),
        ("--training.max-samples=960 --evaluation.interval-samples=320", 960, 320, 30, 3, 128, 0.01),
        ("--training.max-samples=960 --model.hidden-size=1024", 960, 320, 30, 3, 1024, 0.000625),
        ("--training.max-steps=17 --optimizer.num-warmup-steps=2", 32_000, 544, 17, 2, 128, 0.01),
    ],
)
def test_settings_are_derived_from_the_data_and_from_given_settings(
    own: Path, given: str, samples: int, interval: int, steps: int, warmup: int, hidden: int, rate: float
) -> None:
    config = parse(arguments(own, *given.split()))
    model, optimizer = config.model, config.optimizer
    assert (model.vocab_size, model.max_position_embeddings, model.hidden_size) == (100, 48, hidden)
    assert (config.training.max_samples, config.evaluation.interval_samples) == (samples, interval)
    assert (optimizer.learning_rate_training_steps, optimizer.num_warmup_steps) == (steps, warmup)
    assert optimizer.base_learning_rate == pytest.approx(rate)


@pytest.mark.slow
def test_with_an_initial_checkpoint_its_model_is_used_and_each_sample_is_seen_once(own: Path, tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "theirs", own / "vocab.txt", rows=128)
    config = parse(arguments(own, f"--data.initial-checkpoint={folder}"))
    model = config.model
    assert (model.hidden_size, model.vocab_size, model.max_position_embeddings) == (32, 100, 48)
    assert (model.layer_norm_eps, model.hidden_dropout) == (1e-7, 0.1)
    assert config.training.max_samples == 32 * -(-len(open_dataset(own / "train")) // 32)
    assert config.optimizer.base_learning_rate == 0.01
    check(parse(arguments(own, f"--data.initial-checkpoint={folder}", f"--log.results={tmp_path}")), 1)
    save_weights(BertForPreTraining(model), tmp_path / "ours.safetensors")
    assert parse(arguments(own, f"--data.initial-checkpoint={tmp_path / 'ours.safetensors'}")).model == model


def test_evaluations_take_at_most_a_tenth_of_the_training_time() -> None:
    """There are at most 20 evaluations. Evaluating a sample takes 0.4 times as long as training on one."""
    assert [affordable_samples(2201, held_out) for held_out in (20, 25, 26, 1000)] == [2041, 2001, 2000, 2000]


def test_without_data_no_settings_are_derived_and_the_check_reports_missing_data(tmp_path: Path) -> None:
    config = parse(arguments(tmp_path))
    with pytest.raises(ValueError, match=r"missing: data\.train .*from-text"):
        check(config, 1)


def save_text_model(path: Path, own: Path, normalization: Normalization) -> Path:
    """Save random weights with the metadata of a model that was trained on text with this normalization."""
    vocabulary = Vocabulary.read(own / "vocab.txt")
    model = drawn_model(parse(arguments(own)).model, seed=0)
    save_weights(model, path, text_metadata(vocabulary.sha256, normalization))
    return path


def test_the_normalization_of_data_and_checkpoint_must_agree(own: Path, tmp_path: Path) -> None:
    for normalization, refused in (
        (Normalization(), ""),
        (Normalization(do_lower_case=False), ".*capital letters kept"),
    ):
        stated = save_text_model(tmp_path / "ours.safetensors", own, normalization)
        with pytest.raises(ValueError, match=f"normalized in different ways {refused}") if refused else nullcontext():
            check(parse(arguments(own, f"--data.initial-checkpoint={stated}", f"--log.results={tmp_path}")), 1)


@pytest.mark.slow
def test_an_exported_tokenizer_splits_text_like_this_programs_tokenizer(own: Path, tmp_path: Path) -> None:
    """The metadata of the weights state the normalization."""
    from transformers import AutoTokenizer

    vocabulary = Vocabulary.read(own / "vocab.txt")
    for number, normalization in enumerate(
        (Normalization(), Normalization(strip_accents=False), Normalization(False, False))
    ):
        stated = save_text_model(tmp_path / f"{number}.safetensors", own, normalization)
        out = tmp_path / f"{number}"
        (tmp_path / "vocab.txt").write_bytes(vocabulary.content)
        convert(stated, "hugging-face", out, vocab=tmp_path / "vocab.txt")
        text = "One T\u00e9n s\u00e9ven, Item 9 \u6771\u4eac"
        ours = Tokenizer(vocabulary, normalization).encode_lines([text])[0]
        assert AutoTokenizer.from_pretrained(out)(text, add_special_tokens=False)["input_ids"] == ours.tolist()
        again = tmp_path / f"{number}-again.safetensors"
        convert(stated, "safetensors", again)
        assert open_source(again).normalization == normalization
