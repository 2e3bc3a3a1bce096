"""The whole output of commands that measure nothing: a change of the cost model shows here as changed numbers.

If they are meant to change, write the new output to the file, read the difference, and copy it to the page that shows it.
"""

import os
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from cluster import dry_run
from tests.cluster.conftest import Command
from tests.programs import REPOSITORY

OUTPUTS = Path(__file__).parent / "outputs"
NETWORK = "--networking '8x ConnectX-7 IB NDR 400Gb/s'"


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("devices", "devices.txt"),
        ("plan h100_8x8 --gpus 64", "plan_h100.txt"),
        ("plan bert_3_9b_8x8", "plan_3_9b.txt"),
        ("plan gb200_18x4", "plan_gb200.txt"),
        (f"predict --accelerator H100-SXM --nodes 8 --gpus-per-node 8 {NETWORK}", "predict_h100.txt"),
        ("predict --accelerator B200 --nodes 9 --gpus-per-node 8", "predict_b200.txt"),
        ("predict --accelerator H100-SXM --batch 768 --measured 6.1", "measured_h100.txt"),
        (f"whatif {REPOSITORY}/results/cpu_2cores/bert/metrics_0.jsonl", "whatif.txt"),
    ],
)
def test_the_whole_output(
    command: str, file: str, cluster: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # for plan.json
    done = cluster(*shlex.split(command))
    assert (done.returncode, done.stdout, done.stderr) == (0, (OUTPUTS / file).read_text(), "")


def test_the_whole_output_of_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert dry_run.main(["bert_3_9b_8x8"]) == 2
    assert capfd.readouterr().out == (OUTPUTS / "dry_run_3_9b.txt").read_text()


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("plan_h100.txt", "cluster.md"),
        ("plan_gb200.txt", "cluster.md"),
        ("predict_h100.txt", "cluster.md"),
        ("measured_h100.txt", "cluster.md"),
        ("whatif.txt", "cluster.md"),
        ("dry_run_3_9b.txt", "scaling.md"),
    ],
)
def test_a_page_shows_lines_of_the_output(file: str, page: str) -> None:
    output, text = (OUTPUTS / file).read_text().splitlines(), (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = [
        textwrap.dedent(block).splitlines() for block in re.findall(r"^    .*\n(?:    .*\n|\n(?=    ))*", text, re.M)
    ]
    (shown,) = (block for block in blocks if block[0] == output[0])
    following = iter(output)
    for line in shown:
        assert line.strip() == "..." or line in following, f"docs/{page}: {line}"
