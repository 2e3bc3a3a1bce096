"""A command line is parsed, rejected or explained within half a second, before PyTorch and its dependents are imported."""

import json
import subprocess
import sys

from tests.conftest import REPOSITORY

PROGRAM = """
import contextlib, io, json, sys
from bert import evaluate, train

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for program in (train, evaluate):
        for arguments in (["--help"], ["tiny_cpu", "--help"], ["tiny_cpu", "--no-such"], ["tiny"], ["--config=none.toml"]):
            try:
                assert program.main(arguments) == (0 if program is evaluate and arguments == ["--help"] else 2), arguments
            except SystemExit as end:
                assert end.code in (0, None), arguments
train.parse(["tiny_cpu", "--dry-run"])
print(json.dumps(sorted(sys.modules)))
"""
LARGE = {
    "torch",
    "numpy",
    "h5py",
    "numba",
    "safetensors",
    "tokenizers",
    "triton",
    "rich",
    "mlperf_logging",
    "tensorboard",
}


def test_a_command_line_is_understood_without_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    held = set(json.loads(done.stdout))
    assert not held & LARGE
