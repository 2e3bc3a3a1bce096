"""Write a folder like /sys, for tests of code that reads facts about hardware there."""

from pathlib import Path


class Machine:
    """A folder like /sys that describes NUMA nodes, cores, PCI devices and InfiniBand cards."""

    def __init__(self, folder: Path) -> None:
        self.sys = folder / "sys"
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        (self.sys / "class/infiniband").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        (self.sys / path).parent.mkdir(parents=True, exist_ok=True)
        (self.sys / path).write_text(text + "\n")

    def pci(self, path: str, vendor: str, kind: str, numa: int) -> None:
        """Add a PCI device at ``path``, which begins with the host bridge and ends with the device's address."""
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(numa))):
            self.write(f"devices/{path}/{name}", text)
        (self.sys / "bus/pci/devices" / Path(path).name).symlink_to(self.sys / "devices" / path)

    def gpu(self, path: str, numa: int) -> None:
        self.pci(path, "0x10de", "0x030200", numa)

    def hca(self, name: str, path: str, state: str = "4: ACTIVE") -> None:
        self.pci(path, "0x15b3", "0x020700", 0)
        self.write(f"devices/{path}/infiniband/{name}/ports/1/state", state)
        (self.sys / f"devices/{path}/infiniband/{name}/device").symlink_to(self.sys / "devices" / path)
        (self.sys / "class/infiniband" / name).symlink_to(self.sys / f"devices/{path}/infiniband/{name}")
