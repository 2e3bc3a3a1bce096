"""Find the file system that holds a path, because the rules require data on durable storage (TR 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
LAYERED = frozenset({"overlay", "aufs"})
"""File system types of container layers, which are lost with the container."""


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    kind: str

    def __str__(self) -> str:
        return f"{'memory: ' if self.kind in IN_MEMORY else ''}{self.kind} at {self.point}"


def read_mounts() -> list[Mount]:
    """List all mounted file systems, in the order in which they were mounted."""
    import psutil

    return [Mount(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)]


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount:
    """Return the file system of a file or folder, which need not exist yet. Links are followed."""
    around = [mount for mount in mounts if path.resolve().is_relative_to(mount.point)]
    # The deepest mount point holds the path. The last mount on the same folder hides earlier ones.
    return max(reversed(around), key=lambda mount: len(mount.point), default=Mount("/", "unknown"))
