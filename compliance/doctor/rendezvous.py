"""Look for torchrun's elastic agents, which run what anybody writes who reaches their store.

An elastic agent keeps the state of its rendezvous as a pickle in a store that listens on all addresses and asks for no
password, and unpickles what it finds there every few seconds. `--standalone` and `--rdzv-backend c10d` make agents elastic;
so does one node without `--master-port`. The variables TORCHELASTIC_* do not tell: static agents set them too. What guards
the port, a firewall or a network of the job alone, cannot be seen from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from compliance.doctor.diagnosis import Diagnosis, ok, warn
from compliance.doctor.host import ExaminedHost

MAX_NAMED = 3
"""Maximum number of agents in the message."""

LISTENING = "0A"
"""The state of a socket in /proc/net/tcp."""

_REMEDY = (
    "start torchrun with --master-addr and --master-port, or let only the job's nodes reach it (docs/launching.md)"
)


def rendezvous(host: ExaminedHost) -> Iterator[Diagnosis]:
    """Look for elastic agents on this machine, and for variables that would make torchrun's elastic."""
    agents = [_described(host, pid, option) for pid in _processes(host) if (option := _elastic_agent(host, pid))]
    if here := elastic_option([], host.environment):
        yield warn("rendezvous", f"{here} is set: torchrun would run what others write into its store", _REMEDY)
    if agents:
        more = f" and {len(agents) - MAX_NAMED} more" if len(agents) > MAX_NAMED else ""
        found = f"torchrun runs what others write into its store: {', '.join(agents[:MAX_NAMED])}{more}"
        yield warn("rendezvous", found, _REMEDY)
    elif not here:
        yield ok("rendezvous", "no elastic agent of torchrun here")


def _described(host: ExaminedHost, pid: int, option: str) -> str:
    ports = ports_open_to_all(host, pid)
    where = f"on all addresses, port {' and '.join(map(str, ports))}" if ports else "its ports cannot be seen from here"
    return f"pid {pid} ({option}; {where})"


def elastic_option(options: list[str], environment: Mapping[str, str]) -> str:
    """Return what makes torchrun's agent elastic: an option before its script or a variable PET_<OPTION>; else ""."""
    given = _values(options)
    if "standalone" in given:
        return "--standalone"
    if environment.get("PET_STANDALONE", "0") not in ("", "0"):  # PET_<OPTION> is torchrun's default for --<option>
        return "PET_STANDALONE"
    if backend := given.get("rdzv-backend"):
        return "" if backend == "static" else f"--rdzv-backend {backend}"
    backend = environment.get("PET_RDZV_BACKEND", "static")
    return "" if backend == "static" else f"PET_RDZV_BACKEND={backend}"


def ports_open_to_all(host: ExaminedHost, pid: int) -> list[int]:
    """Return the TCP ports on which a process listens on all addresses; none where its files may not be seen."""
    # A process's table of sockets is that of its whole network namespace; which are its own, only its descriptors tell.
    sockets = set()
    for name in host.names(f"/proc/{pid}/fd"):
        try:
            target = str(host.path(f"/proc/{pid}/fd/{name}").readlink())
        except OSError:
            continue
        sockets |= set(re.findall(r"^socket:\[(\d+)\]$", target))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in host.read(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            # Fields of /proc/net/tcp: 1 local address and port, in hex, 3 state, 9 inode. All zeros is any address.
            if len(fields) > 9 and fields[3] == LISTENING and fields[9] in sockets:
                address, _, port = fields[1].partition(":")
                if not address.strip("0"):
                    ports.add(int(port, 16))
    return sorted(ports)


def _processes(host: ExaminedHost) -> list[int]:
    return sorted(int(name) for name in host.names("/proc") if name.isdecimal())


def _elastic_agent(host: ExaminedHost, pid: int) -> str:
    """Return what makes a process an elastic agent; "" when it is none."""
    words = host.read(f"/proc/{pid}/cmdline").strip("\0").split("\0")  # a zero byte ends each word
    # Behind the interpreter, its options and -m.
    start = next((place for place, word in enumerate(words[:4]) if _is_torchrun(word)), None)
    if start is None:
        return ""
    options = words[start + 1 :]
    pairs = host.read(f"/proc/{pid}/environ").split("\0")
    variables = dict(pair.split("=", 1) for pair in pairs if pair.startswith("PET_"))
    return elastic_option(options, variables) or _without_port(options, variables)


def _is_torchrun(word: str) -> bool:
    return word == "torch.distributed.run" or word.rpartition("/")[2] == "torchrun"


def _without_port(options: list[str], environment: Mapping[str, str]) -> str:
    """Say so where torchrun has no port and a single node: it is elastic then too (PyTorch 2.13)."""
    given = _values(options)
    several = (given.get("nnodes") or environment.get("PET_NNODES", "1")).rpartition(":")[2] != "1"
    named = {"master-port", "rdzv-endpoint", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT"} & {*given, *environment}
    return "" if several or named else "without --master-port"


def _values(options: list[str]) -> dict[str, str]:
    """Return torchrun's options and what follows each, up to its script or module."""
    values: dict[str, str] = {}
    # With "" behind the last word, so that this one is looked at too.
    for word, following in pairwise([*options, ""]):
        if word in ("-m", "--module", "--no-python", "--no_python", "--") or word.endswith(".py"):
            break
        if word.startswith("--"):
            name, equals, value = word[2:].replace("_", "-").partition("=")
            values[name] = value if equals else following
    return values
