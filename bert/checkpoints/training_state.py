"""Checkpoints of a run, from which it continues on any number of ranks.

    FOLDER/step_00000120/model.safetensors      weights, also accepted by ``data.initial_checkpoint``
                         momentum.safetensors   LAMB's first moments, under the names of the weights
                         variance.safetensors   LAMB's second moments
                         state.json             everything else, with the size and digest of each file

The content does not depend on the number of ranks that wrote it: shards are gathered, and the sample order follows from
seed and step. Rank 0 reads and writes the files, and only one run at a time uses the folder (``bert.checkpoints.lock``).
PyTorch's own formats use pickle, so anyone who can write to the folder could run code. A checkpoint gets its final name
after it is completely on disk.

Training waits only for the copy to host memory; a thread writes the files from there.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert.checkpoints.lock import lock_checkpoints
from bert.checkpoints.weights import Weight, write_safetensors
from bert.checkpoints.world import World
from bert.configuration.config import Config
from bert.parallel.collectives import agreed_text, all_reduce_min_, broadcast_
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from console.files import atomic_path, read_bounded, sha256_of, sync, write_atomically
from console.program import say
from dataloading.dataset.folder import Dataset

_FILES = ("model.safetensors", "momentum.safetensors", "variance.safetensors")
BYTES_PER_PARAMETER = 4 * len(_FILES)
_STATE_BYTES = 1 << 20
_REMEDY = "remove it, or resume from another"
_PATIENCE_S = 60.0


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # counters on the device are int64


@dataclass(frozen=True)
class RunState:
    """State of a run, except for its weights and moments."""

    step: _Count
    """Number of global batches trained, which is the position in the plan."""
    samples: _Count
    optimizer_steps: _Count
    """Number of optimizer steps taken, fewer than ``step`` if steps were skipped."""
    seed: _Count
    dropout_draws: _Count
    """Counter of dropout's random state. The key follows from the seed, the rank and the number of ranks."""
    fp8_scales: list[Annotated[float, msgspec.Meta(gt=0)]] | None
    settings: dict[str, str]
    """Settings that must not change when the run continues."""
    path: str = ""
    world: World | None = None
    """Hosts and batch shares of the run that wrote the checkpoint; None in old checkpoints."""


@dataclass(frozen=True)
class _Digest:
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _StateFile(RunState):
    """Content of ``state.json``."""

    format: Literal[1] = 1
    files: dict[str, _Digest]


class Checkpoints:
    """Writer of a run's checkpoints. It writes one at a time and keeps the newest ones."""

    def __init__(
        self, config: Config, train: Dataset, mesh: Mesh, seed: int, step: TrainingStep, world: World | None = None
    ) -> None:
        assert config.checkpoint.folder is not None
        self.longest_s: float | None = None
        """Longest time that writing a checkpoint has taken, in seconds; None before the first one."""
        self._config = config.checkpoint
        self._folder = config.checkpoint.folder
        self._settings = fixed_settings(config, train)
        self._mesh = mesh
        self._seed = seed
        self._step = step
        self._world = world
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        size, pinned = step.whole.size, mesh.device.type == "cuda"
        self._removable = set(_by_step(self._folder)) if mesh.is_main else set()
        """Checkpoints that this run may delete: those that it found at the start, and those that it has written."""
        # Allocated once, because pinned memory is slow to allocate and training waits for the copies.
        self._copies = [torch.empty(size, pin_memory=pinned) for _ in _FILES] if mesh.is_main else []
        """Copies of the whole model's weights and moments in host memory, from which the thread writes."""

    @property
    def writing(self) -> bool:
        """Tell whether a checkpoint is being written."""
        return self._written is not None and not self._written.done()

    def due(self, steps: int) -> bool:
        """Tell whether a checkpoint is due after ``steps`` steps."""
        return steps % self._config.every_steps == 0

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on disk, or has failed."""
        if self._written is not None:
            wait([self._written])

    def failure(self) -> OSError | None:
        """Return the error if the last checkpoint could not be written. Each error is returned only once."""
        if self._written is None or not self._written.done():
            return None
        error = self._written.exception()
        self._written = None
        # Only errors of the file system are survivable. Anything else is a bug and ends the run.
        if error is not None and not isinstance(error, OSError):
            raise error
        return error

    def save(self, steps: int, samples: int) -> None:
        """Start writing a checkpoint; ``wait`` must be called first. Every rank must call it after the same step.

        It also resets random numbers and FP8 scales to the values that a run resumed from this checkpoint has.
        """
        step = self._step
        # A generator's state depends on the rank, so reseed here as a resumed run does, on any number of ranks.
        reseed(self._seed, steps, self._mesh)
        if step.fp8 is not None:  # scales differ between ranks; the smallest ones overflow nowhere
            step.fp8.set_scales_(all_reduce_min_(step.fp8.scale_S))
            step.fp8.refresh_weights_()
        step.gather_weights()
        vectors = step.flat.weights_P, *step.optimizer.moments()
        assert not self.writing
        for place, vector_P in enumerate(vectors):
            whole = step.whole.gather(vector_P)
            if self._mesh.is_main:
                self._copies[place].copy_(whole)
        if not self._mesh.is_main:
            return
        # Reading from the device does not wait here, because the copies above have already waited.
        state = RunState(
            step=steps,
            samples=samples,
            optimizer_steps=int(step.optimizer.steps),
            seed=self._seed,
            dropout_draws=int(step.model.dropout_state[1]),
            fp8_scales=None if step.fp8 is None else step.fp8.scale_S.tolist(),
            settings=self._settings,
            world=self._world,
        )
        self._written = self._writer.submit(self._write, state)

    def _write(self, state: RunState) -> None:
        begin = time.perf_counter()
        try:
            self._write_folder(state)
        except OSError as error:  # errors of an open file do not contain its name
            raise OSError(error.errno, error.strerror, error.filename or str(self._folder)) from None
        finally:
            self.longest_s = max(self.longest_s or 0.0, time.perf_counter() - begin)

    def _write_folder(self, state: RunState) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        final = self._folder / f"step_{state.step:08}"
        with atomic_path(final) as partial:
            partial.mkdir()
            for name, copy in zip(_FILES, self._copies, strict=True):
                write_safetensors(partial / name, _weights(self._step, copy), {})
                sync(partial / name)  # the file must be on disk before the folder gets its name
            files = {name: _digest(partial / name) for name in _FILES}
            content = msgspec.json.encode(_StateFile(**vars(state), files=files))
            write_atomically(partial / "state.json", msgspec.json.format(content, indent=1))
            sync(partial)
            # A rename cannot replace a folder that has files. A folder that this run may delete was skipped as broken
            # when the run resumed.
            if final in self._removable:
                shutil.rmtree(final, ignore_errors=True)
        # Later steps do not count, so that a run that skipped broken later checkpoints still keeps its own.
        self._removable.add(final)
        earlier = [path for path in _by_step(self._folder) if _step_of(path) <= state.step]
        # Delete only this run's own checkpoints: other runs may need the rest.
        for old in earlier[self._config.keep :]:
            if old in self._removable:
                shutil.rmtree(old)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, newest first, or only ``folder`` itself if it is a checkpoint."""
    return [folder] if (folder / "state.json").is_file() else _by_step(folder)


def _by_step(folder: Path) -> list[Path]:
    found = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def reseed(seed: int, steps: int, mesh: Mesh) -> None:
    """Reseed PyTorch's own generators from values that a resumed run also has."""
    known = f"seed {seed} step {steps} rank {mesh.rank} of {mesh.world_size}"
    # Hashed, because the CPU's generator uses only the low 32 bits.
    torch.manual_seed(int.from_bytes(hashlib.sha256(known.encode()).digest()[:8]))


def lock(folder: Path, mesh: Mesh, again: bool) -> None:
    """Keep other runs out of a checkpoint folder until this process ends; every rank must call it at the same time.

    With ``again``, this run was restarted, and one of its earlier processes may still hold the lock. If the file system has
    no locks, a warning is printed. Raises ``ValueError`` on every rank if another run holds the lock.
    """

    def take() -> str:
        try:
            # The descriptor is a plain integer. Dropping it does not close it, so the lock is held until the process ends.
            lock_checkpoints(folder, _PATIENCE_S if again else 0.0)
        except OSError as error:
            return f"warning: no lock on {folder} ({error.strerror}): see that no other run writes there"
        return ""

    warning = _on_rank0(take, mesh)
    if warning and mesh.is_main:
        say(warning)


def find(folder: Path, config: Config, train: Dataset, mesh: Mesh) -> RunState:
    """Return the newest complete checkpoint in ``folder`` that this run may continue from, the same on all ranks.

    Raises ``ValueError`` with the reasons on every rank if there is none.
    """
    found = _on_rank0(lambda: msgspec.json.encode(_newest(folder, config, train)).decode(), mesh)
    return msgspec.json.decode(found, type=RunState)


def written_by(folder: Path, mesh: Mesh) -> str:
    """Return the job (``bert.parallel.launch.job``) that wrote the newest checkpoint in ``folder``, or "" if unknown.

    Every rank must call it at the same time.
    """

    def look() -> str:
        for path in checkpoint_folders(folder):
            with suppress(ValueError):
                state = _state_file(path)
                return state.world.job if state.world else ""
        return ""

    return _on_rank0(look, mesh)


def _on_rank0(act: Callable[[], str], mesh: Mesh) -> str:
    """Run ``act`` on rank 0 and return its result on all ranks; its errors become a ``ValueError`` on all ranks."""
    answer = ""
    if mesh.is_main:
        try:
            # Not raised here, because the other ranks wait for an answer.
            answer = act()
        except (ValueError, OSError) as error:
            answer = f"error: {error}"
    answer = agreed_text(answer, mesh)
    if answer.startswith("error: "):
        raise ValueError(answer.removeprefix("error: "))
    return answer


def restore(step: TrainingStep, state: RunState, mesh: Mesh) -> None:
    """Restore model and optimizer from the checkpoint of ``state``; every rank must call it at the same time."""
    reseed(state.seed, state.step, mesh)
    # Zeros, because checkpoints do not contain the padding.
    vectors = [torch.zeros_like(step.flat.weights_P) for _ in _FILES]
    for name, vector_P in zip(_FILES, vectors, strict=True):
        whole = vector_P.new_zeros(step.whole.size)
        if mesh.is_main:
            _read_into(step, Path(state.path) / name, whole)
        # Only rank 0 reads, so that the other ranks need no access to its file system.
        step.whole.shard_(vector_P, broadcast_(whole))
    weights_P, momentum_P, variance_P = vectors
    with torch.no_grad():
        step.flat.weights_P.copy_(weights_P)
        step.optimizer.set_moments_(momentum_P, variance_P)
        # In place, here and below, because captured graphs contain these addresses.
        step.optimizer.steps.fill_(state.optimizer_steps)
        step.model.dropout_state[1] = state.dropout_draws
        if step.fp8 is not None and state.fp8_scales is not None:
            if len(state.fp8_scales) != step.fp8.scale_S.numel():
                raise ValueError(f"{state.path}: {len(state.fp8_scales)} FP8 scales of another model; {_REMEDY}")
            step.fp8.set_scales_(torch.tensor(state.fp8_scales))
        step.refresh_copies_()
    step.gather_weights()  # refresh the weights that other ranks update


def fixed_settings(config: Config, train: Dataset) -> dict[str, str]:
    """Collect the settings and data that, together with the seed, determine a run's losses."""
    settings = {
        f"{name}.{key}": str(value)
        for name, section in (("model", config.model), ("optimizer", config.optimizer))
        for key, value in asdict(section).items()
    }
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
            # An error, unlike a broken checkpoint, which is skipped: this one is complete but belongs to a different run.
            if state.settings.get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} {state.settings.get(name)}, but this run has {value}: "
                    "resume with the same setting"
                )
        if config.training.seed not in (None, state.seed):
            raise ValueError(f"{path} was made with training.seed {state.seed}: leave the seed out, or give this one")
        for reason in broken:
            say(f"warning: {reason}; going on from {path}")
        return state
    reasons = "".join(f"; {reason}" for reason in broken)
    raise ValueError(
        f"no whole checkpoint in {folder}: set resume to a folder of checkpoints, or leave it out{reasons}"
    )


def _read_state(path: Path) -> RunState:
    """Read a checkpoint's state. Raises ``ValueError`` if the checkpoint is not complete."""
    state = _state_file(path)
    for name in _FILES:
        file, digest = path / name, state.files.get(name)
        # Compare the size first, because computing a digest reads the whole file.
        is_whole = digest is not None and file.is_file() and file.stat().st_size == digest.bytes
        if not is_whole or _digest(file) != digest:
            raise ValueError(f"{file} is missing, or not as it was written; {_REMEDY}")
    return replace(state, path=str(path))


def _state_file(path: Path) -> _StateFile:
    name = path / "state.json"
    try:
        return msgspec.json.decode(read_bounded(name, _STATE_BYTES, _REMEDY), type=_StateFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not the state of a run ({error}); {_REMEDY}") from None


def _digest(path: Path) -> _Digest:
    return _Digest(path.stat().st_size, sha256_of(path))


def _weights(step: TrainingStep, whole: Tensor) -> Mapping[str, Weight]:
    return {name: Weight(tuple(part.shape), part.detach().cpu) for name, part in step.whole.parts(whole)}


def _read_into(step: TrainingStep, path: Path, whole: Tensor) -> None:
    try:
        with safe_open(path, "pt") as file:
            for name, part in step.whole.parts(whole):
                found = file.get_tensor(name)
                if found.shape != part.shape:  # ``copy_`` would broadcast a smaller tensor
                    raise ValueError(f"{path} holds {name} of shape {tuple(found.shape)}, expected {tuple(part.shape)}")
                part.copy_(found)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file of this model ({error}); {_REMEDY}") from error
