"""Programs of the repository as processes that need not import PyTorch: two seconds of a processor less for each.

A server imports ``bert.run`` once and forks. A fork is what ``python -m MODULE ARGUMENTS`` would be, with arguments,
environment, output, signals and an exit status of its own; only the interpreter is not taken down when all else has ended,
which would copy its whole memory. Fresh interpreters are started by the tests of launchers, of scripts and of torchrun.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LARGEST_REQUEST = 200_000
PATIENCE_S = 600.0
"""How long anything may take before it counts as never happening: a busy machine is many times slower than an idle one."""


class Program:
    """A running ``python -m MODULE ARGUMENTS``, as ``subprocess.Popen`` would have it; stdout and stderr go to one file."""

    def __init__(self, module: str, arguments: list[str], /, **environment: object) -> None:
        """``environment``: what differs from the tests' own."""
        variables = os.environ | {name: str(value) for name, value in environment.items()}
        self.returncode: int | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the program that it belongs to
        self._status, status = os.pipe()
        request = json.dumps([module, arguments, variables]).encode()
        socket.send_fds(_server(), [request], [self._output.fileno(), status])
        os.close(status)
        self.pid = self._number()

    @property
    def output(self) -> str:
        """What it has written so far."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode()

    def poll(self) -> int | None:
        """The exit status, or None while it runs; negative after a signal."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = self._number()
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status once it ends. Raises ``subprocess.TimeoutExpired`` when it does not within so many seconds."""
        if self.returncode is None:
            select.select([self._status], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout, self.output.encode())
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for its end; all output."""
        self.wait(timeout)
        return self.output, None

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, if it runs."""
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        return int.from_bytes(os.read(self._status, 4), "little", signed=True)


@cache
def _server() -> socket.socket:
    """A connection to a server, which ends with the tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
    command = [sys.executable, "-m", "tests.programs", str(theirs.fileno())]
    subprocess.Popen(command, cwd=REPOSITORY, pass_fds=[theirs.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"})
    theirs.close()
    return ours


def _serve(requests: socket.socket) -> str:
    """Fork for every request; returns in each fork, with the module to run."""
    atexit.register(_end)  # the first, so that it is called after all others
    import torch.distributed.pipelining  # noqa: F401  and what pipelines import besides, 1.4 s for each of many ranks
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    import bert.run  # noqa: F401  what programs import is there
    from bert.train import parse

    # For the name of a method agents look at all modules, of which here are many: a tenth of a processor for each of them.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    parse(["tiny_cpu"])  # and what tyro finds out about the settings, a fifth of a second
    del sys.modules["bert.train"]  # which may be what is to run
    gc.freeze()  # or each fork copies all memory as it looks for garbage
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, ends, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 2)
        if not request:
            sys.exit()
        output, status = ends
        if os.fork() == 0 and _forked(status):
            break
        os.close(output)
        os.close(status)
    requests.close()
    module, sys.argv[1:], variables = json.loads(request)
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return module


def _forked(status: int) -> bool:
    """Fork once more: the parent says who the child is and how it ended, and the child returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return True
    os.write(status, pid.to_bytes(4, "little", signed=True))
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, ended.to_bytes(4, "little", signed=True))
    os._exit(0)


def _run(module: str) -> None:
    """Run it, and note the exit status of an orderly end."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):
            _statuses.append(end.code)
        raise
    _statuses.append(0)


def _end() -> None:
    if _statuses:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_statuses[0])


_statuses: list[int] = []

if __name__ == "__main__":
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
