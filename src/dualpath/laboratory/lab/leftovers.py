"""The parts of a lab that exist on this machine, found by their names.

After a crash during creation or removal of a lab, its record does not show which parts exist.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dualpath.laboratory.lab.machine import NAMESPACE_FOLDER, find_cgroups, lab_folder, prefix
from dualpath.storage.host_process import process_stat

_MEMORY_FOLDERS = (Path("/dev/shm"),)


class LabRemains(msgspec.Struct, frozen=True, kw_only=True):
    """Everything whose name has a lab's prefix, and the processes inside the lab."""

    process_ids: tuple[int, ...] = ()
    mounts: tuple[str, ...] = ()
    loop_devices: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no part exists."""
        return not any(msgspec.structs.astuple(self))

    def counts(self) -> str:
        """Return the numbers of parts as text."""
        rows = zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True)
        words = {"process_ids": "processes"}
        return ", ".join(
            f"{words.get(name, name.replace('_', ' '))} {len(found)}"
            for name, found in rows
            if found
        )


def find_remains(lab: str) -> LabRemains:
    """Return the parts of a lab that this user can see, whoever made them."""
    start = prefix(lab)
    mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    namespaces = _children(NAMESPACE_FOLDER, start)
    groups = _cgroups(mounts, start)
    files, folders = _files([lab_folder(), *_MEMORY_FOLDERS], start)
    return LabRemains(
        process_ids=tuple(sorted(_processes(start, namespaces, groups))),
        mounts=mounts_of(mounts, start),
        loop_devices=tuple(_loop_devices(start)),
        namespaces=tuple(path.name for path in namespaces),
        cgroups=tuple(map(str, groups)),
        folders=tuple(map(str, folders)),
        files=tuple(map(str, files)),
    )


def mounts_of(mounts: str, start: str) -> tuple[str, ...]:
    """Return mount points whose name begins with ``start``, given /proc/mounts; last one first.

    Mounts of named network namespaces are left out: they are removed with the name.
    """
    points = [Path(line.split()[1]) for line in mounts.splitlines()]
    return tuple(
        str(point)
        for point in reversed(points)
        if point.name.startswith(start) and point.parent != NAMESPACE_FOLDER
    )


def is_alive(process_id: int, started_ticks: int) -> bool:
    """Whether the process with this id is still the one that started at ``started_ticks``."""
    return started_ticks == start_ticks(process_id)


def start_ticks(process_id: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it does not exist."""
    stat = process_stat(process_id)
    return 0 if stat is None or stat.is_zombie else stat.start_ticks


def _processes(start: str, namespaces: Iterable[Path], groups: Iterable[Path]) -> set[int]:
    """Return processes in the lab's cgroups, network namespaces or user namespace."""
    found: set[int] = set()
    for group in groups:
        found.update(map(int, (group / "cgroup.procs").read_text(encoding="utf-8").split()))
    networks = {os.stat(path).st_ino for path in namespaces}
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found.update(pid for pid in everyone if _namespace(pid, "net") in networks)
    markers = {f"{start}anchor".encode(), f"{start}s3".encode()}
    anchors = [pid for pid in everyone if markers & set(_arguments(pid))]
    # An anchor that has not entered its own namespace yet is still in this process's.
    users = {_namespace(pid, "user") for pid in anchors} - {_namespace(os.getpid(), "user"), 0}
    found.update(anchors, (pid for pid in everyone if _namespace(pid, "user") in users))
    return found - {os.getpid()}


def _namespace(process_id: int, kind: str) -> int:
    """Return the inode of a process's namespace; 0 if it has ended or is another user's."""
    try:
        return os.stat(f"/proc/{process_id}/ns/{kind}").st_ino
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return 0


def _arguments(process_id: int) -> list[bytes]:
    try:
        if os.stat(f"/proc/{process_id}").st_uid != os.geteuid():
            return []
        return Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return []


def _cgroups(mounts: str, start: str) -> list[Path]:
    cgroups = find_cgroups(mounts)
    return [] if cgroups is None else _children(Path(cgroups.root), start)


def backing_file(loop_device: str) -> Path:
    """Return the kernel's file that exists while an image is attached to the device."""
    return Path("/sys/block") / Path(loop_device).name / "loop" / "backing_file"


def _loop_devices(start: str) -> Iterator[str]:
    for entry in sorted(Path("/sys/block").glob("loop*")):
        backing = backing_file(entry.name)
        if backing.exists():
            image = backing.read_text(encoding="utf-8").strip()
            if Path(image).name.startswith(start):
                yield f"/dev/{entry.name}"


def _files(places: Iterable[Path], start: str) -> tuple[list[Path], list[Path]]:
    """Return files and folders of the lab."""
    found = [path for place in places for path in _children(place, start)]
    return [p for p in found if not p.is_dir()], [p for p in found if p.is_dir()]


def _children(folder: Path, start: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(start))
