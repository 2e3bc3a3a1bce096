"""Checkpoints, from which a run can continue on any number of ranks.

    FOLDER/step_00000120/model.safetensors      weights, also accepted by ``data.initial_checkpoint``
                         momentum.safetensors   LAMB's first moments, under the names of the weights
                         variance.safetensors   LAMB's second moments
                         site_momentum.safetensors  momentum of the exchange between sites, if any
                         state.json             everything else, with the size and digest of each file

The content does not depend on the number of ranks: the files hold whole tensors, which are gathered from all ranks, and
the order of the samples follows from the seed and the step. Rank 0 reads and writes the files for all ranks. Only one run
at a time uses the folder. PyTorch's own formats are not used, because they contain pickles, which can run any code when
they are loaded. A checkpoint gets its final name only when it is completely on disk.
"""

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert.configuration.config import Config, flattened
from bert.parallel.environment import job
from bert.parallel.mesh import Mesh, agreed_text, broadcast_
from bert.step import TrainingStep
from console.files import BusyError, is_temporary, lock_file, read_bounded, sha256_of, shown
from console.program import say
from console.text import counted
from dataloading.dataset.folder import Dataset

FILES = ("model.safetensors", "momentum.safetensors", "variance.safetensors")
SITE_MOMENTUM = "site_momentum.safetensors"
BYTES_PER_PARAMETER = 4 * len(FILES)
_STATE_BYTES = 1 << 20
_REMEDY = "remove it, or resume from another"
_PATIENCE_S = 60.0
_MOST_NAMED = 8

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # counters on the device are int64
_Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


@dataclass(frozen=True)
class Allocation:
    """Hosts that a launcher has allocated to a run, and how the global batch is divided among their ranks."""

    hosts: Annotated[dict[str, _Positive], msgspec.Meta(min_length=1)]
    """Number of ranks on each host, by host name."""
    accumulation: _Positive
    """Number of micro-batches per rank and step."""
    sequences: _Positive
    """Maximum number of sequences in a micro-batch."""
    fitting: _Positive
    """Largest number of sequences that a micro-batch has had so far. So many are known to fit in the devices' memory."""
    job: str = ""
    """Name of the launcher's job that the run belongs to (``bert.parallel.environment.job``), or "" if there is none."""
    sites: dict[str, str] = field(default_factory=dict)
    """Site of each host, by host name. It is empty unless there are several sites."""

    @classmethod
    def of(
        cls, hosts: Sequence[str], config: Config, before: "Allocation | None" = None, sites: Sequence[str] = ()
    ) -> "Allocation":
        """Return a run's allocation, given each rank's host name and site.

        ``before`` is the allocation of the run that this run continues.
        """
        steps, copies = config.training.gradient_accumulation_steps, len(hosts) // config.parallel.copy_ranks
        sequences = -(-config.training.global_batch_size // (copies * steps))
        fitting = max(sequences, before.fitting) if before else sequences
        return cls(dict(Counter(hosts)), steps, sequences, fitting, job(), dict(zip(hosts, sites, strict=False)))


def rebalance_batch(config: Config, before: Allocation, data_size: int) -> Config:
    """Divide the global batch among ``data_size`` copies of the model, in as few micro-batches as fit in memory.

    A micro-batch gets at most ``before.fitting`` sequences. If this limit is 1 and the batch does not divide evenly, some
    micro-batches get 2. Nothing else is adjusted, because reduction, shape buckets and kernels are chosen at each start.
    """
    batch = config.training.global_batch_size
    # Allow the largest micro-batch so far. The last run may have had smaller ones, because it may have had more hosts.
    steps = -(-batch // (data_size * before.fitting))
    steps = max(1, min(steps, batch // data_size))  # no micro-batch may be empty
    # Use a multiple of the number of pipeline ranks. Some pipeline schedules need rounds of equally many micro-batches.
    steps = -(-steps // config.parallel.pipeline) * config.parallel.pipeline
    return replace(config, training=replace(config.training, gradient_accumulation_steps=steps))


def changes(before: Allocation, now: Allocation) -> list[str]:
    """Return lines about lost and gained hosts, hosts at another site and new batch shares, or [] if nothing changed."""
    # Count the ranks of each host, so that hosts that only lost or gained some ranks are found too.
    gone, come = Counter(before.hosts), Counter(now.hosts)
    lines = [f"{what}: {_named(hosts)}" for what, hosts in (("lost", gone - come), ("gained", come - gone)) if hosts]
    shares = [
        f"{counted(sum(each.hosts.values()), 'rank')} on {counted(len(each.hosts), 'host')}, a step of each with at most "
        f"{each.accumulation} x {counted(each.sequences, 'sequence')}"
        for each in (before, now)
    ]
    if lines or shares[0] != shares[1]:
        lines.append(f"shares of the global batch: {shares[1]}; before {shares[0]}")
    moved = [host for host, site in now.sites.items() if before.sites.get(host, site) != site]
    lines += [f"host {shown(host)} is at site {now.sites[host]}; before {shown(before.sites[host])}" for host in moved]
    return lines


def _named(hosts: Mapping[str, int]) -> str:
    names = [f"host {shown(name)} ({counted(ranks, 'rank')})" for name, ranks in sorted(hosts.items())]
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )


@dataclass(frozen=True)
class Digest:
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Digest":
        return cls(path.stat().st_size, sha256_of(path))


@dataclass(frozen=True)
class RunState:
    """State of a run without its weights and moments. It is stored in ``state.json``."""

    step: _Count
    """Number of global batches trained, which is the position in the stream of samples."""
    samples: _Count
    optimizer_steps: _Count
    """Number of optimizer steps taken. It is less than ``step`` if steps were skipped."""
    seed: _Count
    dropout_draws: _Count
    """Step number in the model's ``dropout_state``. The dropout seed is not stored: it follows from run seed and rank."""
    fp8_scales: list[Annotated[float, msgspec.Meta(gt=0)]] | None
    settings: dict[str, str]
    """Settings that must not change when the run continues."""
    path: str = ""
    allocation: Allocation | None = None
    """Hosts and batch shares of the run that wrote the checkpoint. Old checkpoints do not contain them."""
    files: dict[str, Digest] = field(default_factory=dict)
    format: Literal[1] = 1


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, newest first, or only ``folder`` itself if it is a checkpoint."""
    return [folder] if (folder / "state.json").is_file() else written_in(folder)


def written_in(folder: Path) -> list[Path]:
    """Return the checkpoints that runs have written into ``folder``, newest first."""
    found = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def reseed(seed: int, steps: int, mesh: Mesh) -> None:
    """Seed PyTorch's generators from seed, step and rank. Call it at each checkpoint, and when a run resumes from one."""
    known = f"seed {seed} step {steps} rank {mesh.rank} of {mesh.world_size}"
    # Hash the values, because the CPU's generator uses only the low 32 bits of its seed.
    torch.manual_seed(int.from_bytes(hashlib.sha256(known.encode()).digest()[:8]))


def lock(folder: Path, mesh: Mesh, again: bool) -> None:
    """Keep other runs out of a checkpoint folder until this process ends; every rank must call it at the same time.

    Unfinished checkpoints of killed runs are removed. If this run was restarted (``again``), it waits for its earlier
    processes, which may still hold the lock. If the file system has no locks, a warning is printed. Raises ``ValueError``
    on every rank if another run holds the lock.
    """

    def take() -> str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The lock is held until the process ends, because nothing closes the file descriptor that this call returns.
            lock_file(folder / ".lock", patience_s=_PATIENCE_S if again else 0.0)
        except BusyError as owner:
            raise ValueError(
                f"another run ({owner}) writes its checkpoints into {folder}: set checkpoint.folder to another folder, "
                "or wait until that run has ended"
            ) from None
        except OSError as error:
            return f"warning: no lock on {folder} ({error.strerror}): make sure that no other run writes there"
        # Only the process that has the lock writes here, so these unfinished folders are left over from killed runs.
        for left in filter(is_temporary, folder.glob(".step_*.partial")):
            shutil.rmtree(left, ignore_errors=True)  # leaves plain files and other users' folders, without an error
        return ""

    warning = _on_rank0(take, mesh)
    if warning and mesh.is_main:
        say(warning)


def find(folder: Path, config: Config, train: Dataset, mesh: Mesh) -> RunState:
    """Return the newest complete checkpoint in ``folder`` that this run may continue from. All ranks get the same one.

    Raises ``ValueError`` with the reasons on every rank if there is none.
    """
    found = _on_rank0(lambda: msgspec.json.encode(_newest(folder, config, train)).decode(), mesh)
    return msgspec.json.decode(found, type=RunState)


def written_by(folder: Path, mesh: Mesh) -> str:
    """Return the job (``bert.parallel.environment.job``) that wrote the newest checkpoint in ``folder``, or "" if unknown.

    Every rank must call it at the same time.
    """

    def look() -> str:
        for path in checkpoint_folders(folder):
            with suppress(ValueError):
                state = _state_file(path)
                return state.allocation.job if state.allocation else ""
        return ""

    return _on_rank0(look, mesh)


def _on_rank0(act: Callable[[], str], mesh: Mesh) -> str:
    """Run ``act`` on rank 0 and return its result on all ranks. If it fails, all ranks raise ``ValueError``."""
    answer = ""
    if mesh.is_main:
        try:
            # Catch errors and send them as the answer, because the other ranks wait for one.
            answer = act()
        except (ValueError, OSError) as error:
            answer = f"error: {error}"
    answer = agreed_text(answer, mesh)
    if answer.startswith("error: "):
        raise ValueError(answer.removeprefix("error: "))
    return answer


def restore(step: TrainingStep, state: RunState) -> None:
    """Restore model and optimizer from the checkpoint that `find` has checked and returned as ``state``.

    Every rank must call it at the same time. Raises ``ValueError`` if the files do not fit the model, for
    example because another version of this program wrote them.
    """
    reseed(state.seed, state.step, step.mesh)
    # Start from zeros, because checkpoints contain no values for the padding between parameters.
    names = FILES if step.sites is None else files_of(state)
    vectors = [torch.zeros_like(step.flat.weights_P) for _ in names]
    for name, vector_P in zip(names, vectors, strict=True):
        whole = vector_P.new_zeros(step.vectors.size)
        if step.mesh.is_main:
            _read_into(step, Path(state.path) / name, whole)
        # Only rank 0 reads the file, because the other ranks may have no access to it.
        step.vectors.shard_(vector_P, broadcast_(whole))
    weights_P, momentum_P, variance_P, *site_momentum = vectors
    with torch.no_grad():
        step.flat.weights_P.copy_(weights_P)
        step.optimizer.set_moments_(momentum_P, variance_P)
        # Write in place, here and below, because captured CUDA graphs contain the addresses of these tensors.
        step.optimizer.steps.fill_(state.optimizer_steps)
        step.model.dropout_state[1] = state.dropout_draws
        if step.fp8 is not None and state.fp8_scales is not None:
            if len(state.fp8_scales) != step.fp8.scale_S.numel():
                raise ValueError(f"{state.path} holds {len(state.fp8_scales)} FP8 scales of another model; {_REMEDY}")
            step.fp8.set_scales_(torch.tensor(state.fp8_scales))
        step.refresh_copies_()
        if step.fp8 is not None and state.fp8_scales is None:  # the checkpoint is from a run without FP8
            step.fp8.update_()  # compute scales from the magnitudes that `refresh_copies_` measured
    step.gather_weights()  # fetch the weights that other ranks update
    if step.sites is not None:
        step.sites.restore_(*site_momentum)


def files_of(state: RunState) -> tuple[str, ...]:
    """Return the names of a checkpoint's files of weights and moments."""
    return (*FILES, SITE_MOMENTUM) if SITE_MOMENTUM in state.files else FILES


def fixed_settings(config: Config, train: Dataset) -> dict[str, str]:
    """Collect the settings and data that, together with the seed, determine a run's losses."""
    named = flattened("model", config.model) + flattened("optimizer", config.optimizer)
    settings = {name: str(value) for name, value in named}
    settings["training.global_batch_size"] = str(config.training.global_batch_size)
    shards = "\n".join(f"{shard.name} {shard.samples} {shard.digest}" for shard in train.shards)
    settings["data.train"] = "sha256 " + hashlib.sha256(shards.encode()).hexdigest()
    return settings


def _newest(folder: Path, config: Config, train: Dataset) -> RunState:
    expected = fixed_settings(config, train)
    broken = []
    for path in checkpoint_folders(folder):
        try:
            state = _read_state(path)
        except ValueError as error:
            broken.append(str(error))
            continue
        for name, value in expected.items():
            # Unlike a broken checkpoint, which is skipped, a complete checkpoint with other settings is an error.
            if state.settings.get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} {state.settings.get(name)}, but this run has {value}: "
                    f"set {name} to the checkpoint's value"
                )
        if config.training.seed not in (None, state.seed):
            raise ValueError(
                f"{path} was made with training.seed {state.seed}: leave training.seed out, or set it to {state.seed}"
            )
        for reason in broken:
            say(f"warning: {reason}; resuming from {path}")
        return state
    reasons = "".join(f"; {reason}" for reason in broken)
    raise ValueError(
        f"no complete checkpoint in {folder}: set resume to a folder of checkpoints, or leave resume out{reasons}"
    )


def _read_state(path: Path) -> RunState:
    """Read a checkpoint's state. Raises ``ValueError`` if the checkpoint is not complete."""
    state = _state_file(path)
    for name in files_of(state):
        file = path / name
        if not file.is_file() or Digest.of(file) != state.files.get(name):
            raise ValueError(f"{file} is missing or has changed since it was written; {_REMEDY}")
    return replace(state, path=str(path))


def _state_file(path: Path) -> RunState:
    name = path / "state.json"
    try:
        return msgspec.json.decode(read_bounded(name, _STATE_BYTES, _REMEDY), type=RunState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not the state of a run ({error}); {_REMEDY}") from None


def _read_into(step: TrainingStep, path: Path, whole: Tensor) -> None:
    try:
        with safe_open(path, "pt") as file:
            for name, part in step.vectors.parts(whole):
                found = file.get_tensor(name)
                if found.shape != part.shape:  # check it, because ``copy_`` would broadcast a smaller tensor
                    raise ValueError(f"{path} holds {name} of shape {tuple(found.shape)}, expected {tuple(part.shape)}")
                part.copy_(found)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file of this model ({error}); {_REMEDY}") from error
