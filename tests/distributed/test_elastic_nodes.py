"""Two torchrun agents, each of which stands for a node: a rank is killed, and both start their ranks again.

The rank that survives takes its time to end. So its agent sees the other one wait before it sees a fault, and starts its
rank again without counting that.
"""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, SmallRun
from tests.distributed.faulty_worker import AT_STEP
from tests.distributed.ranks import ENVIRONMENT, free_port
from tests.programs import PATIENCE_S


def test_all_nodes_start_again_and_go_on_from_the_last_checkpoint(small_run: SmallRun, tmp_path: Path) -> None:
    folder, results = tmp_path / "checkpoints", tmp_path / "tiny_cpu" / "bert"
    samples = 16 * (AT_STEP + 15)
    settings = {"training__max_samples": samples, "evaluation__interval_samples": 16 * 40}
    settings |= {"checkpoint__folder": folder, "checkpoint__every_steps": 20, "log__interval_steps": 20}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=nodes",
        "--local-addr=127.0.0.1",
    ]
    command += ["-m", "tests.distributed.faulty_worker", "linger:0,die:1", *small_run.arguments(tmp_path, **settings)]
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
        statuses = [agent.wait(PATIENCE_S) for agent in agents]
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
    assert int(found[1]) in (20, 40)
    assert f'"samples_count": {samples}' in second
