"""The launcher as a real process, whose programs are replaced by short shell scripts."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.programs import PATIENCE_S, REPOSITORY, write_script

_PYTHON = """#!/bin/bash
echo "${{@:2}}" >>{calls}
case "${{*:2}}" in
"bert.train"*--dry-run*) {check} ;;
"bert.train"* | "bert.launch.agent"*) {train} ;;
"bert.launch"*) exec -a "$0" {python} "$@" ;;
"compliance"*) {compliance} ;;
"cluster.dry_run"*) {dry_run} ;;
esac
"""
_OUTSIDE = re.compile("(RANK|WORLD_|LOCAL_|OMP_|OMPI_|SLURM_|MASTER_|NNODES|NODE_RANK|NPROC|PET_|MLPERF_BERT_)")


RUNNING: list[subprocess.Popen[str]] = []
"""Launchers of this test, which are killed at its end (``conftest.py``)."""


class Started:
    """A running program of `bert.launch`. ``train``, ``check``, ``compliance`` and ``dry_run`` are scripts that replace
    the programs that it starts.

    ``ignored`` names a signal that is ignored when the launcher starts.
    """

    def __init__(
        self, folder: Path, words: str, train: str = ":", check: str = ":", compliance: str = ":", dry_run: str = ":",
        ignored: str = "", **variables: str,
    ) -> None:  # fmt: skip
        self._calls = folder / "calls"
        (folder / "bin").mkdir()
        for name in ("pyvenv.cfg", "lib"):
            (folder / name).symlink_to(Path(sys.prefix, name))
        scripts = {"train": train, "check": check, "compliance": compliance, "dry_run": dry_run}
        places = {"calls": shlex.quote(str(self._calls)), "python": shlex.quote(sys.executable)}
        write_script(folder / "bin/python", _PYTHON.format(**places, **scripts))
        (folder / "tmp").mkdir()

        def set_signals() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job inherits that SIGINT is ignored
            if ignored:
                signal.signal(signal.Signals[ignored], signal.SIG_IGN)

        kept = {name: value for name, value in os.environ.items() if not _OUTSIDE.match(name)}
        self.process = subprocess.Popen(
            [folder / "bin/python", "-m", *shlex.split(words)],
            cwd=REPOSITORY,
            env=kept | {"CLEAR_CACHES": "0", "TMPDIR": str(folder / "tmp")} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=set_signals,
        )
        RUNNING.append(self.process)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end, and return the status and the output."""
        output, errors = self.process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess((), self.process.returncode, output, errors)

    @property
    def calls(self) -> list[str]:
        """Return the command lines of the programs that the launcher has started, in order."""
        return self._calls.read_text().splitlines()[1:]
