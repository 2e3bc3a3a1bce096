from pathlib import Path

import pytest

from compliance.doctor.run_checks import Mount, mount_of, read_mounts

MOUNTS = [
    Mount("/proc", "proc"),
    Mount("/dev/shm", "tmpfs"),
    Mount("/", "ext4"),
    Mount("/scratch", "xfs"),
    Mount("/twice", "ext4"),
    Mount("/twice", "tmpfs"),
]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/srv/data", "ext4 at /"),
        ("/scratch/bert", "xfs at /scratch"),
        ("/scratch2", "ext4 at /"),
        ("/dev/shm", "memory: tmpfs at /dev/shm"),
        ("/twice/data", "memory: tmpfs at /twice"),
    ],
)
def test_the_deepest_and_last_mount_holds_a_path(path: str, expected: str) -> None:
    assert str(mount_of(Path(path), MOUNTS)) == expected
    assert mount_of(Path(path), []).kind == "unknown"


def test_links_are_followed_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/dev/shm")
    assert str(mount_of(tmp_path / "data", read_mounts())).startswith("memory: ")
