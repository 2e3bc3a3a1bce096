"""Client of the process that runs the official tools (`compliance.official.worker`).

The process starts at the first question and answers all later questions. It restarts after a crash or a timeout.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from console.interruption import ignore_signals

NAMES = {
    "log": "compliance checker",
    "package": "package checker",
    "package by train_samples": "package checker",
    "system": "system description checker",
    "repository": "repository checker",
    "reference": "RCP checker",
    "score": "result summarizer",
}
"""Official tool that answers each kind of question."""

TIMEOUTS_S = dict.fromkeys(NAMES, 600) | {"log": 120, "reference": 120}


class Worker:
    """Client of one process that runs the official tools and answers one question at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="compliance-")  # Python removes it at exit
        self.folder = Path(self._temporary.name)
        atexit.register(self.end)
        atexit.register(ignore_signals)  # runs before `end`, because Python calls these functions in reverse order

    def answer(self, question: str, subject: Path | int, ruleset: str) -> dict[str, Any]:
        """Return a tool's answer to a question, or {"crash": reason} if the tool died twice or timed out.

        `question` is a key of `NAMES`. `subject` is a path, or the global batch size for the question "reference".
        Raises ``ValueError`` if mlperf-logging is not installed.
        """
        request = json.dumps([question, subject, ruleset], default=str).encode() + b"\n"
        timeout_s = TIMEOUTS_S[question]
        # Try twice, because the process may have died on the previous question.
        for _ in range(2):
            process, began_s = self.process or self._start(), time.monotonic()
            assert process.stdin
            assert process.stdout
            watchdog = threading.Timer(timeout_s, _kill, [process])
            watchdog.start()
            try:
                with suppress(BrokenPipeError):  # if the process is dead, its answer is empty
                    process.stdin.write(request)
                    process.stdin.flush()
                answer = process.stdout.readline()
            finally:  # cancel the timer even after a signal: Python waits for its thread before it ends
                watchdog.cancel()
            # An answer without a line end means that the process died while answering.
            if answer.endswith(b"\n"):
                return json.loads(answer)
            self.end()
            if time.monotonic() - began_s >= timeout_s:
                return {"crash": f"the official {NAMES[question]} did not end within {timeout_s} s"}
        return {"crash": f"the official {NAMES[question]} ended without a verdict"}

    def _start(self) -> subprocess.Popen[bytes]:
        if find_spec("mlperf_logging") is None:
            raise ValueError("the package mlperf-logging is not installed: install the project's requirements")
        self.process = subprocess.Popen(
            # -P keeps the folder of the script off sys.path, because its modules are named like modules of other packages.
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,  # a temporary folder, because some tools leave files in the current one
            # The tools read descriptions in the locale's encoding. Ours are UTF-8, so select UTF-8.
            env=os.environ | {"PYTHONUTF8": "1"},
            start_new_session=True,  # so that Ctrl-C reaches only the parent process
        )
        return self.process

    def end(self) -> None:
        """Kill the process. The next question starts a new one."""
        process, self.process = self.process, None
        if process is None:
            return
        _kill(process)
        # Leaving the block closes the pipes and waits for the process. Closing stdin flushes buffered requests, which fails
        # because the process is dead.
        with suppress(OSError), process:
            pass


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@cache
def the_worker() -> Worker:
    """Return the worker that all questions of this program share."""
    return Worker()
