"""Small data sets and run settings that several tests share."""

import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

from dataloading.dataset.folder import write_dataset
from dataloading.shards.samples import Samples, synthetic_samples
from dataloading.shards.shard import DatasetInfo
from dataloading.text.vocabulary import Vocabulary
from tests.programs import REPOSITORY

# Allow cached bytecode. Compiling PyTorch and other imports would take half of the time of hundreds of processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Collect garbage less often. A full collection visits all modules, which takes a quarter of a second.
gc.set_threshold(10_000, 10, 100)

# Set no deadline, because an example's duration depends more on other processes than on the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.register_profile("patient", patient)
settings.register_profile("quick", patient, max_examples=10)
settings.load_profile("patient")


def at_most(examples: int) -> settings:
    """Return settings for a property test with slow examples. The profile ``quick`` runs at most 10."""
    return settings(max_examples=min(examples, settings().max_examples))


STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

# In the background or under nohup, pytest ignores these signals. Programs that tests start and stop must not inherit this.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _restored_process() -> Iterator[None]:
    """Restore signal handlers and choices of ops after a test, which may have run a program in this process."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    if kernels := sys.modules.get("kernels"):
        for op in kernels.OPS.values():
            op.ask_for("auto")
            op.prefer({})


SLOW_FOLDERS = ("e2e", "distributed", "benchmarks", "kernels/triton", "convergence")
"""Test folders in which all tests are slow, the slowest first."""
TRIES = 3
"""Maximum number of tries of a test marked ``measured``."""
VOCAB_SIZE = 200
MAX_SEQ_LENGTH = 48


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests and run them first, so that no worker starts a long test when other workers are idle."""
    for item in items:
        if _folder_number(item.path) < len(SLOW_FOLDERS):
            item.add_marker("slow")
    items.sort(key=lambda item: _folder_number(item.path))
    # Sort these tests again, because a plugin may have shuffled them: a documented command needs files of earlier ones.
    in_order = [
        (place, item)
        for place, item in enumerate(items)
        if isinstance(item, pytest.Function) and item.get_closest_marker("in_order")
    ]
    for path in {item.path for _, item in in_order}:
        places = [place for place, item in in_order if item.path == path]
        of_file = [item for _, item in in_order if item.path == path]
        for place, item in zip(places, sorted(of_file, key=lambda item: item.callspec.indices["command"]), strict=True):
            items[place] = item


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from garbage collection, which would take a third of a second to visit them."""
    gc.freeze()


@cache
def _folder_number(path: Path) -> int:
    file = f"{path.relative_to(REPOSITORY / 'tests').as_posix()}/"
    return next(
        (place for place, folder in enumerate(SLOW_FOLDERS) if file.startswith(f"{folder}/")), len(SLOW_FOLDERS)
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip folders of slow tests if they are deselected, because importing them takes half of the collection's time."""
    if config.option.markexpr != "not slow" or collection_path.is_file():
        return None
    return True if _folder_number(collection_path) < len(SLOW_FOLDERS) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Repeat a test marked ``measured`` until it passes, at most ``TRIES`` times, each with fresh fixtures.

    Such a test measures time, links or disks. Other load on the machine may make one try fail, but a bug makes all fail.
    From the second try on, no other ``measured`` test runs at the same time. A failed try is reported as a warning.
    """
    if item.get_closest_marker("measured") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports: list[pytest.TestReport] = []
    with Path(tempfile.gettempdir(), f"mlperf-bert-tests-{os.getuid()}.lock").open("w") as lock:
        for number in range(TRIES):
            if failed := [report.longreprtext for report in reports if report.failed]:
                item.warn(pytest.PytestWarning(f"try {number} failed: {failed[0].splitlines()[-1]}"))
            fcntl.flock(lock, fcntl.LOCK_EX if number else fcntl.LOCK_SH)
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing would not unlock: forked processes inherit the file
            if not any(report.failed for report in reports):
                break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@dataclass(frozen=True)
class SmallRun:
    """A data set of synthetic samples, and the command line that trains a very small model on it."""

    folder: Path
    train: Samples
    evaluation: Samples

    def arguments(self, results: Path, **changes: object) -> list[str]:
        """Return arguments for ``python -m bert.train``. In the names of ``changes``, ``__`` stands for a dot."""
        settings: dict[str, object] = {
            "model__num_hidden_layers": 2,
            "model__hidden_size": 32,
            "model__num_attention_heads": 2,
            "model__intermediate_size": 64,
            "model__vocab_size": VOCAB_SIZE,
            "model__max_position_embeddings": MAX_SEQ_LENGTH,
            "data__train": self.folder / "train",
            "data__evaluation": self.folder / "evaluation",
            "data__vocab": self.folder / "vocab.txt",
            "data__initial_checkpoint": None,
            "training__global_batch_size": 16,
            "training__max_samples": 160,
            "training__seed": 7,
            "evaluation__interval_samples": 80,
            "evaluation__target": 0.9,
            "log__results": results,
            "log__interval_steps": 1,
        }
        settings |= changes
        flags = [(f"--{name.replace('__', '.').replace('_', '-')}", str(value)) for name, value in settings.items()]
        return ["tiny_cpu", *(part for flag in flags for part in flag)]


def write_small_dataset(folder: Path, samples: Samples, vocab: Path) -> None:
    """Write ``samples`` as a data set made with the vocabulary file ``vocab``."""
    info = DatasetInfo.of(Vocabulary.from_file(vocab), MAX_SEQ_LENGTH, 8, {"made_up": True})
    write_dataset(folder, samples, shards=2, info=info)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    folder = tmp_path_factory.mktemp("small_run")
    vocab = folder / "vocab.txt"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab.write_text("".join(f"{token}\n" for token in tokens + [f"word{i}" for i in range(VOCAB_SIZE - len(tokens))]))
    lengths = np.random.default_rng(3).integers(3, MAX_SEQ_LENGTH + 1, 300)
    train = synthetic_samples(lengths[:250], VOCAB_SIZE, seed=1)
    evaluation = synthetic_samples(lengths[250:], VOCAB_SIZE, seed=2)
    write_small_dataset(folder / "train", train, vocab)
    write_small_dataset(folder / "evaluation", evaluation, vocab)
    return SmallRun(folder, train, evaluation)
