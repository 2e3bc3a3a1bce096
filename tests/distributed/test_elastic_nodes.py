"""Two torchrun agents stand for two nodes. One rank is killed, and both agents restart their ranks.

The surviving rank ends slowly. Its agent therefore learns that the other agent is waiting before it notices a fault,
and restarts its rank without counting that as a restart.
"""

import re
from pathlib import Path

from tests.conftest import SmallRun
from tests.distributed.faulty import AT_STEP, faulty
from tests.distributed.ranks import WORKER, free_port, name_of
from tests.programs import PATIENCE_S, Program


def test_all_nodes_start_again_and_go_on_from_the_last_checkpoint(small_run: SmallRun, tmp_path: Path) -> None:
    folder, results = tmp_path / "checkpoints", tmp_path / "tiny_cpu" / "bert"
    samples = 16 * (AT_STEP + 15)
    settings = {"training__max_samples": samples, "evaluation__interval_samples": 16 * 40}
    settings |= {"checkpoint__folder": folder, "checkpoint__every_steps": 20, "log__interval_steps": 20}
    agent = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=nodes"]
    agent += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    agent += [
        "-m",
        *(WORKER, name_of(faulty), "linger:0,die:1"),
        *small_run.arguments(tmp_path, **settings),
    ]
    agents = [Program("torch.distributed.run", agent, OMP_NUM_THREADS=1) for _ in range(2)]
    try:
        statuses = [each.wait(PATIENCE_S) for each in agents]
    finally:
        for each in agents:
            each.kill()
    assert statuses == [0, 0], "".join(each.output for each in agents)
    first, second = ((results / f"result_{number}.txt").read_text() for number in (0, 1))
    assert "# ended by a fault: rank 1 on host" in first
    found = re.search(r"# resumed from: .*/step_(\d{8})\n", second)
    assert found
    assert int(found[1]) in (20, 40)
    assert f'"samples_count": {samples}' in second
