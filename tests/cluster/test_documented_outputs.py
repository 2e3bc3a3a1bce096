"""Commands print the lines that docs/cluster.md shows. If figures are meant to change, copy the new lines to the page."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from cluster.published.calibration import CALIBRATION, calibration
from tests.cluster.conftest import Command
from tests.programs import REPOSITORY

NETWORK = "--networking '8x ConnectX-7 IB NDR 400Gb/s'"
COMMANDS = (
    pytest.param("plan h100_8x8 --gpus 64", marks=pytest.mark.slow),
    "plan gb200_18x4",
    f"predict --accelerator H100-SXM --nodes 8 --gpus-per-node 8 {NETWORK}",
    "predict --accelerator H100-SXM --batch 768 --measured 6.1",
    f"whatif {REPOSITORY}/results/cpu_2cores/bert/metrics_0.jsonl",
)


def assert_shown(output: str, page: str) -> None:
    """Find the page's block that begins with the output's first line. The output must have the block's lines in order."""
    lines, text = output.splitlines(), (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = [textwrap.dedent(block).splitlines() for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.M)]
    (shown,) = (block for each in blocks if (block := [line for line in each if line.strip()])[0] == lines[0])
    following = iter(lines)
    for line in shown:
        assert line.strip() == "..." or line in following, f"docs/{page}: {line}"


@pytest.mark.parametrize("command", COMMANDS)
def test_cluster_md_shows_the_current_output(
    command: str, cluster: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # `plan` writes plan.json to the current folder
    done = cluster(*shlex.split(command))
    assert (done.returncode, done.stderr) == (0, "")
    assert_shown(done.stdout, "cluster.md")


def test_calibrate_writes_the_shipped_file(cluster: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, shipped = tmp_path / "calibration.json", calibration()
    monkeypatch.setattr("cluster.published.calibration.calibrate", lambda: (shipped, {}))  # a fit takes half a minute
    assert cluster("calibrate", "--out", out).stdout == f"{out}: {len(shipped.parameters)} parameters\n"
    assert out.read_bytes() == CALIBRATION.read_bytes()
