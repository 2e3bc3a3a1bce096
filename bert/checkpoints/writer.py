"""Writer of checkpoints. Training waits only until the state is copied to host memory, and a thread writes the files.

If a checkpoint cannot be written, the run prints a warning and continues.
"""

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import msgspec
import torch

from bert.checkpoints.training_state import (
    FILES,
    SITE_MOMENTUM,
    Allocation,
    Digest,
    RunState,
    fixed_settings,
    reseed,
    written_in,
)
from bert.checkpoints.weights import Weight, write_safetensors
from bert.configuration.config import Config
from bert.parallel.mesh import all_reduce_
from bert.reporting.reporter import Position, Reporter
from bert.step import TrainingStep
from console.files import atomic_path, sync, write_atomically
from dataloading.dataset.folder import Dataset


class Checkpoints:
    """Writer of a run's checkpoints. It writes one at a time and keeps only the newest. Without a folder, it writes none.

    It tells the step's phase tracker when training waits for a checkpoint, and reports errors to ``reporter``.
    """

    def __init__(
        self, config: Config, train: Dataset, seed: int, step: TrainingStep, reporter: Reporter, allocation: Allocation
    ) -> None:
        self._config, self._folder = config.checkpoint, config.checkpoint.folder
        self._settings = fixed_settings(config, train)
        self._seed, self._step, self._allocation, self._reporter = seed, step, allocation, reporter
        self._mesh, self._tracker = step.mesh, step.stopwatch.tracker
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        self._longest_s = 0.0
        """Longest time in seconds that writing a checkpoint has taken so far."""
        folder = self._folder if self._mesh.is_main else None
        self._removable = set(written_in(folder)) if folder else set()
        """Checkpoints that this run may delete: the checkpoints that existed at the start, and its own."""
        # Allocate the copies only once. Allocating pinned memory is slow, and training would wait for it at each checkpoint.
        pinned = self._mesh.device.type == "cuda"
        self._files = FILES if step.sites is None else (*FILES, SITE_MOMENTUM)
        self._copies = [torch.empty(step.vectors.size, pin_memory=pinned) for _ in self._files] if folder else []
        """Copies of the whole model's weights and moments in host memory, from which the thread writes."""

    def due(self, steps: int) -> bool:
        return self._folder is not None and steps % self._config.every_steps == 0

    def wait(self, at: Position) -> None:
        """Wait until the checkpoint that is being written is on disk."""
        if self._written is not None and not self._written.done():
            self._tracker.enter("checkpoint_write")
            wait([self._written])
        self.poll(at)

    def poll(self, at: Position) -> None:
        """Warn if the last checkpoint could not be written, and tell the phase tracker how long writing takes."""
        if self._written is None or not self._written.done():
            return
        # The future keeps the thread's error until the training loop asks for it here.
        error, self._written = self._written.exception(), None
        # Waiting may take as long as writing. The watchdog limits a phase to a multiple of its longest duration.
        self._tracker.longest["checkpoint_write"] = self._longest_s
        if isinstance(error, OSError):
            self._reporter.warn(at.steps, f"no checkpoint was written: {error.filename}: {error.strerror}")
        elif error is not None:  # any other error is a bug, and ends the run
            raise error

    def save(self, at: Position) -> None:
        """Start writing a checkpoint, after the previous one is on disk. Every rank must call it after the same step.

        Random generators, FP8 scales and the state of the sites get the values that they will have in a run that is resumed
        from this checkpoint.
        """
        if self._folder is None:
            return
        # Wait first, because the thread may still be writing from the only set of copies in host memory.
        self.wait(at)
        self._tracker.enter("checkpoint")
        step = self._step
        # Checkpoints contain no states of generators, because these depend on the rank. Reseed here, as a resumed run does.
        reseed(self._seed, at.steps, self._mesh)
        if step.fp8 is not None:  # scales differ between ranks; with the smallest, no rank overflows
            step.fp8.set_scales_(all_reduce_(step.fp8.scale_S, "min"))
            step.fp8.refresh_weights_()
        for place, vector_P in enumerate(step.settled_state()):
            whole = step.vectors.gather(vector_P)
            if self._mesh.is_main:
                self._copies[place].copy_(whole)
        if not self._mesh.is_main:
            return
        # Reading counters from the device is fast here, because the copies above have already waited for the device.
        state = RunState(
            step=at.steps,
            samples=at.samples,
            optimizer_steps=int(step.optimizer.steps),
            seed=self._seed,
            dropout_draws=int(step.model.dropout_state[1]),
            fp8_scales=None if step.fp8 is None else step.fp8.scale_S.tolist(),
            settings=self._settings,
            allocation=self._allocation,
        )
        self._written = self._writer.submit(self._write, state)

    def _write(self, state: RunState) -> None:
        begin = time.perf_counter()
        try:
            self._write_folder(state)
        except OSError as error:  # an error of an open file has no file name, so name the folder
            raise OSError(error.errno, error.strerror, error.filename or str(self._folder)) from None
        finally:
            self._longest_s = max(self._longest_s, time.perf_counter() - begin)

    def _write_folder(self, state: RunState) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        final = self._folder / f"step_{state.step:08}"
        with atomic_path(final) as partial:
            partial.mkdir()
            for name, copy in zip(self._files, self._copies, strict=True):
                parts = self._step.vectors.parts(copy)
                weights = {key: Weight(tuple(part.shape), part.detach().cpu) for key, part in parts}
                write_safetensors(partial / name, weights, {})
                sync(partial / name)  # the file must be on disk before the folder gets its name
            files = {name: Digest.of(partial / name) for name in self._files}
            content = msgspec.json.encode(replace(state, files=files))
            write_atomically(partial / "state.json", msgspec.json.format(content, indent=1))
            # A rename cannot replace a folder that contains files. So remove a broken checkpoint of this
            # name, which this run skipped when it resumed.
            if final in self._removable:
                shutil.rmtree(final, ignore_errors=True)
        # Count only this checkpoint and earlier ones towards the limit, because later ones are from another run.
        self._removable.add(final)
        folders = written_in(self._folder)
        # Do not delete checkpoints that another run has written here since this run started.
        for old in folders[folders.index(final) + self._config.keep :]:
            if old in self._removable:
                shutil.rmtree(old)
