"""The benchmark of reading by every rank against broadcasting whole shards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.programs import PATIENCE_S


@pytest.mark.measured  # other tests have the system drop what it has cached
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system to keep broadcast shards in")
def test_ranks_share_what_one_has_read(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--samples", "4000", "--ranks", "2", "--rounds", "1", "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "benchmarks/data_stages/data_startup.py", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode == 2 and "nothing was read from a disk" in done.stderr:
        pytest.skip("the folder is in memory")
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())
    ways = {(way["part"], way["way"]): way["bytes_from_disk"] for way in figures["ways"]}
    assert len(ways) == 4
    for part in (1.0, 0.03):
        first, second = ways[part, "broadcast"]
        assert first > 0.9 * figures["files_bytes"]
        assert second < 0.5 * figures["files_bytes"]
    assert sum(ways[1.0, "each by itself"]) > 0.9 * figures["files_bytes"]
    assert len([line for line in done.stdout.splitlines() if "time of broadcast over each by itself" in line]) == 2
    assert list(tmp_path.iterdir()) == [out]
