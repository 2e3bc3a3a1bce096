from pathlib import Path

import pytest

from compliance.doctor.storage import linked_elsewhere, mount_of, parse_mounts, storage_of
from tests.compliance.doctor.fake_host import fake_host

HOST = """22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24731708k
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 27 0:40 / /scratch rw,relatime - xfs /dev/nvme0n1p1 rw
31 27 0:41 / /lustre/project rw - lustre 10.0.0.1@o2ib:/fs rw,flock
32 27 0:42 / /ram rw - ramfs ramfs rw
33 27 0:43 / /ro ro,relatime - ext4 /dev/vdb ro
34 27 0:44 / /with\\040space rw - tmpfs tmpfs rw
35 27 0:45 / /compressed rw - ext4 /dev/zram0 rw
36 27 7:0 / /image ro - squashfs /dev/loop0 ro
37 27 7:1 / /image2 ro - squashfs /dev/loop1 ro
38 27 0:46 / /home rw - nfs4 server:/home rw,vers=4.2
39 27 0:47 / /twice rw - ext4 /dev/vdc rw
40 39 0:48 / /twice rw - tmpfs tmpfs rw
41 27 0:49 / /fuse rw - fuse.s3fs s3fs rw
half a line - tmpfs
"""
CONTAINER = """500 400 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/l,upperdir={},workdir=/var/lib/w
501 500 0:51 / /data rw - xfs /dev/sda1 rw
502 500 0:52 / /dev/shm rw - tmpfs shm rw,size=65536k
503 500 0:53 / /run rw - tmpfs tmpfs rw
"""
ON_DISK, IN_MEMORY = (CONTAINER.format(upper) for upper in ("/var/lib/u", "/run/u"))
UPON_ITSELF = "1 0 0:1 / / rw - overlay overlay rw,upperdir=/upper\n"


@pytest.mark.parametrize(
    ("mounts", "path", "durability", "words"),
    [
        (HOST, "/srv/data", "durable", "a disk (ext4 at /)"),
        (HOST, "/scratch/bert", "durable", "a disk (xfs at /scratch)"),
        (HOST, "/scratch2", "durable", "a disk (ext4 at /)"),
        (HOST, "/lustre/project/data", "durable", "the network (lustre"),
        (HOST, "/home/somebody", "durable", "the network (nfs4"),
        (HOST, "/fuse/bucket", "durable", "the network (fuse.s3fs"),
        (HOST, "/dev/shm/data", "memory", "memory (tmpfs at /dev/shm)"),
        (HOST, "/dev/shm", "memory", "memory"),
        (HOST, "/ram/data", "memory", "memory (ramfs"),
        (HOST, "/with space/data", "memory", "memory (tmpfs at /with space)"),
        (HOST, "/compressed/data", "memory", "memory (ext4 at /compressed)"),
        (HOST, "/image/data", "memory", "memory (squashfs at /image on memory (tmpfs at /dev/shm))"),
        (HOST, "/image2/data", "durable", "a disk (squashfs at /image2)"),
        (HOST, "/twice/data", "memory", "memory"),
        (ON_DISK, "/work", "layer", "layer (overlay at /)"),
        (IN_MEMORY, "/work", "memory", "memory (overlay at / on memory"),
        (ON_DISK, "/data/train", "durable", "a disk (xfs at /data)"),
        (ON_DISK, "/dev/shm/train", "memory", "memory (tmpfs"),
        (UPON_ITSELF, "/x", "layer", "layer"),
        *((mounts, "/srv", "unknown", "does not name") for mounts in ("", "nothing\n", " - - - \n")),
    ],
)
def test_on_what_a_path_lies(tmp_path: Path, mounts: str, path: str, durability: str, words: str) -> None:
    files = {
        "/proc/self/mountinfo": mounts,
        "/sys/block/loop0/loop/backing_file": "/dev/shm/image.sqsh\n",
        "/sys/block/loop1/loop/backing_file": "/scratch/image.sqsh\n",
    }
    storage = storage_of(Path(path), fake_host(tmp_path, files))
    assert (storage.durability, storage.is_read_only) == (durability, path.startswith("/image"))
    assert words in storage.description


def test_links_are_followed_and_the_deepest_mount_counts(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/dev/shm")
    assert storage_of(tmp_path / "data", fake_host(tmp_path, {"/proc/self/mountinfo": HOST})).durability == "memory"
    mounts = parse_mounts(HOST)
    mount = mount_of(Path("/ro/x"), mounts)
    assert mount is not None
    assert (len(mounts), mount.point, mount.is_read_only) == (15, "/ro", True)


def test_files_that_are_links(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    assert linked_elsewhere(data) == []  # it cannot be read
    data.mkdir()
    elsewhere.mkdir()
    (elsewhere / "shard").write_text("x")
    (data / "own").write_text("x")
    (data / "near").symlink_to(data / "own")
    assert linked_elsewhere(data) == []
    (data / "shard").symlink_to(elsewhere / "shard")
    (data / "again").symlink_to(data / "shard")
    (data / "circle").symlink_to(data / "circle")
    assert linked_elsewhere(data) == [elsewhere]
