"""Check what a run reads and writes: recipe, packages, caches, data, results, source, checkpoint."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost
from compliance.doctor.layout import IntendedRun, RunLayout
from compliance.doctor.machine import Machine
from compliance.doctor.storage import Mount, storage_of
from compliance.doctor.system import version
from compliance.doctor.system_file import compare
from compliance.log import rules
from compliance.log.rules import SUBMISSION_RUNS
from console.processes import Output
from console.safetensors_header import read_header

DRY_RUN_TIMEOUT_S = 300.0
VERIFY_TIMEOUT_S = 3600.0
RESULTS_BYTES = 2**30
"""Free space that the logs and metrics of ten runs need at most."""

_MAKE_DATA = "python -m dataloading wikipedia FOLDER... (docs/data.md)"


@dataclass(frozen=True)
class ExaminedRun:
    """The run that is intended, with all that is known about it."""

    intended: IntendedRun
    layout: RunLayout
    host: ExaminedHost
    machine: Machine
    mounts: Sequence[Mount]
    pytorch: Mapping[str, Any]

    def folder(self, name: Literal["train", "evaluation"]) -> Path | None:
        """Return a data set of the run."""
        given = self.intended.data
        if given is None:
            return self.layout.named_path("data", name)
        inside = given / name
        # A folder without train and evaluation in it is a data set itself.
        return inside if inside.exists() or self.layout.recipe else given if name == "train" else None

    @property
    def results(self) -> Path | None:
        """The run's results/ folder."""
        return self.intended.results or self.layout.named_path("log", "results")

    @property
    def checkpoint(self) -> Path | None:
        """The weights that the run starts from."""
        return self.intended.checkpoint or self.layout.named_path("data", "initial_checkpoint")

    @property
    def system_file(self) -> Path | None:
        """The system description."""
        name = self.layout.setting("log", "system")
        in_results = self.results / "systems" / f"{name}.json" if self.results and name else None
        return self.intended.system or in_results


def check_batch(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check that the batch can be divided over ranks and micro-batches."""
    layout = run.layout
    if not layout.recipe:
        yield ok("recipe", "none given: only the machine is examined (--recipe NAME examines a run)")
        return
    batch, steps = (layout.setting("training", name) for name in ("global_batch_size", "gradient_accumulation_steps"))
    division = f"{layout.nodes} node(s) x {layout.ranks} rank(s) x {steps} micro-batch(es)"
    if layout.copy > 1:
        division += f", {layout.copy} ranks to a copy of the model,"
    each, rest = divmod(batch * layout.copy, layout.world_size * steps)
    if layout.ranks % layout.tensor or layout.world_size % layout.copy:
        remedy = "change the number of ranks (--nodes, NPROC), or --parallel.tensor and --parallel.pipeline"
        yield fail("recipe", f"copies of the model of {layout.copy} rank(s) cannot share {division}", remedy)
    elif rest:
        remedy = "change the number of ranks (--nodes, NPROC), or --training.gradient-accumulation-steps"
        yield fail("recipe", f"a batch of {batch} cannot be divided over {division}", remedy)
    else:
        yield ok("recipe", f"{layout.recipe}: a batch of {batch} over {division} of {each} sequence(s)")


def check_packages(_: ExaminedRun) -> Iterator[Diagnosis]:
    """Check that the official package is installed and has the newest rules."""
    installed, rules_file = version("mlperf-logging"), f"training_{rules.NEWEST_RULESET}/closed_bert.yaml"
    if not installed or not (resources.files("mlperf_logging.compliance_checker") / rules_file).is_file():
        found = f"{installed or 'not installed'}: no rules of BERT for {rules.NEWEST_RULESET}"
        yield fail("mlperf-logging", found, "install the pinned packages: rm -r .venv, and run run_and_time.sh again")
    else:
        yield ok("mlperf-logging", f"{installed}, with the rules of {rules.NEWEST_RULESET}")


def check_caches(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Open the switch that drops caches for writing, which drops nothing; root in a container may not."""
    switch = run.host.path("/proc/sys/vm/drop_caches")
    try:
        os.close(os.open(switch, os.O_WRONLY))
    except OSError as error:
        # -l asks whether the command would be allowed; -n asks for no password.
        if run.host.run("sudo", "-n", "-l", "sysctl", "-q", "vm.drop_caches=3", timeout_s=10).answer:
            yield ok("caches", "may be dropped by sudo, as launch/slurm.sub does")
            return
        found = f"may not be dropped before the run: {switch}: {error.strerror}"
        remedy = (
            "run as root, in a container with --privileged, or allow sudo sysctl (Slurm: see launch/slurm.sub; TR 6.1)"
        )
        yield fail_or_warn("caches", run.layout.is_closed, found, remedy)
    else:
        yield ok("caches", "may be dropped before the run")


def check_storage(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check that the data lie on durable storage (TR 6.1)."""
    folders = [run.folder("train"), run.folder("evaluation")]
    for folder in dict.fromkeys(folder for folder in folders if folder and folder.exists()):
        storage = storage_of(folder, run.mounts)
        found = f"{folder} lies on {storage.description}"
        if storage.durability == "memory":
            remedy = "put the data on a disk: the rules want durable storage (TR 6.1)"
            yield fail_or_warn("data", run.layout.is_closed, found, remedy)
        elif storage.durability == "durable":
            yield ok("data", found)
        else:
            yield warn("data", found, "mount the data into the container from a disk of the host")


def check_results(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check that results can be written, and what the folder holds already."""
    results = run.results
    if results is None:
        return
    # The nearest folder that exists; the others will be made in it.
    existing = next(folder for folder in (results.absolute(), *results.absolute().parents) if folder.exists())
    storage, free = storage_of(existing, run.mounts), shutil.disk_usage(existing).free
    named = f"{results}, on {storage.description}"
    if storage.is_read_only or not os.access(existing, os.W_OK | os.X_OK):
        yield fail(
            "results", f"{named}, may not be written", "choose another folder (--log.results), or change its owner"
        )
        return
    if free < RESULTS_BYTES:
        found = f"{named}: {free / 2**20:.0f} MiB are free"
        yield fail_or_warn("results", free < RESULTS_BYTES // 16, found, "make room, or choose another folder")
    elif storage.durability == "memory":
        yield warn("results", f"{named}: a reboot clears it", "choose a folder on a disk (--log.results)")
    else:
        yield ok("results", f"{named}: {free / 2**30:.0f} GiB are free")
    if run.layout.recipe:
        yield from _earlier_logs(run.layout, results)


def _earlier_logs(layout: RunLayout, results: Path) -> Iterator[Diagnosis]:
    folder, wanted = results / str(layout.setting("log", "system") or "") / "bert", layout.setting("log", "run")
    there = {int(match[1]) for path in folder.glob("*") if (match := rules.RESULT_FILE.fullmatch(path.name))}
    if wanted in there:
        yield fail("results", f"{folder}/result_{wanted}.txt exists already", "move it away, or set another log.run")
    elif len(there) >= SUBMISSION_RUNS and layout.is_closed:
        remedy = "move them away (with metrics_*), or set log.system to another name"
        yield warn("results", f"{len(there)} logs in {folder} already, and a submission has {SUBMISSION_RUNS}", remedy)
    elif there:
        yield ok("results", f"{len(there)} log(s) in {folder} already")


def check_source(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check that the commit of the source is known, and that no file differs from it."""
    # Results and data change with every run and are no source.
    status = run.host.run("git", "status", "--porcelain", "--", ".", ":!results", ":!data", timeout_s=30)
    changed = status.text.splitlines()
    built_from = run.host.environment.get("MLPERF_BERT_COMMIT", "unknown")
    if status.trouble and built_from == "unknown":
        yield warn(
            "source", "its commit is unknown", "run from a checkout, or build the image with --build-arg REVISION"
        )
    elif status.trouble:
        yield ok("source", f"an image built from commit {built_from[:12]}")
    elif changed:
        # Two letters of state and a space come first.
        files = ", ".join(line[3:] for line in changed[:3]) + (" ..." if len(changed) > 3 else "")
        remedy = (
            "commit them: the log names the commit, and a submission holds the source that was run (SR Source code)"
        )
        yield warn("source", f"{len(changed)} file(s) differ from the commit: {files}", remedy)
    else:
        head = run.host.run("git", "rev-parse", "--short", "HEAD").answer.strip()
        yield ok("source", f"commit {head}, without changes")


def check_system_file(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Compare the system description with this machine."""
    if path := run.system_file:
        yield from compare(path, run.layout, run.host, run.machine)


def check_checkpoint(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check that the weights are whole, and of the recipe's model."""
    path = run.checkpoint
    if path is None:
        return
    remedy = f"make it by {_MAKE_DATA}, or by python -m bert.convert (docs/checkpoints.md)"
    try:
        shapes, _ = read_header(path)
    except ValueError as error:
        yield fail("checkpoint", str(error), remedy)
        return
    vocabulary, hidden = (run.layout.setting("model", name) for name in ("vocab_size", "hidden_size"))
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    if hidden and not any(rows >= vocabulary and columns == hidden for rows, columns in matrices):
        found = f"{path} holds no word embeddings of {vocabulary} x {hidden}, which {run.layout.recipe} trains"
        yield fail("checkpoint", found, remedy)
    else:
        parameters = sum(map(math.prod, shapes.values()))
        yield ok("checkpoint", f"{path}: whole, {len(shapes)} tensors, {parameters / 1e6:.1f} million parameters")


def check_dry_run(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Ask the trainer for its own checks: data, vocabulary, settings, the free number of the result."""
    if not run.layout.recipe:
        return
    arguments = ["-m", "bert.train", run.layout.recipe, "--dry-run"]
    given = {"log.results": run.intended.results, "data.initial-checkpoint": run.intended.checkpoint}
    if run.intended.data:
        given |= {"data.train": run.folder("train"), "data.evaluation": run.folder("evaluation")}
    for name, path in given.items():
        # Absolute, as the trainer starts in the repository.
        arguments += [f"--{name}", str(path.absolute())] if path else []
    # One process, which checks the shares of as many ranks as the run will have.
    environment = {"WORLD_SIZE": str(run.layout.world_size)}
    output = run.host.python(*arguments, timeout_s=DRY_RUN_TIMEOUT_S, environment=environment)
    yield _last_line("dry run", output, "do what it says; python -m bert.train RECIPE --dry-run asks again")


def check_data(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Check every byte of the data against the manifest, which takes as long as reading the data."""
    for name in ("train", "evaluation"):
        folder = run.folder(name)
        if folder is None:
            continue
        if not folder.exists():
            yield fail("data", f"{folder}: no such folder", f"make the data by {_MAKE_DATA}")
        elif run.intended.quick:
            yield warn("data", f"{folder} was not read", "omit --quick once, before the first run")
        else:
            begin = time.monotonic()
            arguments = ("-m", "dataloading", "verify", str(folder.absolute()))
            output = run.host.python(*arguments, timeout_s=VERIFY_TIMEOUT_S)
            remedy = f"copy it again, or make it again by {_MAKE_DATA}"
            yield _last_line("data", output, remedy, f"; read in {time.monotonic() - begin:.0f} s")


def _last_line(subject: str, output: Output, remedy: str, note: str = "") -> Diagnosis:
    if output.trouble:
        return fail(subject, output.complaint[:400], remedy)
    return ok(subject, output.text.strip().splitlines()[-1][:400] + note)
