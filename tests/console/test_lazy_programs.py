"""Programs print help and version without importing large packages."""

import json

import pytest

from console.version import version_line
from tests.programs import python

LARGE = "torch triton numpy numba h5py scipy tokenizers safetensors google_crc32c yaml rich mlperf_logging tensorboard"
"""Packages that take from a tenth of a second to several seconds to import."""
DATALOADING = "extract prepare demo index shuffle convert wikipedia verify dump"
COMPLIANCE = "check report summary system convergence doctor package watch"
COMMANDS = {  # --help is added unless there is an option; "" is the program without a command
    "dataloading": ("", *DATALOADING.split()),
    "compliance": ("", *COMPLIANCE.split()),
    "cluster": ("", "devices", "predict", "calibrate", "probe", "show", "whatif"),
    "bert.convert": ("",),
    "bert.train": ("", "tiny_cpu", "tiny_cpu --print-config"),
    "bert.evaluate": ("", "tiny_cpu"),
}
RUN = """
import json, runpy, sys
module, *commands = sys.argv[1:]
for command in ("--version", *commands):
    sys.argv = [module, *command.split(), *([] if "--" in command else ["--help"])]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        assert not stop.code, stop.code
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("module", COMMANDS)
def test_version_and_help_import_no_large_packages(module: str) -> None:
    done = python("-c", RUN, module, *COMMANDS[module])
    assert done.returncode == 0, done.stderr
    version, *shown, held = done.stdout.splitlines()
    assert version == version_line()
    own_words = module in ("bert.train", "bert.evaluate")
    assert own_words or sum(line.startswith("usage: ") for line in shown) == len(COMMANDS[module])
    assert not {*LARGE.split()} & {*json.loads(held)}
