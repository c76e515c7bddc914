"""All checks of a node in the order in which a reader wants them."""

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
#: What may be left out: it takes seconds, or does not apply to a node.
PARTS = (VLLM, NIXL)


class Wanted(Settings, frozen=True, kw_only=True):
    """What the node is to be checked for; storage, ports and the router only if they are given."""

    storage: Annotated[str, Setting("measure this storage", metavar="PATH")] = ""
    storage_bytes: Annotated[int, Setting("of the temporary file it is measured with", ge=1)] = (
        256 << 20
    )
    snic_bytes_per_s: Annotated[
        float, Setting("its reads should reach this rate; 0 for any", ge=0)
    ] = 0.0
    buffer_bytes: BufferBytes = 1 << 30
    host: Annotated[str, Setting("where the ports are to be listened on")] = "127.0.0.1"
    ports: Annotated[tuple[int, ...], Setting("should be free", metavar="PORT,…")] = ()
    router: Annotated[
        str, Setting("the router's address; should be reachable", metavar="TCP-ADDRESS")
    ] = ""
    interface: Annotated[
        str, Setting("of the compute network; empty: by the default route", metavar="NAME")
    ] = ""
    skip: Annotated[tuple[Literal["vllm", "nixl"], ...], Setting("leave out these imports")] = ()


def examine(wanted: Wanted, node: Node) -> Iterator[Finding]:
    """Yield what the checks say, one after the other."""
    yield software.python_version(node.python_version())
    yield from _vllm(wanted, node)
    if NIXL not in wanted.skip:
        yield from software.nixl(node.run_module("dualpath.transport.nixl_probe"))
    yield from _network(wanted, node)
    yield from _machine(wanted, node)
    if wanted.storage:
        yield from _storage(wanted)
    for number in wanted.ports:
        yield network.port(number, node.port_refusal(wanted.host, number))
    if wanted.router:
        yield network.control_address(wanted.router, node.connection_refusal(wanted.router))


def _vllm(wanted: Wanted, node: Node) -> Iterator[Finding]:
    installed = node.vllm_distributions()
    yield software.vllm_version(installed)
    if installed and VLLM not in wanted.skip:
        yield software.vllm_hooks(node.run_module("dualpath.vllm.hooks"))
        yield software.vllm_plugin(node.vllm_plugins(), node.environment.get("VLLM_PLUGINS"))


def _network(wanted: Wanted, node: Node) -> Iterator[Finding]:
    ports = node.rdma_ports()
    has_rdma = any(port.is_active for port in ports)
    yield network.rdma(ports)
    if has_rdma:
        yield network.nics_of_gpus(node.nics_of_gpus())
    yield network.ucx_environment(node.environment)
    yield network.kv_lane(node.environment, has_rdma)
    interface = wanted.interface or node.default_interface()
    if interface and not has_rdma:
        yield network.shaping(interface, node.queueing_disciplines(interface))


def _machine(wanted: Wanted, node: Node) -> Iterator[Finding]:
    has_rdma = any(port.is_active for port in node.rdma_ports())
    yield machine.memory(node.available_bytes(), wanted.buffer_bytes)
    yield machine.shared_memory(node.sharing_refusal(wanted.buffer_bytes), wanted.buffer_bytes)
    yield machine.huge_pages(node.transparent_huge_pages())
    yield machine.locked_memory(node.locked_memory_bytes(), wanted.buffer_bytes, has_rdma)
    yield machine.file_descriptors(*node.file_descriptors())
    yield machine.clock(node.clock_synchronised())


def _storage(wanted: Wanted) -> Iterator[Finding]:
    folder = directory_of(wanted.storage)
    if folder is None:
        yield storage.not_measured(wanted.storage)
        return
    try:
        measured = storage.measure(folder, wanted.storage_bytes)
    except OSError as failure:
        yield storage.unusable(str(folder), failure.strerror or str(failure))
        return
    yield from storage.storage(measured, wanted.snic_bytes_per_s)
