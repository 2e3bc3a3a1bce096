"""The dry run with a forecast."""

import signal
from pathlib import Path

import pytest

from tests.conftest import SmallRun
from tests.programs import python

INTERRUPTED = """
import signal, sys
from cluster import dry_run

dry_run.memory_and_step = lambda *_: signal.raise_signal(signal.SIGTERM) or []
sys.exit(dry_run.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_ends_the_forecast(small_run: SmallRun, tmp_path: Path) -> None:
    done = python("-c", INTERRUPTED, *small_run.arguments(tmp_path, training__device="cuda"))
    assert done.returncode == -signal.SIGTERM, done.stderr
