"""Checks of the compute network: RDMA, traffic classes (§5.1, §A.1), ports, the router."""

from collections.abc import Mapping, Sequence

import msgspec

from dualpath.launch.doctor.finding import Finding, error, ok, warning
from dualpath.transport.nic_pairing import PairedPort
from dualpath.transport.ucx_config import DEFAULT_ENGINE_CONFIG

#: UCX settings that give KV its own lane on InfiniBand or RoCE, and on TCP.
_RDMA_MARKS = ("UCX_IB_SL", "UCX_IB_TRAFFIC_CLASS")
_TCP_MARK = "UCX_TCP_PORT_RANGE"


class RdmaPort(msgspec.Struct, frozen=True):
    """A port of an RDMA device: ``state`` such as ``4: ACTIVE``, ``layer`` such as InfiniBand."""

    device: str
    port: str
    state: str
    layer: str

    @property
    def is_active(self) -> bool:
        """Whether the port is up."""
        return "ACTIVE" in self.state


def rdma(ports: Sequence[RdmaPort]) -> Finding:
    """Check the RDMA devices of the compute network."""
    check, needed = "RDMA devices", "an active port, for GPU clusters"
    found = ", ".join(f"{p.device}/{p.port} {p.layer} {p.state}" for p in ports) or "none"
    if any(port.is_active for port in ports):
        return ok(check, found, needed)
    remedy = "KV is transferred over TCP or shared memory, which costs CPU; "
    remedy += "bring a port up" if ports else "sufficient for tests and CPU engines only"
    return warning(check, found, needed, remedy)


def nics_of_gpus(pairs: Mapping[str, PairedPort]) -> Finding:
    """Check which port carries the KV of each GPU (``transport.nic_pairing``).

    ``pairs`` maps PCI addresses of GPUs to ports.
    """
    check, needed = "NIC of each GPU", "a port for each GPU, below the same PCI root"
    found = ", ".join(f"{gpu} {port}" for gpu, port in pairs.items()) or "no GPU, or no port"
    if not any(port.problem for port in pairs.values()):
        return ok(check, found, needed)
    remedy = (
        "GPUs that share a port share its bandwidth, and bytes cross CPU sockets to a port at "
        "another PCI root; choose others with net_devices"
    )
    return warning(check, found, needed, remedy)


def ucx_environment(environment: Mapping[str, str]) -> Finding:
    """Check for environment variables that override our UCX settings."""
    check = "UCX variables"
    ours = {f"UCX_{key}": value for key, value in DEFAULT_ENGINE_CONFIG.items()}
    overriding = [
        f"{name}={environment[name]} (ours: {value})"
        for name, value in sorted(ours.items())
        if environment.get(name, value) != value
    ]
    if overriding:
        remedy = "unset them unless they are intended: they override dualpath's settings"
        return warning(check, ", ".join(overriding), "none that override ours", remedy)
    others = sorted(name for name in environment if name.startswith("UCX_"))
    return ok(check, ", ".join(f"{n}={environment[n]}" for n in others) or "none")


def kv_lane(environment: Mapping[str, str], has_rdma: bool) -> Finding:
    """Check whether the environment sets KV's traffic class; engine settings may do so instead."""
    check = "Traffic class of KV"
    marks = (*_RDMA_MARKS, _TCP_MARK)
    found = ", ".join(f"{name}={environment[name]}" for name in marks if name in environment)
    if found:
        return ok(check, found)
    fabric = "infiniband or roce" if has_rdma else "ethernet"
    remedy = f"set what `dualpath qos --fabric {fabric}` prints, as a variable or as an engine's "
    remedy += "nixl_engine_config"
    needed = f"one of {', '.join(_RDMA_MARKS if has_rdma else (_TCP_MARK,))}"
    return warning(check, "not in the environment", needed, remedy)


def shaping(interface: str, disciplines: str | None) -> Finding:
    """Check ``tc qdisc show`` of an Ethernet interface for HTB; None: tc is not installed."""
    check = f"Shaping of {interface}"
    remedy = f"run the commands of `dualpath qos --fabric ethernet --interface {interface}`"
    if disciplines is None:
        return warning(check, "cannot run tc", "HTB, without RDMA", f"install tc; {remedy}")
    if "qdisc htb" in disciplines:
        return ok(check, "HTB", "HTB, without RDMA")
    found = disciplines.split("\n")[0][:60] or "no queueing discipline"
    return warning(check, found, "HTB, without RDMA", remedy)


def port(number: int, refusal: str) -> Finding:
    """Check a port to listen on; ``refusal`` is why it cannot be used, empty if it is free."""
    check = f"Port {number}"
    if refusal:
        return error(check, refusal, "free", "stop what listens there, or choose another port")
    return ok(check, "free", "free")


def control_address(address: str, refusal: str) -> Finding:
    """Check the router's control address; ``refusal`` is the error, empty if it is reachable."""
    check = "Control address"
    if refusal:
        remedy = "start the router with a --control-host that other nodes reach; open the port"
        return error(check, f"{address}: {refusal}", "accepts connections", remedy)
    return ok(check, f"{address} accepts connections")
