"""Train a model on your own text, in one command: ``python -m bert.own_text TEXT... --out FOLDER``.

FOLDER then holds

    data/                  training set, held-out set and vocabulary
    run.toml               settings of the training, which ./run_and_time.sh --config repeats
    results/               logs and report
    trained.safetensors    weights of the best evaluation
    model/                 Hugging Face folder with tokenizer and model card

After an interruption, the same command continues.
"""

import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import tyro

from bert.configuration.recipes import RECIPES
from bert.derived_settings import affordable_samples
from bert.train import parse
from console.commands import run_program
from console.files import read_bounded, sha256_of, write_atomically
from console.program import say
from dataloading.options import OwnText

if TYPE_CHECKING:
    from bert.launch.series import Series
    from bert.launch.supervision import Supervisor

_RECIPE = "own_text_cpu"
_SETTINGS, _TRAINED, _CHECKPOINTS, _LOGS = "run.toml", "trained.safetensors", "checkpoints", f"results/{_RECIPE}/bert"
_DEFAULTS = OwnText()
_TRIAL_STEPS, _TRIAL_MINUTES = 60, 0.15
"""Limits of the trial run that measures the time of a step. The limit that is reached first ends it."""
_LINE_SECONDS = 5.0
"""Approximate time in seconds between two printed lines about training steps."""
_MOST_BYTES = 1 << 24
"""Largest size of own_text.json, which records the command that made the folder."""


def own_text(
    text: tyro.conf.Positional[tuple[Path, ...]],
    out: Path,
    minutes: float = 5.0,
    start: str | None = None,
    own: Annotated[OwnText, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes] = _DEFAULTS,
) -> None:
    """Train a BERT on your own text, and export it as a Hugging Face folder. The same command continues after Ctrl-C.

    Args:
        text: Files of UTF-8 text with an empty line between documents, folders of such files, or patterns
            ("texts/**/*.txt").
        out: Folder to make.
        minutes: Approximate time to train.
        start: Model to start from: tiny_cpu (English, ships with this program), or the folder of a Hugging Face model. By
            default, weights are random.
        own: Settings of the data.
    """
    # Import these only here, because they are slow and a wrong command line must be reported at once.
    from bert.launch.supervision import Stopped, Supervisor

    if not 0 < minutes <= 100_000:
        raise ValueError(f"--minutes is {minutes:g}: expected more than 0 and at most 100,000")
    out = out.absolute()
    if (model := out / "model").exists():
        raise ValueError(
            f"{model} exists, so this training is complete: name another --out, perhaps with --start {model}"
        )
    initial, own = _starting_point(start, own)
    supervisor = Supervisor()
    try:
        _prepare(text, own, initial, minutes, out)
        if not (out / _SETTINGS).exists():
            _choose_length(minutes, initial, own, out, supervisor)
        _train(out, supervisor)
    except Stopped:
        say(f"to continue, run the same command again ({out})")
        raise SystemExit(supervisor.status) from None
    # Import this only after the training, because it imports PyTorch, which is slow.
    from bert.export import export

    export(out / _TRAINED, out / "data", out / _LOGS, model)


def _starting_point(start: str | None, own: OwnText) -> tuple[Path | None, OwnText]:
    """Return the initial weights' path (None: random weights) and ``own``. If it has no vocabulary, it gets the weights'."""
    if start is None:
        return None, own
    if start == "tiny_cpu":
        data = RECIPES["tiny_cpu"]().data
        initial, vocab = data.initial_checkpoint, data.vocab
    else:
        initial = vocab = Path(start).absolute()
        if not initial.is_dir():
            raise ValueError(
                f"--start {start}: expected tiny_cpu, or the folder of a Hugging Face model on this machine"
            )
    return initial, own if own.vocab is not None else replace(own, vocab=vocab)


def _prepare(text: tuple[Path, ...], own: OwnText, initial: Path | None, minutes: float, out: Path) -> None:
    """Make the data sets, unless an earlier call of the same command has made them."""
    from dataloading.__main__ import from_text
    from dataloading.preparation.own_text import text_files

    data, stored = out / "data", out / "own_text.json"
    files = {path.as_posix(): sha256_of(path) for path in text_files(text)}
    request = {"text": files, "start": initial, "minutes": minutes, "data": asdict(own)}
    asked = json.dumps(request, indent=1, default=str).encode()
    if stored.exists() and read_bounded(stored, _MOST_BYTES, "name another --out") != asked:
        raise ValueError(f"{out} was made from other text or with other settings: name another --out")
    if not data.exists():
        if not stored.exists() and out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty, and this command did not make it: name another --out")
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(stored, asked)
        from_text(text, data, own)


def _choose_length(minutes: float, initial: Path | None, own: OwnText, out: Path, supervisor: "Supervisor") -> None:
    """Measure the speed in a short trial, and write the settings of a training that takes about ``minutes``."""
    from dataloading.dataset.folder import open_dataset

    data = out / "data"
    settings = {
        "data.train": data / "train",
        "data.evaluation": data / "evaluation",
        "data.vocab": data / "vocab.txt",
        **({} if initial is None else {"data.initial_checkpoint": initial}),
        "training.seed": own.seed,
    }
    say("==> short trial, to measure the speed")
    seconds = _seconds_per_sample([_RECIPE, *(f"--{name}={value}" for name, value in settings.items())], supervisor)
    samples = affordable_samples(60 * minutes / seconds, len(open_dataset(data / "evaluation")))
    batch = RECIPES[_RECIPE]().training.global_batch_size
    settings |= {
        "training.max_samples": max(1, samples // batch) * batch,
        "log.interval_steps": max(1, round(_LINE_SECONDS / (batch * seconds))),
        "log.results": out / "results",
        "checkpoint.folder": out / _CHECKPOINTS,
        "save_checkpoint": out / _TRAINED,
    }
    # JSON's strings and numbers are also valid TOML.
    values = {name: json.dumps(value, default=str, ensure_ascii=False) for name, value in settings.items()}
    lines = [f'recipe = "{_RECIPE}"', *(f"{name} = {value}" for name, value in values.items())]
    write_atomically(out / _SETTINGS, "".join(f"{line}\n" for line in lines).encode())


def _seconds_per_sample(arguments: list[str], supervisor: "Supervisor") -> float:
    from bert.launch.supervision import Stopped
    from compliance.log.metrics import read_metrics

    with TemporaryDirectory(prefix="mlperf-bert-") as folder:
        limits = f"--training.max-steps={_TRIAL_STEPS}", f"--training.max-minutes={_TRIAL_MINUTES}"
        series = _series([*arguments, *limits, "--log.interval-steps=2", f"--log.results={folder}"])
        series.train_once(Path(folder, "claim"), supervisor, quiet=True)
        found = [record for path in Path(folder).rglob("metrics_*.jsonl") for record in read_metrics(path).steps]
    if supervisor.status:
        raise Stopped
    if len(found) < 2:
        raise ValueError("the short trial failed: see its error above")
    # Leave out the first steps, which are slower. The median ignores short disturbances.
    return statistics.median(record.step_ms for record in found[1:]) / 1000 / series.config.training.global_batch_size


def _series(arguments: list[str]) -> "Series":
    from bert.launch.layout import layout_of
    from bert.launch.series import Nodes, Series

    config = parse(arguments)
    return Series(config, arguments, 1, Nodes(), layout_of(config), clear_caches=False)


def _train(out: Path, supervisor: "Supervisor") -> None:
    """Train to the end, unless an earlier call has done so. Raises ``SystemExit`` if the training or the report fails."""
    from bert.checkpoints.training_state import checkpoint_folders
    from bert.launch.supervision import Stopped
    from compliance.log.reader import read_log

    if any(read_log(path).run.status == "success" for path in (out / _LOGS).glob("result_*.txt")):
        return
    arguments, checkpoints = ["--config", str(out / _SETTINGS)], out / _CHECKPOINTS
    if checkpoints.is_dir() and checkpoint_folders(checkpoints):
        arguments += ["--resume", str(checkpoints)]
    status = _series(arguments).train(supervisor)
    if supervisor.status:
        raise Stopped
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    sys.exit(run_program(own_text, "python -m bert.own_text"))
