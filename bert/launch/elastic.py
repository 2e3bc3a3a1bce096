"""Training on hosts that may be lost and come back: the program behind ``launch/elastic.sh``, which holds the help text."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from bert.launch.binding import torchrun, torchrun_environment
from bert.launch.layout import layout_of, parse_whole_number, whole_number
from bert.launch.supervision import announce
from bert.parallel.master_port import require_free_port
from bert.train import parse, refused


def serve_rendezvous(port: int) -> NoReturn:
    """Serve the store through which hosts find each other, until a signal ends this process.

    Raises ``ValueError`` if this host cannot listen on the port.
    """
    from torch._C._distributed_c10d import TCPStore

    require_free_port(port, "PORT")
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    announce(f"hosts meet at port {store.port} until Ctrl-C")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        signal.pause()


def join(hosts: str, endpoint: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with torchrun's agent for this host.

    ``hosts`` is MIN:MAX, and ``endpoint`` is the HOST:PORT at which `serve_rendezvous` listens.

    Raises ``ValueError`` if an argument or a variable is wrong.
    """
    match = re.fullmatch("([1-9][0-9]{0,5}):([1-9][0-9]{0,5})", hosts)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(f"MIN:MAX is {hosts!r}, expected the minimum and maximum number of hosts, such as 3:4")
    if not re.fullmatch(r"[A-Za-z0-9._-]+:[0-9]{1,5}", endpoint):
        raise ValueError(
            f"HOST:PORT is {endpoint!r}, expected the host that runs launch/elastic.sh --meet PORT, and PORT"
        )
    last_call = whole_number("LAST_CALL", 30, 0, 3600)
    if not arguments or arguments[0].startswith("-") or arguments[1:2] not in ([], ["--"]):
        raise ValueError(f"expected launch/elastic.sh {hosts} {endpoint} RECIPE -- settings")
    settings = [arguments[0], *arguments[2:]]
    config = parse(settings)
    folder = config.checkpoint.folder
    if folder is None:
        raise ValueError(
            "checkpoint.folder is not set, but a run continues from its checkpoints when hosts are lost or come back: "
            "set --checkpoint.folder to a folder that all hosts see"
        )
    layout = layout_of(config)
    options = {
        "nnodes": hosts,
        "nproc-per-node": layout.processes,
        "max-restarts": 1000,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": endpoint,
        "rdzv-id": folder,
        # The store is in the process of `serve_rendezvous` and not on one of the hosts, so that any host may be lost.
        "rdzv-conf": f"is_host=0,last_call_timeout={last_call}",
        # By default, torchrun leaves log folders on each host, and beside the checkpoints if rdzv-id is an absolute path.
        "log-dir": os.devnull,
        **({"local-addr": address} if (address := os.environ.get("ADDRESS")) else {}),
    }
    # Keep the ranks from using the agents' store: in PyTorch 2.13, hosts would hang when another host joins later.
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": str(layout.threads)}
    os.execve(sys.executable, [*torchrun(config.log.folder, options), *settings], torchrun_environment() | shared)


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["--meet"]:
            serve_rendezvous(parse_whole_number("PORT", " ".join(arguments[1:]), 1, 65535))
        hosts, endpoint, *arguments = [*arguments, *[""] * (2 - len(arguments))]
        join(hosts, endpoint, arguments)
    except (ValueError, OSError) as error:
        return refused(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
