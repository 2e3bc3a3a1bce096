"""Two torchrun agents, each of which stands for a node: a rank is killed, and both start their ranks again.

The rank that survives takes its time to end. So its agent sees the other one wait before it sees a fault, and starts its
rank again without counting that.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, SmallRun
from tests.distributed.test_ranks import ENVIRONMENT, wait_for


def test_all_nodes_start_again_and_go_on_from_the_last_checkpoint(small_run: SmallRun, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder, results = tmp_path / "checkpoints", tmp_path / "tiny_cpu" / "bert"
    settings = {"training__max_samples": 16 * 600, "evaluation__interval_samples": 16 * 300}
    settings |= {"checkpoint__folder": folder, "checkpoint__every_steps": 40, "log__interval_steps": 20}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=nodes", "--local-addr=127.0.0.1"]
    command += ["-m", "tests.distributed.faulty_worker", "linger", "0", *small_run.arguments(tmp_path, **settings)]
    outputs = [tmp_path / f"agent_{node}" for node in range(2)]
    agents: list[subprocess.Popen[str]] = []
    for output in outputs:
        with output.open("wb") as file:
            agents.append(
                subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=ENVIRONMENT
                )
            )
    try:
        wait_for(lambda: (folder / "step_00000080").exists(), agents[0])
        [killed] = [pid for agent in agents for pid in children(agent.pid) if rank_of(pid) == 1]
        os.kill(killed, signal.SIGKILL)
        statuses = [agent.wait(90) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    said = "".join(output.read_text() for output in outputs)
    assert statuses == [0, 0], said
    first, second = ((results / f"result_{number}.txt").read_text() for number in (0, 1))
    assert "# ended by a fault: rank 1 on host" in first
    found = re.search(r"# resumed from: .*/step_(\d{8})\n", second)
    assert found
    assert int(found[1]) >= 80
    assert '"samples_count": 9600' in second


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid: int) -> int | None:
    for variable in Path(f"/proc/{pid}/environ").read_text().split("\0"):
        if variable.startswith("RANK="):
            return int(variable.removeprefix("RANK="))
    return None
