"""Start the repository's programs as forks of a server, which saves each two seconds of CPU time for imports.

A server imports packages once and forks for each program. A fork behaves like ``python -m MODULE ARGUMENTS``, with its
own arguments, environment, folder, output, signals and exit status. It only skips the interpreter's finalization, which
would copy all shared memory. All pytest workers share two servers: one for ``Program``, which has also imported
``bert.run``, and one for the ``python`` of copies of the repository, whose forks import the copy's own modules. Tests
of scripts, of a run from its first start, and of signals to torchrun start real interpreters, and so does ``.ci/run``
for the command at the top of the README.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
LARGEST_REQUEST = 200_000
PATIENCE_S = 600.0
"""Timeout of tests, in seconds. It is long because a busy machine is many times slower than an idle one."""

_SHARED = "MLPERF_BERT_TEST_SERVERS"
"""Environment variable that holds the id of the process that started pytest's workers, and the servers' folder."""
OWN = ("benchmarks", "bert", "cluster", "compliance", "console", "dataloading", "kernels", "tests")
_FORKED_PYTHON = """#!{python} -IS
# Runs programs of this repository as forks of the server in tests/programs.py, and anything else by {python}.
import json, os, signal, socket, sys

words = sys.argv[1:]
unbuffered = words[:1] == ["-u"]
del words[:unbuffered]
module = words[1].partition(".")[0] if words[:1] == ["-m"] and len(words) > 1 else ""
script = bool(words) and words[0].endswith(".py")
if words[:2] == ["-m", "bert.launch"]:  # imports no PyTorch, and tests look for its children
    os.execv({python!r}, [os.path.abspath(sys.argv[0]), *sys.argv[1:]])
if not (script or module in {own!r} or words[:2] == ["-m", "torch.distributed.run"]) or "PYTHONPATH" in os.environ:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
request = dict(words=words, environment=dict(os.environ), folder=os.getcwd(), executable=os.path.abspath(sys.argv[0]))
request |= dict(cores=sorted(os.sched_getaffinity(0)), unbuffered=unbuffered)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {largest})
server.connect({path!r})
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
number = lambda: int.from_bytes(server.recv(4), "little", signed=True)
pid = number()
for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(one, lambda number, _: os.kill(pid, number))
status = number()
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Program:
    """A running ``python -m MODULE ARGUMENTS`` with methods of ``subprocess.Popen``. stdout and stderr share one file."""

    def __init__(self, module: str, arguments: list[str], /, **environment: object) -> None:
        """Start the program. ``environment`` has variables that are added to the tests' environment."""
        variables = os.environ | {name: str(value) for name, value in environment.items()}
        self.returncode: int | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the program that it belongs to
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
        self._server.connect(_server("bert"))
        request = {"words": ["-m", module, *arguments], "environment": variables, "folder": str(REPOSITORY)}
        request |= {"executable": _forked_python("bert"), "cores": sorted(os.sched_getaffinity(0)), "unbuffered": False}
        with Path(os.devnull).open() as nothing:
            descriptors = [nothing.fileno(), self._output.fileno(), self._output.fileno()]
            socket.send_fds(self._server, [json.dumps(request).encode()], descriptors)
        self.pid = self._number()

    @property
    def output(self) -> str:
        """Return the program's output so far."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode()

    def poll(self) -> int | None:
        """Return the exit status, which is negative after a signal, or None while the program runs."""
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.returncode = self._number()
            self._server.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the exit status. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        if self.returncode is None:
            select.select([self._server], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout, self.output.encode())
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for the end and return all output."""
        self.wait(timeout)
        return self.output, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        return int.from_bytes(self._server.recv(4), "little", signed=True)


def write_forked_python(folder: Path, imported: str = "packages") -> None:
    """Write programs ``python`` and ``torchrun`` to a folder. Both ask a server to fork instead of starting Python."""
    (folder / "python").symlink_to(_forked_python(imported))
    write_script(folder / "torchrun", '#!/bin/bash\nexec "${0%/*}/python" -m torch.distributed.run "$@"\n')


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def wait_for(condition: Callable[[], object], process: Program | subprocess.Popen[str] | None = None) -> None:
    """Wait until ``condition()`` holds. Fails if ``process`` ends first."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process and process.poll() is not None:
            assert condition(), process.communicate(timeout=PATIENCE_S)[0]
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.02)


def wait_for_text(path: Path, text: str, writer: Program | subprocess.Popen[str] | None = None, count: int = 1) -> None:
    """Wait until a file contains ``text`` ``count`` times. Fails if the process ``writer`` ends first."""
    wait_for(lambda: path.exists() and path.read_text().count(text) >= count, writer)


def is_alive(process: int) -> bool:
    """Return whether a process runs. One that has ended may remain as a zombie until its parent asks for its status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def python(*arguments: object, cwd: Path = REPOSITORY, **changes: object) -> subprocess.CompletedProcess[str]:
    """Run Python, by default in the repository's root. ``changes`` sets environment variables, or unsets them if None."""
    environment = {name: str(value) for name, value in (os.environ | changes).items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def git(folder: Path, *arguments: str) -> str:
    """Run git in a repository, and return its output."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.check_output(["git", *identity, *arguments], cwd=folder, text=True).strip()


@cache
def _forked_python(imported: str) -> str:
    """Write a program that asks a server to fork, and return its path.

    Each pytest worker writes its own, because a file cannot be executed while another process writes to it.
    """
    path = Path(_FOLDER, f"{os.getpid()} python of {imported}")
    text = _FORKED_PYTHON.format(python=sys.executable, own=OWN, path=_server(imported), largest=LARGEST_REQUEST)
    write_script(path, text)
    return str(path)


@cache
def _server(imported: str) -> str:
    """Return the address of a server that has imported ``imported``, and start the server if none runs."""
    address = Path(_FOLDER, imported)
    if address.exists():
        return str(address)
    own = Path(_FOLDER, f"{os.getpid()} {imported}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
        requests.bind(str(own))
        requests.listen(64)  # requests wait until the server has imported everything
        try:
            address.hardlink_to(own)
        except FileExistsError:  # another pytest worker was faster
            return str(address)
        finally:
            own.unlink()
        command = [sys.executable, "-m", "tests.programs", imported, str(requests.fileno()), str(_OWNER)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.Popen(command, cwd=REPOSITORY, pass_fds=[requests.fileno()], env=environment)
    return str(address)


def _shared() -> tuple[int, str]:
    """Return the id of the process with which the servers end, and their folder. pytest's workers share both."""
    owner, _, folder = os.environ.get(_SHARED, "").partition(" ")
    if owner == str(os.getppid()):  # false if a test starts pytest, which gets its own servers
        return int(owner), folder
    made = tempfile.TemporaryDirectory(prefix="mlperf-bert-", ignore_cleanup_errors=True)
    atexit.register(made.cleanup)
    os.environ[_SHARED] = f"{os.getpid()} {made.name}"
    return os.getpid(), made.name


def _serve(imported: str, requests: socket.socket, owner: int) -> dict[str, Any]:
    """Fork for every request, and send back the process id and the exit status. Returns the request, in the fork."""
    owner_end = os.pidfd_open(owner)  # becomes readable when pytest ends
    atexit.register(_end)  # registered first, so it runs last
    _import_packages()
    if imported == "bert":
        _import_own()
    else:
        del sys.path[0]
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
            del sys.modules[name]
    gc.freeze()  # otherwise garbage collection in forks would copy all memory
    # With SCHED_BATCH, a woken thread does not preempt the waker, which may hold a lock that gloo's loop needs.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    running: dict[int, socket.socket] = {}
    """Connection to each fork's client, by the fork's pidfd."""
    while True:
        ready, *_ = select.select([requests, owner_end, *running, *running.values()], [], [])
        for fork, connection in list(running.items()):
            if fork in ready or connection in ready or owner_end in ready:
                if fork not in ready:  # the fork's client or this server's owner has closed the connection
                    signal.pidfd_send_signal(fork, signal.SIGKILL)
                ended = os.waitid(os.P_PIDFD, fork, os.WEXITED)
                assert ended is not None
                _tell(connection, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
                del running[fork]
                connection.close()
                os.close(fork)
        if owner_end in ready:
            sys.exit()
        if requests not in ready:
            continue
        connection, _ = requests.accept()
        content, descriptors, *_ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
        if content:
            pid = os.fork()
            if pid == 0:
                break
            running[os.pidfd_open(pid)] = connection
            _tell(connection, pid)
        for descriptor in descriptors:
            os.close(descriptor)
    for each in (requests, connection, *running.values()):
        each.close()
    for descriptor in (owner_end, *running):
        os.close(descriptor)
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    return json.loads(content)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client may have closed the connection
        connection.sendall(number.to_bytes(4, "little", signed=True))


def _import_packages() -> None:
    # Include packages that only pipeline parallelism needs: they would take 1.4 s on each of many ranks.
    packages = "h5py mlperf_logging numba safetensors.torch scipy.optimize tokenizers tyro torch.distributed.pipelining"
    for name in (*packages.split(), "torch.distributed.run"):
        importlib.import_module(name)
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # torchrun's agents search all modules for a method's name, which takes a tenth of a CPU with this many modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _import_own() -> None:
    import bert.run  # imports nearly everything that programs need
    from bert.train import parse

    parse(["tiny_cpu"])  # fills tyro's cache, which takes 0.2 s
    del sys.modules["bert.train"]  # runpy would warn in a fork that runs it
    inspect.getmodule(bert.run.run.__code__)  # fills inspect's cache of modules' files


def _run(request: dict[str, Any]) -> None:
    """Run the requested program in this fork, and record the exit status for ``_end`` if there is no error."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    sys.executable = request["executable"]
    tempfile.tempdir = None  # forget the server's temporary folder
    # Open new streams on the request's descriptors, with its buffering.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    lines, encoding = 1 if request["unbuffered"] else -1, sys.stdout.encoding
    sys.stdout = open(1, "w", lines, encoding, sys.stdout.errors, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115
    option, *words = request["words"]
    try:
        if option == "-m":
            sys.path.insert(0, request["folder"])
            sys.argv[1:] = words[1:]
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(option).resolve().parent))
            sys.argv[1:] = words
            runpy.run_path(option, run_name="__main__")
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
    _run(_serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])))
else:
    _OWNER, _FOLDER = _shared()
