"""The port at which the processes of a run meet."""

import os
import random
import socket
from contextlib import suppress


def master_port() -> int:
    """Return MASTER_PORT. Raises ``ValueError`` if it is not a valid port."""
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT is {port!r}: set it to a whole number from 1 to 65535")
    return int(port)


def require_free_port(port: int, name: str = "MASTER_PORT") -> None:
    """Raise ``ValueError`` if another program listens on the port, or if this user may not listen on it.

    ``name`` is the variable or argument that sets the port. PyTorch's own error message is long and hard to understand.
    """
    both = socket.has_dualstack_ipv6()  # like PyTorch's store, which listens on all addresses
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        reason = (
            os.strerror(error.errno) if error.errno else str(error)
        )  # not ``str(error)``, which repeats the address
        raise ValueError(
            f"{name} is {port}, but this node cannot listen there ({reason}): set it to a port that is free here, "
            "the same one on all nodes"
        ) from None


def free_port() -> int:
    """Return a port that is free here, below the range of ephemeral ports."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", random.SystemRandom().randrange(10_000, 32_000)))
            return probe.getsockname()[1]
