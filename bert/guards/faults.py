"""Fault handling: a run that fails on one rank ends on all ranks."""

import contextlib
from collections.abc import Iterator

from bert.configuration.config import Config
from bert.guards.interruption import Interrupted
from bert.log.mllog import MLLog
from bert.parallel.launch import may_start_again
from bert.parallel.mesh import Mesh
from bert.parallel.watchdog.watchdog import FAULT_STATUS, Watchdog
from console.program import reason


@contextlib.contextmanager
def ended_together(config: Config, mesh: Mesh, log: MLLog) -> Iterator[Watchdog]:
    """End the run on all ranks, and log the reason, if the body raises an exception on this rank.

    All ranks must enter this context at the same time.
    """

    def close_log(reason: str) -> None:
        line = f"# ended by a fault: {' '.join(reason.split())}"
        for act in (lambda: log.line(line), log.abort, log.close):
            with contextlib.suppress(OSError):  # the fault may be a full disk
                act()

    watchdog = Watchdog(mesh, config.training.fault_seconds, close_log)
    try:
        yield watchdog
    except Interrupted as interrupted:
        # Elastic agents on the other hosts restart their ranks without this one only if its exit status shows a failure.
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
