"""Run every command of the README and the pages unchanged in a fresh copy of the repository.

The commands are the lines of the blocks marked ``sh``. The commands of a group of pages run in order in one copy, so
that later commands find what earlier ones made. Each group has its own test file, so that workers share the groups.
Long commands get settings, listed here, that make them short.
"""

import os
import re
import subprocess
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.distributed.ranks import free_port

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TRAINING = ("training.md", "tiny_cpu.md")
DATA = ("data.md", "own_text.md", "checkpoints.md")
RESULTS = tuple(page.name for page in PAGES if page.name not in ("README.md", *TRAINING, *DATA))

EASY = " --evaluation.interval-samples 64 --evaluation.target 0.02"
"""Makes a run reach its target at the first evaluation. ``.ci/run`` runs the README's first commands unchanged."""
BRIEF = " --training.max-samples 64 --evaluation.interval-samples 64"
SHORT = " --training.max-samples 320 --evaluation.interval-samples 320 --evaluation.target 0.0001"
"""Makes a run train to its end, with a target of one correct masked token in some hundreds."""
ON_A_CPU = "env -u TRITON_INTERPRET python benchmarks/gpu.py --device cpu --tiny --out results/gpu"
SHORTENED = {
    "./run_tests.sh": "./run_tests.sh --collect-only --numprocesses 0 tests/test_imports.py",  # avoids recursion
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ./run_and_time.sh": "./run_and_time.sh --prepare",
    "./run_and_time.sh tiny_cpu 3": "NPROC=1 ./run_and_time.sh tiny_cpu 2 --" + EASY,
    "NPROC=2 ./run_and_time.sh tiny_cpu 1 -- --parallel.tensor 2": (
        "NPROC=2 ./run_and_time.sh tiny_cpu 1 -- --parallel.tensor 2" + EASY
    ),
    "NPROC=2 ./run_and_time.sh tiny_cpu 1 -- --parallel.pipeline 2 --training.gradient-accumulation-steps 2": (
        "NPROC=2 ./run_and_time.sh tiny_cpu 1 -- --parallel.pipeline 2 --training.gradient-accumulation-steps 2" + EASY
    ),
    "python -m bert.train tiny_cpu --training.max-samples 9600": "python -m bert.train tiny_cpu" + BRIEF,
    "python -m bert.train tiny_cpu --training.max-samples 9600 --log.tensorboard data/tensorboard": (
        "python -m bert.train tiny_cpu --log.tensorboard data/tensorboard" + BRIEF
    ),
    "torchrun --master-addr 127.0.0.1 --master-port 29500 --nproc-per-node 2 -m bert.train tiny_cpu"
    " --training.max-samples 9600": (
        f"torchrun --master-addr 127.0.0.1 --master-port {free_port()} --nproc-per-node 2 -m bert.train tiny_cpu"
        + BRIEF
    ),
    "./run_and_time.sh tiny_cpu 1 -- --training.seed 5 --log.interval-steps 50": (
        "NPROC=1 ./run_and_time.sh tiny_cpu 1 -- --training.seed 5 --log.interval-steps 50" + EASY
    ),
    "./run_and_time.sh own_text_cpu 1 -- --save-checkpoint data/own/trained.safetensors": (
        "./run_and_time.sh own_text_cpu 1 -- --save-checkpoint data/own/trained.safetensors" + SHORT
    ),
    "./run_and_time.sh own_text_cpu 1 -- --data.initial-checkpoint data/own/model": (
        "./run_and_time.sh own_text_cpu 1 -- --data.initial-checkpoint data/own/model" + SHORT
    ),
    "python benchmarks/data_stages/prepare.py": "python benchmarks/data_stages/prepare.py --rounds 1 --dupe-factor 2 "
    "--text README.md docs/data.md",
    "python -m compliance doctor --recipe h100_1x1 --quick": "python -m compliance doctor --recipe tiny_cpu --quick",
    "./run_tests.sh tests/kernels": "./run_tests.sh --collect-only --numprocesses 0 tests/kernels/test_registry.py",
    "python -m tests.kernels.compiled": "env -u TRITON_INTERPRET python -m tests.kernels.compiled",
    "python benchmarks/gpu.py --part ceilings,correctness": f"{ON_A_CPU} --part ceilings,correctness",
    "python benchmarks/gpu.py --part step,kernels": f"{ON_A_CPU} --part step",  # tests/benchmarks runs the other parts
    "python benchmarks/gpu.py --part fp8,peers": f"{ON_A_CPU} --part fp8",
    "python benchmarks/gpu.py --part memory": f"{ON_A_CPU} --part memory",
    "python benchmarks/gpu.py --part end-to-end": f"{ON_A_CPU} --part end-to-end",
    "torchrun --master-addr 127.0.0.1 --master-port 29500 --nproc-per-node 8 -m cluster probe --out cluster.json": (
        f"torchrun --master-addr 127.0.0.1 --master-port {free_port()} --nproc-per-node 1"
        " -m cluster probe --out cluster.json --seconds 1"
    ),
    "NPROC=8 ./run_and_time.sh tiny_cpu 1 -- --training.device cuda": "NPROC=2 ./run_and_time.sh tiny_cpu 1 --" + EASY,
    "./run_and_time.sh h100_1x8": "./run_and_time.sh tiny_cpu 1 --" + EASY,
    "python -m cluster probe --out cluster.json": "python -m cluster probe --out cluster.json --seconds 1",
    "python -m cluster scale h100_8x8 --out scale.html": (
        "python -m cluster scale h100_8x8 --out scale.html --gpus-per-node 8192"
    ),
    "python -m dataloading demo --out data/tiny_cpu --vocab bert/artifacts/tiny_cpu/vocab.txt": (
        "python -m dataloading demo --out data/whole --vocab bert/artifacts/tiny_cpu/vocab.txt"
    ),
    "python -m bert.evaluate tiny_cpu --expect 0.185 --tolerance 0.02": (
        "python -m bert.evaluate tiny_cpu --expect 0.185 --tolerance 0.02 --data.evaluation data/whole/evaluation"
    ),
    "./run_and_time.sh tiny_cpu -- --plan plan.json": "./run_and_time.sh tiny_cpu -- --plan plan.json" + EASY,
    "python -m cluster tune tiny_cpu": (
        "set -o pipefail; python -m cluster tune tiny_cpu --seconds 10 | grep 'kept for tiny_cpu on this machine: '"
    ),
    "python benchmarks/training/cpu_step.py": "python benchmarks/training/cpu_step.py --workload tiny --repeats 1",
}
FIRST = "./run_and_time.sh"
"""``tests/e2e/test_rendezvous.py`` runs this command and checks its output and files."""
MAY_MISS_TARGET = re.compile(r"-m bert\.train tiny_cpu --training\.max-samples")
"""The pages show these commands with too few samples on purpose. Exit status 1 means that the target was missed."""


def commands(*names: str) -> list[str]:
    """Return the commands of these pages in order. A command that is also on an earlier page belongs to that page only."""
    first: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for line in block.splitlines():
                if line and not line.startswith("#"):
                    first.setdefault(line, page.name)
    return [line for line, name in first.items() if not names or name in names]


def assert_works(command: str, checkout: Path) -> None:
    """Run a command in a copy of the repository as a reader would, with the environment's programs on the path."""
    # One thread per process: beside another busy test, two threads are many times slower than one.
    # Keep the page cache, because other tests read from it.
    path = f"{checkout}/.venv/bin:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CLEAR_CACHES": "0"}
    shown = SHORTENED.get(command, command)
    done = subprocess.run(
        ["bash", "-c", shown], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    allowed = {0, 1} if MAY_MISS_TARGET.search(command) else {0}
    assert done.returncode in allowed, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr
