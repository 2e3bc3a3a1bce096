"""Find on what a file lies: a disk, the network, or memory that a reboot forgets (TR 6.1 wants durable storage)."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compliance.doctor.host import ExaminedHost

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

MAX_LOOKED_AT = 10_000
"""Entries of a folder whose links are followed."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo: the folder, the file system's type, what is mounted there, and its options by name."""

    point: str
    kind: str
    device: str
    options: dict[str, str]
    is_read_only: bool = False


@dataclass(frozen=True)
class Storage:
    """The storage of a path: in words, and how durable it is."""

    durability: Literal["durable", "memory", "layer", "unknown"]
    description: str
    is_read_only: bool = False


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The mounts of /proc/self/mountinfo, in its order; lines that are none are left out."""
    mounts: list[Mount] = []
    for line in mountinfo.splitlines():
        # A line has any number of optional fields before the dash, so the right part is counted from there.
        left, dash, right = line.partition(" - ")
        place, what = left.split(" "), right.split(" ")
        if not dash or len(place) < 6 or len(what) < 3:
            continue
        options = {name: value for name, _, value in (option.partition("=") for option in what[2].split(","))}
        # Read-only as it is mounted here, or in all places.
        read_only = "ro" in place[5].split(",") or "ro" in options
        mounts.append(Mount(_unescaped(place[4]), what[0], _unescaped(what[1]), options, read_only))
    return mounts


def _unescaped(text: str) -> str:
    # Spaces and tabs of a name are octal escapes in that file.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """The mount that an absolute path lies in: the deepest, and of those on one folder the last."""
    around = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(around), key=lambda mount: len(mount.point), default=None)


def storage_of(path: Path, host: ExaminedHost) -> Storage:
    """Find on what a file or folder lies, links followed; of one that is not there yet, what it would lie on."""
    mounts = parse_mounts(host.read("/proc/self/mountinfo"))
    return _storage(path.resolve(), mounts, host, depth=0)


def _storage(path: Path, mounts: list[Mount], host: ExaminedHost, depth: int) -> Storage:
    mount = mount_of(path, mounts)
    if mount is None:
        return Storage("unknown", "a file system that /proc/self/mountinfo does not name")
    named = f"{mount.kind} at {mount.point}"
    # Compressed memory and memory disks bear names of block devices, with any file system on them.
    if mount.kind in IN_MEMORY or re.match(r"/dev/(zram|ram)\d", mount.device):
        return Storage("memory", f"memory ({named})", mount.is_read_only)
    # A file system on a layer or in a file is as durable as what holds that.
    backing = mount.options.get("upperdir", "") if mount.kind in LAYERED else _loop_file(mount.device, host)
    # Layers and files may lie in one another, but not without end.
    if backing and depth < 4:
        below = _storage(Path(backing), mounts, host, depth + 1)
        if below.durability == "memory":
            return Storage("memory", f"memory ({named} on {below.description})", mount.is_read_only)
    if mount.kind in LAYERED:
        return Storage("layer", f"the container's own layer ({named})", mount.is_read_only)
    if mount.kind.startswith(ON_NETWORK):
        return Storage("durable", f"the network ({named})", mount.is_read_only)
    return Storage("durable", f"a disk ({named})", mount.is_read_only)


def _loop_file(device: str, host: ExaminedHost) -> str:
    match = re.fullmatch(r"/dev/(loop\d+)", device)
    return host.read(f"/sys/block/{match[1]}/loop/backing_file") if match else ""


def linked_elsewhere(folder: Path) -> list[Path]:
    """The other folders that links among a folder's files lead to: shards linked from memory, for example."""
    found: dict[Path, None] = {}
    try:
        own = folder.resolve()
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MAX_LOOKED_AT), entries, strict=False):
                if entry.is_symlink():  # one that leads nowhere is named by the data's own check
                    with suppress(OSError, RuntimeError):  # RuntimeError: links in a circle
                        found[Path(entry.path).resolve().parent] = None
        found.pop(own, None)
    except OSError:
        return []
    return list(found)
