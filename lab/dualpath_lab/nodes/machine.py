"""What this machine supports for a lab, and the names of everything in a lab.

Every name begins with the lab's prefix, so that a lab is found even if its record is lost.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.node.host_process import process_stat
from dualpath_lab.nodes.s3_server import S3Server, find_s3_server
from dualpath_lab.nodes.settings import LabSettings, Shaping, StorageServer

#: Where `ip netns` stores named network namespaces.
NAMESPACE_FOLDER = Path("/run/netns")
_MEMORY_FOLDER = Path("/dev/shm")
_HEAD_HOST = 1
_FIRST_HOST = 10
#: Networks of further CNICs are 10.79.0.0 and so on: 10.78.0.0 is that of a storage server.
_RAILS = 78
_COMMAND_DEADLINE_S = 30.0


class Cgroups(msgspec.Struct, frozen=True):
    """The hierarchy that throttles block devices: ``version`` 1 or 2, mounted at ``root``."""

    version: int
    root: str


class LabMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of this machine that a lab uses.

    ``shaping`` is never AUTO.  ``folder`` has the lab's files.  ``storage`` is the folder that all
    nodes read; if the lab makes a file system for it, that is mounted there, else ``image`` and
    ``loop_device`` are empty.  ``device_number`` (major:minor) is the block device throttled
    through ``cgroups``; without one, no kernel throttles reads of the folder.  ``s3_server`` serves
    the folder if the settings require it.
    """

    shaping: Shaping
    folder: str
    storage: str
    image: str = ""
    loop_device: str = ""
    device_number: str = ""
    cgroups: Cgroups | None = None
    s3_server: S3Server | None = None


class Node(msgspec.Struct, frozen=True):
    """One node: its short name (pe0, de1), its network namespace and cgroup, its address."""

    name: str
    full_name: str
    address: str


def prefix(lab: str) -> str:
    """Return the prefix of all names of a lab."""
    return f"dualpath-{lab}-"


def nodes(settings: LabSettings) -> tuple[Node, ...]:
    """Return the nodes, prefill first."""
    names = [f"pe{i}" for i in range(settings.prefill)]
    names += [f"de{i}" for i in range(settings.decode)]
    return tuple(
        Node(name, prefix(settings.name) + name, f"10.77.0.{_FIRST_HOST + index}")
        for index, name in enumerate(names)
    )


def rail_address(node: Node, rail: int) -> str:
    """Return the address of a node's CNIC number ``rail``; CNIC 0 has the node's address."""
    return f"10.{_RAILS + rail}.0.{node.address.rpartition('.')[2]}" if rail else node.address


def head_node(settings: LabSettings) -> Node:
    """Return the switch as a node for router and clients: reachable by all nodes, without links.

    It has no SNIC and no cgroup.
    """
    return Node("head", f"{prefix(settings.name)}switch", f"10.77.0.{_HEAD_HOST}")


def lab_folder(environment: Mapping[str, str] = os.environ, user_id: int | None = None) -> Path:
    """Return the folder for records of labs; it may not exist.

    For root it is in the system's runtime folder, which a reboot empties as it removes labs.  For
    other users it is `$XDG_STATE_HOME/dualpath`, else `~/.local/state/dualpath`, since inside
    their labs the runtime folder is replaced.
    """
    if (os.geteuid() if user_id is None else user_id) == 0:
        return Path("/run/dualpath")
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]).absolute() / "dualpath"
    return Path.home() / ".local" / "state" / "dualpath"


def state_file(lab: str, folder: Path) -> Path:
    """Return the record of a lab."""
    return folder / f"{prefix(lab)}state.json"


def find_machine(settings: LabSettings) -> LabMachine:
    """Return the resources that a lab can use on this machine; changes nothing.

    Raises ``ConfigError`` if the machine does not support ``settings.shaping``.
    """
    shaping = _shaping(settings.shaping)
    folder = lab_folder()
    storage = str(Path(settings.storage).absolute()) if settings.storage else ""
    if storage and not Path(storage).is_dir():
        raise ConfigError(
            f"storage {storage!r} is not a folder; create it or leave the setting out"
        )
    own = str(folder / f"{prefix(settings.name)}storage")
    server = None
    if settings.storage_server is StorageServer.S3:
        server = find_s3_server()
        if shaping is Shaping.TOKEN_BUCKETS:
            raise ConfigError(
                "storage_server s3 needs shaped links, which shaping token-buckets has not; leave "
                "storage_server out, or choose shaping root or user-namespaces"
            )
    if shaping is not Shaping.ROOT:
        return LabMachine(
            shaping=shaping, folder=str(folder), storage=storage or own, s3_server=server
        )
    # With a server the link is throttled, not the device.
    mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    cgroups = None if server else find_cgroups(mounts)
    if storage:
        number = _disk_number(Path(storage)) if cgroups else ""
        return LabMachine(
            shaping=shaping,
            folder=str(folder),
            storage=storage,
            device_number=number,
            cgroups=cgroups if number else None,
            s3_server=server,
        )
    made = _with_image(settings, folder, own, cgroups)
    return msgspec.structs.replace(made, s3_server=server)


def _with_image(
    settings: LabSettings, folder: Path, storage: str, cgroups: Cgroups | None
) -> LabMachine:
    _require("losetup", "mkfs.ext4", "mount", "umount")
    memory = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else folder
    loop_device = _output("losetup", "--find")
    number = Path("/sys/block") / Path(loop_device).name / "dev"
    return LabMachine(
        shaping=Shaping.ROOT,
        folder=str(folder),
        storage=storage,
        image=str(memory / f"{prefix(settings.name)}storage.img"),
        loop_device=loop_device,
        device_number=number.read_text(encoding="utf-8").strip() if cgroups else "",
        cgroups=cgroups,
    )


def find_cgroups(mounts: str) -> Cgroups | None:
    """Return the hierarchy that throttles block devices, given the contents of /proc/mounts."""
    rows = [line.split() for line in mounts.splitlines()]
    for _, root, kind, options, *_ in rows:
        if kind == "cgroup" and "blkio" in options.split(","):
            return Cgroups(1, root)
    for _, root, kind, *_ in rows:
        if kind == "cgroup2" and "io" in _words(Path(root) / "cgroup.controllers"):
            return Cgroups(2, root)
    return None


def _words(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def _shaping(wanted: Shaping) -> Shaping:
    refusals = []
    for shaping in (Shaping.ROOT, Shaping.USER_NAMESPACES):
        if wanted not in (Shaping.AUTO, shaping):
            continue
        refusal = _refusal(shaping)
        if not refusal:
            return shaping
        refusals.append(f"{shaping.value}: {refusal}")
    if wanted in (Shaping.AUTO, Shaping.TOKEN_BUCKETS):
        return Shaping.TOKEN_BUCKETS
    raise ConfigError(
        f"shaping is not possible ({'; '.join(refusals)}); correct it or choose another shaping"
    )


def _refusal(shaping: Shaping) -> str:
    """Return why this user cannot use it here, empty if it is possible."""
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found, install iproute2 and util-linux"
    if shaping is Shaping.ROOT and os.geteuid() != 0:
        return "needs root"
    options = ("--net",) if shaping is Shaping.ROOT else ("-Urnm",)
    tried = subprocess.run(
        ("unshare", *options, "true"), capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S
    )
    return "" if tried.returncode == 0 else f"the kernel refuses ({tried.stderr.strip()})"


def _disk_number(folder: Path) -> str:
    """Return major:minor of the disk of a folder's file system, empty if it is not on a disk."""
    device = os.stat(folder).st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not entry.exists():
        return ""
    entry = entry.resolve()
    disk = entry.parent if (entry / "partition").exists() else entry
    return (disk / "dev").read_text(encoding="utf-8").strip()


def _require(*tools: str) -> None:
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not found, needed for storage in memory; install util-linux and "
            "e2fsprogs, or give a folder with --storage"
        )


def _output(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S)
    if done.returncode:
        raise ConfigError(
            f"{' '.join(argv)} failed: {done.stderr.strip()!r}; if no loop device is free, give a "
            "folder with --storage"
        )
    return done.stdout.strip()


# --------------------------------------------------------------------------------------- leftovers
# The parts of a lab that exist on this machine, found by their names.
#
# After a crash during creation or removal of a lab, its record does not show which parts exist.

_MEMORY_FOLDERS = (Path("/dev/shm"),)


class LabRemains(msgspec.Struct, frozen=True, kw_only=True):
    """Everything with a lab's prefix in its name, and the processes inside the lab."""

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
    """Return mount points with names that begin with ``start``, given /proc/mounts; last one first.

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
