"""Time and disk that the preparation takes on this machine, estimated from a small piece of its text, and its progress."""

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from console.durations import clock
from console.files import read_json, write_atomically
from console.program import say
from dataloading.dataset.folder import open_dataset
from dataloading.dataset.shuffle import shuffle
from dataloading.options import EVALUATION_SAMPLES, ExtractionOptions, PretrainingOptions
from dataloading.preparation.mlcommons import Inputs
from dataloading.preparation.prepare import Job, prepare
from dataloading.shards.samples import Samples
from dataloading.shards.shard import ShardRecord
from dataloading.text.wikipedia import extract

_RATES_NAME = "rates.json"
MEASURED_IN = "estimate-"
"""How the names of the folders begin that the measurement works in."""

_PIECE_BYTES = 4 << 20
"""Text that is prepared for the measurement, in about a second."""


_STARTING_SECONDS = 5
"""Of the process that converts the checkpoint, which imports PyTorch."""

_PRIOR = 0.1
"""Share of the whole time by which the estimate counts beside the time that has passed."""


@dataclass(frozen=True)
class Estimate:
    """Expected time and disk of what is not there yet."""

    seconds: Mapping[str, float]
    """By stage, in order."""
    result_bytes: float = 0
    most_bytes: float = 0
    """While it is made."""
    there_bytes: float = 0
    """Of intermediate results that an earlier attempt left."""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {clock(seconds)}" for name, seconds in self.seconds.items())
        return f"{clock(sum(self.seconds.values()))} ({parts})"


def estimate(
    inputs: Inputs, vocab: Path, work: Path, *, jobs: int, options: ExtractionOptions, there: Collection[str]
) -> Estimate:
    """Estimate time and disk from the beginning of the text; ``there`` names the results that are there already."""
    sources = inputs.text or inputs.articles
    to_make = {
        "checkpoint": bool(inputs.checkpoint) and "phase1.safetensors" not in there,
        "evaluation": bool(inputs.evaluation or inputs.articles) and "evaluation" not in there,
        "train": bool(sources) and "train" not in there,
    }
    if not any(to_make.values()):
        return Estimate({})
    workers = max(1, min(jobs, os.cpu_count() or 1))
    checkpoint_bytes = _total(inputs.checkpoint)
    hashed = _hash_rate(inputs.files[-1])
    seconds = {"check": _total(inputs.files) / hashed / workers}
    # A TF1 checkpoint holds each weight and two moments of it.
    result, most = (checkpoint_bytes / 3, checkpoint_bytes / 3) if to_make["checkpoint"] else (0.0, 0.0)
    if to_make["checkpoint"]:
        seconds["checkpoint"] = _STARTING_SECONDS + checkpoint_bytes / hashed
    if to_make["evaluation"] or to_make["train"]:
        piece = sources[0] if sources else inputs.evaluation
        assert piece is not None  # one of the two is to be made
        rates = _kept_rates(work) or _measure(piece, vocab, work, bool(inputs.articles), options)
        text = _total(inputs.text) + _total(inputs.articles) * rates.text_per_article_byte
        most += text if inputs.articles else 0
        if inputs.articles:
            seconds["text"] = _total(inputs.articles) / rates.extracted / workers
        if to_make["evaluation"]:
            # Of articles the text that is held out is not known; the benchmark's is one part in 400.
            held_out = inputs.evaluation.stat().st_size if inputs.evaluation else text / 400
            seconds["evaluation"] = held_out / rates.prepared
            picked = min(EVALUATION_SAMPLES, held_out * rates.samples_per_text_byte) * rates.sample_bytes
            result += picked
            most += picked + held_out * rates.samples_per_text_byte * rates.sample_bytes
        samples = text * rates.samples_per_text_byte
        if to_make["train"]:
            # Shards are read once by one process when all are there.
            indexed = samples / rates.verified
            seconds["samples"] = max(0, text / rates.prepared - indexed) / workers + indexed
            seconds["train"] = samples / rates.shuffled
            result += samples * rates.sample_bytes
            # The samples in order, the buckets that they are thrown into, and the result.
            most += 3 * samples * rates.sample_bytes
        seconds["verify"] = samples / rates.verified
    return Estimate(seconds, result, most, _tree_bytes(work))


@dataclass(frozen=True)
class _Rates:
    """Speed of each stage with one process, in a second, and size of its result."""

    extracted: float
    """bytes of articles"""
    text_per_article_byte: float
    prepared: float
    """bytes of text"""
    samples_per_text_byte: float
    sample_bytes: float
    shuffled: float
    """samples"""
    verified: float
    """samples"""


def _kept_rates(work: Path) -> _Rates | None:
    """Return what an earlier attempt measured, so that the work goes on at once."""
    path = work / _RATES_NAME
    try:
        return _Rates(**read_json(path, 1 << 16, "measure again")) if path.exists() else None
    except (TypeError, ValueError):
        return None


def _measure(piece: Path, vocab: Path, folder: Path, articles: bool, options: ExtractionOptions) -> _Rates:
    """Run every stage on the beginning of ``piece``, a text or a file of ``articles``, on the file system of ``folder``."""
    with tempfile.TemporaryDirectory(prefix=MEASURED_IN, dir=folder) as name:
        here = Path(name)
        text, extracted, share = here / "text.txt", math.inf, 1.0
        if articles:
            within = ExtractionOptions(options.sentences, evaluation_articles=0)
            extracted = piece.stat().st_size / _seconds_of(lambda: extract([piece], here / "text", within))
            text = here / "text" / "part-00000-of-00001"
            share = text.stat().st_size / piece.stat().st_size
        else:
            # Whatever the file holds: it has not been compared with its checksum yet.
            content = _beginning(piece).decode(errors="replace").replace("\0", " ")
            text.write_text(content.rpartition("\n\n")[0] or content, encoding="utf-8")
        (here / "warm-up.txt").write_text("a b\nc\n\nd\n")
        # Compiles what has to be compiled.
        prepare(Job((here / "warm-up.txt",), vocab, PretrainingOptions()), here / "warm-up")
        prepared = _seconds_of(lambda: prepare(Job((text,), vocab, PretrainingOptions()), here / "samples"))
        samples = open_dataset(here / "samples")
        shuffled = _seconds_of(lambda: shuffle(samples, here / "train", shards=1, seed=0))
        verified = _seconds_of(lambda: open_dataset(here / "train").verify(_digest))
        size, count = text.stat().st_size, max(1, len(samples))
        rates = _Rates(
            extracted=extracted,
            text_per_article_byte=share,
            prepared=size / prepared,
            samples_per_text_byte=count / size,
            sample_bytes=sum(record.file_bytes for record in samples.shards) / count,
            shuffled=count / shuffled,
            verified=count / verified,
        )
    write_atomically(folder / _RATES_NAME, json.dumps(asdict(rates)).encode())
    return rates


class Progress:
    """Progress over all stages, said in a line for each percent of the expected time."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds
        self._shares = dict.fromkeys(seconds, 0.0)
        self._kept = 0.0
        """Seconds of the estimate for what was there already."""
        self._started = time.perf_counter()
        self._told = -1

    def set(self, stage: str, share: float, *, kept: bool = False) -> None:
        """Note that a share of a stage is done; with ``kept`` it was found done and took no time."""
        if stage not in self._seconds:  # its result was there before
            return
        self._kept += kept * (share - self._shares[stage]) * self._seconds[stage]
        self._shares[stage] = share
        total = sum(self._seconds.values())
        done = sum(self._shares[name] * self._seconds[name] for name in self._seconds)
        if int(100 * done / total) > self._told:
            self._told = int(100 * done / total)
            # The estimate counts for a tenth, so that the first seconds do not decide.
            slowness = (time.perf_counter() - self._started + _PRIOR * total) / (done - self._kept + _PRIOR * total)
            say(f"[{self._told:3} %] {stage}, about {clock(slowness * (total - done))} left")

    def add(self, stage: str, share: float) -> None:
        """Note a further share of a stage."""
        self.set(stage, min(1.0, self._shares.get(stage, 0.0) + share))

    def finish(self, stage: str) -> None:
        """Note the end of a stage, whatever it took."""
        self.set(stage, 1.0, kept=True)


def _digest(_: ShardRecord, samples: Samples) -> None:
    samples.sample_digests()


def _total(paths: Collection[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _tree_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, where others may be at work."""
    size = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += (Path(top) / name).stat().st_size
    return size


def _hash_rate(path: Path) -> float:
    """Return bytes a second of reading and hashing."""
    size = min(_PIECE_BYTES, path.stat().st_size)
    return size / _seconds_of(lambda: hashlib.md5(_beginning(path), usedforsecurity=False)) or 1.0


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_PIECE_BYTES)


def _seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
