"""Invalid command lines cause a one-line error before anything is written."""

from pathlib import Path

import pytest

from tests.cluster.conftest import Refused


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan h100_9x9", "unknown recipe 'h100_9x9'"),
        (
            "plan tiny_cpu",
            "the name of tiny_cpu states no device: set --accelerator, or for `plan`",
        ),
        ("plan h100_1x8 --gpus 0", "--gpus is 0, expected at least 1"),
        ("plan h100_1x8 --gpus 12", "--gpus is 12, expected whole nodes: a multiple of 8"),
        ("plan h100_8x8 --gpus 70 --accelerator GB200", "--gpus is 70, expected whole nodes: a multiple of 4"),
        ("plan h100_1x8 --gpus 262144", "global batch size 262,144 on 262,144 accelerators: expected at least one"),
        ("plan h100_1x8 --cluster x.json --accelerator H100", "omit --accelerator and --networking"),
        ("plan h100_1x8 --out no/such/plan.json", "no/such/plan.json cannot be written"),
        ("calibrate --out no/such/file.json", "no/such/file.json cannot be written"),
        ("scale h100_1x8 --out no/such/page.html", "no/such/page.html cannot be written"),
        ("place no/such/cluster.json --tasks-per-node 0", "--tasks-per-node is 0, expected at least 1"),
        ("predict", "no --accelerator given"),
        ("predict --accelerator Z9000", "Z9000"),
        ("predict --accelerator H100 --nodes 0", "the number of nodes is 0"),
        ("scale gb200_18x4 --gpus-per-node 0", "--gpus-per-node is 0"),
        ("probe --out no/such/cluster.json", "no/such/cluster.json cannot be written"),
        ("probe --out cluster.json --seconds 0", "--seconds is 0 and --limit is 60, expected at least 1"),
    ],
)
def test_an_invalid_command_line_is_refused(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(*command.split())
    assert list(tmp_path.iterdir()) == []
