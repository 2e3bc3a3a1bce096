"""Training on real text, held against an independent implementation: losses, gradient norms, weights.

    python benchmarks/training/agreement.py [--text FILE ...] [--vocab FILE] [--steps N] [--layers N] [--out FILE]

The program trains as a user runs it, on two ranks over gloo; its numbers are those of its metrics file and of the weights
that it saves. ``benchmarks/training/independent.py`` trains from the same weights on the same global batches: in
float64, which stands for the truth, and twice in fp32, with sums in another order. Without dropout all of them compute the
same. What the independent sides differ by between themselves is what fp32 costs: the floor. Exit status 1 where the program
is further from float64 than the goal and than the floor.

Without --text the input is the standard library's prose, and without --vocab the vocabulary that ships with the built-in
default, filled up to BERT's size: norms are of as many elements as they would be.
"""

import importlib.util
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.conditions import write_figures
from benchmarks.inputs import flags, write_demo_text
from benchmarks.training.independent import Side, Trained, train
from bert.checkpoints.hugging_face import to_hugging_face
from bert.checkpoints.weights import save_weights
from bert.configuration.recipes import ARTIFACTS
from bert.configuration.sections import ModelConfig, OptimizerConfig
from bert.model import BertForPreTraining, initialize_
from compliance.log.records import read_metrics
from dataloading.batches.sampler import BatchPlan
from dataloading.dataset.folder import Dataset, write_dataset
from dataloading.options import PretrainingOptions
from dataloading.preparation.prepare import Job, prepare
from dataloading.shards.samples import Samples

ROOT = Path(__file__).resolve().parents[2]
# Two ranks, so that the reduction and the dealing of batches are part of what is compared.
RANKS, BATCH, LENGTH, SEED = 2, 16, 128, 7
VOCABULARY = 30522
OPTIMIZER = OptimizerConfig(1e-3, learning_rate_training_steps=400, num_warmup_steps=30, start_warmup_step=-1)
PROGRAM, TRUTH = "program", "independent, float64"
SIDES = (
    Side(TRUTH, torch.float64, micro_batches=2),
    Side("independent, fp32", torch.float32),
    Side("independent, fp32, other order", torch.float32, micro_batches=3, reverse=True, attention="eager"),
)
GOALS = {"loss": 3e-6, "weight matrix": 1e-5, "bias or norm": 3e-5, "gradient norm": 1e-5}
"""By kind of number, how far the program may be from float64."""


@dataclass(frozen=True)
class Settings:
    """Settings: what is trained, and on what."""

    text: tuple[Path, ...] = ()
    """Files with one sentence a line and an empty line between documents."""
    vocab: Path | None = None
    """Vocabulary file, one token a line."""
    steps: int = 300
    layers: int = 4
    out: Path | None = None
    """Write the figures here as JSON."""

    def __post_init__(self) -> None:
        if min(self.steps, self.layers) < 1:
            raise ValueError(f"--steps is {self.steps}, --layers {self.layers}: expected at least 1")


@dataclass(frozen=True, order=True)
class Worst:
    """The largest relative difference of a kind of number, and where it is."""

    difference: float
    where: str


Pair = tuple[str, str]
Differences = dict[str, Worst]
"""By kind of number, the kinds of ``GOALS``."""


def main(arguments: Sequence[str]) -> int:
    """Train on all sides, compare, print, and write if asked; returns the exit status."""
    try:
        settings = tyro.cli(Settings, args=arguments, description=__doc__)
        # Missing packages are said before anything is trained.
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("transformers, the independent model, is not installed: pip install transformers")
        with tempfile.TemporaryDirectory() as folder:
            sides = trained_sides(settings, Path(folder))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # All pairs: those without the program make the floor.
    pairs = {(one, other): differences(sides[one], sides[other]) for one, other in itertools.combinations(sides, 2)}
    between = [row for pair, row in pairs.items() if PROGRAM not in pair]
    floor = {kind: max(row[kind].difference for row in between) for kind in GOALS}
    _print(pairs, floor)
    if settings.out:
        write_figures(settings.out, _figures(settings, sides, pairs, floor), ("torch", "numpy", "transformers"))
    found = pairs[PROGRAM, TRUTH]
    # The goal, or the floor where fp32 itself cannot do better.
    return 0 if all(found[kind].difference <= max(goal, floor[kind]) for kind, goal in GOALS.items()) else 1


def trained_sides(settings: Settings, folder: Path) -> dict[str, Trained]:
    """Train each side; return what it leaves, by its name, the program first. Data and program files go to ``folder``."""
    vocab = settings.vocab or _vocabulary_of_full_size(folder / "vocab.txt")
    texts = settings.text or (write_demo_text(folder / "text.txt"),)
    options = PretrainingOptions(max_seq_length=LENGTH, max_predictions_per_seq=20)
    data = prepare(Job(texts, vocab, options), folder / "train")
    write_dataset(folder / "evaluation", data.take(np.arange(BATCH)), shards=1, info=data.info)
    model = BertForPreTraining(
        # Without dropout: every generator draws other masks.
        ModelConfig(settings.layers, 128, 2, 512, data.info.vocab_size, LENGTH, hidden_dropout=0, attention_dropout=0)
    )
    # One initial model for all sides, saved for the program to load.
    initialize_(model, torch.Generator().manual_seed(SEED))
    save_weights(model, folder / "initial.safetensors")
    sides = {PROGRAM: _train_by_the_program(model.config, vocab, settings.steps, folder)}
    for side in SIDES:
        # Batches are made anew for each side: a generator is used up by the first.
        sides[side.name] = train(side, model, _global_batches(data, settings.steps), OPTIMIZER)
    return sides


def differences(one: Trained, other: Trained) -> Differences:
    """The worst of each kind, relative to ``other``: of a step's number, of a matrix by the norm of the difference."""
    # By dimension: matrices are adapted by LAMB, vectors are not.
    distances: dict[bool, list[Worst]] = {True: [], False: []}
    for name, weight in other.weights.items():
        # Softmax takes no notice of a key's bias, whose gradient is rounding alone.
        if not name.endswith("key.bias"):
            distances[weight.ndim > 1].append(Worst(_distance(one.weights[name], weight), name))
    return {
        "loss": max(
            _worst_step("masked-LM, ", one.masked_lm_loss, other.masked_lm_loss),
            _worst_step("next-sentence, ", one.next_sentence_loss, other.next_sentence_loss),
        ),
        "weight matrix": max(distances[True]),
        "bias or norm": max(distances[False]),
        "gradient norm": _worst_step("", one.gradient_norm, other.gradient_norm),
    }


def _worst_step(kind: str, one: list[float], other: list[float]) -> Worst:
    steps = enumerate(zip(one, other, strict=True), 1)
    return max(Worst(abs(found - expected) / abs(expected), f"{kind}step {step}") for step, (found, expected) in steps)


def _distance(one: Tensor, other: Tensor) -> float:
    distance = torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other)
    return distance.nan_to_num(nan=torch.inf).item()  # no NaN is the worst of anything


def _train_by_the_program(model: ModelConfig, vocab: Path, steps: int, folder: Path) -> Trained:
    """``bert.train`` from the initial weights in ``folder``; the target is out of reach."""
    saved = folder / "trained.safetensors"
    settings = {f"model.{name}": value for name, value in asdict(model).items()}
    settings |= {f"optimizer.{name}": value for name, value in asdict(OPTIMIZER).items()}
    settings |= {f"data.{name}": folder / name for name in ("train", "evaluation")}
    settings |= {
        "data.vocab": vocab.resolve(),
        "data.initial-checkpoint": folder / "initial.safetensors",
        "training.global-batch-size": BATCH,
        "training.max-samples": steps * BATCH,
        "training.seed": SEED,
        # The evaluation set is looked at once, at the end; its target is out of reach, so that all steps are taken.
        "evaluation.interval-samples": steps * BATCH,
        "evaluation.target": 0.999,
        "log.results": folder,
        "log.interval-steps": 1,
        "save-checkpoint": saved,
    }
    with socket.socket() as probe:
        # A free port of this moment; torchrun binds it at once.
        probe.bind(("127.0.0.1", 0))
        rendezvous = ["--master-addr=127.0.0.1", f"--master-port={probe.getsockname()[1]}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={RANKS}", "-m", "bert.train", "tiny_cpu", *flags(settings)],
        cwd=ROOT,
        # One thread a rank: two ranks share the cores.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not saved.exists():
        raise RuntimeError(f"the program ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    records = read_metrics(folder / "tiny_cpu" / "bert" / "metrics_0.jsonl").steps
    return Trained(
        masked_lm_loss=[record.masked_lm_loss for record in records],
        next_sentence_loss=[record.next_sentence_loss for record in records],
        gradient_norm=[record.gradient_norm for record in records],
        # Names of Hugging Face, under which the independent sides have their weights.
        weights={name: weight.double() for name, weight in to_hugging_face(load_file(saved)).items()},
    )


def _global_batches(data: Dataset, steps: int) -> Iterator[Samples]:
    """The samples of each step, as the program's ranks take them together."""
    # The same plan as the program's ranks make, put together again.
    plan = BatchPlan(data.lengths, data.masked_counts, BATCH, RANKS, gradient_accumulation_steps=1, seed=SEED)
    return (data.take(plan.global_batch(step)) for step in range(steps))


def _vocabulary_of_full_size(path: Path) -> Path:
    tokens = (ARTIFACTS / "tiny_cpu" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    # Filled up with tokens that do not occur, so that the embedding has BERT's size.
    tokens += [f"[unused{number}]" for number in range(VOCABULARY - len(tokens))]
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def _print(pairs: dict[Pair, Differences], floor: dict[str, float]) -> None:
    table = Table("", *GOALS, title="worst relative difference")
    for pair, row in pairs.items():
        table.add_row("\nfrom ".join(pair), *(f"{worst.difference:.1e}\n{worst.where}" for worst in row.values()))
    Console(width=200).print(table)
    for kind, worst in pairs[PROGRAM, TRUTH].items():
        print(f"{kind}: {worst.difference:.1e}; goal {GOALS[kind]:.0e}, between independent sides {floor[kind]:.1e}")


def _figures(
    settings: Settings, sides: dict[str, Trained], pairs: dict[Pair, Differences], floor: dict[str, float]
) -> dict[str, object]:
    """Return the content of the JSON file."""
    return {
        "steps": settings.steps,
        "layers": settings.layers,
        "global_batch_size": BATCH,
        "ranks": RANKS,
        "optimizer": asdict(OPTIMIZER),
        "first_and_last_masked_lm_loss": {
            name: (side.masked_lm_loss[0], side.masked_lm_loss[-1]) for name, side in sides.items()
        },
        "differences": {
            f"{one} from {other}": {kind: asdict(worst) for kind, worst in row.items()}
            for (one, other), row in pairs.items()
        },
        "floor": floor,
        "goals": GOALS,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
