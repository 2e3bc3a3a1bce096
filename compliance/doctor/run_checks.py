"""Check what a run reads and writes: recipe, caches, data, results, source."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost
from compliance.doctor.run import ExaminedRun
from compliance.log import rules
from compliance.log.rules import SUBMISSION_RUNS
from console.processes import Output

DRY_RUN_TIMEOUT_S = 300.0
VERIFY_TIMEOUT_S = 3600.0


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
LAYERED = frozenset({"overlay", "aufs"})
"""File system types of container layers, which are lost with the container."""


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    kind: str

    def __str__(self) -> str:
        return f"{'memory: ' if self.kind in IN_MEMORY else ''}{self.kind} at {self.point}"


def read_mounts() -> list[Mount]:
    """List all mounted file systems, in the order in which they were mounted."""
    import psutil

    return [Mount(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)]


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount:
    """Return the file system of a file or folder, which need not exist yet. Links are followed."""
    around = [mount for mount in mounts if path.resolve().is_relative_to(mount.point)]
    # The deepest mount point holds the path. The last mount on the same folder hides earlier ones.
    return max(reversed(around), key=lambda mount: len(mount.point), default=Mount("/", "unknown"))


def check_recipe(run: ExaminedRun) -> Iterator[Diagnosis]:
    """Report the ranks of the run. The dry run checks that they can share the batch evenly."""
    if run.recipe:
        batch = run.setting("training", "global_batch_size")
        yield ok("recipe", f"{run.recipe}: a batch of {batch} over {run.nodes} node(s) x {run.ranks} rank(s)")
    else:
        yield ok("recipe", "none given: only the machine is examined (--recipe NAME examines a run)")


def check_caches(run: ExaminedRun, host: ExaminedHost) -> Iterator[Diagnosis]:
    """Check that the run may drop the page cache. Opening the file drops nothing, and even root may fail in a container."""
    switch = host.path("/proc/sys/vm/drop_caches")
    try:
        os.close(os.open(switch, os.O_WRONLY))
    except OSError as error:
        # -l asks whether the command would be allowed; -n asks for no password.
        if host.run("sudo", "-n", "-l", "sysctl", "-q", "vm.drop_caches=3", timeout_s=10).answer:
            yield ok("caches", "may be dropped by sudo, as launch/slurm.sub does")
            return
        found = f"may not be dropped before the run: {switch}: {error.strerror}"
        remedy = (
            "run as root, in a container with --privileged, or allow sudo sysctl (Slurm: see launch/slurm.sub; TR 6.1)"
        )
        yield fail_or_warn("caches", run.is_closed, found, remedy)
    else:
        yield ok("caches", "may be dropped before the run")


def check_storage(run: ExaminedRun, mounts: Sequence[Mount]) -> Iterator[Diagnosis]:
    """Check that the data are on durable storage (TR 6.1)."""
    folders = [run.folder("train"), run.folder("evaluation")]
    for folder in dict.fromkeys(folder for folder in folders if folder and folder.exists()):
        mount = mount_of(folder, mounts)
        found = f"{folder} lies on {mount}"
        if mount.kind in IN_MEMORY:
            remedy = "put the data on a disk: the rules want durable storage (TR 6.1)"
            yield fail_or_warn("data", run.is_closed, found, remedy)
        elif mount.kind in LAYERED:
            yield warn("data", f"{found}, a layer of the container", "mount the data from a disk of the host")
        else:
            yield ok("data", found)


def check_results(run: ExaminedRun, mounts: Sequence[Mount]) -> Iterator[Diagnosis]:
    """Check the storage of the results folder and its existing files. The dry run checks that it is writable."""
    results = run.results
    if results is None:
        return
    mount = mount_of(results, mounts)
    folder = results / str(run.setting("log", "system") or "") / "bert"
    there = sum(bool(rules.RESULT_FILE.fullmatch(path.name)) for path in folder.glob("*"))
    found = f"{results}, on {mount}: {there} log(s) of this system already"
    if mount.kind in IN_MEMORY:
        yield warn("results", f"{results} lies on {mount}", "choose a folder on a disk (--log.results)")
    elif there >= SUBMISSION_RUNS and run.is_closed:
        remedy = "move them away (with metrics_*), or set log.system to another name"
        yield warn("results", f"{found}, and a submission has {SUBMISSION_RUNS}", remedy)
    else:
        yield ok("results", found)


def check_source(revision: str) -> Iterator[Diagnosis]:
    """Check that the source's commit is known and unmodified (see `console.version.commit`)."""
    if revision == "unknown":
        yield warn(
            "source", "its commit is unknown", "run from a checkout, or build the image with --build-arg REVISION"
        )
    elif " " in revision:
        yield warn("source", f"commit {revision}", "commit them: a submission holds the source of its runs")
    else:
        yield ok("source", f"commit {revision[:12]}")


def check_dry_run(run: ExaminedRun, host: ExaminedHost) -> Iterator[Diagnosis]:
    """Run the trainer's own checks: data, vocabulary, settings, and a free result number."""
    if not run.recipe:
        return
    arguments = ["-m", "bert.train", run.recipe, "--dry-run"]
    given = {"log.results": run.intended.results, "data.initial-checkpoint": run.intended.checkpoint}
    if run.intended.data:
        given |= {"data.train": run.folder("train"), "data.evaluation": run.folder("evaluation")}
    for name, path in given.items():
        # Make the path absolute, because the trainer starts in the repository.
        arguments += [f"--{name}", str(path.absolute())] if path else []
    # A single process checks the shares of all ranks that the run will have.
    environment = {"WORLD_SIZE": str(run.world_size)}
    output = host.python(*arguments, timeout_s=DRY_RUN_TIMEOUT_S, environment=environment)
    yield _last_line("dry run", output, "do what it says; python -m bert.train RECIPE --dry-run asks again")


def check_data(run: ExaminedRun, host: ExaminedHost) -> Iterator[Diagnosis]:
    """Check every byte of the data against the manifest, which takes as long as reading the data."""
    for name in ("train", "evaluation"):
        folder = run.folder(name)
        if folder is None or not folder.exists():  # the dry run reports this, with the command that makes the data
            continue
        if run.intended.quick:
            yield warn("data", f"{folder} was not read", "omit --quick once, before the first run")
        else:
            begin = time.monotonic()
            arguments = ("-m", "dataloading", "verify", str(folder.absolute()))
            output = host.python(*arguments, timeout_s=VERIFY_TIMEOUT_S)
            remedy = "copy it again, or make it again (docs/data.md)"
            yield _last_line("data", output, remedy, f"; read in {time.monotonic() - begin:.0f} s")


def _last_line(subject: str, output: Output, remedy: str, note: str = "") -> Diagnosis:
    if output.trouble:
        return fail(subject, output.complaint[:400], remedy)
    return ok(subject, output.text.strip().splitlines()[-1][:400] + note)
