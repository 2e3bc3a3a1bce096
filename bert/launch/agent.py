"""torchrun with its reports in a file instead of on the terminal: ``python -m bert.launch.agent FOLDER ARGUMENTS...``.

Ranks report their faults themselves, in one line. torchrun's log and its tracebacks go to a file in FOLDER, which appears
with its first line. The exit status is 2 if ranks have refused their input, 3 after a fault of a rank or of torchrun, and
128 + n after signal n to this process.
"""

import io
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from bert.parallel.watchdog.judge import FAULT_STATUS
from console.program import accept_any_text, complain

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_REFUSED = 2
"""Exit status of ranks that have refused their input."""


class Report(io.TextIOBase):
    """Text stream to a file that appears with the first text. If the file cannot be written, the text is dropped."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"torchrun_{socket.gethostname()}_{os.getpid()}.txt"
        self.place = ""
        """Where the report is, as the end of a sentence."""

    def write(self, text: str) -> int:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            self.place = f"torchrun's report is in {self._path}"
        except OSError as error:
            self.place = f"torchrun's report cannot be written to {self._path} ({error.strerror})"
        return len(text)

    def fileno(self) -> int:
        return 2  # torchrun enables Python's fault handler, which needs an open file


def main(folder: str, *arguments: str) -> int:
    accept_any_text()
    terminal, report = sys.stderr, Report(Path(folder))
    # Redirect before the import, because PyTorch's log handlers keep the stream that they find. Ranks inherit the terminal.
    with redirect_stderr(report):
        from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

        def say(fault: str) -> None:
            with redirect_stderr(terminal):
                complain(f"{fault}; {report.place}")

        wait = PContext.wait

        def wait_and_say(self: PContext, timeout: float = -1, period: float = 1) -> "RunProcsResult | None":
            result = wait(self, timeout, period)
            if result and result.is_failed() and not _reported(result.failures.values()):
                first = min(result.failures.values(), key=lambda failure: failure.timestamp)
                say(f"rank {self.envs[first.local_rank]['RANK']}: {_ending(first.exitcode)}")
            return result

        # After a failure, an elastic agent starts the ranks again, so the exception below comes too late for this line.
        PContext.wait = wait_and_say
        try:
            torchrun(arguments)
            return 0
        except ChildFailedError as error:
            report.write(f"{error}\n")
            return _REFUSED if _REFUSED in _reported(error.failures.values()) else FAULT_STATUS
        except SignalException as error:
            traceback.print_exc()
            return 128 + error.sigval
        except Exception as error:
            traceback.print_exc()
            first_line = str(error).partition("\n")[0]  # the rest is a stack of C++ functions
            say(f"torchrun: {first_line}")
            return FAULT_STATUS


def _reported(failures: "Iterable[ProcessFailure]") -> set[int]:
    """Return the exit statuses of ranks that have printed the reason themselves."""
    return {failure.exitcode for failure in failures} & {_REFUSED, FAULT_STATUS}


def _ending(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
