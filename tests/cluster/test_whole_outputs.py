"""The whole output of commands that measure nothing: a change of the cost model shows here as changed numbers.

If they are meant to change, write the new output to the file, and read the difference.
"""

from pathlib import Path

import pytest

from tests.cluster.conftest import Command
from tests.programs import REPOSITORY


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("devices", "devices.txt"),
        ("plan h100_8x8 --gpus 64", "plan_h100.txt"),
        ("plan bert_3_9b_8x8", "plan_3_9b.txt"),
        ("predict --accelerator A100-SXM --nodes 8 --gpus-per-node 8", "predict_a100.txt"),
        ("predict --accelerator B200 --nodes 9 --gpus-per-node 8", "predict_b200.txt"),
        (f"whatif {REPOSITORY}/results/cpu_2cores/bert/metrics_0.jsonl", "whatif.txt"),
    ],
)
def test_the_whole_output(
    command: str, file: str, cluster: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # for plan.json
    assert cluster(*command.split()).stdout == (Path(__file__).parent / "outputs" / file).read_text()
