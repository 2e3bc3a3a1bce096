"""Find the file system that holds a path. The rules want data on durable storage (TR 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
LAYERED = frozenset({"overlay", "aufs"})
"""Layers of a container, which are lost with it."""


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
    """Return the file system that holds a file or folder, or would hold it. Links are followed."""
    around = [mount for mount in mounts if path.resolve().is_relative_to(mount.point)]
    # The deepest mount holds the path; the last mount on a folder hides the earlier ones.
    return max(reversed(around), key=lambda mount: len(mount.point), default=Mount("/", "unknown"))
