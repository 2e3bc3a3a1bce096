from pathlib import Path

import pytest

from compliance.doctor.storage import Mount, read_mounts, storage_of

HOST = [
    Mount("/proc", "proc"),
    Mount("/dev/shm", "tmpfs"),
    Mount("/", "ext4"),
    Mount("/scratch", "xfs"),
    Mount("/lustre/project", "lustre"),
    Mount("/home", "nfs4"),
    Mount("/twice", "ext4"),
    Mount("/twice", "tmpfs"),
    Mount("/fuse", "fuse.s3fs"),
]
CONTAINER = [Mount("/", "overlay"), Mount("/data", "xfs"), Mount("/dev/shm", "tmpfs")]


@pytest.mark.parametrize(
    ("mounts", "path", "durability", "words"),
    [
        (HOST, "/srv/data", "durable", "a disk (ext4 at /)"),
        (HOST, "/scratch/bert", "durable", "a disk (xfs at /scratch)"),
        (HOST, "/scratch2", "durable", "a disk (ext4 at /)"),
        (HOST, "/lustre/project/data", "durable", "the network (lustre"),
        (HOST, "/home/somebody", "durable", "the network (nfs4"),
        (HOST, "/fuse/bucket", "durable", "the network (fuse.s3fs"),
        (HOST, "/dev/shm", "memory", "memory (tmpfs at /dev/shm)"),
        (HOST, "/twice/data", "memory", "memory"),
        (CONTAINER, "/work", "layer", "layer (overlay at /)"),
        (CONTAINER, "/data/train", "durable", "a disk (xfs at /data)"),
        ([], "/srv", "unknown", "unknown"),
    ],
)
def test_what_a_path_lies_on(mounts: list[Mount], path: str, durability: str, words: str) -> None:
    storage = storage_of(Path(path), mounts)
    assert storage.durability == durability
    assert words in storage.description


def test_links_are_followed_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/dev/shm")
    assert storage_of(tmp_path / "data", read_mounts()).durability == "memory"
    assert storage_of(Path("/proc"), read_mounts()).description.endswith("(proc at /proc)")
