"""A run from its checks to its result file: ranks, log, clock, training, saved weights."""

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from bert.checkpoints.training_state import RunState, checkpoint_folders, find, lock, written_by
from bert.checkpoints.weights import VOCABULARY, save_weights
from bert.checkpoints.world import World, changes, rebalance_batch
from bert.configuration.config import Config
from bert.guards.data_guard import DataGuard
from bert.guards.faults import ended_together
from bert.guards.interruption import Interruption, orderly
from bert.guards.preflight import Inputs, check, check_shares, refuse_others, result_folder
from bert.guards.triton_cache import require_private_cache
from bert.log.mllog import MLLog
from bert.log.provenance import provenance
from bert.log.result_files import CLAIM, claim, create_log
from bert.loop import train
from bert.parallel.collectives import agreed_integer, all_reduce_sum_, barrier
from bert.parallel.launch import Launch, job, may_start_again, restarts
from bert.parallel.mesh import Mesh, join_mesh, leave_mesh, require_gpus
from bert.parallel.watchdog.watchdog import FAULT_STATUS
from bert.setup import build_run, capturing, log_settings
from console.program import complain, drop_lost_output, say
from console.version import commit

__all__ = ["leave_mesh", "run"]

_OWN_SIGNAL_S = 15.0
"""Agents that stop their ranks at the same event do so within this time."""


def run(config: Config, arguments: Sequence[str]) -> int:
    """Check everything, join the other ranks and train, unless it is a dry run; return the exit status.

    Raises ``ValueError`` or ``OSError`` for a wrong input or setting, and ``Interrupted`` if a signal comes before
    training starts. The caller must call ``leave_mesh``, however this ends.
    """
    # Before anything else: an audit hook sees only files that are opened after it.
    guard = DataGuard([config.data.train, config.data.evaluation])
    interruption = Interruption()
    launch = Launch.from_environment()
    # Each rank by itself before they meet: a fault of one machine is reported there, and nobody waits for its ranks.
    inputs = check(config, launch.world_size, launch.local_size)
    if config.dry_run:
        _say_ready(config, inputs, launch)
        return 0
    mesh = join_mesh(config.training.device, parallel=config.parallel)
    # Before the first kernel is compiled: Triton loads and runs the files of that folder.
    if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
        say(f"warning: {warning}")
    status = _timed_run(config, inputs, mesh, guard, interruption)
    # The last condition is a collective. The others are the same on all ranks, so all ranks reach it, or none.
    if status == "aborted" and may_start_again() and _stopped_for_others(interruption, mesh):
        complain("stopped with ranks of another host: to be started again without them", "warning")
        return FAULT_STATUS
    if interruption.number is None:
        return orderly(0 if status == "success" else 1)
    if mesh.is_main:
        _say_how_to_go_on(config, arguments)
    return orderly(128 + interruption.number)


def _say_ready(config: Config, inputs: Inputs, launch: Launch) -> None:
    if config.training.device == "cuda" and CLAIM in os.environ:
        # A launcher that waits for the name of a log is about to start the run here, and would end in a traceback.
        require_gpus(max(1, launch.local_size))
    elif config.training.device == "cuda" and not torch.cuda.is_available():
        complain("training.device is cuda, but PyTorch sees no GPU here: this machine could not run it", "warning")
    say(f"{config.recipe}: ready, results would go to {inputs.result}")


def _timed_run(config: Config, inputs: Inputs, mesh: Mesh, guard: DataGuard, interruption: Interruption) -> str:
    """Initialise, start the clock, train to the target, stop the clock; return how it ended."""
    # Start and shares of the run are decided before there is a log.
    again = _started_again(config, mesh)
    if config.checkpoint.folder is not None:
        # Before the folder is read: another run could remove its checkpoints.
        lock(config.checkpoint.folder, mesh, again)
    resumed = _resumed(config, inputs, mesh, again)
    before = resumed.world if resumed else None
    # Only if a launcher has restarted the run: a user who resumes states how the batch is shared.
    if again and before:
        config = rebalance_batch(config, before, mesh.data_size)
    adaptive = config.log.division == "open" and (again or may_start_again())
    # Again, because preflight skips this check if shares may follow from the checkpoint.
    check_shares(config, inputs.train, mesh.data_size, uneven=adaptive)
    # Saved in each checkpoint, so that a run on other hosts knows which micro-batches fitted in memory.
    world = World.of(mesh.hosts, config, before if again else None)
    # Each rank draws a seed if none is set, and rank 0's counts: another seed is another order of samples.
    seed = resumed.seed if resumed else agreed_integer(_seed(config), mesh)
    barrier()  # no rank creates files before all have passed their checks
    # Ranks other than 0 have a log that writes nothing.
    log = MLLog(None)
    if mesh.is_main:
        # Creating the file decides its number: the number that was free at the check may be taken now.
        log, files = create_log(result_folder(config), config.log.run)
        inputs = replace(inputs, **files._asdict())
    # The watchdog closes before the log, whose last lines may be about a fault. Graphs are reset after the watchdog,
    # which first tells the other ranks of an error.
    with log, capturing(config, mesh) as capturer, ended_together(config, mesh, log) as watchdog:
        drop_lost_output(partial(_note_lost_output, log))
        if mesh.is_main:
            claim(inputs.result)
            say(f"log in {inputs.result}")
        log.header(provenance(config, mesh, seed))
        if resumed:
            log.resumed(resumed.path, resumed.samples)
        if before:
            for line in changes(before, world):
                log.line(f"# {line}")
                if mesh.is_main:
                    say(line)
        log.cache_clear(config.log.cache_cleared)
        # The rules count the initialisation from before the model is built (TR 11).
        log.init_start()
        log_settings(log, config, inputs, mesh, seed)
        timed = build_run(config, inputs, mesh, log, interruption, world, seed, resumed, capturer)
        with timed.reporter:
            log.init_stop()
            # It takes milliseconds, so it runs before the clock starts.
            guard.require_untouched()
            # The clock starts when the last rank is ready, and no rank opens data before it has.
            barrier()
            log.run_start()
            barrier()
            guard.release()
            with watchdog.expect_progress(timed.stopwatch.tracker):
                status = train(timed)
        timed.loader.close()
        if capturer is not None:
            _note_uncaptured(timed.step.uncaptured_batches, mesh, log)
        if config.save_checkpoint:
            # All ranks gather, one writes.
            model = timed.step.gather_whole_model()
            metadata = {"recipe": config.recipe, "commit": commit(), VOCABULARY: inputs.vocabulary_sha256}
            if mesh.is_main:
                save_weights(model, config.save_checkpoint, metadata)
        if mesh.is_main:
            say(f"{status}: {inputs.result}" + (" (resumed: no timed result)" if resumed else ""))
    return status


def _note_lost_output(log: MLLog, text: str) -> None:
    with suppress(ValueError):  # the log is closed already
        log.line(f"# {text}")


def _note_uncaptured(batches: int, mesh: Mesh, log: MLLog) -> None:
    """Warn if micro-batches of any rank ran without a CUDA graph."""
    batches = int(all_reduce_sum_(torch.tensor([batches], device=mesh.device)).item())
    if batches:
        text = (
            f"{batches:,} of the ranks' micro-batches ran without a CUDA graph, and slower, because one that ran at the "
            "same time was larger than every captured shape"
        )
        log.line(f"# warning: {text}")
        if mesh.is_main:
            complain(text, "warning")


def _stopped_for_others(interruption: Interruption, mesh: Mesh) -> bool:
    """Tell whether ranks of other hosts got a signal and this one gets none, so that this host continues without them.

    An agent treats exit status 0 as the end of the run, and ends all agents. If all ranks must restart, as when a host
    joins, each agent stops its own ranks, one a little after the other.
    """
    signals = torch.tensor([int(interruption.number is not None)], device=mesh.device)
    some = all_reduce_sum_(signals).item() > 0
    leave_mesh()
    deadline = time.monotonic() + _OWN_SIGNAL_S
    while some and interruption.number is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return some and interruption.number is None


def _started_again(config: Config, mesh: Mesh) -> bool:
    """Tell whether this continues an earlier run, by its launcher's count of restarts or by its checkpoints.

    When a host joins, torchrun's agents restart all ranks without counting it, but the job's name stays the same.
    """
    # All ranks must decide alike, but agents may have counted different restarts.
    if all_reduce_sum_(torch.tensor([restarts()], device=mesh.device)).item():
        return True
    folder = config.checkpoint.folder
    # The last condition is a collective; the others are the same on all ranks.
    return folder is not None and job() != "" and written_by(folder, mesh) == job()


def _resumed(config: Config, inputs: Inputs, mesh: Mesh, again: bool) -> RunState | None:
    """Find the checkpoint from which the run continues, if ``resume`` is set or the run is started ``again``."""
    folder = config.resume
    if not again:
        refuse_others(config)
    elif config.checkpoint.folder and checkpoint_folders(config.checkpoint.folder):
        if config.log.division == "closed":
            raise ValueError(
                "a run of the closed division is timed in one piece and does not continue after a fault: start a new run"
            )
        folder = config.checkpoint.folder
    return None if folder is None else find(folder, config, inputs.train, mesh)


def _seed(config: Config) -> int:
    if config.training.seed is not None:
        return config.training.seed
    # The system's entropy, as the rules require (training_rules, section 5.1).
    return int.from_bytes(os.urandom(4), "little") >> 1  # 31 bits, as `training.seed` takes


def _say_how_to_go_on(config: Config, arguments: Sequence[str]) -> None:
    """Print the command that continues a run which a signal has ended with a checkpoint."""
    folder = config.checkpoint.folder
    if folder is not None and config.log.division == "open" and checkpoint_folders(folder):
        settings = [*arguments, "--resume", str(folder)]  # the last value of a setting counts
        say(f"to go on: python -m bert.train {shlex.join(settings)}")
