"""Find what a file lies on: a disk, the network, or memory that a reboot clears (TR 6.1 wants durable storage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
LAYERED = frozenset({"overlay", "aufs"})
ON_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "wekafs",
    "9p",
    "virtiofs",
    "fuse.",
)


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    kind: str


@dataclass(frozen=True)
class Storage:
    """The storage of a path: how durable it is, and in words."""

    durability: Literal["durable", "memory", "layer", "unknown"]
    description: str


def read_mounts() -> list[Mount]:
    """List all mounted file systems, in the order in which they were mounted."""
    import psutil

    partitions = psutil.disk_partitions(all=True)
    return [Mount(each.mountpoint, each.fstype) for each in partitions]


def storage_of(path: Path, mounts: Sequence[Mount]) -> Storage:
    """Find what a file or folder lies on. Links are followed; a path that does not exist yet would lie there."""
    path = path.resolve()
    around = [mount for mount in mounts if path.is_relative_to(mount.point)]
    # The deepest mount holds the path; the last mount on a folder hides the earlier ones.
    mount = max(reversed(around), key=lambda mount: len(mount.point), default=None)
    if mount is None:
        return Storage("unknown", "an unknown file system")
    named = f"{mount.kind} at {mount.point}"
    if mount.kind in IN_MEMORY:
        return Storage("memory", f"memory ({named})")
    if mount.kind in LAYERED:
        return Storage("layer", f"the container's own layer ({named})")
    place = "the network" if mount.kind.startswith(ON_NETWORK) else "a disk"
    return Storage("durable", f"{place} ({named})")
