"""Work out the run to check, with the nodes and ranks that the launchers would choose, and check its files."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compliance.doctor.diagnosis import Diagnosis, fail, fail_or_warn, ok, warn
from compliance.doctor.host import ExaminedHost, run_root
from console.processes import Output
from console.text import counted
from console.version import commit

RECIPE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class IntendedRun:
    """Options of the doctor command. None means that the recipe decides. Without a recipe, only the machine is checked."""

    recipe: str = ""
    data: Path | None = None
    checkpoint: Path | None = None
    results: Path | None = None
    nodes: int | None = None
    quick: bool = False


@dataclass(frozen=True)
class ExaminedRun:
    """A run to check. `settings` are its recipe's settings as text. It has `nodes` nodes with `ranks` ranks on each.

    Without a recipe there are no settings, and only the machine is checked.
    """

    intended: IntendedRun
    settings: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    ranks: int = 1

    @property
    def recipe(self) -> str:
        """Name of the recipe; "" without one."""
        return self.intended.recipe

    @property
    def on_gpus(self) -> bool:
        return self.settings.get("training.device") == "cuda"

    @property
    def is_closed(self) -> bool:
        return self.settings.get("log.division") == "closed"

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def folder(self, name: Literal["train", "evaluation"]) -> Path | None:
        """Return the folder of the training or evaluation set; None if it is unknown."""
        given = self.intended.data
        if given is None:
            return self._named(f"data.{name}")
        inside = given / name
        # A folder that does not contain train and evaluation is itself a data set.
        return inside if inside.exists() or self.recipe else given if name == "train" else None

    @property
    def results(self) -> Path | None:
        """The run's results/ folder; None if neither the user nor a recipe names one."""
        return self.intended.results or self._named("log.results")

    def _named(self, setting: str) -> Path | None:
        """Return the path in a setting, relative to the current folder. The recipe states it relative to `run_root`."""
        named = self.settings.get(setting)
        return Path(os.path.relpath(run_root() / named)) if named else None


def shape_in_name(recipe: str) -> tuple[int, int] | None:
    """Return the nodes and the GPUs per node in a recipe's name, such as dgxa100_8x8; None if it states none."""
    match = re.search(r"_(\d+)x(\d+)$", recipe)
    return (int(match[1]), int(match[2])) if match else None


def lay_out(intended: IntendedRun, host: ExaminedHost, gpus_here: int) -> ExaminedRun:
    """Return the requested run with the nodes and ranks that the launchers would choose.

    Raises ``ValueError`` if the recipe is unknown, a number of nodes or ranks is below 1, a given file or folder does not
    exist, a checkpoint is given without a recipe, or the trainer is missing.
    """
    # An installation by pip lacks the trainer (bert), which reads recipes and checks data.
    if (intended.recipe or intended.data) and not (run_root() / "bert").is_dir():
        raise ValueError("--recipe and --data need the trainer: run the doctor in the root of a clone")
    for option, path in (("--data", intended.data), ("--checkpoint", intended.checkpoint)):
        if path is not None and not path.exists():
            raise ValueError(f"{option} {path}: no such file or folder")
    if intended.checkpoint and not intended.recipe:
        raise ValueError("--checkpoint needs --recipe: the trainer checks that the weights fit its model")
    if intended.nodes is not None and intended.nodes < 1:
        raise ValueError(f"--nodes is {intended.nodes}, expected at least 1")
    shape = shape_in_name(intended.recipe)
    nodes = intended.nodes or _count(host, "NNODES") or _count(host, "SLURM_JOB_NUM_NODES") or (shape or (1,))[0]
    settings = _ask_recipe(intended.recipe, host) if intended.recipe else {}
    # This counts processes like `bert.launch.layout`. It is repeated here because this package must not import bert.
    on_cpu = 2 if intended.recipe in ("tiny_cpu", "own_text_cpu") and len(os.sched_getaffinity(0)) > 1 else 1
    per_node = shape[1] if shape else on_cpu if settings.get("training.device") == "cpu" else gpus_here
    return ExaminedRun(intended, settings, nodes, max(1, _count(host, "NPROC") or per_node))


def _ask_recipe(recipe: str, host: ExaminedHost) -> dict[str, str]:
    # Read the recipe in a separate process, because modules of this package must not import bert.
    output = host.python("-m", "bert.train", recipe, "--print-config", timeout_s=RECIPE_TIMEOUT_S)
    settings = dict(re.findall(r"^# config\.(\S+): (.*)$", output.answer, re.MULTILINE))
    if not settings:
        raise ValueError(f"--recipe {recipe}: {output.complaint[:400]}")
    return settings


def _count(host: ExaminedHost, variable: str) -> int | None:
    text = host.environment.get(variable)
    if text and not re.fullmatch("[1-9][0-9]{0,8}", text):  # the launchers refuse such a value too
        raise ValueError(f"{variable} is {text!r}, expected a whole number of at least 1")
    return int(text) if text else None


DRY_RUN_TIMEOUT_S = 300.0
VERIFY_TIMEOUT_S = 3600.0


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
LAYERED = frozenset({"overlay", "aufs"})
"""File system types of a container's own layers. Files there are lost when the container is removed."""


def _file_system(path: Path, host: ExaminedHost) -> tuple[str, str]:
    """Return the type of a path's file system, such as ext4, and a sentence about it. The path need not exist yet."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    *_, line = host.run("df", "--output=fstype,target", str(there)).answer.splitlines() or ["unknown /"]
    kind, _, point = line.partition(" ")
    return kind, f"{path} lies on {'memory: ' if kind in IN_MEMORY else ''}{kind} at {point.strip()}"


def check_recipe(run: ExaminedRun) -> Diagnosis:
    """Report how many ranks share the batch. Whether they can share it evenly is checked later, by the dry run."""
    if not run.recipe:
        return ok("recipe", "none given: only the machine is examined (--recipe NAME examines a run)")
    batch = run.settings["training.global_batch_size"]
    return ok(
        "recipe", f"{run.recipe}: a batch of {batch} over {counted(run.nodes, 'node')} x {counted(run.ranks, 'rank')}"
    )


def check_files(run: ExaminedRun, host: ExaminedHost) -> Iterator[Diagnosis]:
    """Check caches, data, results and source. The slowest checks come last."""
    yield _caches(run, host)
    yield from _storage(run, host)
    yield _source()
    if run.recipe:
        yield _dry_run(run, host)
    yield from _data(run, host)


def _caches(run: ExaminedRun, host: ExaminedHost) -> Diagnosis:
    switch = host.path("/proc/sys/vm/drop_caches")
    try:
        # Even root may lack this permission in a container, so try to open the file. Opening alone drops no caches.
        os.close(os.open(switch, os.O_WRONLY))
    except OSError as error:
        # -l only tests whether sudo allows the command, and -n prevents a password prompt.
        if host.run("sudo", "-n", "-l", "sysctl", "-q", "vm.drop_caches=3", timeout_s=10).answer:
            return ok("caches", "can be dropped with sudo, as launch/slurm.sub does")
        found = f"cannot be dropped before the run: {switch}: {error.strerror}"
        remedy = "run as root, in a container with --privileged, or allow sudo sysctl"
        return fail_or_warn("caches", run.is_closed, found, f"{remedy} (Slurm: see launch/slurm.sub; TR 6.1)")
    return ok("caches", "can be dropped before the run")


def _storage(run: ExaminedRun, host: ExaminedHost) -> Iterator[Diagnosis]:
    folders = [run.folder("train"), run.folder("evaluation")]
    for folder in dict.fromkeys(folder for folder in folders if folder and folder.exists()):
        kind, found = _file_system(folder, host)
        if kind in IN_MEMORY:
            remedy = "put the data on a disk: the rules want durable storage (TR 6.1)"
            yield fail_or_warn("data", run.is_closed, found, remedy)
        elif kind in LAYERED:
            yield warn("data", f"{found}, a layer of the container", "mount the data from a disk of the host")
        else:
            yield ok("data", found)
    if run.results is not None:
        kind, found = _file_system(run.results, host)
        if kind in IN_MEMORY:
            yield warn("results", found, "choose a folder on a disk (--log.results)")
        else:
            yield ok("results", found)


def _source() -> Diagnosis:
    revision = commit()
    if revision == "unknown":
        remedy = "run from a checkout, or build the image with --build-arg REVISION"
        return warn("source", "the commit is unknown", remedy)
    if " " in revision:
        return warn("source", f"commit {revision}", "commit all changes: a submission holds the source of its runs")
    return ok("source", f"commit {revision[:12]}")


def _dry_run(run: ExaminedRun, host: ExaminedHost) -> Diagnosis:
    """Run the trainer's own checks: data, vocabulary, settings, and a free result number."""
    arguments = ["-m", "bert.train", run.recipe, "--dry-run"]
    given = {"log.results": run.intended.results, "data.initial-checkpoint": run.intended.checkpoint}
    if run.intended.data:
        given |= {"data.train": run.folder("train"), "data.evaluation": run.folder("evaluation")}
    for name, path in given.items():
        # Make the path absolute, because the trainer starts in the repository.
        arguments += [f"--{name}", str(path.absolute())] if path else []
    # The dry run is a single process. With WORLD_SIZE, it checks how all ranks of the run would share the batch.
    environment = {"WORLD_SIZE": str(run.world_size)}
    output = host.python(*arguments, timeout_s=DRY_RUN_TIMEOUT_S, environment=environment)
    return _last_line(
        "dry run", output, "correct what the message names, and run python -m bert.train RECIPE --dry-run"
    )


def _data(run: ExaminedRun, host: ExaminedHost) -> Iterator[Diagnosis]:
    """Check every byte of the data against the manifest. This reads all data, so it may take long."""
    for name in ("train", "evaluation"):
        folder = run.folder(name)
        if folder is None or not folder.exists():  # the dry run reports a missing folder
            continue
        if run.intended.quick:
            yield warn("data", f"{folder} was not read", "run the doctor once without --quick before the first run")
        else:
            arguments = ("-m", "dataloading", "verify", str(folder.absolute()))
            output = host.python(*arguments, timeout_s=VERIFY_TIMEOUT_S)
            yield _last_line("data", output, "copy the data again, or create it again (docs/data.md)")
            for line in output.errors.splitlines():
                if line.startswith("warning: "):  # verify warns that text is missing from the data
                    found, _, remedy = line.removeprefix("warning: ").partition("; ")
                    yield warn("data", f"{folder.name}: {found}", remedy)


def _last_line(subject: str, output: Output, remedy: str) -> Diagnosis:
    if output.trouble:
        return fail(subject, output.complaint[:400], remedy)
    return ok(subject, output.text.strip().splitlines()[-1][:400])
