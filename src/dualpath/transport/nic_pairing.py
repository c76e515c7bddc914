"""Pairs each GPU with its nearest RDMA port on the PCI tree (§2.3: a CNIC per GPU).

Sysfs has the path of every device through the tree, bridge after bridge.  The longer the common
prefix of two paths, the fewer bridges are between the devices; paths that differ at the root cross
CPU sockets.  Among equally near ports, GPUs are distributed evenly.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_NVIDIA = "0x10de"
#: Prefix of the PCI classes of display controllers, which GPUs without a display also have.
_DISPLAY = "0x03"
#: How sysfs names the roots of the tree.
_ROOT = "pci"


class PciDevice(NamedTuple):
    """A device, or a port of one, with the bridges on the path from the root."""

    name: str
    path: tuple[str, ...]

    def has_root_of(self, other: "PciDevice") -> bool:
        """Return whether both devices are below the same PCI root (``pci0000:00``)."""
        roots = [
            next((part for part in device.path if part.startswith(_ROOT)), "")
            for device in (self, other)
        ]
        return roots[0] == roots[1]

    def shared(self, other: "PciDevice") -> int:
        """Return the length of the common prefix of two devices' paths."""
        same = 0
        for mine, theirs in zip(self.path, other.path, strict=False):
            if mine != theirs:
                break
            same += 1
        return same


class PairedPort(NamedTuple):
    """The RDMA port of a GPU, as UCX names it (mlx5_0:1); ``gpus`` GPUs have this port.

    ``near``: both are below the same PCI root, so that no byte crosses CPU sockets.
    """

    name: str
    near: bool
    gpus: int

    @property
    def problem(self) -> str:
        """What makes the pair slow; empty if nothing does."""
        problems = [
            *(["at another PCI root than the GPU"] if not self.near else []),
            *([f"shared by {self.gpus} GPUs"] if self.gpus > 1 else []),
        ]
        return ", ".join(problems)

    def __str__(self) -> str:
        return f"{self.name} ({self.problem})" if self.problem else self.name


def pair(gpus: Sequence[PciDevice], ports: Sequence[PciDevice]) -> dict[str, PairedPort]:
    """Return the port of each GPU, by the GPU's name; empty without ports."""
    taken: Counter[str] = Counter()
    found = {}
    for gpu in gpus if ports else ():
        nearest = min(ports, key=lambda port: (-gpu.shared(port), taken[port.name], port.name))
        taken[nearest.name] += 1
        found[gpu.name] = PairedPort(nearest.name, gpu.has_root_of(nearest), 0)
    return {gpu: port._replace(gpus=taken[port.name]) for gpu, port in found.items()}


def local_nic_pairing(root: Path = Path("/")) -> dict[str, PairedPort]:
    """Return the ports of this machine's GPUs, by PCI address."""
    return pair(_gpus(root), _active_ports(root))


def _gpus(root: Path) -> list[PciDevice]:
    folders = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [
        PciDevice(folder.name, folder.resolve().parts)
        for folder in folders
        if _read(folder / "vendor") == _NVIDIA and _read(folder / "class").startswith(_DISPLAY)
    ]


def _active_ports(root: Path) -> list[PciDevice]:
    folders = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return [
        PciDevice(
            f"{folder.parent.parent.name}:{folder.name}",
            (folder.parent.parent / "device").resolve().parts,
        )
        for folder in folders
        if "ACTIVE" in _read(folder / "state")
    ]


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
