"""The compute network through NIXL and UCX: RDMA if available, else shared memory or TCP.

Setup costs are paid once: memory is registered once, the descriptor list of a view is prepared once
per peer, and a posted transfer is two index arrays into prepared lists (about 0.6 µs per piece).
NIXL's UCX backend posts one operation per piece.  A posted transfer owns one NIXL handle.

Agent names are never reused: a name contains the engine's epoch, so metadata of a dead process
cannot be mistaken for its successor's.
"""

import importlib
import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dualpath.core.errors import ConfigError, PeerLostError, TransportError
from dualpath.core.extras import extra
from dualpath.transport.contract import (
    AgentInfo,
    Direction,
    PieceIndices,
    RegionInfo,
    TransferState,
)
from dualpath.transport.regions import (
    check_pair,
    check_region,
    check_traffic_class,
    check_view,
    find_region,
    named_regions,
    span_bytes,
)
from dualpath.transport.ucx_config import engine_config_text

# -------------------------------------------------------------------------------------- nixl agent
# Opens NIXL agents: the import, the progress thread's pause, UCX's environment.
#
# All workarounds for the library are in this file.
#
# * ``nixl_cu12`` or ``nixl_cu13`` is imported, not ``nixl``: the latter imports torch (1.2 s,
#   234 MB).
# * The Python API creates agents with ``pthrDelay = 0``, which makes the UCX progress thread spin
#   on a full core.  There is no public setting, so the constructor of the native agent is replaced
#   during creation and sets the field.  On RDMA hardware 0 is right: completions arrive without the
#   CPU, and the spinning thread notices them early.  With a delay the thread still wakes on events:
#   100 and 1000 µs cost no latency over shared memory or TCP and 1.8 % of a core when idle
#   (``lab/dualpath_lab/benchmarks/transfer_speed.py``).
# * ``UCX_*`` variables of the user always override our settings.

_creation_lock = threading.Lock()

#: NIXL's packages, one for each CUDA; the first one is required if none is installed.
NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
_CUDA_OF_TORCH = re.compile(r"^cuda\b[^=]*=\s*['\"](\d+)", re.MULTILINE)


def nixl_package() -> str:
    """Return the package of NIXL to import; of two installed ones that for torch's CUDA.

    Nothing is imported.
    """
    found = [package for package in NIXL_PACKAGES if importlib.util.find_spec(package) is not None]
    if len(found) > 1 and (matching := f"nixl_cu{_torch_cuda()}") in found:
        return matching
    return (found or NIXL_PACKAGES)[0]


def _torch_cuda() -> str:
    """Return the major version of CUDA that the installed torch was built for, or no text."""
    torch = importlib.util.find_spec("torch")
    for folder in (torch and torch.submodule_search_locations) or ():
        try:
            version = Path(folder, "version.py").read_text()
        except OSError:
            continue
        if found := _CUDA_OF_TORCH.search(version):
            return found[1]
    return ""


def load_nixl() -> Any:  # noqa: ANN401 - the library carries no types
    """Import the NIXL API module; raises ``ConfigError`` if it is not installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        return importlib.import_module(f"{nixl_package()}._api")
    except ImportError as error:
        raise ConfigError(
            f"NIXL cannot be imported ({error}); {extra('nixl').remedy}, or run engines of one "
            "machine without GPUs and without it: --transport memory"
        ) from error


def open_agent(name: str, progress_delay_us: int | None) -> Any:  # noqa: ANN401 - as above
    """Create an agent without backends; ``progress_delay_us`` None means no progress thread.

    The agent is thread-safe (strict lock mode).
    """
    api = load_nixl()
    bindings = api.nixlBind
    native_agent = bindings.nixlAgent

    def native_agent_with_delay(agent_name: str, config: Any) -> Any:  # noqa: ANN401 - as above
        config.pthrDelay = progress_delay_us or 0
        return native_agent(agent_name, config)

    config = api.nixl_agent_config(
        enable_prog_thread=progress_delay_us is not None,
        backends=[],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    with _creation_lock:
        bindings.nixlAgent = native_agent_with_delay
        try:
            return api.nixl_agent(name, config)
        finally:
            bindings.nixlAgent = native_agent


def nixl_errors(api: Any) -> tuple[type[Exception], ...]:  # noqa: ANN401 - as above
    """Return the exception types that NIXL raises; they have no common base class."""
    bindings = api.nixlBind
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(getattr(bindings, name) for name in names)


# ----------------------------------------------------------------------------------- nixl transfer
# One posted NIXL request.
#
# A request cannot be cancelled: over TCP, bytes of a cancelled READ were written after the peer had
# been removed and the handle released.  A transfer with a disconnected peer therefore stays MOVING
# until NIXL reports its end, and only then becomes FAILED; until then its handle and the peer's
# connection stay open.


class TransferOwner(Protocol):
    """The interface of a transport for its transfers."""

    errors: tuple[type[Exception], ...]

    def start(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Post a request and return its state."""
        ...

    def state_of(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Return the state of a request."""
        ...

    def note_failure(self, agent: str, error: Exception) -> None:
        """Handle the failure of a request with ``agent``."""
        ...

    def drop_if_idle(self, agent: str) -> None:
        """Handle the end of a request with a disconnected agent."""
        ...

    def released(self, transfer: "NixlTransfer") -> None:
        """Handle the release of a transfer."""
        ...


class NixlTransfer:
    """One posted NIXL request; see ``dualpath.transport.contract.Transfer``."""

    def __init__(self, owner: TransferOwner, agent: str, handle: Any, size: int) -> None:  # noqa: ANN401 - untyped library
        self.bytes = size
        self.agent = agent
        self._owner = owner
        self._handle = handle
        self._lock = threading.Lock()
        self._state = TransferState.MOVING if handle is not None else TransferState.DONE
        self._error: str | None = None
        self._failure_reason: str | None = None

    def poll(self) -> TransferState:
        """Drive progress and return the state; it becomes FAILED if the peer is lost."""
        with self._lock:
            if self._state is TransferState.MOVING:
                self._advance(self._owner.state_of, "check")
            return self._state

    @property
    def is_moving(self) -> bool:
        """Whether bytes may still move, as of the last poll."""
        return self._state is TransferState.MOVING

    def error(self) -> str | None:
        """Return why the transfer failed, or None."""
        return self._error

    def release(self) -> None:
        """Release the handle; raises ``TransportError`` while the transfer is moving."""
        with self._lock:
            if self._state is TransferState.MOVING:
                raise TransportError("transfer released while moving; poll it to the end first")
            self._drop_handle()
        self._owner.released(self)

    def start(self) -> None:
        """Post the request; called once by the transport."""
        with self._lock:
            self._advance(self._owner.start, "post")

    def fail_when_over(self, reason: str) -> None:
        """Fail with ``reason`` once no more bytes of the transfer can be written."""
        with self._lock:
            self._failure_reason = reason

    def abort(self, reason: str) -> None:
        """Fail immediately and release the handle; only while the agent itself is closing."""
        with self._lock:
            if self._state is TransferState.MOVING:
                self._state = TransferState.FAILED
                self._error = reason
            self._drop_handle()

    def _advance(self, ask: Callable[[Any], str], verb: str) -> None:
        try:
            status = ask(self._handle)
        except self._owner.errors as error:
            self._state = TransferState.FAILED
            self._error = f"{verb} of a transfer with {self.agent!r} failed: {error}"
            self._owner.note_failure(self.agent, error)
        else:
            if status == "PROC":
                return
            if status != "DONE":
                self._error = f"transfer with {self.agent!r} ended in NIXL state {status}"
            elif self._failure_reason is not None:
                self._error = self._failure_reason
            self._state = TransferState.DONE if self._error is None else TransferState.FAILED
        if self._failure_reason is not None:
            self._owner.drop_if_idle(self.agent)

    def _drop_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.release()
        except self._owner.errors as error:
            # NIXL's wrapper retries when the agent is destroyed.
            logger.warning("cannot release a transfer handle with %s yet: %s", self.agent, error)


logger = logging.getLogger(__name__)

LOCAL_SIDE = "NIXL_INIT_AGENT"

#: How long ``close`` waits for transfers that are still moving, and the interval of its polls.
CLOSE_DRAIN_S = 1.0
CLOSE_POLL_S = 0.001


class NixlTransport:
    """One engine's NIXL agent; see ``dualpath.transport.contract.Transport``.

    ``agent``: unique per process start.  ``tls``: UCX transports such as ``"tcp"``, exported as
    ``UCX_TLS`` for the whole process unless the user has set it; None lets UCX choose.
    ``progress_delay_us``: pause of the progress thread between polls, µs; 0 on RDMA hardware.
    ``engine_config``: further UCX settings of this agent (``transport.ucx_config``), e.g.
    ``IB_SL``, ``IB_TRAFFIC_CLASS``, ``TCP_PORT_RANGE``, which define its traffic class on the
    network; ``traffic_classes``: the classes that this agent carries.  Raises ``ConfigError`` if
    NIXL refuses.
    """

    def __init__(
        self,
        agent: str,
        *,
        tls: str | None = None,
        progress_delay_us: int = 1000,
        engine_config: Mapping[str, str] | None = None,
        traffic_classes: Collection[str] = ("kv",),
    ) -> None:
        if tls is not None:
            os.environ.setdefault("UCX_TLS", tls)
        self.agent = agent
        self._traffic_classes = frozenset(traffic_classes)
        api = load_nixl()
        self.errors: tuple[type[Exception], ...] = nixl_errors(api)
        self._peer_gone: type[Exception] = api.nixlBind.nixlRemoteDisconnectError
        self._nixl = open_agent(agent, progress_delay_us)
        self._create_backend(engine_config_text(engine_config or {}))
        self._lock = threading.Lock()
        self._regions: dict[str, RegionInfo] = {}
        self._registrations: list[tuple[RegionInfo, Any, object]] = []
        self._local_lists: dict[str, Any] = {}
        self._remote_lists: dict[tuple[str, RegionInfo], Any] = {}
        self._peers: dict[str, dict[str, RegionInfo]] = {}
        self._lost: set[str] = set()
        self._leaving: set[str] = set()
        self._transfers: set[NixlTransfer] = set()
        self._closed = False

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Register memory; memory inside an earlier region's span is not registered again."""
        with self._lock:
            check_region(region, self._regions)
            descriptor = None
            if not any(_covers(known, region) for known, _, _ in self._registrations):
                descriptor = self._register_span(region)
            self._registrations.append((region, descriptor, keep_alive))
            self._regions[region.name] = region
            self._local_lists[region.name] = self._prepare(LOCAL_SIDE, region)

    def view(self, view: RegionInfo) -> None:
        """Prepare the descriptors of a view; see the contract."""
        with self._lock:
            check_view(view, self._registered(), self._regions)
            self._regions[view.name] = view
            self._local_lists[view.name] = self._prepare(LOCAL_SIDE, view)

    def info(self) -> AgentInfo:
        """Return this agent's address and all regions registered so far."""
        with self._lock:
            metadata = self._nixl.get_agent_metadata()
            return AgentInfo(self.agent, metadata, self._registered())

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """Load a peer's metadata and prepare the views; other regions are prepared on first use."""
        regions = named_regions(peer.regions, views)
        with self._lock:
            if self._closed:
                raise TransportError(f"transport {self.agent!r} is closed; open a new one")
            self._leaving.discard(peer.agent)
            if peer.agent in self._lost:
                self._drop_peer(peer.agent)
            elif self._peers.get(peer.agent) == regions:
                return
            try:
                name = _text(self._nixl.add_remote_agent(peer.metadata))
                for view in views:
                    self._remote_list(peer.agent, view)
                self._nixl.make_connection(peer.agent)
            except self.errors as error:
                self._drop_peer(peer.agent)
                raise PeerLostError(
                    f"agent {peer.agent!r} cannot be reached ({error}); is its engine running?"
                ) from error
            if name != peer.agent:
                raise ConfigError(f"the metadata of agent {peer.agent!r} is that of {name!r}")
            self._peers[peer.agent] = regions

    def disconnect(self, agent: str) -> None:
        """Disconnect a peer; its unfinished transfers become FAILED once they have ended."""
        with self._lock:
            if agent not in self._peers:
                return
            self._leaving.add(agent)
            moving = [t for t in self._transfers if t.agent == agent and t.is_moving]
        for transfer in moving:
            transfer.fail_when_over(f"agent {agent!r} was disconnected")
            transfer.poll()
        self.drop_if_idle(agent)

    def post(
        self,
        direction: Direction,
        local_region: str,
        local_pieces: PieceIndices,
        agent: str,
        remote_region: str,
        remote_pieces: PieceIndices,
        *,
        traffic_class: str = "kv",
    ) -> NixlTransfer:
        """Post one transfer; see the contract.  A transfer without pieces is DONE immediately."""
        check_traffic_class(traffic_class, self._traffic_classes)
        with self._lock:
            remote_regions = self._regions_of(agent)
            local = find_region(self._regions, local_region, self.agent)
            remote = find_region(remote_regions, remote_region, agent)
            here, there = check_pair(local, local_pieces, remote, remote_pieces)
            if here.size == 0:
                return NixlTransfer(self, agent, None, 0)
            handle = self._make_handle(
                direction,
                self._local_lists[local.name],
                here.astype(np.int32),
                self._remote_list(agent, remote),
                there.astype(np.int32),
            )
            transfer = NixlTransfer(self, agent, handle, here.size * local.piece_bytes)
            self._transfers.add(transfer)
        transfer.start()
        return transfer

    def close(self) -> None:
        """Wait for moving transfers, then deregister memory and drop the agent; idempotent.

        Waits at most ``CLOSE_DRAIN_S``: closing during a READ logs errors on both sides, and can
        crash a peer that was suspended meanwhile.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            held = list(self._transfers)
        deadline_s = time.monotonic() + CLOSE_DRAIN_S
        while any([t.poll() is TransferState.MOVING for t in held]):
            if time.monotonic() > deadline_s:
                break
            time.sleep(CLOSE_POLL_S)
        for transfer in held:
            transfer.abort(f"transport {self.agent!r} was closed")
        with self._lock:
            self._transfers.clear()
            for agent in list(self._peers):
                self._drop_peer(agent)
            for prepared in (*self._remote_lists.values(), *self._local_lists.values()):
                prepared.release()
            self._remote_lists.clear()
            self._local_lists.clear()
            for _, descriptor, _ in self._registrations:
                if descriptor is not None:
                    self._nixl.deregister_memory(descriptor)
            self._registrations.clear()
            self._nixl = None

    def _create_backend(self, engine_config: str) -> None:
        try:
            self._nixl.create_backend("UCX", {"engine_config": engine_config})
        except self.errors as error:
            raise ConfigError(
                f"UCX refuses the settings {engine_config!r} with "
                f"UCX_TLS={os.environ.get('UCX_TLS', 'unset')} ({error}); correct them"
            ) from error

    def _register_span(self, region: RegionInfo) -> Any:  # noqa: ANN401 - untyped library
        span = (region.base_address, span_bytes(region), region.device, "")
        try:
            return self._nixl.register_memory([span], region.memory)
        except self.errors as error:
            raise ConfigError(
                f"region {region.name!r} of {span[1]} bytes cannot be registered ({error}); "
                "check the address and the locked-memory limit (ulimit -l)"
            ) from error

    def _prepare(self, side: str, region: RegionInfo) -> Any:  # noqa: ANN401 - untyped library
        rows = np.empty((region.pieces, 3), dtype=np.uint64)
        rows[:, 0] = region.base_address + np.arange(region.pieces) * region.stride_bytes
        rows[:, 1] = region.piece_bytes
        rows[:, 2] = region.device
        return self._nixl.prep_xfer_dlist(side, rows, region.memory)

    def _remote_list(self, agent: str, region: RegionInfo) -> Any:  # noqa: ANN401 - untyped library
        prepared = self._remote_lists.get((agent, region))
        if prepared is None:
            prepared = self._remote_lists[agent, region] = self._prepare(agent, region)
        return prepared

    def _make_handle(self, direction: Direction, *lists: Any) -> Any:  # noqa: ANN401 - untyped library
        try:
            return self._nixl.make_prepped_xfer(direction.name, *lists)
        except self.errors as error:
            raise TransportError(f"NIXL refuses the transfer: {error}") from error

    def _registered(self) -> tuple[RegionInfo, ...]:
        return tuple(region for region, _, _ in self._registrations)

    def _regions_of(self, agent: str) -> Mapping[str, RegionInfo]:
        if self._closed:
            raise TransportError(f"transport {self.agent!r} is closed; open a new one")
        if agent == self.agent:
            return self._regions
        regions = self._peers.get(agent)
        if regions is None or agent in self._lost | self._leaving:
            raise PeerLostError(f"agent {agent!r} is not connected; connect to it again")
        return regions

    def drop_if_idle(self, agent: str) -> None:
        """Remove a disconnected peer once all its transfers have ended."""
        with self._lock:
            if agent in self._leaving and not any(
                t.agent == agent and t.is_moving for t in self._transfers
            ):
                self._drop_peer(agent)

    def _drop_peer(self, agent: str) -> None:
        self._lost.discard(agent)
        self._leaving.discard(agent)
        known = self._peers.pop(agent, None)
        for key in [key for key in self._remote_lists if key[0] == agent != self.agent]:
            self._remote_lists.pop(key).release()
        if known is None:
            return
        try:
            self._nixl.remove_remote_agent(agent)
        except self.errors as error:
            logger.debug("agent %s had disconnected before it was removed: %s", agent, error)

    # Interface for transfers (``nixl_transfer.TransferOwner``).

    def state_of(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Drive a request's progress and return its NIXL state."""
        return str(self._nixl.check_xfer_state(handle))

    def start(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Post a request and return its state."""
        return str(self._nixl.transfer(handle))

    def note_failure(self, agent: str, error: Exception) -> None:
        """Mark a peer as lost if its connection broke: later posts to it are refused."""
        logger.warning("transfer with %s failed: %s", agent, error)
        if isinstance(error, self._peer_gone):
            with self._lock:
                self._lost.add(agent)

    def released(self, transfer: NixlTransfer) -> None:
        """Remove a released transfer."""
        with self._lock:
            self._transfers.discard(transfer)


def _covers(known: RegionInfo, region: RegionInfo) -> bool:
    start, end = region.base_address, region.base_address + span_bytes(region)
    return (
        (known.memory, known.device) == (region.memory, region.device)
        and known.base_address <= start
        and end <= known.base_address + span_bytes(known)
    )


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
