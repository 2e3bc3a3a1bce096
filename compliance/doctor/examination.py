"""Look, before a run, at everything that would stop it, slow it down or make its result invalid.

Each thing gets a line: ok, warn or fail, what was found, and what to do. Nothing is changed: caches are not dropped, no
file is written. Every question to the machine has a time limit, and a tool that is missing is a warning at most.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from compliance.doctor import gpus, vitals
from compliance.doctor.accelerators import accelerators
from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost, Output, run_root
from compliance.doctor.layout import IntendedRun, RunLayout, layout_of
from compliance.doctor.rendezvous import rendezvous
from compliance.doctor.storage import linked_elsewhere, storage_of
from compliance.doctor.system import ask_pytorch, container, version
from compliance.doctor.system_truth import compare
from compliance.log import rules
from compliance.log.rules import SUBMISSION_RUNS
from console.files import open_regular
from console.program import say, say_json
from console.text import visible
from console.version import REPOSITORY

DRY_RUN_TIMEOUT_S = 300.0
VERIFY_TIMEOUT_S = 3600.0
_MAKE_DATA = "python -m dataloading wikipedia FOLDER... (docs/data.md)"

RESULTS_BYTES = 2**30
"""Free space that the logs and metrics of ten runs need at most."""

CHECKPOINT_HEADER_BYTES = 100 * 2**20
"""Largest header of a safetensors file (its format's own limit)."""


@dataclass(frozen=True)
class _Examined:
    """The run that is meant, with all that is known about it."""

    intended: IntendedRun
    layout: RunLayout
    host: ExaminedHost
    gpus: gpus.Gpus
    pytorch: Mapping[str, Any]

    def folder(self, name: Literal["train", "evaluation"]) -> Path | None:
        """A data set of the run."""
        given = self.intended.data
        if given is None:
            return self._named("data", name)
        inside = given / name
        # A folder that holds no two data sets is one.
        return inside if inside.exists() or self.layout.recipe else given if name == "train" else None

    @property
    def results(self) -> Path | None:
        """results/ of the run."""
        return self.intended.results or self._named("log", "results")

    @property
    def checkpoint(self) -> Path | None:
        """The weights that the run starts from."""
        return self.intended.checkpoint or self._named("data", "initial_checkpoint")

    @property
    def system_file(self) -> Path | None:
        """The system description."""
        name = self.layout.setting("log", "system")
        in_results = self.results / "systems" / f"{name}.json" if self.results and name else None
        return self.intended.system or in_results

    def _named(self, section: str, name: str) -> Path | None:
        """A path of the recipe, which is relative to `run_root`, as seen from the current folder."""
        named = self.layout.setting(section, name)
        return Path(os.path.relpath(run_root() / named)) if named else None


def examine(intended: IntendedRun, host: ExaminedHost | None = None) -> Iterator[Diagnosis]:
    """Look at everything, the quick things first.

    Raises:
        ValueError: an unknown recipe, a number of nodes below 1, or a named file or folder that is not there.
    """
    host = host or ExaminedHost()
    for path in (intended.data, intended.checkpoint, intended.system):
        if path is not None and not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    found = gpus.query(host)
    layout = layout_of(intended, host, len(found.gpus))
    # Only for GPUs: importing PyTorch takes long, and a run without them needs no answer.
    about = _Examined(intended, layout, host, found, ask_pytorch(host) if layout.on_gpus else {})
    for check in _CHECKS:
        yield from check(about)


def _check_batch(about: _Examined) -> Iterator[Diagnosis]:
    layout = about.layout
    if not layout.recipe:
        yield ok("recipe", "none given: only the machine is looked at (--recipe NAME looks at a run)")
        return
    batch, steps = (layout.setting("training", name) for name in ("global_batch_size", "gradient_accumulation_steps"))
    division = f"{layout.nodes} node(s) x {layout.ranks} rank(s) x {steps} micro-batch(es)"
    if layout.copy > 1:
        division += f", {layout.copy} ranks to a copy of the model,"
    if layout.ranks % layout.tensor:
        remedy = f"start a multiple of {layout.tensor} ranks on each node (NPROC), or change --parallel.tensor"
        found = f"{layout.ranks} rank(s) of a node cannot share copies of the model by {layout.tensor}"
        yield fail("recipe", found, remedy)
    elif not _is_whole(layout):
        remedy = "change --parallel.pipeline: nodes hold whole copies of the model, or copies take whole nodes"
        yield fail("recipe", f"{layout.pipeline} stages of {layout.tensor} rank(s) do not divide {division}", remedy)
    elif batch * layout.copy % (layout.world_size * steps):
        remedy = "change the number of nodes (--nodes) or ranks (NPROC), or --training.gradient-accumulation-steps"
        yield fail("recipe", f"a batch of {batch} cannot be divided over {division}", remedy)
    else:
        each = batch * layout.copy // (layout.world_size * steps)
        yield ok("recipe", f"{layout.recipe}: a batch of {batch} over {division} of {each} sequence(s)")


def _is_whole(layout: RunLayout) -> bool:
    """Tell whether the ranks divide into copies of the model."""
    groups, stages = layout.ranks // layout.tensor, layout.pipeline
    return layout.nodes * groups % stages == 0 and (groups % stages == 0 or stages % groups == 0)


def _check_machine(about: _Examined) -> Iterator[Diagnosis]:
    host, layout = about.host, about.layout
    # The time of a file comes from its server's clock, which may be ahead.
    not_before = Path(__file__).stat().st_mtime - 24 * 3600
    yield from vitals.clock(host, layout, vitals.read_clock(), not_before)
    yield from accelerators(host, layout, about.gpus, about.pytorch)
    yield from vitals.memory(host, layout)
    yield from vitals.processors(host, layout)
    yield from vitals.limits(host, layout)
    yield from vitals.network(host, layout)
    yield from rendezvous(host)
    yield ok("container", container(host) or "none")


def _check_packages(_: _Examined) -> Iterator[Diagnosis]:
    installed = version("mlperf-logging")
    constraints = REPOSITORY / "constraints.txt"  # which an installed package is without
    pins = constraints.read_text(encoding="utf-8").split() if constraints.exists() else [f"mlperf-logging=={installed}"]
    pinned = {name: number for name, _, number in (pin.partition("==") for pin in pins)}
    remedy = "install the pinned packages: rm -r .venv, and run run_and_time.sh again"
    if not installed:
        yield fail("mlperf-logging", "not installed, so no log can be written or checked", remedy)
    elif not _has_bert_rules():
        found = f"{installed} has no rules of BERT for {rules.NEWEST_RULESET}"
        yield fail("mlperf-logging", found, remedy)
    elif installed != pinned.get("mlperf-logging"):
        found = f"{installed}, but this repository was tested with {pinned.get('mlperf-logging')}"
        yield warn("mlperf-logging", found, remedy)
    else:
        yield ok("mlperf-logging", f"{installed}, with the rules of {rules.NEWEST_RULESET}")


def _has_bert_rules() -> bool:
    folder = resources.files("mlperf_logging.compliance_checker")
    return (folder / f"training_{rules.NEWEST_RULESET}" / "closed_bert.yaml").is_file()


def _check_caches(about: _Examined) -> Iterator[Diagnosis]:
    """Open the switch for writing: that drops nothing, and root in a container with a read-only /proc/sys may not."""
    switch = about.host.path("/proc/sys/vm/drop_caches")
    remedy = "run as root, in a container with --privileged, or allow sudo sysctl for it (Slurm: see launch/slurm.sub)"
    try:
        os.close(os.open(switch, os.O_WRONLY))
    except OSError as error:
        # -l asks whether the command would be allowed, and runs nothing; -n asks for no password.
        command = ("sudo", "-n", "-l", "sysctl", "-q", "vm.drop_caches=3")
        if about.host.run(*command, timeout_s=10).answer:
            yield ok("caches", "may be dropped by way of sudo, as launch/slurm.sub does")
            return
        found = f"may not be dropped before the run: {switch}: {error.strerror}"
        yield fail_or_warn("caches", about.layout.is_closed, found, f"{remedy} (TR 6.1)")
    else:
        yield ok("caches", "may be dropped before the run")


def _check_storage(about: _Examined) -> Iterator[Diagnosis]:
    folders = [about.folder("train"), about.folder("evaluation")]
    for folder in dict.fromkeys(folder for folder in folders if folder and folder.exists()):
        for place in (folder, *linked_elsewhere(folder)):
            storage = storage_of(place, about.host)
            if storage.durability == "memory":
                remedy = "put the data on a disk: the rules want them on durable storage, not in memory (TR 6.1)"
                yield fail_or_warn("data", about.layout.is_closed, f"{place} lies in {storage.description}", remedy)
            elif storage.durability == "durable":
                yield ok("data", f"{place} lies on {storage.description}")
            else:
                remedy = "mount the data into the container from a disk of the host"
                yield warn("data", f"{place} lies on {storage.description}", remedy)


def _check_results(about: _Examined) -> Iterator[Diagnosis]:
    results = about.results
    if results is None:
        return
    # The nearest folder that is there: the others will be made in it.
    existing = next(folder for folder in (results.absolute(), *results.absolute().parents) if folder.exists())
    storage, usage = storage_of(existing, about.host), shutil.disk_usage(existing)
    named = f"{results}, on {storage.description}"
    if storage.is_read_only or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "choose another folder (--log.results), or change its owner"
        yield fail("results", f"{named}, may not be written", remedy)
        return
    if usage.free < RESULTS_BYTES:
        found = f"{named}: {usage.free / 2**20:.0f} MiB are free"
        yield fail_or_warn("results", usage.free < RESULTS_BYTES // 16, found, "make room, or choose another folder")
    elif storage.durability == "memory":
        yield warn("results", f"{named}: a reboot forgets them", "choose a folder on a disk (--log.results)")
    else:
        yield ok("results", f"{named}: {usage.free / 2**30:.0f} GiB are free")
    yield from _check_earlier(about, results)


def _check_earlier(about: _Examined, results: Path) -> Iterator[Diagnosis]:
    folder = results / str(about.layout.setting("log", "system") or "") / "bert"
    wanted, target = about.layout.setting("log", "run"), SUBMISSION_RUNS
    there = sorted(int(match[1]) for path in folder.glob("*") if (match := rules.RESULT_FILE.fullmatch(path.name)))
    if not about.layout.recipe:
        return
    if wanted is not None and wanted in there:
        yield fail("results", f"{folder}/result_{wanted}.txt is there already", "move it away, or set another log.run")
    elif len(there) >= target and about.layout.is_closed:
        remedy = "move them away (with metrics_*), or set log.system to another name"
        yield warn("results", f"{len(there)} logs in {folder} already, and a submission has {target}", remedy)
    elif there:
        missing = len(there) < there[-1] + 1  # they count from 0
        gaps = "; their numbers have gaps, and the next run fills the first" if missing else ""
        yield ok("results", f"{len(there)} log(s) in {folder} already{gaps}")


def _check_source(about: _Examined) -> Iterator[Diagnosis]:
    # Results and data change with every run and are no source.
    command = ("git", "status", "--porcelain", "--", ".", ":!results", ":!data")
    status = about.host.run(*command, timeout_s=30)
    if not status.trouble:
        changed = status.text.splitlines()
        head = about.host.run("git", "rev-parse", "--short", "HEAD").answer.strip()
        if changed:
            # Two letters of state and a space come first.
            files = ", ".join(line[3:] for line in changed[:3]) + (" ..." if len(changed) > 3 else "")
            found = f"{len(changed)} file(s) differ from commit {head}: {files}"
            why = "a submission holds the source that was run (SR Source code)"
            remedy = f"commit them: {why if about.layout.is_closed else 'the log names the commit that was run'}"
            yield warn("source", found, remedy)
        else:
            yield ok("source", f"commit {head}, without changes")
    elif commit := about.host.environment.get("MLPERF_BERT_COMMIT", "unknown").replace("unknown", ""):
        yield ok("source", f"an image made from commit {commit[:12]}")
    else:
        remedy = "run from a git checkout, or build the image with --build-arg REVISION"
        yield warn("source", "which commit this is cannot be told", remedy)


def _check_system_file(about: _Examined) -> Iterator[Diagnosis]:
    if path := about.system_file:
        yield from compare(path, about.layout, about.host)


def _check_checkpoint(about: _Examined) -> Iterator[Diagnosis]:
    path = about.checkpoint
    if path is None:
        return
    remedy = f"make it by {_MAKE_DATA}, or by python -m bert.convert (docs/checkpoints.md)"
    try:
        tensors, parameters = read_safetensors_header(path)
    except ValueError as error:
        yield fail("checkpoint", str(error), remedy)
        return
    vocabulary, hidden = (about.layout.setting("model", name) for name in ("vocab_size", "hidden_size"))
    matrices = [shape for shape in tensors.values() if len(shape) == 2]
    if hidden and not any(rows >= vocabulary and columns == hidden for rows, columns in matrices):
        found = f"{path} holds no word embeddings of {vocabulary} x {hidden}, which {about.layout.recipe} trains"
        yield fail("checkpoint", found, remedy)
    else:
        yield ok("checkpoint", f"{path}: whole, {len(tensors)} tensors, {parameters / 1e6:.1f} million parameters")


def read_safetensors_header(path: Path) -> tuple[dict[str, list[int]], int]:
    """Shapes by tensor and the number of parameters of a safetensors file, whose size is compared with its header.

    Raises:
        ValueError: the file is missing, no safetensors file, or cut off.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            # Before the header is read: eight bytes of another file could claim any length.
            if not 2 <= length <= min(CHECKPOINT_HEADER_BYTES, size - 8):
                raise ValueError(f"{path}: not a safetensors file")
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        shapes = {name: [int(number) for number in entry["shape"]] for name, entry in entries.items()}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError):
        raise ValueError(f"{path}: not a safetensors file, or damaged") from None
    # Offsets count from behind the header, and the last tensor ends the file.
    if size != 8 + length + end:
        raise ValueError(f"{path}: {size} bytes, but its header speaks of {8 + length + end}: cut off or damaged")
    return shapes, sum(map(math.prod, shapes.values()))


def _check_dry_run(about: _Examined) -> Iterator[Diagnosis]:
    """The trainer's own checks: data, vocabulary, settings, the free number of the result."""
    if not about.layout.recipe:
        return
    arguments = ["-m", "bert.train", about.layout.recipe, "--dry-run"]
    intended = about.intended
    given: dict[str, object] = {"log.results": intended.results, "data.initial-checkpoint": intended.checkpoint}
    if intended.data:
        given |= {"data.train": about.folder("train"), "data.evaluation": about.folder("evaluation")}
    for name, value in given.items():
        # From the root on, as the trainer starts in the repository.
        arguments += [f"--{name}", str(Path(str(value)).absolute())] if value else []
    # One process, which checks the shares of as many as the run will have.
    environment = {"WORLD_SIZE": str(about.layout.world_size)}
    output = about.host.python(*arguments, timeout_s=DRY_RUN_TIMEOUT_S, environment=environment)
    remedy = "do what it says; python -m bert.train RECIPE --dry-run asks again"
    yield _last_line("dry run", output, remedy)


def _last_line(subject: str, output: Output, remedy: str, note: str = "") -> Diagnosis:
    """The last line of what a program of this repository says, which is its error if it failed."""
    if output.trouble:
        said = output.errors.strip() or output.text.strip() or output.trouble
        return fail(subject, said.splitlines()[-1].removeprefix("error: ")[:400], remedy)
    return ok(subject, output.text.strip().splitlines()[-1][:400] + note)


def _check_data(about: _Examined) -> Iterator[Diagnosis]:
    """Check every byte of the data against the manifest; this takes as long as reading it."""
    for name in ("train", "evaluation"):
        folder = about.folder(name)
        if folder is None:
            continue
        if not folder.exists():
            yield fail("data", f"{folder}: no such folder", f"make the data by {_MAKE_DATA}")
        elif about.intended.quick:
            yield warn("data", f"{folder} was not read through", "leave --quick out once, before the first run")
        else:
            begin = time.monotonic()
            arguments = ("-m", "dataloading", "verify", str(folder.absolute()))
            output = about.host.python(*arguments, timeout_s=VERIFY_TIMEOUT_S)
            remedy = f"copy it again, or make it again by {_MAKE_DATA}"
            yield _last_line("data", output, remedy, f"; read in {time.monotonic() - begin:.0f} s")


_CHECKS: tuple[Callable[[_Examined], Iterator[Diagnosis]], ...] = (
    _check_batch,
    _check_packages,
    _check_machine,
    _check_caches,
    _check_storage,
    _check_results,
    _check_source,
    _check_system_file,
    _check_checkpoint,
    _check_dry_run,
    _check_data,
)


def print_examination(intended: IntendedRun, as_json: bool) -> int:
    """Print each diagnosis as soon as it is known, or all as one JSON list. Returns the exit status: 1 if one fails.

    Raises:
        ValueError: see `examine`.
    """
    console = Console(highlight=False, soft_wrap=True)
    found: list[Diagnosis] = []
    for diagnosis in examine(intended):
        found.append(diagnosis)
        if not as_json:
            console.print(_lines(diagnosis))
    counts = Counter(diagnosis.state for diagnosis in found)
    if as_json:
        say_json([asdict(diagnosis) for diagnosis in found])
    else:
        say(f"{counts['fail']} fail, {counts['warn']} warn, {counts['ok']} ok")
    return 1 if counts["fail"] else 0


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _lines(diagnosis: Diagnosis) -> Text:
    shown = Text(no_wrap=True)
    shown.append(f"{diagnosis.state:<5}", style=_COLOURS[diagnosis.state])
    shown.append(f"{diagnosis.subject:<15} ", style="bold").append(visible(diagnosis.found))
    if diagnosis.remedy:
        shown.append(f"\n{'':20} -> {visible(diagnosis.remedy)}")
    return shown
