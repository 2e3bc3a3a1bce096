"""A whole run: the checks, joining the ranks, the log, the clock, training, and saving the weights."""

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch

from bert.captured_step import CapturedStep
from bert.checkpoints.training_state import (
    Allocation,
    RunState,
    changes,
    checkpoint_folders,
    find,
    lock,
    rebalance_batch,
    written_by,
)
from bert.configuration.config import Config
from bert.execution.cuda_graphs import CudaCapturer
from bert.guards.data_guard import DataGuard
from bert.guards.interruption import Interrupted, Interruption, orderly_status
from bert.guards.preflight import Inputs, check, check_shares, refuse_foreign_checkpoints
from bert.guards.triton import require_private_cache
from bert.log.mllog import MLLog
from bert.log.result_files import CLAIM, claim, create_log, provenance
from bert.loop import train
from bert.parallel.environment import SITE, Launch, job, may_start_again, restarts
from bert.parallel.mesh import Mesh, agreed_integer, all_reduce_, barrier, join_mesh, leave_mesh, require_gpus
from bert.parallel.watchdog.watchdog import FAULT_STATUS, Watchdog
from bert.setup import build_run, captures, log_settings
from console.program import complain, drop_lost_output, reason, say

_OWN_SIGNAL_S = 15.0
"""If an event makes all elastic agents restart their ranks, all agents send their signals within this many seconds."""


def run(config: Config, arguments: Sequence[str]) -> int:
    """Check everything, join the other ranks, train and return the exit status. A dry run only checks.

    Raises ``ValueError`` or ``OSError`` for a wrong input or setting, and ``Interrupted`` if a signal arrives before
    training starts. The caller must always call ``leave_mesh`` afterwards, even after an exception.
    """
    # Create the guard first, because its audit hook only notices files that are opened later.
    guard = DataGuard([config.data.train, config.data.evaluation])
    interruption = Interruption()
    launch = Launch.from_environment()
    # Check this machine before the ranks join. Otherwise the other ranks would wait for a rank whose check fails.
    inputs = check(config, launch.world_size, launch.local_size)
    if config.dry_run:
        _say_ready(config, inputs, launch)
        return 0
    mesh = join_mesh(config.training.device, parallel=config.parallel)
    # Do this before the first kernel is compiled, because Triton loads and runs the files in its cache folder.
    if mesh.device.type == "cuda" and (warning := require_private_cache()) and mesh.is_main:
        say(f"warning: {warning}")
    status = _timed_run(config, inputs, mesh, guard, interruption)
    # `_stopped_for_others` is a collective. The first two conditions are equal on all ranks, so all or none call it.
    if status == "aborted" and may_start_again() and _stopped_for_others(interruption, mesh):
        complain("ranks on another host were stopped: this host ends too, to be restarted without them", "warning")
        return FAULT_STATUS
    if interruption.number is None:
        return orderly_status(0 if status == "success" else 1)
    if mesh.is_main:
        _say_how_to_go_on(config, arguments)
    return orderly_status(128 + interruption.number)


def _say_ready(config: Config, inputs: Inputs, launch: Launch) -> None:
    if config.training.device == "cuda" and CLAIM in os.environ:
        # The launcher will start the run here next. Fail now if GPUs are missing, because the run would end in a traceback.
        require_gpus(max(1, launch.local_size))
    elif config.training.device == "cuda" and not torch.cuda.is_available():
        complain("training.device is cuda, but PyTorch sees no GPU here: this run needs a machine with GPUs", "warning")
    say(f"{config.recipe}: ready, results would go to {inputs.result}")


def _timed_run(config: Config, inputs: Inputs, mesh: Mesh, guard: DataGuard, interruption: Interruption) -> str:
    """Initialize, start the clock, train until the target is reached, stop the clock, and return the final status."""
    # Choose the checkpoint to resume from and the ranks' shares before the log is created, so that an error leaves no log.
    again = _is_restarted(config, mesh)
    if config.checkpoint.folder is not None:
        # Lock the folder before reading it, because another run could remove its checkpoints.
        lock(config.checkpoint.folder, mesh, again)
    resumed = _resumed(config, inputs, mesh, again)
    before = resumed.allocation if resumed else None
    # Rebalance only if a launcher has restarted the run: a user who resumes a run chooses how to divide the batch.
    if again and before:
        config = rebalance_batch(config, before, mesh.data_size)
    adaptive = config.log.division == "open" and (again or may_start_again())
    if config.training.site_steps > 1 and not mesh.sites:
        _accept_one_site(config, mesh, is_elastic=again or may_start_again())
    # Check the shares here, because preflight skips this check if they may depend on the checkpoint.
    check_shares(config, mesh.data_size, uneven=adaptive)
    # Checkpoints record the allocation: after a restart on other hosts, `rebalance_batch` uses the largest micro-batch that
    # has fitted in memory so far.
    allocation = Allocation.of(mesh.hosts, config, before if again else None, mesh.sites)
    # If no seed is set, each rank draws one, and all use rank 0's seed. The seed determines the order of the samples, so
    # it must be equal on all ranks.
    seed = resumed.seed if resumed else agreed_integer(_seed(config), mesh)
    barrier()  # no rank creates files before all ranks have passed their checks
    log = MLLog(None)  # only rank 0 writes a log: a log without a path writes nothing
    if mesh.is_main:
        # Creating the file reserves its number. The number that was free during the checks may be taken by now.
        log, files = create_log(config.log.folder, config.log.run)
        inputs = replace(inputs, **files._asdict())
    # Contexts end in reverse order, so the watchdog ends first. It may log a fault, so the log must still be open then. It
    # must tell the other ranks about an error before the graphs are reset.
    capturing = closing(CudaCapturer(mesh.device)) if captures(config, mesh) else nullcontext()
    with log, capturing as capturer, _fail_together(config, mesh, log) as watchdog:
        drop_lost_output(partial(_note_lost_output, log))
        if mesh.is_main:
            claim(inputs.result)
            say(f"log in {inputs.result}")
        log.header(provenance(config, mesh, seed))
        if resumed:
            log.resumed(resumed.path, resumed.samples)
        if before:
            for line in changes(before, allocation):
                log.line(f"# {line}")
                if mesh.is_main:
                    say(line)
        log.event("cache_clear", config.log.cache_cleared)
        # By the rules, the initialization starts before the model is built (TR 11).
        log.event("init_start")
        log_settings(log, config, inputs, mesh, seed)
        timed = build_run(config, inputs, mesh, log, interruption, allocation, seed, resumed, capturer)
        with timed.reporter:
            log.event("init_stop")
            # Run this check, which takes milliseconds, before the clock starts.
            guard.require_untouched()
            # The first barrier starts the clock only when all ranks are ready. The second one ensures that no rank opens
            # data before the clock has started.
            barrier()
            log.event("run_start")
            barrier()
            guard.release()
            with watchdog.expect_progress(timed.step.stopwatch.tracker):
                status = train(timed)
        timed.loader.close()
        if isinstance(timed.step, CapturedStep):
            _note_uncaptured(timed.step.uncaptured_batches, mesh, log)
        timed.trained.ended()
        # No rank ends before rank 0 has written everything, because launchers soon end all ranks when one has ended.
        barrier()
        if mesh.is_main:
            say(f"{status}: {inputs.result}" + (" (resumed: no timed result)" if resumed else ""))
    return status


@contextmanager
def _fail_together(config: Config, mesh: Mesh, log: MLLog) -> Iterator[Watchdog]:
    """End the run on all ranks, and log the reason, if the body raises an exception on this rank.

    All ranks must enter this context at the same time.
    """

    def close_log(reason: str) -> None:
        line = f"# ended by a fault: {' '.join(reason.split())}"
        for act in (lambda: log.line(line), log.abort, log.close):
            with suppress(OSError):  # if a full disk was the fault, writing the log fails too
                act()

    watchdog = Watchdog(mesh, config.training.fault_seconds, close_log)
    try:
        yield watchdog
    except Interrupted as interrupted:
        # Elastic agents on other hosts restart their ranks without this one only if it exits with the status of a failure.
        watchdog.failed(str(interrupted), FAULT_STATUS if may_start_again() else interrupted.status)
        raise
    except (ValueError, OSError) as error:
        # All ranks exit with status 2, which means invalid input.
        watchdog.failed(reason(error), 2)
        raise
    except Exception as error:
        watchdog.failed(f"{type(error).__name__}: {error}", error=error)
        raise
    finally:
        watchdog.close()


def _note_lost_output(log: MLLog, text: str) -> None:
    with suppress(ValueError):  # `line` fails if the log is closed already
        log.line(f"# {text}")


def _note_uncaptured(batches: int, mesh: Mesh, log: MLLog) -> None:
    """Warn if some rank ran micro-batches without a CUDA graph. All ranks must call this at the same time."""
    batches = int(all_reduce_(torch.tensor([batches], device=mesh.device)).item())
    if batches:
        text = (
            f"{batches:,} of the ranks' micro-batches ran without a CUDA graph, and slower, because a micro-batch that "
            "ran at the same time was larger than every captured shape"
        )
        log.line(f"# warning: {text}")
        if mesh.is_main:
            complain(text, "warning")


def _stopped_for_others(interruption: Interruption, mesh: Mesh) -> bool:
    """Return whether other ranks were signalled and this rank was not, so that this host must be restarted without them.

    This rank must then not exit with status 0, after which its elastic agent would consider the whole run finished. If all
    ranks must restart, for example because a host joins, agents signal their ranks at slightly different times. Therefore
    this function waits some time for a signal to this rank before it returns True.
    """
    signals = torch.tensor([int(interruption.number is not None)], device=mesh.device)
    some = all_reduce_(signals).item() > 0
    leave_mesh()
    deadline = time.monotonic() + _OWN_SIGNAL_S
    while some and interruption.number is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return some and interruption.number is None


def _is_restarted(config: Config, mesh: Mesh) -> bool:
    """Return whether a launcher has restarted this run: its restart count is positive, or its job wrote the checkpoints.

    The restart count alone does not show every restart. When a host joins, torchrun's agents restart all ranks without
    increasing it.
    """
    # Add the restart counts of all ranks: agents' counts may differ, but all ranks must get the same answer.
    if all_reduce_(torch.tensor([restarts()], device=mesh.device)).item():
        return True
    folder = config.checkpoint.folder
    # The last condition is a collective. The other conditions are equal on all ranks.
    return folder is not None and job() != "" and written_by(folder, mesh) == job()


def _resumed(config: Config, inputs: Inputs, mesh: Mesh, again: bool) -> RunState | None:
    """Return the checkpoint to continue from: after a restart (``again``) the newest one, otherwise that of --resume."""
    folder = config.resume
    if not again:
        refuse_foreign_checkpoints(config)
    elif config.checkpoint.folder and checkpoint_folders(config.checkpoint.folder):
        if config.log.division == "closed":
            raise ValueError(
                "a run of the closed division is timed in one piece and does not continue after a fault: start a new run"
            )
        folder = config.checkpoint.folder
    return None if folder is None else find(folder, config, inputs.train, mesh)


def _accept_one_site(config: Config, mesh: Mesh, *, is_elastic: bool) -> None:
    """Continue with one site if the hosts of the other sites may have been lost; otherwise raise ``ValueError``."""
    if not is_elastic:
        raise ValueError(
            f"training.site_steps is {config.training.site_steps}, but all ranks are at one site: set {SITE} on each host "
            "to the name of its site, or leave training.site_steps out"
        )
    if mesh.is_main:
        say("one site: its ranks sum the gradients of every step until another site joins")


def _seed(config: Config) -> int:
    if config.training.seed is not None:
        return config.training.seed
    # The rules require a seed from the system's entropy (training_rules, section 5.1).
    return int.from_bytes(os.urandom(4), "little") >> 1  # 31 bits, the range of `training.seed`


def _say_how_to_go_on(config: Config, arguments: Sequence[str]) -> None:
    """Print the command that resumes the run, if a checkpoint exists."""
    folder = config.checkpoint.folder
    if folder is not None and config.log.division == "open" and checkpoint_folders(folder):
        settings = [*arguments, "--resume", str(folder)]  # overrides any --resume in ``arguments``
        say(f"to continue: python -m bert.train {shlex.join(settings)}")
