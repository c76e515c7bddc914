"""The steps that make and remove a lab, as data; nothing here changes the machine."""

from collections.abc import Iterator

import msgspec

from dualpath.plan.traffic_class import burst_bytes, shaping_commands
from dualpath_lab.nodes.machine import (
    Cgroups,
    LabMachine,
    LabRemains,
    Node,
    head_node,
    nodes,
    prefix,
    rail_address,
)
from dualpath_lab.nodes.s3_server import (
    ADDRESS,
    BUCKET,
    S3Server,
    server_command,
    server_environment,
)
from dualpath_lab.nodes.settings import LabSettings, Shaping

#: Names of devices inside the namespaces: the NICs of a node, and a switch's bridge.
CNIC = "cnic"
SNIC = "snic"
BRIDGE = "bridge"
_NETWORK_BITS = 24


def cnics(settings: LabSettings) -> tuple[str, ...]:
    """Return the devices of a node's CNICs, in order of ranks."""
    return (CNIC, *(f"{CNIC}{rail}" for rail in range(1, settings.cnics)))


class Run(msgspec.Struct, frozen=True):
    """Run a command; ``inside``: in the lab's user namespace, if it has one."""

    argv: tuple[str, ...]
    inside: bool = False


class StartAnchor(msgspec.Struct, frozen=True):
    """Start the process that holds the user namespace; it is called ``marker``."""

    marker: str


class MakeFolder(msgspec.Struct, frozen=True):
    """Make a folder, or a cgroup."""

    path: str


class MakeImage(msgspec.Struct, frozen=True):
    """Make a sparse file."""

    path: str
    size_bytes: int


class WriteValue(msgspec.Struct, frozen=True):
    """Write a value to a file of the kernel."""

    path: str
    value: str


class StartServer(msgspec.Struct, frozen=True):
    """Start the S3 server in a network namespace and wait until it listens; logs to ``log``."""

    namespace: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    log: str

    def __repr__(self) -> str:
        return f"StartServer({self.namespace!r}, {self.argv!r})"


class EndProcesses(msgspec.Struct, frozen=True):
    """Kill processes and wait for their end."""

    process_ids: tuple[int, ...]


class AttachLoop(msgspec.Struct, frozen=True):
    """Attach an image to a free loop device, once the kernel has detached the previous one."""

    device: str
    image: str


class DetachLoop(msgspec.Struct, frozen=True):
    """Detach the image of a loop device and wait until that is done."""

    device: str


class RemoveFolder(msgspec.Struct, frozen=True):
    """Remove a folder with its contents, or an empty cgroup."""

    path: str
    cgroup: bool = False


class RemoveFile(msgspec.Struct, frozen=True):
    """Remove a file."""

    path: str


Step = (
    Run
    | StartAnchor
    | MakeFolder
    | MakeImage
    | WriteValue
    | StartServer
    | EndProcesses
    | AttachLoop
    | DetachLoop
    | RemoveFolder
    | RemoveFile
)


def make_steps(settings: LabSettings, machine: LabMachine) -> tuple[Step, ...]:
    """Return the steps that make a lab, in order."""
    steps: list[Step] = []
    if machine.shaping is Shaping.USER_NAMESPACES:
        steps.append(StartAnchor(anchor_marker(settings.name)))
    if machine.shaping is not Shaping.TOKEN_BUCKETS:
        steps += _network(settings)
    steps += _storage(settings, machine)
    if machine.cgroups is not None:
        steps += _throttles(settings, machine, machine.cgroups)
    if machine.s3_server is not None:
        steps += _storage_network(settings)
        steps += _serve(settings, machine, machine.s3_server)
    return tuple(steps)


def undo_steps(found: LabRemains) -> tuple[Step, ...]:
    """Return the steps that remove all parts found; users of a part are removed before it."""
    steps: list[Step] = []
    if found.process_ids:
        steps.append(EndProcesses(found.process_ids))
    steps += [Run(("umount", folder)) for folder in found.mounts]
    steps += [DetachLoop(device) for device in found.loop_devices]
    steps += [Run(("ip", "netns", "delete", name)) for name in found.namespaces]
    steps += [RemoveFolder(cgroup, cgroup=True) for cgroup in found.cgroups]
    steps += [RemoveFolder(folder) for folder in found.folders]
    # The record is removed last, so that a lab that could not be removed stays known.
    steps += [RemoveFile(file) for file in sorted(found.files, key=lambda f: f.endswith(".json"))]
    return tuple(steps)


def anchor_marker(lab: str) -> str:
    """Return the argument by which the process that holds a user namespace is found."""
    return f"{prefix(lab)}anchor"


def server_marker(lab: str) -> str:
    """Return the argument by which the process that serves storage is found."""
    return f"{prefix(lab)}s3"


def storage_switch_name(lab: str) -> str:
    """Return the network namespace of the storage server, which all SNICs lead to."""
    return f"{prefix(lab)}storage-switch"


def cgroup_folder(cgroups: Cgroups, node: Node) -> str:
    """Return a node's cgroup."""
    return f"{cgroups.root}/{node.full_name}"


def _network(settings: LabSettings) -> Iterator[Step]:
    switch = head_node(settings).full_name
    mtu = str(settings.mtu_bytes)
    yield _inside("ip", "netns", "add", switch)
    for rail in range(settings.cnics):
        bridge = _bridge(rail)
        yield _inside("ip", "-n", switch, "link", "add", bridge, "mtu", mtu, "type", "bridge")
        yield _inside("ip", "-n", switch, "link", "set", bridge, "up")
    address = f"{head_node(settings).address}/{_NETWORK_BITS}"
    yield _inside("ip", "-n", switch, "address", "add", address, "dev", BRIDGE)
    yield _inside("ip", "-n", switch, "link", "set", "lo", "up")
    for node in nodes(settings):
        yield from _node_network(settings, switch, node)


def _node_network(settings: LabSettings, switch: str, node: Node) -> Iterator[Step]:
    home = node.full_name
    yield _inside("ip", "netns", "add", home)
    yield _inside("ip", "-n", home, "link", "set", "lo", "up")
    for rail, cnic in enumerate(cnics(settings)):
        yield from _rail(settings, switch, node, rail, cnic)
    yield from _shape(settings, home, "lo", settings.loopback_rate_bytes_per_s)


def _bridge(rail: int) -> str:
    return f"{BRIDGE}{rail}" if rail else BRIDGE


def _rail(settings: LabSettings, switch: str, node: Node, rail: int, cnic: str) -> Iterator[Step]:
    """Yield the steps for one CNIC of a node; CNICs of equal ranks form one network.

    Each of these networks has its own bridge: if two devices of a node received an ARP request for
    an address, either could answer it, and bytes for one rank would arrive over the other's CNIC.
    """
    home, mtu = node.full_name, str(settings.mtu_bytes)
    port = f"{node.name}-{rail}" if rail else node.name
    yield _inside(
        *("ip", "link", "add", cnic, "mtu", mtu, "netns", home, "type", "veth"),
        *("peer", "name", port, "mtu", mtu, "netns", switch),
    )
    yield _inside("ip", "-n", switch, "link", "set", port, "master", _bridge(rail), "up")
    address = f"{rail_address(node, rail)}/{_NETWORK_BITS}"
    yield _inside("ip", "-n", home, "address", "add", address, "dev", cnic)
    yield _inside("ip", "-n", home, "link", "set", cnic, "up")
    # A link is shaped where bytes enter it: at the node, and at the switch's port.
    yield from _shape(settings, home, cnic, settings.cnic_bytes_per_s)
    yield from _shape(settings, switch, port, settings.cnic_bytes_per_s)


def _shape(
    settings: LabSettings, namespace: str, device: str, bytes_per_s: float
) -> Iterator[Step]:
    for command in shaping_commands(device, bytes_per_s, settings.weights, settings.ports):
        tool, *words = command.argv
        yield _inside(tool, "-n", namespace, *words)


def _storage(settings: LabSettings, machine: LabMachine) -> Iterator[Step]:
    if settings.storage:
        return
    yield MakeFolder(machine.storage)
    if not machine.image:
        return
    yield MakeImage(machine.image, settings.image_bytes)
    # No journal, as no data survives the lab; all inode tables are written now, as a kernel thread
    # that does it later would disturb measurements.
    yield Run(
        (
            *("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal"),
            *("-E", "lazy_itable_init=0", machine.image),
        )
    )
    yield AttachLoop(machine.loop_device, machine.image)
    # Processes on nodes of another lab have copies of all mounts.  Below a shared mount, unmounting
    # also removes these copies; otherwise the loop device would be held until they end.
    yield Run(("mount", "--bind", machine.storage, machine.storage))
    yield Run(("mount", "--make-shared", machine.storage))
    yield Run(("mount", "-o", "noatime", machine.loop_device, machine.storage))


def _throttles(settings: LabSettings, machine: LabMachine, cgroups: Cgroups) -> Iterator[Step]:
    rate = round(settings.snic_bytes_per_s)
    if cgroups.version == 2:
        # Lets child groups of the root limit devices; most systems have this on already.
        yield WriteValue(f"{cgroups.root}/cgroup.subtree_control", "+io")
    for node in nodes(settings):
        folder = cgroup_folder(cgroups, node)
        yield MakeFolder(folder)
        if cgroups.version == 1:
            limit = f"{folder}/blkio.throttle.read_bps_device"
            yield WriteValue(limit, f"{machine.device_number} {rate}")
        else:
            yield WriteValue(f"{folder}/io.max", f"{machine.device_number} rbps={rate}")


def _storage_network(settings: LabSettings) -> Iterator[Step]:
    switch, mtu = storage_switch_name(settings.name), str(settings.mtu_bytes)
    yield _inside("ip", "netns", "add", switch)
    yield _inside("ip", "-n", switch, "link", "add", BRIDGE, "mtu", mtu, "type", "bridge")
    yield _inside("ip", "-n", switch, "link", "set", BRIDGE, "up")
    address = f"{ADDRESS}/{_NETWORK_BITS}"
    yield _inside("ip", "-n", switch, "address", "add", address, "dev", BRIDGE)
    for node in nodes(settings):
        yield from _snic(settings, switch, node)


def _snic(settings: LabSettings, switch: str, node: Node) -> Iterator[Step]:
    home, port, mtu = node.full_name, node.name, str(settings.mtu_bytes)
    yield _inside(
        *("ip", "link", "add", SNIC, "mtu", mtu, "netns", home, "type", "veth"),
        *("peer", "name", port, "mtu", mtu, "netns", switch),
    )
    yield _inside("ip", "-n", switch, "link", "set", port, "master", BRIDGE, "up")
    # Nodes reach the server but not each other: KV between them must use the CNIC.
    slave = ("type", "bridge_slave", "isolated", "on")
    yield _inside("ip", "-n", switch, "link", "set", port, *slave)
    network, host = ADDRESS.rpartition(".")[0], node.address.rpartition(".")[2]
    address = f"{network}.{host}/{_NETWORK_BITS}"
    yield _inside("ip", "-n", home, "address", "add", address, "dev", SNIC)
    yield _inside("ip", "-n", home, "link", "set", SNIC, "up")
    # Only what the server sends is shaped: writes are not throttled.
    bits, burst = (
        f"{round(settings.snic_bytes_per_s * 8)}bit",
        burst_bytes(settings.snic_bytes_per_s),
    )
    shaped = ("tc", "-n", switch)
    yield _inside(*shaped, *f"qdisc add dev {port} root handle 1: htb default 1".split())
    yield _inside(
        *shaped,
        *f"class add dev {port} parent 1: classid 1:1 htb rate {bits} ceil {bits}".split(),
        *f"burst {burst} cburst {burst}".split(),
    )


def _serve(settings: LabSettings, machine: LabMachine, server: S3Server) -> Iterator[Step]:
    yield MakeFolder(f"{machine.storage}/{BUCKET}")
    marker = server_marker(settings.name)
    yield StartServer(
        storage_switch_name(settings.name),
        server_command(server, machine.storage, marker),
        server_environment(server),
        f"{machine.folder}/{marker}.log",
    )


def _inside(*argv: str) -> Run:
    return Run(argv, inside=True)
