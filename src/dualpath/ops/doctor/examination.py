"""Runs all checks of a node, in the order in which they are printed."""

from collections.abc import Iterator
from typing import Annotated, Literal

from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import BufferBytes
from dualpath.ops.doctor import machine, network, software, storage
from dualpath.ops.doctor.finding import Finding
from dualpath.ops.doctor.node import Node
from dualpath.storage.location import directory_of

VLLM = "vllm"
NIXL = "nixl"
#: Checks that may be skipped: they take seconds, or do not apply to a node.
PARTS = (VLLM, NIXL)


class CheckSettings(Settings, frozen=True, kw_only=True):
    """Requirements of the node; storage, ports and the router are checked only if given."""

    storage: Annotated[str, Setting("measure this storage", metavar="PATH")] = ""
    storage_bytes: Annotated[int, Setting("size of the temporary file to measure with", ge=1)] = (
        256 << 20
    )
    snic_bytes_per_s: Annotated[
        float, Setting("read rate that the storage should reach; 0: any", ge=0)
    ] = 0.0
    buffer_bytes: BufferBytes = 1 << 30
    host: Annotated[str, Setting("address on which the ports must be free")] = "127.0.0.1"
    ports: Annotated[tuple[int, ...], Setting("ports that must be free", metavar="PORT,…")] = ()
    router: Annotated[
        str, Setting("the router's address, which must be reachable", metavar="TCP-ADDRESS")
    ] = ""
    interface: Annotated[
        str,
        Setting(
            "interface of the compute network; empty: that of the default route", metavar="NAME"
        ),
    ] = ""
    skip: Annotated[tuple[Literal["vllm", "nixl"], ...], Setting("skip these imports")] = ()


def examine(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    """Yield the findings of all checks, one after the other."""
    yield software.python_version(node.python_version())
    yield from _vllm(settings, node)
    if NIXL not in settings.skip:
        yield from software.nixl(node.run_module("dualpath.transport.nixl_probe"))
    yield from _network(settings, node)
    yield from _machine(settings, node)
    if settings.storage:
        yield from _storage(settings)
    for number in settings.ports:
        yield network.port(number, node.port_refusal(settings.host, number))
    if settings.router:
        yield network.control_address(settings.router, node.connection_refusal(settings.router))


def _vllm(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    installed = node.vllm_distributions()
    yield software.vllm_version(installed)
    if installed and VLLM not in settings.skip:
        yield software.vllm_hooks(node.run_module("dualpath.vllm.hooks"))
        yield software.vllm_plugin(node.vllm_plugins(), node.environment.get("VLLM_PLUGINS"))


def _network(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    ports = node.rdma_ports()
    has_rdma = any(port.is_active for port in ports)
    yield network.rdma(ports)
    if has_rdma:
        yield network.nics_of_gpus(node.nics_of_gpus())
    yield network.ucx_environment(node.environment)
    yield network.kv_lane(node.environment, has_rdma)
    interface = settings.interface or node.default_interface()
    if interface and not has_rdma:
        yield network.shaping(interface, node.queueing_disciplines(interface))


def _machine(settings: CheckSettings, node: Node) -> Iterator[Finding]:
    has_rdma = any(port.is_active for port in node.rdma_ports())
    yield machine.memory(node.available_bytes(), settings.buffer_bytes)
    yield machine.shared_memory(node.sharing_refusal(settings.buffer_bytes), settings.buffer_bytes)
    yield machine.huge_pages(node.transparent_huge_pages())
    yield machine.locked_memory(node.locked_memory_bytes(), settings.buffer_bytes, has_rdma)
    yield machine.file_descriptors(*node.file_descriptors())
    yield machine.clock(node.clock_synchronised())


def _storage(settings: CheckSettings) -> Iterator[Finding]:
    folder = directory_of(settings.storage)
    if folder is None:
        yield storage.not_measured(settings.storage)
        return
    try:
        measured = storage.measure(folder, settings.storage_bytes)
    except OSError as failure:
        yield storage.unusable(str(folder), failure.strerror or str(failure))
        return
    yield from storage.storage(measured, settings.snic_bytes_per_s)
