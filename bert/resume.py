"""Checkpoints of a run, from which it goes on at any number of ranks.

    FOLDER/step_00000120/model.safetensors      weights, as ``data.initial_checkpoint`` takes them too
                         momentum.safetensors   LAMB's moments, under the names of the weights
                         variance.safetensors
                         state.json             everything else, with size and digest of each file

Nothing in it depends on how many ranks wrote it: what is sharded is gathered, and the sample order follows from seed and
step. Rank 0 writes and reads. Safetensors and JSON rather than PyTorch's own formats, because those unpickle, and whoever
can write to the folder could run code then. A checkpoint gets its name when all of it is on disk.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert.checkpoint import Weight, write_safetensors
from bert.config import Config
from bert.parallel.collectives import agreed_text, broadcast_
from bert.parallel.mesh import Mesh
from bert.step import TrainingStep
from dataloading.dataset import Dataset
from dataloading.files import read_bounded, sync

FORMAT = 1
_FILES = ("model.safetensors", "momentum.safetensors", "variance.safetensors")
_STATE_BYTES = 1 << 20
_REMEDY = "remove it, or resume from another"


@dataclass(frozen=True)
class RunState:
    """Where a run stands, beside its weights and moments."""

    step: int
    """Global batches trained: the position in the plan."""
    samples: int
    optimizer_steps: int
    """Fewer than ``step`` where steps were skipped."""
    seed: int
    dropout_draws: int
    """The counter of the dropout's random state; its key follows from seed, rank and number of ranks."""
    fp8_scales: list[float] | None
    settings: dict[str, str]
    """What must be the same when the run goes on."""
    path: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """All its whole numbers."""
        return self.step, self.samples, self.optimizer_steps, self.seed, self.dropout_draws


class Checkpoints:
    """Writes a run's checkpoints, and keeps the newest ones."""

    def __init__(self, config: Config, train: Dataset, mesh: Mesh, seed: int) -> None:
        assert config.checkpoint.folder is not None
        self._config = config.checkpoint
        self._folder = config.checkpoint.folder
        self._settings = fixed_settings(config, train)
        self._mesh = mesh
        self._seed = seed

    def due(self, steps: int) -> bool:
        """Whether one is to be written after so many steps."""
        return steps % self._config.every_steps == 0

    def save(self, step: TrainingStep, steps: int, samples: int) -> None:
        """Write one; every rank must call it after the same step. Raises ``OSError`` on rank 0 when it cannot.

        From here on, random numbers are those of a run that goes on from this checkpoint.
        """
        reseed(self._seed, steps, self._mesh)
        momentum_P, variance_P = step.optimizer.moments()
        if not self._mesh.is_main:
            return
        state = RunState(
            step=steps,
            samples=samples,
            optimizer_steps=int(step.optimizer.steps),
            seed=self._seed,
            dropout_draws=int(step.model.dropout_state[1]),
            fp8_scales=None if step.fp8 is None else step.fp8.scale_S.tolist(),
            settings=self._settings,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        final = self._folder / f"step_{steps:08}"
        partial = final.with_name(f".{final.name}.partial")
        for folder in (partial, final):
            shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir()
        try:
            for name, vector_P in zip(_FILES, (step.flat.weights_P, momentum_P, variance_P), strict=True):
                write_safetensors(partial / name, _weights(step, vector_P), {})
                sync(partial / name)
            files = {name: _digest(partial / name) for name in _FILES}
            text = json.dumps({"format": FORMAT, **asdict(state), "files": files}, indent=1)
            (partial / "state.json").write_text(text, encoding="utf-8")
            for path in (partial / "state.json", partial):
                sync(path)
            partial.rename(final)
            sync(self._folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for old in checkpoint_folders(self._folder)[self._config.keep :]:
            shutil.rmtree(old)


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` by their names, the newest first; ``folder`` itself if it is one."""
    if (folder / "state.json").is_file():
        return [folder]
    return sorted((path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)), reverse=True)


def reseed(seed: int, steps: int, mesh: Mesh) -> None:
    """Start PyTorch's own generators anew, from what a run that goes on knows too."""
    torch.manual_seed((steps << 32) + seed * mesh.world_size + mesh.rank)


def find(folder: Path, config: Config, train: Dataset, mesh: Mesh) -> RunState:
    """The newest whole checkpoint in ``folder`` that this run may go on from; all ranks agree.

    Raises ``ValueError`` on every rank when there is none, with what is wrong with each.
    """
    answer = ""
    if mesh.is_main:
        try:
            answer = json.dumps(asdict(_newest(folder, config, train)))
        except (ValueError, OSError) as error:
            answer = f"error: {error}"
    answer = agreed_text(answer, mesh)
    if answer.startswith("error: "):
        raise ValueError(answer.removeprefix("error: "))
    return RunState(**json.loads(answer))


def restore(step: TrainingStep, state: RunState, mesh: Mesh) -> None:
    """Bring model and optimizer to where ``state`` says; every rank must call it at the same time."""
    reseed(state.seed, state.step, mesh)
    vectors = [torch.zeros_like(step.flat.weights_P) for _ in _FILES]
    if mesh.is_main:
        for name, vector_P in zip(_FILES, vectors, strict=True):
            _read_into(step, Path(state.path) / name, vector_P)
    for vector_P in vectors:
        broadcast_(vector_P)
    weights_P, momentum_P, variance_P = vectors
    with torch.no_grad():
        step.flat.weights_P.copy_(weights_P)
        step.optimizer.set_moments_(momentum_P, variance_P)
        step.optimizer.steps.fill_(state.optimizer_steps)
        step.model.dropout_state[1] = state.dropout_draws
        if step.fp8 is not None:
            if state.fp8_scales is not None:
                step.fp8.set_scales_(torch.tensor(state.fp8_scales))
            step.fp8.refresh_weights_()


def fixed_settings(config: Config, train: Dataset) -> dict[str, str]:
    """What decides the losses of a run besides its seed."""
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
            if state.settings.get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} {state.settings.get(name)}, but this run has {value}: "
                    "resume with the same setting"
                )
        if config.training.seed not in (None, state.seed):
            raise ValueError(f"{path} was made with training.seed {state.seed}: leave the seed out, or give this one")
        for reason in broken:
            print(f"warning: {reason}; going on from {path}", flush=True)
        return state
    reasons = "".join(f"; {reason}" for reason in broken)
    raise ValueError(
        f"no whole checkpoint in {folder}: set resume to a folder of checkpoints, or leave it out{reasons}"
    )


def _read_state(path: Path) -> RunState:
    """Raises ``ValueError`` unless the checkpoint is whole."""
    name = path / "state.json"
    try:
        content = json.loads(read_bounded(name, _STATE_BYTES, _REMEDY))
        if content.pop("format") != FORMAT:
            raise ValueError(f"{name}: of another format than {FORMAT}; {_REMEDY}")
        files: dict[str, Any] = content.pop("files")
        state = RunState(**content | {"path": str(path)})
        whole = {file: dict(files[file]) for file in _FILES}
        if not all(isinstance(value, int) and value >= 0 for value in state.counts):
            raise TypeError
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{name}: not the state of a run ({type(error).__name__}); {_REMEDY}") from None
    for file, digest in whole.items():
        if not (path / file).is_file():
            raise ValueError(f"{path / file} is missing; {_REMEDY}")
        found = (path / file).stat().st_size
        if found != digest["bytes"]:
            raise ValueError(f"{path / file}: {found:,} bytes, expected {digest['bytes']:,}; {_REMEDY}")
        if _digest(path / file) != digest:
            raise ValueError(f"{path / file}: its content has changed since it was written; {_REMEDY}")
    return state


def _digest(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _parts(step: TrainingStep, vector_P: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A flat vector's part for each parameter, in the parameter's shape."""
    start = 0
    for name, parameter in step.model.named_parameters():
        yield name, vector_P[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def _weights(step: TrainingStep, vector_P: Tensor) -> Mapping[str, Weight]:
    return {name: Weight(tuple(part.shape), part.detach().cpu) for name, part in _parts(step, vector_P)}


def _read_into(step: TrainingStep, path: Path, vector_P: Tensor) -> None:
    try:
        with safe_open(path, "pt") as file:
            for name, part in _parts(step, vector_P):
                part.copy_(file.get_tensor(name))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file of this model ({error}); {_REMEDY}") from error
