"""The interfaces of an engine to its machine: threads and time, storage, network.

A live engine uses those of the machine.  A simulation replaces all of them, so that its seed
determines everything that happens to an engine.
"""

import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import HostProcess
from dualpath.core.errors import ConfigError
from dualpath.engine.control.link import RouterConnection, ZmqRouterConnection
from dualpath.engine.io.storage_maintenance import load_storage_keys
from dualpath.engine.passes.device import Device
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.node.cluster_secret import load_secret
from dualpath.node.host_process import has_exited, this_process
from dualpath.node.system_calls import KERNEL, SystemCalls
from dualpath.storage.compression import Compressor
from dualpath.storage.contract import BlockStorage
from dualpath.storage.factory import open_storage, open_tree
from dualpath.storage.node_dram import NodeDram
from dualpath.storage.objects import ObjectTree
from dualpath.storage.readers import FileReader
from dualpath.storage.sealed_blocks import require_keys
from dualpath.transport.contract import Transport
from dualpath.transport.shared_memory import NearestTransport, SharedMemoryTransport

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 1.0


def _open_storage(settings: EngineSettings, namespace: StoreNamespace) -> BlockStorage:
    return open_storage(
        settings.storage,
        namespace,
        mode=settings.mode,
        read_bytes_per_s=settings.snic_bytes_per_s or None,
        keys=storage_keys(settings),
        compressor=Compressor() if settings.storage_codec == "zstd" else None,
        open_plugin=_open_plugin,
    )


def storage_keys(settings: EngineSettings) -> "KeyRing | None":
    """Return the keys that seal an engine's blocks, None if they are not sealed.

    Raises ``ConfigError`` if keys are needed and there are none, or they cannot be read.
    """
    if settings.protection is msgspec.UNSET:
        return None
    keys = load_storage_keys(settings.storage_key_file)
    require_keys(settings.protection, keys)
    return keys


def open_node_dram(
    settings: EngineSettings,
    namespace: StoreNamespace,
    calls: SystemCalls = KERNEL,
    now_s: Callable[[], float] = time.time,
) -> NodeDram | None:
    """Open the DRAM cache that engines of this machine share; None if it is not enabled.

    Raises ``ConfigError`` if its folder cannot be used.
    """
    if not settings.dram_dir or not settings.mode.moves_bytes:
        return None
    keys = storage_keys(settings)
    try:
        return NodeDram(
            *(settings.dram_dir, namespace, settings.dram_bytes),
            keys=keys,
            calls=calls,
            now_s=now_s,
        )
    except OSError as error:
        raise ConfigError(
            f"dram_dir {settings.dram_dir} cannot be used ({error.strerror}); give a directory in "
            "tmpfs"
        ) from error


def _open_tree(settings: EngineSettings) -> ObjectTree:
    return open_tree(settings.storage)


def _open_plugin(plugin: str) -> FileReader:
    from dualpath.transport.nixl_storage import NixlReader

    return NixlReader(plugin)


def _open_transport(agent: str, settings: EngineSettings, device: Device) -> Transport:
    """Open the transport that ``settings.transport`` selects."""
    if settings.transport == "nixl":
        return _open_nixl(agent, settings)
    process = this_process()
    if settings.transport == "memory":
        return SharedMemoryTransport(agent, process, has_exited)
    network = _open_nixl(agent, settings)
    try:
        memory = SharedMemoryTransport(agent, process, has_exited, device.hbm_copies())
    except ConfigError as error:
        log.warning("engines of this machine are reached through NIXL: %s", error)
        return network
    return NearestTransport(memory, network)


def _open_nixl(agent: str, settings: EngineSettings) -> Transport:
    from dualpath.transport.nixl import NixlTransport

    return NixlTransport(
        agent,
        tls=settings.ucx_tls or None,
        progress_delay_us=settings.progress_delay_us,
        engine_config=settings.nixl_engine_config,
    )


def _connect(settings: EngineSettings) -> RouterConnection:
    return ZmqRouterConnection(settings.router, load_secret(settings.cluster_secret_file))


def _listens(api_url: str) -> bool:
    url = urlsplit(api_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), _PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _new_epoch() -> str:
    return uuid.uuid4().hex[:12]


def _end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Surroundings:
    """The defaults are those of a live engine; functions that open something raise ``ConfigError``.

    ``now_s`` is Unix time.  ``open_transport`` gets the name of its agent and the device of its
    HBM.  ``listens`` returns whether a server accepts connections at a URL.  ``new_epoch`` returns
    a unique name of a process start.  ``has_exited`` returns whether a process of this machine,
    identified as by ``this_process``, has ended.  ``end_process`` ends this process, whatever its
    threads do.
    """

    threads: Threads = OS_THREADS
    now_s: Callable[[], float] = time.time
    open_storage: Callable[[EngineSettings, StoreNamespace], BlockStorage] = _open_storage
    open_tree: Callable[[EngineSettings], ObjectTree] = _open_tree
    open_node_dram: Callable[[EngineSettings, StoreNamespace], NodeDram | None] = open_node_dram
    open_transport: Callable[[str, EngineSettings, Device], Transport] = _open_transport
    connect: Callable[[EngineSettings], RouterConnection] = _connect
    listens: Callable[[str], bool] = _listens
    new_epoch: Callable[[], str] = _new_epoch
    this_process: Callable[[], HostProcess] = this_process
    has_exited: Callable[[HostProcess], bool] = has_exited
    end_process: Callable[[], None] = _end_process


#: The surroundings of a live engine.
LIVE = Surroundings()
