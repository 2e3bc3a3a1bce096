"""A run from its checks to its result file: ranks, log, clock, training, saved weights."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

import torch

from bert.checkpoints.training_state import RunState, checkpoint_folders, find, lock
from bert.checkpoints.weights import VOCABULARY, save_weights
from bert.configuration.config import Config
from bert.guards.data_guard import DataGuard
from bert.guards.faults import ended_together
from bert.guards.interruption import Interruption, orderly
from bert.guards.preflight import Inputs, check, refuse_others, result_folder
from bert.guards.triton_cache import require_private_cache
from bert.loop import train
from bert.mllog import MLLog
from bert.parallel.collectives import agreed_integer, all_reduce_sum_, barrier
from bert.parallel.launch import Launch
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh
from bert.reporting.provenance import provenance
from bert.reporting.result_files import claim, create_log
from bert.setup import build_run, log_settings
from console.program import complain, say
from console.version import commit

__all__ = ["leave_mesh", "run"]


def run(config: Config, arguments: Sequence[str]) -> int:
    """Check everything, join the other ranks and train, unless it is a dry run; returns the exit status.

    Raises ``ValueError`` or ``OSError`` where an input or a setting is wrong, and ``Interrupted`` when a signal comes before
    training does. ``leave_mesh`` is for the caller, however it ends.
    """
    guard = DataGuard([config.data.train, config.data.evaluation])
    interruption = Interruption()
    launch = Launch.from_environment()
    inputs = check(config, launch.world_size, launch.local_size)
    if config.dry_run:
        if config.training.device == "cuda" and not torch.cuda.is_available():
            complain("training.device is cuda, but PyTorch sees no GPU here: this machine could not run it", "warning")
        say(f"{config.recipe}: ready, results would go to {inputs.result}")
        return 0
    mesh = join_mesh(config.training.device, tensor=config.parallel.tensor)
    if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
        say(f"warning: {warning}")
    status = _timed_run(config, inputs, mesh, guard, interruption)
    if interruption.number is None:
        return orderly(0 if status == "success" else 1)
    if mesh.is_main:
        _say_how_to_go_on(config, arguments)
    return orderly(128 + interruption.number)


def _timed_run(config: Config, inputs: Inputs, mesh: Mesh, guard: DataGuard, interruption: Interruption) -> str:
    """Initialise, start the clock, train to the target, stop the clock; returns how it ended."""
    if config.checkpoint.folder is not None:
        lock(config.checkpoint.folder, mesh)
    resumed = _resumed(config, inputs, mesh)
    seed = resumed.seed if resumed else agreed_integer(_seed(config), mesh)
    barrier()  # no rank creates files before all have passed their checks
    log = MLLog(None)
    if mesh.is_main:
        log, files = create_log(result_folder(config), config.log.run)
        inputs = replace(inputs, **files._asdict())
    with log, ended_together(config, mesh, log) as watchdog:
        if mesh.is_main:
            claim(inputs.result)
            say(f"log in {inputs.result}")
        log.header(provenance(config, mesh, seed))
        if resumed:
            log.resumed(resumed.path, resumed.samples)
        log.cache_clear(config.log.cache_cleared)
        log.init_start()
        log_settings(log, config, inputs, mesh, seed)
        timed = build_run(config, inputs, mesh, log, interruption, watchdog.hosts, seed, resumed)
        with timed.reporter:
            log.init_stop()
            guard.require_untouched()
            barrier()
            log.run_start()
            guard.release()
            with watchdog.getting_on(timed.stopwatch.stage):
                status = train(timed)
        timed.loader.close()
        model = timed.step.gather_whole_model()
        if config.save_checkpoint and mesh.is_main:
            metadata = {"recipe": config.recipe, "commit": commit(), VOCABULARY: inputs.vocabulary_sha256}
            save_weights(model, config.save_checkpoint, metadata)
        if mesh.is_main:
            say(f"{status}: {inputs.result}" + (" (resumed: no timed result)" if resumed else ""))
    return status


def _resumed(config: Config, inputs: Inputs, mesh: Mesh) -> RunState | None:
    """Find the state from which the run goes on, if it does: asked to, or started again by torchrun after a fault.

    An agent of torchrun that only starts its ranks again because another one does so has not counted that.
    """
    folder = config.resume
    restarts = torch.tensor([int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))], device=mesh.device)
    if not all_reduce_sum_(restarts).item():
        refuse_others(config)
    elif folder is None and config.checkpoint.folder and checkpoint_folders(config.checkpoint.folder):
        if config.log.division == "closed":
            raise ValueError(
                "a run of the closed division is timed in one piece and does not go on after a fault: start it anew"
            )
        folder = config.checkpoint.folder
    return None if folder is None else find(folder, config, inputs.train, mesh)


def _seed(config: Config) -> int:
    if config.training.seed is not None:
        return config.training.seed
    return int.from_bytes(os.urandom(4), "little") >> 1


def _say_how_to_go_on(config: Config, arguments: Sequence[str]) -> None:
    """Print, last of all, the settings with which another run goes on from one that a signal has ended with a checkpoint."""
    folder = config.checkpoint.folder
    if folder is not None and config.log.division == "open" and checkpoint_folders(folder):
        settings = [*arguments, "--resume", str(folder)]  # of a setting that is given twice, the latter counts
        say(f"to go on: python -m bert.train {shlex.join(settings)}")
