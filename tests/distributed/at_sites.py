"""Ranks of a run at several sites. Each rank has a host of its own, which is only a name."""

import socket
from collections.abc import Sequence

from bert.parallel.environment import SITE
from tests.distributed.ranks import Ranks, free_port, program
from tests.programs import Program


def at_sites(sites: Sequence[str], arguments: Sequence[object]) -> Ranks:
    """Start a run with one rank for each name in ``sites``, at that site; "" stands for a rank that states no site."""
    port, ranks = free_port(), []
    for rank, site in enumerate(sites):
        place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(sites), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, SITE: site}
        ranks.append(Program(*program(on_host, [f"h{rank}", *arguments]), **place))
    return Ranks.of(ranks, port)


def on_host(host: str, *arguments: str) -> int:
    """Run ``bert.train`` under a host name that only this process knows."""
    socket.gethostname = lambda: host
    from bert.train import main

    return main(arguments)
