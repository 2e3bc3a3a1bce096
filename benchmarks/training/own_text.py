"""Compare the time to learn from your own text on a CPU: the recipe ``own_text_cpu`` and Hugging Face's Trainer.

    python benchmarks/training/own_text.py [--text PLACE ...] [--repeats N] [--out FILE]

Both train the same architecture from random weights, on the same sentence pairs in batches of 32. Both are evaluated on the
same held-out samples with the same masks, and the times exclude evaluations. The recipe uses its own schedule.
The Trainer uses AdamW, DataCollatorForLanguageModeling, which draws a new mask for each batch, and batches of samples of
similar length. Its learning rate decays linearly. In the first repeat, the Trainer trains once with each learning rate in
--rates, and the best of these trainings counts. The other repeats use the best learning rate.
"""

import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(REPOSITORY := Path(__file__).resolve().parents[2]))

import tyro

from benchmarks.conditions import write_figures
from benchmarks.inputs import write_demo_text
from bert.train import parse
from compliance.log.metrics import read_metrics
from console.processes import run
from dataloading.options import OwnText
from dataloading.preparation.own_text import write_own_text

BATCH = 32
EVALUATIONS = 20
TARGET_SHARE = 0.95
"""The target accuracy is this share of the accuracy at the end of the recipe's first training."""
DEFAULT_RATE = 5e-5
"""The Trainer's default learning rate, which is used without a warm-up."""
PEER_PACKAGES = ("transformers", "accelerate")


@dataclass(frozen=True)
class Point:
    """Result of an evaluation."""

    samples: int
    seconds: float
    """Time that the training has taken so far, without evaluations."""
    accuracy: float


@dataclass(frozen=True)
class Training:
    repeat: int
    rate: float | None
    """The Trainer's learning rate, or None for a training by the recipe."""
    curve: list[Point]

    @property
    def samples_per_s(self) -> float:
        return self.curve[-1].samples / self.curve[-1].seconds

    def seconds_to(self, accuracy: float) -> float:
        """Return the time until the first evaluation with this accuracy, or infinity if there is none."""
        return next((point.seconds for point in self.curve if point.accuracy >= accuracy), math.inf)

    def figures(self, target: float) -> dict[str, object]:
        seconds = self.seconds_to(target)
        derived = {"samples_per_s": self.samples_per_s, "seconds_to_target": seconds if seconds < math.inf else None}
        return {**asdict(self), **derived}


@dataclass(frozen=True)
class Trainings:
    """Trainings on the same data."""

    data: Path
    samples: int
    interval: int
    warmup_steps: int

    @classmethod
    def on(cls, data: Path, samples: int | None) -> "Trainings":
        """Take the recipe's schedule and space the evaluations evenly. ``samples`` replaces its number of samples."""
        given = [] if samples is None else [f"--training.max-samples={samples}"]
        config = parse([*recipe_arguments(data), *given])
        steps = -(-config.training.max_samples // BATCH)
        steps += -steps % EVALUATIONS
        samples, interval = steps * BATCH, steps // EVALUATIONS * BATCH
        return cls(data, samples, interval, config.optimizer.num_warmup_steps)

    def ours(self, repeat: int) -> Training:
        """Train as ``run_and_time.sh`` does, with the number of processes and threads that it chooses."""
        log = self.data.parent / f"ours_{repeat}"
        lengths = [f"--training.max-samples={self.samples}", f"--evaluation.interval-samples={self.interval}"]
        recipe, *settings = recipe_arguments(self.data, *lengths, f"--log.results={log}")
        _run("-m", "bert.launch", recipe, "1", "--", *settings)
        curve, paused = [], 0.0
        for each in read_metrics(next(log.rglob("metrics_*.jsonl"))).evaluations:
            paused += each.eval_s
            curve.append(Point(each.samples, each.time_s - paused, each.masked_lm_accuracy))
        return Training(repeat, None, curve)

    def theirs(self, repeat: int, rate: float | None) -> Training:
        """Train with Hugging Face's Trainer."""
        out = self.data.parent / "theirs.json"
        warmup = 0 if rate == DEFAULT_RATE else self.warmup_steps
        options = {"data": self.data, "out": out, "samples": self.samples, "interval": self.interval}
        options |= {"rate": rate, "warmup-steps": warmup, "seed": repeat}
        program = Path(__file__).with_name("hugging_face_trainer.py")
        _run(str(program), *(f"--{name}={value}" for name, value in options.items()))
        return Training(repeat, rate, [Point(*values) for values in json.loads(out.read_text(encoding="utf-8"))])


def compare(trainings: Trainings, rates: Sequence[float], target_share: float, repeats: int) -> dict[str, object]:
    """Train with both programs in turn. Return the trainings, the ratios of their times and of their rates, and medians."""
    ours = [trainings.ours(0)]
    target = target_share * ours[0].curve[-1].accuracy
    _report(ours[0], target)
    tried = []
    for rate in rates:
        tried.append(trainings.theirs(0, rate))
        _report(tried[-1], target)
    theirs = [best_of(tried, target)]
    for repeat in range(1, repeats):
        ours.append(trainings.ours(repeat))
        _report(ours[-1], target)
        theirs.append(trainings.theirs(repeat, theirs[0].rate))
        _report(theirs[-1], target)
    pairs = list(zip(ours, theirs, strict=True))
    # If the Trainer missed the target, the time of its whole training is a lower bound of its time to the target.
    times = [min(their.seconds_to(target), their.curve[-1].seconds) / our.seconds_to(target) for our, their in pairs]
    ratios = {
        "time_to_target": times,
        "samples_per_s": [our.samples_per_s / their.samples_per_s for our, their in pairs],
    }
    return {
        "target": target,
        "best_rate": theirs[0].rate,
        "is_lower_bound": any(their.seconds_to(target) == math.inf for their in theirs),
        "ratios": ratios,
        "medians": {name: statistics.median(values) for name, values in ratios.items()},
        "ours": [training.figures(target) for training in ours],
        "theirs": [training.figures(target) for training in tried + theirs[1:]],
    }


def main(
    text: tuple[Path, ...] = (),
    rates: tuple[float, ...] = (DEFAULT_RATE, 1e-3, 2e-3, 5e-3),
    samples: int | None = None,
    repeats: int = 3,
    out: Path | None = None,
) -> None:
    """Print the time of each training until the target accuracy, then the ratios.

    Args:
        text: Files or folders of text with an empty line between documents. Default: prose of the standard library.
        rates: Learning rates to try with the Trainer.
        samples: Number of training samples. Default: the recipe's number.
        repeats: Number of times that both programs train.
        out: Write the figures here as JSON.
    """
    if missing := [name for name in PEER_PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"packages are not installed: {', '.join(missing)}. Run pip install {' '.join(missing)}")
    if min(repeats, len(rates)) < 1:
        raise ValueError(f"--repeats is {repeats}, and --rates has {len(rates)} rates; use at least one of each")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_own_text(text or (write_demo_text(Path(folder, "text.txt")),), OwnText(), data)
        trainings = Trainings.on(data, samples)
        print(f"{trainings.samples:,} samples, evaluated every {trainings.interval:,}", flush=True)
        figures = compare(trainings, rates, TARGET_SHARE, repeats)
    print(f"medians of ours against the Trainer: {figures['medians']}")
    if figures["is_lower_bound"]:
        print("the Trainer missed the target: its time is a lower bound")
    if out:
        # If OMP_NUM_THREADS is set, both programs use it instead of the number of threads that they would choose.
        given = {"cores": len(os.sched_getaffinity(0)), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
        write_figures(out, {"samples": trainings.samples, **given, **figures})


def best_of(trainings: list[Training], target: float) -> Training:
    """Return the training that reaches the target first. If there is none, return the most accurate training."""
    return min(trainings, key=lambda training: (training.seconds_to(target), -training.curve[-1].accuracy))


def recipe_arguments(data: Path, *settings: str) -> list[str]:
    """Return the arguments for a training by the recipe on the data in this folder."""
    places = {"train": data / "train", "evaluation": data / "evaluation", "vocab": data / "vocab.txt"}
    return ["own_text_cpu", *(f"--data.{name}={place}" for name, place in places.items()), *settings]


def _report(training: Training, target: float) -> None:
    name = "ours" if training.rate is None else f"Trainer, rate {training.rate:g}"
    seconds, last = training.seconds_to(target), training.curve[-1]
    reached = f"not in {last.seconds:.1f} s" if seconds == math.inf else f"after {seconds:.1f} s"
    print(
        f"{name}: accuracy {target:.4f} {reached}; {training.samples_per_s:.0f} samples/s, "
        f"accuracy {last.accuracy:.4f} after {last.samples:,} samples",
        flush=True,
    )


def _run(*arguments: str) -> None:
    """Run a Python program of this repository. If the program fails, exit with its output."""
    environment = os.environ | {"CLEAR_CACHES": "0"}  # keep the page cache, which other programs also use
    done = run([sys.executable, *arguments], folder=REPOSITORY, environment=environment)
    if done.trouble:
        sys.exit(f"error: {' '.join(arguments[:2])} failed:\n{(done.text + done.errors)[-4000:]}")


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except ValueError as error:
        sys.exit(f"error: {error}")
