"""Check that this node can listen where the processes of a run are to meet: `python -m bert.parallel.master_port`.

PyTorch would say at length, and in words of its own, that it cannot.
"""

import os
import socket
import sys

from console.program import complain


def master_port() -> int:
    """Return MASTER_PORT. Raises ``ValueError`` if it is no port."""
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT is {port!r}, expected a whole number from 1 to 65535")
    return int(port)


def require_free_port() -> None:
    """Raise ``ValueError`` where another program listens at MASTER_PORT, or this user may not."""
    port = master_port()
    both = socket.has_dualstack_ipv6()  # as PyTorch's store listens: at all addresses
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # create_server adds the address to it
        raise ValueError(
            f"MASTER_PORT is {port}, but this node cannot listen there ({reason}): set it to a port that is free here, "
            "the same one on all nodes"
        ) from None


if __name__ == "__main__":
    try:
        require_free_port()
    except ValueError as error:
        complain(error)
        sys.exit(2)
