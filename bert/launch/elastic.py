"""Hosts that may be lost and come back: the program behind ``launch/elastic.sh``, whose head is the help."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from bert.launch.binding import torchrun, torchrun_environment
from bert.launch.layout import in_range, layout_of, whole_number
from bert.launch.supervision import announce
from bert.parallel.master_port import require_free_port
from bert.train import parse, refused


def meet(port: int) -> NoReturn:
    """Serve the store in which hosts find each other, until a signal ends this process.

    Raises ``ValueError`` if this host cannot listen on the port.
    """
    from torch._C._distributed_c10d import TCPStore

    require_free_port(port, "PORT")
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    announce(f"hosts meet at port {store.port} until Ctrl-C")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        signal.pause()


def join(hosts: str, place: str, arguments: Sequence[str]) -> NoReturn:
    """Become torchrun's agent of this host. ``hosts`` is MIN:MAX, and ``place`` is HOST:PORT of `meet`.

    Raises ``ValueError`` if an argument or a variable is wrong.
    """
    match = re.fullmatch("([1-9][0-9]{0,5}):([1-9][0-9]{0,5})", hosts)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(f"the numbers of hosts are {hosts!r}, expected MIN:MAX, such as 3:4")
    if not re.fullmatch(r"[A-Za-z0-9._-]+:[0-9]{1,5}", place):
        raise ValueError(f"the place to meet is {place!r}, expected HOST:PORT of --meet")
    last_call = whole_number("LAST_CALL", 30, 0, 3600)
    if not arguments or arguments[0].startswith("-") or arguments[1:2] not in ([], ["--"]):
        raise ValueError(f"expected launch/elastic.sh {hosts} {place} RECIPE -- settings")
    settings = [arguments[0], *arguments[2:]]
    config = parse(settings)
    folder = config.checkpoint.folder
    if folder is None:
        raise ValueError("a run goes on from its checkpoints: set --checkpoint.folder to a folder that all hosts see")
    layout = layout_of(config)
    options = {
        "nnodes": hosts,
        "nproc-per-node": layout.processes,
        "max-restarts": 1000,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": place,
        "rdzv-id": folder,
        # No host keeps the store, so that any host may be lost.
        "rdzv-conf": f"is_host=0,last_call_timeout={last_call}",
        # torchrun would leave a folder on each host, with a path that contains the id.
        "log-dir": os.devnull,
        **({"local-addr": address} if (address := os.environ.get("ADDRESS")) else {}),
    }
    # In PyTorch 2.13, hosts hang when a host joins later if the ranks share the agents' store.
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": str(layout.threads)}
    os.execve(sys.executable, [*torchrun(options), *settings], torchrun_environment() | shared)


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["--meet"]:
            meet(in_range("PORT", " ".join(arguments[1:]), 1, 65535))
        hosts, place, *arguments = [*arguments, *[""] * (2 - len(arguments))]
        join(hosts, place, arguments)
    except (ValueError, OSError) as error:
        return refused(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
