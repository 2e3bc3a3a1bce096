"""Bytes that a rank sends in a step, counted by the interface of its host, and what docs/scaling.md says of them.

Every rank is on a host of its own, a network namespace, so that nothing goes past the interface; which of them make a node
is as in the formulas.
"""

import json
from typing import Any

import pytest

from benchmarks.hosts import BridgedHosts, why_not
from tests.distributed.ranks import free_port
from tests.distributed.workers.bytes_worker import BUCKET, MODEL
from tests.programs import PATIENCE_S, Program

RANKS = 4
SHAPES = [
    "1,1,flat,fp32,2,1",
    "1,1,hierarchical,fp32,2,1",
    "1,1,sharded,fp32,2,1",
    "1,1,sharded_world,fp32,2,1",
    "1,1,sharded,fp32,2,2",
    "1,1,sharded_world,bf16,2,2",
    "2,1,sharded,fp32,4,1",
    "1,2,sharded_world,fp32,2,2",
    "2,2,flat,fp32,4,2",
]
MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out, port = tmp_path_factory.mktemp("bytes") / "out.json", free_port()
    with BridgedHosts(RANKS) as hosts:
        ranks = []
        for rank, host in enumerate(hosts):
            place = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
            place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "v0"}
            module = ["tests.distributed.workers.bytes_worker", str(out), *SHAPES]
            ranks.append(Program("tests.distributed.workers.host_worker", [host, "h", "any", *module], **place))
        try:
            assert [rank.wait(PATIENCE_S) for rank in ranks] == [0] * RANKS, "".join(each.output for each in ranks)
        finally:
            for rank in ranks:
                rank.kill()
    return json.loads(out.read_text())


def all_gather(size: float, ranks: int) -> float:
    """Bytes that a rank sends, of a whole of so many; an all-to-all sends as many."""
    return (ranks - 1) / ranks * size


def all_reduce(size: float, ranks: int) -> float:
    return 2 * all_gather(size, ranks)


reduce_scatter = all_reduce
"""As gloo has it: the sum of everything, of which each rank keeps its part."""


def reduced(strategy: str, dtype: str, size: float, ranks: int, node: int) -> float:
    """Count the bytes of a gradient, and of the weights after it."""
    rails = ranks // node
    scatter, sent = (reduce_scatter, size) if dtype == "fp32" else (all_gather, size / 2)
    match strategy:
        case "flat":
            return all_reduce(sent, ranks)
        case "sharded_world":
            return scatter(sent, ranks) + all_gather(size, ranks)
        case "hierarchical":
            return scatter(sent, node) + all_reduce(sent / node, rails) + all_gather(sent, node)
    return scatter(sent, node) + all_reduce(sent / node, rails) + all_gather(size, node)


def exchanged(tensor: int, layers: int, has_ends: tuple[bool, bool]) -> float:
    """Count the bytes of a tensor group in a micro-batch: an all-gather and a reduce-scatter of so many rows, either way."""
    first, last = has_ends
    heads = BUCKET.sequences + BUCKET.masked
    rows = first * BUCKET.tokens + 4 * (layers - last) * BUCKET.tokens
    rows += last * (BUCKET.tokens + 4 * heads + BUCKET.masked)
    size = 4 * MODEL.hidden_size * rows
    return 2 * all_gather(size, tensor)  # ranks send each other what a reduce-scatter adds up


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_send_what_the_formulas_say(found: dict[str, dict[str, Any]], shape: str) -> None:
    tensor, pipeline, strategy, dtype, node, accumulation = shape.split(",")
    shared, stages, micro_batches = int(tensor), int(pipeline), int(accumulation)
    copies = RANKS // (shared * stages)
    a_node = max(1, int(node) // (shared * stages))
    for rank in found[shape]["ranks"]:
        is_first, is_last = rank["rank"] == 0, rank["rank"] == stages - 1
        expected = 0.0
        if copies > 1:
            expected += reduced(strategy, dtype, 4 * rank["parameters"], copies, a_node)
        if shared > 1:
            layers = MODEL.num_hidden_layers // stages
            expected += micro_batches * exchanged(shared, layers, (is_first, is_last))
            expected += all_reduce(4 * rank["on_all_ranks"], shared)
        if stages > 1:
            hidden = micro_batches * 4 * MODEL.hidden_size * BUCKET.tokens / shared
            expected += hidden * ((not is_first) + (not is_last))
            expected += 4 * MODEL.hidden_size * MODEL.vocab_size / shared  # its gradient, or itself
        assert rank["sent"] == pytest.approx(expected, rel=0.02), rank
