"""Check that this node can listen on the port where the processes of a run meet: `python -m bert.parallel.master_port`.

PyTorch's own error message is long and hard to understand.
"""

import os
import random
import socket
import sys
from contextlib import suppress

from console.program import complain


def master_port() -> int:
    """Return MASTER_PORT. Raises ``ValueError`` if it is not a valid port."""
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT is {port!r}, expected a whole number from 1 to 65535")
    return int(port)


def require_free_port() -> None:
    """Raise ``ValueError`` if another program listens on MASTER_PORT, or if this user may not listen on it."""
    port = master_port()
    both = socket.has_dualstack_ipv6()  # like PyTorch's store, which listens on all addresses
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # without the address that create_server adds
        raise ValueError(
            f"MASTER_PORT is {port}, but this node cannot listen there ({reason}): set it to a port that is free here, "
            "the same one on all nodes"
        ) from None


def free_port() -> int:
    """Return a port that is free here, below the range of ephemeral ports."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", random.SystemRandom().randrange(10_000, 32_000)))
            return probe.getsockname()[1]


if __name__ == "__main__":
    try:
        require_free_port()
    except ValueError as error:
        complain(error)
        sys.exit(2)
