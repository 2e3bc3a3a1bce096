"""The guard against touching training data before the clock starts.

Each case runs in its own process because audit hooks cannot be removed.
"""

import shutil
from pathlib import Path

import pytest

from tests.conftest import SmallRun
from tests.programs import python

pytestmark = pytest.mark.slow

TOUCHES = [
    "open_shard(shard)",
    "open_dataset(folder).take(numpy.array([0]))",
    "shard.read_bytes()",
    "os.open(str(shard), 0)",
    "numpy.memmap(shard, mode='r')",
    "(folder / '.' / shard.name).open('rb')",
    "os.chdir(folder) or open(shard.name, 'rb')",
    "open(f'/proc/self/cwd/{os.path.relpath(shard)}', 'rb')",
    "open(f'/proc/self/fd/{os.open(folder, 0)}/{shard.name}', 'rb')",
    "os.symlink(shard, link) or open(link, 'rb')",
    "os.symlink(folder, link) or (link / shard.name).read_bytes()",
    "os.link(shard.resolve(), link) or open(link, 'rb')",
    "shard.resolve().open('rb')",
    "(kept := h5py.h5f.open(os.fsencode(shard))) and open(kept.get_vfd_handle())",
    "(kept := h5py.File(shard)) and guard.require_untouched()",
    "(kept := torch.from_file(str(shard), size=8)).numel() and guard.require_untouched()",
    "swallow(shard) or guard.require_untouched()",
    "swallow(shard) or guard.release()",
    "guard.release() or DataGuard([folder.parent]) and shard.read_bytes()",
]
EACH_IN_A_PROCESS = """
import contextlib, os, sys
from pathlib import Path
import h5py, numpy, torch
from bert.guards.data_guard import DataGuard, DataTouchedEarlyError
from dataloading.dataset.folder import open_dataset
from dataloading.shards.formats import open_shard

def swallow(shard):
    with contextlib.suppress(DataTouchedEarlyError):
        shard.read_bytes()

for number, touch in enumerate(sys.argv[2:]):
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        if os.fork():
            os.wait()
            continue
        guard = DataGuard([folder])
        shard, link = next(folder.glob('part_*')), folder.parent.parent / f'{folder.name}_{number}'
        try:
            exec(touch)
        except DataTouchedEarlyError as error:
            assert "opened before run_start" in str(error)
            print(number, folder.name, flush=True)
        os._exit(0)
"""


def test_opening_data_before_the_clock_starts_raises_an_error(small_run: SmallRun, tmp_path: Path) -> None:
    """The guard recognizes a shard even if it is opened by a different path, such as a link."""
    source, places = small_run.folder / "train", tmp_path / "places"
    shutil.copytree(source, places / "folder")
    (places / "linked_folder").symlink_to(source)
    for name in ("links", "hard_links"):
        (places / name).mkdir()
        for path in source.iterdir():
            if path.name.startswith("part_"):
                link = places / name / path.name
                link.symlink_to(path) if name == "links" else link.hardlink_to(path)
            else:
                shutil.copy(path, places / name)
    done = python("-c", EACH_IN_A_PROCESS, places, *TOUCHES)
    assert done.returncode == 0, done.stderr
    noticed = {(TOUCHES[int(number)], place) for number, place in (line.split() for line in done.stdout.splitlines())}
    assert {(touch, place.name) for touch in TOUCHES for place in places.iterdir()} - noticed == set()
