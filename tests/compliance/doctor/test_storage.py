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


@pytest.mark.parametrize(
    ("path", "durability", "words"),
    [
        ("/srv/data", "durable", "a disk (ext4 at /)"),
        ("/scratch/bert", "durable", "a disk (xfs at /scratch)"),
        ("/scratch2", "durable", "a disk (ext4 at /)"),
        ("/lustre/project/data", "durable", "the network (lustre"),
        ("/home/somebody", "durable", "the network (nfs4"),
        ("/fuse/bucket", "durable", "the network (fuse.s3fs"),
        ("/dev/shm/data", "memory", "memory (tmpfs at /dev/shm)"),
        ("/dev/shm", "memory", "memory"),
        ("/ram/data", "memory", "memory (ramfs"),
        ("/with space/data", "memory", "memory (tmpfs at /with space)"),
        ("/compressed/data", "memory", "memory (ext4 at /compressed)"),
        ("/image/data", "memory", "memory (squashfs at /image on memory (tmpfs at /dev/shm))"),
        ("/image2/data", "durable", "a disk (squashfs at /image2)"),
        ("/twice/data", "memory", "memory"),
    ],
)
def test_on_what_a_path_lies(tmp_path: Path, path: str, durability: str, words: str) -> None:
    files = {
        "/proc/self/mountinfo": HOST,
        "/sys/block/loop0/loop/backing_file": "/dev/shm/image.sqsh\n",
        "/sys/block/loop1/loop/backing_file": "/scratch/image.sqsh\n",
    }
    storage = storage_of(Path(path), fake_host(tmp_path, files))
    assert storage.durability == durability
    assert words in storage.description
    assert storage.is_read_only == path.startswith("/image")


@pytest.mark.parametrize(
    ("upper", "path", "durability"),
    [
        ("/var/lib/u", "/work", "layer"),
        ("/run/u", "/work", "memory"),
        ("/var/lib/u", "/data/train", "durable"),
        ("/var/lib/u", "/dev/shm/train", "memory"),
    ],
)
def test_in_a_container(tmp_path: Path, upper: str, path: str, durability: str) -> None:
    host = fake_host(tmp_path, {"/proc/self/mountinfo": CONTAINER.format(upper)})
    assert storage_of(Path(path), host).durability == durability


def test_a_layer_upon_itself_comes_to_an_end(tmp_path: Path) -> None:
    mounts = "1 0 0:1 / / rw - overlay overlay rw,upperdir=/upper\n"
    assert storage_of(Path("/x"), fake_host(tmp_path, {"/proc/self/mountinfo": mounts})).durability == "layer"


@pytest.mark.parametrize("mountinfo", ["", "nothing\n", " - - - \n"])
def test_without_mounts_nothing_is_known(tmp_path: Path, mountinfo: str) -> None:
    host = fake_host(tmp_path, {"/proc/self/mountinfo": mountinfo})
    assert storage_of(Path("/srv"), host).durability == "unknown"


def test_links_are_followed(tmp_path: Path) -> None:
    host = fake_host(tmp_path, {"/proc/self/mountinfo": HOST})
    (tmp_path / "data").symlink_to("/dev/shm")
    assert storage_of(tmp_path / "data", host).durability == "memory"
    assert storage_of(Path("/usr"), host).durability == "durable"


def test_the_deepest_mount_counts() -> None:
    mounts = parse_mounts(HOST)
    assert len(mounts) == 15
    mount = mount_of(Path("/ro/x"), mounts)
    assert mount is not None
    assert (mount.point, mount.is_read_only) == ("/ro", True)


def test_files_that_are_links(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
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


def test_a_folder_that_cannot_be_read_has_no_links(tmp_path: Path) -> None:
    assert linked_elsewhere(tmp_path / "none") == []
