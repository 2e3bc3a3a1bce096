"""The stages from MLCommons' files to the data of the GPU recipes, each of which is skipped when its result is there.

    OUT/preparation/checked*.json    MD5 sums of the input files, by name, size and time of change
    OUT/preparation/NAME.json        inputs and settings that a result in OUT was made from
    OUT/preparation/NAME-DIGEST      a stage at work, named by the digest of its inputs and settings
    OUT/preparation/rates.json       the speed of each stage, measured on a small piece
    OUT/preparation/verified.json    digests of the manifests of data sets that were read through

Every stage goes on where it was stopped, after ``kill -9`` too. What is no longer needed is deleted at the end.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from console.files import is_temporary, read_bounded, read_json, sha256_of, sync, write_atomically
from console.program import say
from dataloading.dataset import known
from dataloading.dataset.folder import Dataset, open_dataset, write_dataset
from dataloading.dataset.manifest import MANIFEST_NAME, parts_in
from dataloading.dataset.merge import merge
from dataloading.dataset.shuffle import JOB_NAME, ShuffleProgress, shuffle
from dataloading.dataset.verification import verify
from dataloading.jobs import JobProgress, WorkPart
from dataloading.options import EVALUATION_SAMPLES, ExtractionOptions, PretrainingOptions
from dataloading.preparation.estimate import MEASURED_IN, Estimate, Progress, estimate
from dataloading.preparation.mlcommons import TEXT_PARTS, Checksums, Inputs, check_digests, digests_of
from dataloading.preparation.prepare import Job, prepare
from dataloading.text.wikipedia import EVALUATION_NAME, extract, extract_part, text_names

VOCABULARY, CHECKPOINT, EVALUATION, TRAIN = "vocab.txt", "phase1.safetensors", "evaluation", "train"
_SEED = 24
_SMALL_BYTES = 1 << 20
_MAX_RECORD_BYTES = 64 << 20
_WORK = re.compile(r"[a-z-]+-[0-9a-f]{16}")
_STAGES_IN_PARTS = ("check", "text", "samples")
_ELSEWHERE = "move it away, or name another --out"


@dataclass(frozen=True)
class Request:
    """What to make, of what, and how."""

    folders: tuple[Path, ...]
    out: Path
    extraction: ExtractionOptions
    shards: int = 4320
    jobs: int = 1
    part: WorkPart | None = None
    checksums: Path | None = None

    @property
    def work(self) -> Path:
        """Folder of the stages."""
        return self.out / "preparation"


@dataclass(frozen=True)
class _Stage:
    """A step from inputs to a result."""

    name: str
    result: str
    """Name in OUT, or empty for an intermediate result."""
    made_from: Mapping[str, object]
    """Digests of inputs, and settings."""
    make: Callable[[Path], None]
    """Makes the result under the name given, and goes on where it was stopped."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.made_from, sort_keys=True).encode()).hexdigest()[:16]


class Preparation:
    """One run of the command, in an OUT that is its own."""

    def __init__(self, request: Request, inputs: Inputs, checksums: Checksums) -> None:
        self.out, self.work = request.out, request.work
        self.request, self.inputs, self.checksums = request, inputs, checksums
        self.vocab = (self.out / VOCABULARY).resolve()
        self.options = PretrainingOptions()
        self.progress = Progress({})
        self.md5s: dict[Path, str] = {}

    def make(self) -> None:
        """Make everything that the inputs allow, and verify it."""
        # Of attempts that were killed: no other process is at work here.
        self._delete(lambda path: is_temporary(path) or path.name.startswith(MEASURED_IN))
        for path in filter(is_temporary, list(self.out.glob(f".{VOCABULARY}.*"))):
            path.unlink()
        self._begin(self.inputs.files)
        if self.inputs.checkpoint:
            self._run(self._checkpoint_stage())
        if self.inputs.evaluation or self.inputs.articles:
            self._run(self._evaluation_stage())
        if self.inputs.text or self.inputs.articles:
            self._run(self._train_stage())
        self._verify()
        # Before there is a training set, parts of it may be there.
        if (self.out / TRAIN).exists():
            self._delete(lambda path: _WORK.fullmatch(path.name) is not None)

    def _delete(self, is_useless: Callable[[Path], bool]) -> None:
        for path in filter(is_useless, list(self.work.iterdir())):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def make_part(self, part: WorkPart) -> bool:
        """Make one part of the samples; return whether all parts are there."""
        if not (self.inputs.text or self.inputs.articles):
            raise ValueError("--part shares the work of making samples, and there is no text; leave it out")
        names = self._text_names()
        mine = part.share_of(len(names))
        articles, text = self.inputs.articles, self.inputs.text
        self._begin([path for path in (self.inputs.vocabulary, *text[mine.start : mine.stop]) if path])
        if articles:
            folder = self._place(self._text_stage())
            options, report = self.request.extraction, self._files("text")
            extract_part(articles, folder, options, part, jobs=self.request.jobs, report=report)
        folder = self._place(self._samples_stage())
        prepare(self._job(), folder, jobs=self.request.jobs, part=part, report=self._files("samples"))
        return {each.index for each in parts_in(folder) if each.count == part.count} == set(range(1, part.count + 1))

    def _begin(self, files: list[Path]) -> None:
        """Check the small files, estimate, check the rest, and put the vocabulary in its place."""
        self._check([path for path in files if path.stat().st_size <= _SMALL_BYTES])
        vocabulary = self.inputs.vocabulary or self.vocab
        has_text = self.inputs.text or self.inputs.evaluation or self.inputs.articles
        if has_text and not vocabulary.is_file():
            raise ValueError(
                "vocab.txt is missing, and no sample can be made without it; docs/data.md says how to download it"
            )
        there = {name for name in (CHECKPOINT, EVALUATION, TRAIN) if (self.out / name).exists()}
        jobs, options, part = self.request.jobs, self.request.extraction, self.request.part
        expected = estimate(self.inputs, vocabulary, self.work, jobs=jobs, options=options, there=there)
        if part is not None:
            own = {name: each / part.count for name, each in expected.seconds.items() if name in _STAGES_IN_PARTS}
            expected = replace(expected, seconds=own)
        self._announce(expected)
        self.progress = Progress(expected.seconds)
        if unlisted := self._check(files):
            say(f"note: {unlisted:,} file(s) are in no list of MD5 sums, and were not compared")
        if self.inputs.vocabulary:
            if not self.vocab.exists():
                write_atomically(
                    self.vocab, read_bounded(self.inputs.vocabulary, _MAX_RECORD_BYTES, "name a vocabulary")
                )
            elif sha256_of(self.vocab) != sha256_of(self.inputs.vocabulary):
                raise ValueError(f"{self.vocab} is another vocabulary than {self.inputs.vocabulary}; {_ELSEWHERE}")

    def _announce(self, expected: Estimate) -> None:
        if not expected.seconds:
            return
        free, needed = shutil.disk_usage(self.work).free, max(0, expected.most_bytes - expected.there_bytes)
        say(
            f"to make in {self.out}: {in_units(expected.result_bytes)}; until it is made, {in_units(needed)} more are "
            f"needed, and {in_units(free)} are free"
        )
        say(f"expected time with --jobs {self.request.jobs} on this machine of {os.cpu_count()} cores: {expected}")
        if needed > free:
            raise ValueError(
                f"{self.out}: {in_units(needed)} are needed, and {in_units(free)} are free; make room, or name "
                "another --out"
            )

    def _check(self, files: list[Path]) -> int:
        """Compare files with their MD5 sums, as far as lists have them; return how many files no list has."""
        total = sum(path.stat().st_size for path in files) or 1
        self.md5s |= digests_of(
            *(files, self.work, self.request.part, self.request.jobs),
            report=lambda path: self.progress.add("check", path.stat().st_size / total),
        )
        return check_digests({path: self.md5s[path] for path in files}, self.checksums)

    def _run(self, stage: _Stage) -> None:
        """Make a result, unless it is there."""
        result, marker = self.out / stage.result, self.work / f"{stage.name}.json"
        if result.exists() or result.is_symlink():
            if marker.exists() and read_json(marker, _MAX_RECORD_BYTES, "delete it") == stage.made_from:
                self.progress.finish(stage.name)
                say(f"{stage.name}: {result} is there already")
                return
            raise ValueError(f"{result} is there, and was not made from these inputs with these settings; {_ELSEWHERE}")
        place = self._place(stage)
        stage.make(place)
        # The marker first: with the result it says what that was made from, and without the result it says nothing.
        write_atomically(marker, json.dumps(stage.made_from, indent=1).encode())
        place.rename(result)
        sync(self.out)
        self.progress.finish(stage.name)

    def _place(self, stage: _Stage) -> Path:
        return self.work / f"{stage.name}-{stage.digest}"

    def _checkpoint_stage(self) -> _Stage:
        def make(place: Path) -> None:
            if place.exists():  # it is whole, or it would not be there
                return
            prefix = str(self.inputs.checkpoint[0]).removesuffix(".index")
            # Another process, as imports go one way and PyTorch stays out of this one.
            command = [sys.executable, "-m", "bert.convert", prefix, "--to", "safetensors", "--out", str(place)]
            done = subprocess.run(command + self._heads(), capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip() or f"exit status {done.returncode}"
                raise ValueError(f"the checkpoint cannot be converted: {said.splitlines()[-1].removeprefix('error: ')}")

        return _Stage("checkpoint", CHECKPOINT, self._digests(self.inputs.checkpoint), make)

    def _heads(self) -> list[str]:
        """Options for `bert.convert`: the number of attention heads, which a TF1 checkpoint does not say."""
        config = self.inputs.config
        stated = read_json(config, _MAX_RECORD_BYTES, "download it again") if config else None
        heads = stated.get("num_attention_heads") if isinstance(stated, dict) else None
        return ["--num-attention-heads", str(heads)] if isinstance(heads, int) else []

    def _text_stage(self) -> _Stage:
        def make(place: Path) -> None:
            if not (place / MANIFEST_NAME).exists():
                articles, options = self.inputs.articles, self.request.extraction
                extract(articles, place, options, jobs=self.request.jobs, report=self._files("text"))

        return _Stage("text", "", self._sizes(self.inputs.articles) | asdict(self.request.extraction), make)

    def _evaluation_stage(self) -> _Stage:
        def make(place: Path) -> None:
            if (place / MANIFEST_NAME).exists():
                return
            text = self.inputs.evaluation or self._text_folder() / EVALUATION_NAME
            intermediate = self.work / f"evaluation-samples-{stage.digest}"
            if not (intermediate / MANIFEST_NAME).exists():
                report = self._files("evaluation")
                prepare(Job((text.resolve(),), self.vocab, self.options), intermediate, report=report)
            source = open_dataset(intermediate)
            # Of less text than the benchmark's, all samples are taken.
            count = min(EVALUATION_SAMPLES, len(source))
            write_dataset(place, source.take(known.pick_evaluation(source, count)), shards=1, info=source.info)

        made_from = self._digests((self.inputs.evaluation,) if self.inputs.evaluation else self.inputs.articles)
        stage = _Stage("evaluation", EVALUATION, made_from | self._settings(), make)
        return stage

    def _samples_stage(self) -> _Stage:
        def make(place: Path) -> None:
            if (place / MANIFEST_NAME).exists():
                return
            if self.inputs.articles:
                self._text_folder()
            parts = parts_in(place) if place.is_dir() else []
            if parts and {part.count for part in parts} == {len(parts)}:
                merge([place], place)
            else:
                prepare(self._job(), place, jobs=self.request.jobs, report=self._files("samples"))

        # Texts are identified by size here, because a machine that makes one part does not read the texts of the other
        # parts. Each shard holds the digest of its own text, and the training set holds the digests of all texts.
        return _Stage("samples", "", self._sizes(self.inputs.text or self.inputs.articles) | self._settings(), make)

    def _train_stage(self) -> _Stage:
        def make(place: Path) -> None:
            samples = self._place(self._samples_stage())
            # Its last act is to delete the description of its job.
            if not (place / MANIFEST_NAME).exists() or (place / JOB_NAME).exists():
                self._samples_stage().make(samples)
                self.progress.finish("samples")
                shards, report = self.request.shards, self._shuffled
                shuffle(open_dataset(samples), place, shards=shards, seed=_SEED, report=report)
            shutil.rmtree(samples, ignore_errors=True)

        order = {"shards": self.request.shards, "seed": _SEED}
        made_from = self._digests(self.inputs.text or self.inputs.articles) | self._settings() | order
        return _Stage("train", TRAIN, made_from, make)

    def _text_folder(self) -> Path:
        """Return the folder of the text that is made of the articles, made when it is first asked for."""
        stage = self._text_stage()
        stage.make(self._place(stage))
        self.progress.finish("text")
        return self._place(stage)

    def _verify(self) -> None:
        """Read the data sets through, unless they were read before."""
        folders = [self.out / name for name in (TRAIN, EVALUATION) if (self.out / name).exists()]
        state = {folder.name: sha256_of(folder / MANIFEST_NAME) for folder in folders}
        marker = self.work / "verified.json"
        if not marker.exists() or read_json(marker, _MAX_RECORD_BYTES, "delete it") != state:
            total = sum(len(open_dataset(folder)) for folder in folders)
            for folder in folders:
                dataset = open_dataset(folder)
                found = verify(dataset, visit=lambda shard: self.progress.add("verify", shard.samples / max(total, 1)))
                for line in (*found.lines, found.order) if folder.name == TRAIN else found.lines:
                    say(f"{folder.name}: {line}")
                if self._inputs_are_the_benchmarks():
                    _require_the_benchmarks(folder, dataset)
            write_atomically(marker, json.dumps(state).encode())
        self.progress.finish("verify")

    def _inputs_are_the_benchmarks(self) -> bool:
        """Tell whether the text was compared with the known sums of the benchmark's."""
        return self.request.checksums is None and len(self.inputs.text) == TEXT_PARTS and bool(self.inputs.evaluation)

    def _job(self) -> Job:
        folder = self._place(self._text_stage()).resolve()
        texts = self.inputs.text or tuple(folder / name for name in self._text_names())
        return Job(tuple(texts), self.vocab, self.options)

    def _text_names(self) -> list[str]:
        if self.inputs.text:
            return [path.name for path in self.inputs.text]
        return text_names(self.inputs.articles, self.request.extraction)

    def _digests(self, files: Sequence[Path]) -> dict[str, object]:
        """Digest of files by their names and contents."""
        return _inputs((path.name, self.md5s[path]) for path in files)

    def _sizes(self, files: Sequence[Path]) -> dict[str, object]:
        """Digest of files by their names and sizes."""
        return _inputs((path.name, path.stat().st_size) for path in files)

    def _settings(self) -> dict[str, object]:
        """Settings that samples depend on, beside the text."""
        extraction = asdict(self.request.extraction) if self.inputs.articles else {}
        return {"vocabulary": sha256_of(self.vocab), **asdict(self.options), **extraction}

    def _files(self, stage: str) -> Callable[[JobProgress], None]:
        return partial(_add_file, self.progress, stage)

    def _shuffled(self, progress: ShuffleProgress) -> None:
        place = ("read", "written", "checked").index(progress.step)
        self.progress.set("train", (place + progress.done / max(progress.total, 1)) / 3)


def _inputs(rows: Iterable[tuple[str, object]]) -> dict[str, object]:
    return {"inputs": hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()}


def _add_file(progress: Progress, stage: str, file: JobProgress) -> None:
    progress.set(stage, file.done / file.total, kept=file.kept)


def _require_the_benchmarks(folder: Path, dataset: Dataset) -> None:
    """Raise ``ValueError`` where a set that was made from the benchmark's text has another number of samples."""
    least, most = (
        (known.TRAINING_SAMPLES_4320, known.TRAINING_SAMPLES) if folder.name == TRAIN else 2 * (EVALUATION_SAMPLES,)
    )
    if not least <= len(dataset) <= most:
        raise ValueError(f"{folder}: {len(dataset):,} samples of the benchmark's text, expected {least:,} to {most:,}")


def in_units(count: float) -> str:
    """Format a number of bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} bytes"
