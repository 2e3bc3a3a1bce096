"""The command ``wikipedia``: the data of the GPU recipes, made from MLCommons' files in stages and verified.

A stage is skipped if its result exists. Every stage can continue after an interruption, including ``kill -9``.

    OUT/vocab.txt, phase1.safetensors, evaluation/, train/   results; each appears once it is complete
    OUT/preparation/NAME.json        input digests and settings of the result NAME
    OUT/preparation/NAME-DIGEST      unfinished result, named by the digest of its inputs and settings; deleted at the end
    OUT/preparation/verified.json    manifest digests of the verified data sets
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.filesize import decimal

from console.files import BusyError, is_temporary, lock_file, read_bounded, read_json, sha256_of, sync, write_atomically
from console.processes import run
from console.program import complain, say
from console.text import clock, counted
from dataloading.dataset import known
from dataloading.dataset.folder import MANIFEST_NAME, open_dataset, write_dataset
from dataloading.dataset.rewrite import SHUFFLE_JOB, STEPS, shuffle
from dataloading.jobs import Report, StageProgress, WorkPart, run_tasks
from dataloading.options import EVALUATION_SAMPLES, ExtractionOptions, PretrainingOptions
from dataloading.preparation.mlcommons import (
    CHECKPOINT,
    EVALUATION,
    SOURCES,
    TRAIN,
    VOCABULARY,
    Checksums,
    Inputs,
    attention_heads,
    digest_of,
    estimate,
    find_inputs,
    how_to_download,
    total_bytes,
)
from dataloading.preparation.prepare import Job, make_shards, prepare
from dataloading.text.vocabulary import Vocabulary
from dataloading.text.wikipedia import extract

_SEED = 24
_MAX_RECORD_BYTES = 64 << 20
_ELSEWHERE = "move it away, or name another --out"

_MadeFrom = dict[str, object]
"""Settings that a result was made with, and digests of its inputs."""
_ACCURACY_BEFORE_TRAINING = 0.34085
"""Accuracy of the phase-1 checkpoint on the evaluation set, from the reference's README."""
_REMEDY = "expected the benchmark's text and vocab.txt: download both again"


@dataclass(frozen=True)
class Request:
    folders: tuple[Path, ...]
    out: Path
    extraction: ExtractionOptions
    shards: int = 4320
    jobs: int = 1
    part: WorkPart | None = None
    checksums: Path | None = None

    @property
    def work(self) -> Path:
        return self.out / "preparation"


def make_wikipedia(request: Request) -> bool:
    """Make all results that the inputs allow, or one part of the samples.

    The process that completes the last part also makes the other results. Returns False if a result was not made because
    the folders lack files for it.
    """
    inputs = find_inputs(request.folders, request.out)
    checksums = Checksums(request.checksums, inputs.lists)
    problems = _problems(request, inputs, checksums)
    _describe(request.out, inputs, problems)
    if problems:
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        raise ValueError(count + " | ".join(problems))
    request.work.mkdir(parents=True, exist_ok=True)
    if inputs.uses_articles:
        inputs = _with_extracted_text(request, inputs)
    try:
        # If the training set is complete, no part needs to be made.
        if request.part is not None and not (request.out / TRAIN).exists():
            with _locked(request, shared=True):
                shards = _Preparation(request, inputs, checksums).make_part(request.part)
            # Look for the other parts after releasing the lock: the last process that releases it then finds all parts.
            if not all(shard.exists() for shard in shards):
                say(f"part {request.part} is done; the process that completes the last part makes the other results")
                return True
        with _locked(request, shared=False):
            _Preparation(replace(request, part=None), inputs, checksums).make()
    except BusyError as holder:
        if request.part is None:
            raise ValueError(f"{request.out}: {holder} is at work there; wait for it, or name another --out") from None
        # The process with the lock is making the other results, or will make them after its part.
        say(f"part {request.part} is done; another process makes the other results")
        return True
    return _conclude(request.out, inputs)


def _with_extracted_text(request: Request, inputs: Inputs) -> Inputs:
    """Extract the text of WikiExtractor's files unless both data sets exist. Return the inputs with the extracted text."""
    if all((request.out / name).exists() for name in (TRAIN, EVALUATION)):
        return inputs
    job = [asdict(request.extraction), *((str(path), path.stat().st_size) for path in inputs.articles)]
    folder = request.work / f"text-{hashlib.sha256(json.dumps(job).encode()).hexdigest()[:16]}"
    # One process extracts the whole text, and the others wait for it with this separate lock. Afterwards, all of them make
    # their parts of the samples at the same time.
    with _locked(request, shared=False, name="text.lock", patience_s=86_400):
        if not (folder / "eval.txt").exists():
            extract(inputs.articles, folder, request.extraction, jobs=request.jobs)
    text = tuple(path.resolve() for path in sorted(folder.glob("part-*")))
    return replace(inputs, text=text, evaluation=((folder / "eval.txt").resolve(),))


@contextmanager
def _locked(request: Request, *, shared: bool, name: str = "lock", patience_s: float = 0.0) -> Iterator[None]:
    descriptor = lock_file(request.work / name, shared=shared, patience_s=patience_s)
    try:
        yield
    finally:
        os.close(descriptor)


def _problems(request: Request, inputs: Inputs, checksums: Checksums) -> list[str]:
    """Return a sentence for each problem that prevents the command from starting. Large files are not read."""
    problems = [*inputs.problems, *checksums.wrong_sizes(inputs.files)]
    has_text = inputs.evaluation or inputs.text or inputs.articles
    if not (has_text or inputs.files or problems):
        nothing = f"{', '.join(map(str, request.folders)) or 'no folder named'}: none of MLCommons' files found"
        own = ["files in --out are not read"] if request.out.resolve() in map(Path.resolve, request.folders) else []
        others = [why for _, why in inputs.others]
        expected = [f"expected {SOURCES[name]}" for name in dict(inputs.others)]
        problems.append("; ".join([nothing, *own, *others, *expected]))
    if has_text and not (inputs.vocabulary or (request.out / VOCABULARY).is_file()):
        problems.append("vocab.txt is missing, without which no samples can be made")
    if request.part is not None and not (inputs.text or inputs.uses_articles or (request.out / TRAIN).exists()):
        problems.append("--part divides the work on the text, and there is no text; leave out --part")
    if request.shards < 1:
        problems.append(f"--shards is {request.shards}; expected at least 1")
    if request.out.exists() and not request.out.is_dir():
        problems.append(f"--out {request.out} is a file; expected a folder")
    if not problems:
        try:
            for path in inputs.vocabulary:
                Vocabulary.from_file(path)
            attention_heads(inputs)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _describe(out: Path, inputs: Inputs, problems: Sequence[str]) -> None:
    articles = "WikiExtractor's files" + ("" if inputs.uses_articles else " (not used beside MLCommons' text)")
    found: dict[str, Sequence[Path]] = {
        "vocabulary": inputs.vocabulary,
        "checkpoint": inputs.checkpoint,
        "text": inputs.text,
        "evaluation text": inputs.evaluation,
        articles: inputs.articles,
    }
    for name, paths in found.items():
        if paths:
            more = f" ... ({len(paths):,} files)" if len(paths) > 1 else ""
            say(f"found: {name}, {paths[0]}{more}, {decimal(total_bytes(paths))}")
    missing = []
    for name in _missing(out, inputs):
        others = "; ".join(why for result, why in inputs.others if result == name)
        missing.append(f"missing: {SOURCES[name]}, for {out / name}{others and f'; {others}'}")
    for line in [*missing, *how_to_download([*missing, *problems])]:
        say(line)


def _missing(out: Path, inputs: Inputs) -> list[str]:
    from_articles = {EVALUATION, TRAIN} if inputs.uses_articles else set()
    missing = (name for name, files in inputs.by_result.items() if not files and name not in from_articles)
    return [name for name in missing if not (out / name).exists()]


def _conclude(out: Path, inputs: Inputs) -> bool:
    for folder in (out / TRAIN, out / EVALUATION):
        if folder.exists():
            say(f"{folder}: {counted(len(open_dataset(folder)), 'sample')}, verified")
    if missing := _missing(out, inputs):
        names = ", ".join(str(out / name) for name in missing)
        say(f"not made: {names}; run the command again with the folders of the missing files")
        return False
    settings = {"train": TRAIN, "evaluation": EVALUATION, "vocab": VOCABULARY, "initial-checkpoint": CHECKPOINT}
    given = "".join(f" --data.{key} {out / name}" for key, name in settings.items())
    given = "" if out == Path("data/wikipedia") else given
    say(f"accuracy before training: python -m bert.evaluate h100_1x1 --expect {_ACCURACY_BEFORE_TRAINING}{given}")
    say(f"whether a run would start: python -m bert.train h100_1x8 --dry-run{given}")
    return True


class _Preparation:
    """One run of the command ``wikipedia``. The caller holds the lock of the output folder."""

    def __init__(self, request: Request, inputs: Inputs, checksums: Checksums) -> None:
        self.out, self.work = request.out, request.work
        self.request, self.inputs, self.checksums = request, inputs, checksums
        self.vocab = (self.out / VOCABULARY).resolve()
        self.options = PretrainingOptions()
        self.progress = StageProgress({})
        self.md5s: dict[Path, str] = {}

    def make(self) -> None:
        """Make all results that the inputs allow, and verify them."""
        for path in filter(is_temporary, [*self.work.iterdir(), *self.out.glob(f".{VOCABULARY}.*")]):
            _delete(path)
        self._begin(self.inputs.files)
        self._make(CHECKPOINT, self._convert_checkpoint, dict)
        self._make(EVALUATION, self._make_evaluation, self._settings)
        order = {"shards": self.request.shards, "seed": _SEED}
        self._make(TRAIN, self._make_train, lambda: self._settings() | order)
        self._verify()
        # Keep unfinished results until the training set exists, because other processes may still need the parts.
        if (self.out / TRAIN).exists():
            for path in list(self.work.glob(f"*-{16 * '[0-9a-f]'}")):
                _delete(path)

    def make_part(self, part: WorkPart) -> list[Path]:
        """Make one part of the samples, and return the paths of all parts' shards."""
        text = self.inputs.text
        mine = part.share_of(len(text))
        self._begin([*self.inputs.vocabulary, *text[mine.start : mine.stop]])
        folder, job = self._samples_folder(), self._job(text)
        make_shards(job, folder, jobs=self.request.jobs, part=part, report=self._report_files("samples"))
        return [folder / name for name in job.shard_names]

    def _begin(self, files: list[Path]) -> None:
        """Print the expected time and disk space, check the files, and install the vocabulary."""
        given = self.inputs.vocabulary[0] if self.inputs.vocabulary else None
        self._announce()
        total = total_bytes(files) or 1
        for path, md5 in run_tasks(digest_of, files, self.request.jobs):
            self.md5s[path] = md5
            self.progress.add("check", path.stat().st_size / total)
        # Skip text that this command extracted: it has the file names of the benchmark's text, but other content.
        given_md5s = {path: md5 for path, md5 in self.md5s.items() if self.work.resolve() not in path.parents}
        if unlisted := self.checksums.check(given_md5s):
            say(f"note: no list has MD5 sums of {counted(unlisted, 'file')}, so they were not compared")
        if given and not self.vocab.exists():
            write_atomically(self.vocab, read_bounded(given, _MAX_RECORD_BYTES, "name a vocabulary"))
        elif given and sha256_of(self.vocab) != sha256_of(given):
            raise ValueError(f"{self.vocab} exists and differs from {given}; {_ELSEWHERE}")

    def _announce(self) -> None:
        """Print the expected time and disk space. Raises ``ValueError`` if the free disk space is too small."""
        existing = [name for name in self.inputs.by_result if (self.out / name).exists()]
        seconds, result_bytes, most_bytes = estimate(self.inputs, existing, self.request.jobs)
        if part := self.request.part:
            seconds = {name: each / part.count for name, each in seconds.items() if name in ("check", "samples")}
        self.progress = StageProgress(seconds)
        if not seconds:
            return
        left_by_others = total_bytes([path for path in self.work.rglob("*") if path.is_file()])
        free, needed = shutil.disk_usage(self.work).free, max(0, int(most_bytes) - left_by_others)
        room = f"{decimal(needed)} are needed, and {decimal(free)} are free"
        say(f"{self.out}: the results will take {decimal(int(result_bytes))}; while they are made, {room}")
        stages = ", ".join(f"{name} {clock(each)}" for name, each in seconds.items())
        time = f"{clock(sum(seconds.values()))} ({stages})"
        say(f"expected time with --jobs {self.request.jobs} on {counted(os.cpu_count() or 1, 'core')}: {time}")
        if needed > free:
            raise ValueError(f"{self.out}: {room}; make room, or name another --out")

    def _make(self, result: str, make: Callable[[Path], None], settings: Callable[[], _MadeFrom]) -> None:
        """Make a result unless it exists or its inputs are missing.

        ``make`` is called with the path of the unfinished result, where an earlier attempt may have left files. Raises
        ``ValueError`` if the result exists but was made from other inputs or with other settings.
        """
        if not (sources := self.inputs.by_result[result]):
            return
        made_from = _digest_of((path.name, self.md5s[path]) for path in sources) | settings()
        target, marker = self.out / result, self.work / f"{result}.json"
        if target.exists() or target.is_symlink():
            if not _is_recorded(made_from, marker):
                raise ValueError(f"{target} exists and was not made from these inputs and settings; {_ELSEWHERE}")
            say(f"{target} exists and is kept")
        else:
            place = self._unfinished(result, made_from)
            make(place)
            # Write the marker first: a result without a marker would be refused, but a marker alone has no effect.
            write_atomically(marker, json.dumps(made_from).encode())
            place.rename(target)
            sync(self.out)
        self.progress.set(result, kept=True)

    def _unfinished(self, name: str, made_from: _MadeFrom) -> Path:
        """Return the path of an unfinished result. Other inputs or settings give another path."""
        digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        return self.work / f"{name}-{digest[:16]}"

    def _convert_checkpoint(self, place: Path) -> None:
        if place.exists():
            return
        prefix = str(self.inputs.checkpoint[0]).removesuffix(".index")
        # Convert in a separate process, because preparation imports neither PyTorch nor bert.
        command = [sys.executable, "-m", "bert.convert", prefix, "--to", "safetensors", "--out", str(place)]
        if (heads := attention_heads(self.inputs)) is not None:
            command += ["--num-attention-heads", str(heads)]
        if (done := run(command)).trouble:
            why = done.complaint
            if "--num-attention-heads" in why:  # this command has no such option
                why = f"{prefix}.index does not state the attention heads"
            expected = f"expected {SOURCES[CHECKPOINT]}, with its bert_config.json"
            raise ValueError(f"the checkpoint cannot be converted: {why}; {expected}")

    def _make_evaluation(self, place: Path) -> None:
        if (place / MANIFEST_NAME).exists():
            return
        job = self._job(self.inputs.evaluation)
        source = prepare(job, place.with_name(f"all-{place.name}"), report=self._report_files(EVALUATION))
        count = min(EVALUATION_SAMPLES, len(source))
        write_dataset(place, source.take(known.pick_evaluation(source, count)), shards=1, info=source.info)

    def _make_train(self, place: Path) -> None:
        samples = self._samples_folder()
        # A shuffle is complete once it has deleted the description of its job.
        if not (place / MANIFEST_NAME).exists() or (place / SHUFFLE_JOB).exists():
            if not (samples / MANIFEST_NAME).exists():
                prepare(
                    self._job(self.inputs.text), samples, jobs=self.request.jobs, report=self._report_files("samples")
                )
            self.progress.set("samples", kept=True)
            source, shards = open_dataset(samples), self.request.shards
            shuffle(source, place, shards=shards, seed=_SEED, report=self._report_shuffle)
        shutil.rmtree(samples, ignore_errors=True)

    def _job(self, texts: tuple[Path, ...]) -> Job:
        return Job(texts, self.vocab, self.options, remedy=_REMEDY)

    def _samples_folder(self) -> Path:
        # Texts are identified by size, because a machine that makes one part does not read the texts of the other
        # parts. Each shard holds the digest of its own text, and the training set holds the digests of all texts.
        sizes = _digest_of((path.name, path.stat().st_size) for path in self.inputs.text)
        return self._unfinished("samples", sizes | self._settings())

    def _verify(self) -> None:
        folders = [self.out / name for name in (TRAIN, EVALUATION) if (self.out / name).exists()]
        state = {folder.name: sha256_of(folder / MANIFEST_NAME) for folder in folders}
        marker = self.work / "verified.json"
        if not _is_recorded(state, marker):
            datasets = [open_dataset(folder) for folder in folders]
            total = sum(map(len, datasets))
            for dataset in datasets:
                for line in known.verify(dataset, lambda shard: self.progress.add("verify", shard.samples / total)):
                    say(f"{dataset.folder.name}: {line}")
                for doubt in known.doubts(dataset.info, _REMEDY):
                    complain(f"{dataset.folder.name}: {doubt}", "warning")
            write_atomically(marker, json.dumps(state).encode())
        self.progress.set("verify", kept=True)

    def _settings(self) -> _MadeFrom:
        # Settings that the command cannot change are left out, so that results of earlier versions are still recognised.
        fixed = ("strip_accents", "tokenize_chinese_chars")
        settings = {name: value for name, value in asdict(self.options).items() if name not in fixed}
        return {"vocabulary": sha256_of(self.vocab), **settings}

    def _report_files(self, stage: str) -> Report:
        return lambda file: self.progress.set(stage, file.done / file.total, kept=file.kept)

    def _report_shuffle(self, step: str, done: int, total: int) -> None:
        self.progress.set(TRAIN, (STEPS.index(step) + done / total) / len(STEPS))


def _is_recorded(made_from: object, marker: Path) -> bool:
    return marker.exists() and read_json(marker, _MAX_RECORD_BYTES, "delete it") == made_from


def _digest_of(rows: Iterable[tuple[str, object]]) -> _MadeFrom:
    return {"inputs": hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()}


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
