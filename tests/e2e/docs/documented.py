"""Run every command of the README and the pages in docs/ in a fresh copy of the repository.

The commands are the lines of the blocks marked ``sh``. The commands of a group of pages run in order in one copy, so
that later commands find files of earlier commands. Each group has its own test file, so that pytest's workers can run
groups in parallel. Commands that take long are shortened by additional settings.
"""

import os
import re
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.distributed.ranks import free_port
from tests.e2e.test_scripts import start

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TRAINING = ("training.md", "tiny_cpu.md")
DATA = ("data.md", "own_text.md", "checkpoints.md")
RESULTS = tuple(page.name for page in PAGES if page.name not in ("README.md", *TRAINING, *DATA))

SHORT = " --training.max-samples 320 --evaluation.interval-samples 320 --evaluation.target 0.0001"
"""Settings with which a run trains 320 samples and reaches a target that needs one correct masked token."""
SHORTENED = {
    r"^\./run_tests\.sh$": "./run_tests.sh --collect-only --numprocesses 0 tests/test_imports.py",  # avoid endless recursion
    r"^\./run_tests\.sh tests/kernels$": "./run_tests.sh --collect-only --numprocesses 0 tests/kernels/test_registry.py",
    r"^PIP_EXTRA_INDEX_URL=.* \./run_and_time\.sh$": "./run_and_time.sh --prepare",
    r"^\./run_and_time\.sh h100_1x8$": "./run_and_time.sh tiny_cpu 1 --",
    r"^NPROC=8 (.*) --training\.device cuda$": r"NPROC=2 \1",
    r"tiny_cpu 3$": "tiny_cpu 2 --",
    r"^\./run_and_time\.sh tiny_cpu (?=\d)": "NPROC=1 ./run_and_time.sh tiny_cpu ",
    r"\./run_and_time\.sh tiny_cpu .*": r"\g<0> --evaluation.interval-samples 64 --evaluation.target 0.02",
    r"\./run_and_time\.sh own_text_cpu .*": r"\g<0> --training.max-samples 320",
    r"--minutes 1$": "--minutes 0.02",
    r"--training\.max-samples 9600": "--training.max-samples 64 --evaluation.interval-samples 64",
    r"--tolerance 0\.02": r"\g<0> --data.evaluation data/whole/evaluation",
    r"dataloading demo --out data/tiny_cpu": "dataloading demo --out data/whole",
    r"doctor --recipe h100_1x1": "doctor --recipe tiny_cpu",
    r"--master-port 29500": f"--master-port {free_port()}",
    r"--nproc-per-node 8": "--nproc-per-node 1",
    r"cluster probe --out cluster\.json": r"\g<0> --seconds 1",
    r"cluster scale h100_8x8 .*": r"\g<0> --gpus-per-node 8192",
    r"^python -m tests\.kernels\.compiled$": r"env -u TRITON_INTERPRET \g<0>",
    r"^python benchmarks/gpu\.py": r"env -u TRITON_INTERPRET \g<0> --device cpu --tiny --out results/gpu",
    r"--part (\w+),[\w,]+": r"--part \1",  # tests/benchmarks tests the parts that are cut off here
    r"benchmarks/data_stages/prepare\.py": r"\g<0> --rounds 1 --dupe-factor 2 --text README.md docs/data.md",
    r"benchmarks/training/cpu_step\.py": r"\g<0> --workload tiny --repeats 1",
}
"""Patterns in commands and shorter replacements, applied in order. ``.ci/run`` runs the README's first commands in full."""
FIRST = "./run_and_time.sh"
"""README command that ``tests/e2e/test_rendezvous.py`` runs, checking its output and files."""


def commands(*names: str) -> list[str]:
    """Return the commands of these pages in order, without commands that an earlier page shows."""
    first: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for line in block.splitlines():
                if line and not line.startswith("#"):
                    first.setdefault(line, page.name)
    return [line for line, name in first.items() if not names or name in names]


def assert_works(command: str, checkout: Path) -> None:
    """Run a command in a copy of the repository as in an activated environment, and check that it succeeds."""
    shown = command
    for pattern, replacement in SHORTENED.items():
        shown = re.sub(pattern, replacement, shown)
    # Use one thread per process, because two threads are many times slower if other tests use the cores.
    path = f"{checkout}/.venv/bin:{os.environ['PATH']}"
    done = start("bash", "-c", shown, cwd=checkout, PATH=path, OMP_NUM_THREADS="1")
    # A run on few samples may miss the target, which gives exit status 1.
    allowed = {0, 1} if "-m bert.train tiny_cpu --training.max-samples" in command else {0}
    assert done.returncode in allowed, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr
