"""Planted bugs, which the simulation must find.

Each disables one mechanism that protects KV from errors or the cluster from an outage.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec

from dualpath.core.blocks import BlockKey, BlockOrigin, KeyExtras, StoreNamespace, block_keys
from dualpath.core.cluster import EngineAddress, HostProcess, Role
from dualpath.core.control import Assign, Envelope, FetchDone, GrantRead, Register, Release
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.runs import HitRun
from dualpath.core.sessions import Channel
from dualpath.core.transfers import CallAssignment
from dualpath.engine.buffer.block_buffer import NO_REQUEST, BlockBuffer, CachedBlocks, SlotPool
from dualpath.engine.buffer.dram_tier import Retention
from dualpath.engine.buffer.hbm_reservations import HbmReservations
from dualpath.engine.control.assigned_requests import ActiveRequests, TakenNumbers
from dualpath.engine.control.fetches import Fetches
from dualpath.engine.control.membership import Membership
from dualpath.engine.control.peers import Peers
from dualpath.engine.control.surroundings import Surroundings
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.io.read_queue import ReadQueue, ReadTask
from dualpath.engine.passes import prefill_passes
from dualpath.engine.passes.layer_stream import LayerStream, RegionHandover
from dualpath.engine.passes.pass_transfers import BlockHolder, ChunkTransfers
from dualpath.engine.passes.prefill_passes import PassOutcome
from dualpath.engine.ranks import follower
from dualpath.engine.ranks.rank import Rank
from dualpath.engine.settings import EngineSettings
from dualpath.node import host_process
from dualpath.node.host_process import ProcessTable, Sight
from dualpath.node.system_calls import create_file
from dualpath.policy.units import UnitPolicy
from dualpath.router import two_legs
from dualpath.router.engine_calls import Job
from dualpath.router.engines import EngineInfo
from dualpath.router.requests.call_watch import CallWatch
from dualpath.router.requests.request import Attempt, RequestLife
from dualpath.router.scheduler import attempt as engine_attempt
from dualpath.router.scheduler import leases, link_messages, registry, stored_chains
from dualpath.router.scheduler.attempt import EngineAttempt
from dualpath.router.scheduler.control_server import ControlServer, LivenessProbes, NamedPeers
from dualpath.router.scheduler.dispatch import Dispatch
from dualpath.router.scheduler.exchange import Exchange
from dualpath.router.scheduler.front_end_server import FrontEndServer, FrontEndSession
from dualpath.router.scheduler.handovers import Handovers
from dualpath.router.scheduler.leases import KubernetesLease, LeasedLeadership
from dualpath.router.scheduler.pauses import SuspectList
from dualpath.router.scheduler.registry import EngineState, Registry
from dualpath.router.scheduler.releases import Releases
from dualpath.router.scheduler.remote import RemoteAttempt, RemoteRequest, RemoteScheduling
from dualpath.router.scheduler.roles import Roles
from dualpath.router.scheduler.stored_chains import StoredChains
from dualpath.router.scheduler.units import UnitRequest
from dualpath.router.scheduling import Prepared, RequestOrder
from dualpath.storage import janitor, posix
from dualpath.storage.block_file import PlainVerifier
from dualpath.storage.chain_index import NO_PINS, ChainIndex, Pins, Rows, victims
from dualpath.storage.contract import BlockStorage, ReadOutcome
from dualpath.storage.janitor import Lease, apply_events
from dualpath.storage.journal import segments
from dualpath.storage.node_dram import NodeDram, NodeDramStorage
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix import NamespaceDirectory, PosixStorage, refused
from dualpath.storage.quotas import StorageLimits, StoredBytes
from dualpath_lab.emulated.data_plane import EmulatedHbm
from dualpath_lab.emulated.engine_server import RequestSubmitter
from dualpath_lab.faults.simulation.cluster_resources import ProcView, SimProcessTable
from dualpath_lab.faults.simulation.settings import BLOCK_TOKENS


class PlantedBug(msgspec.Struct, frozen=True):
    """``what`` describes the bug; the context of ``patch`` plants it."""

    what: str
    patch: Callable[[], AbstractContextManager[object]]


def replaced(owner: object, name: str, other: object) -> Callable[[], Any]:
    """Return a factory of contexts that replace an attribute."""
    return lambda: mock.patch.object(owner, name, other)


# ------------------------------------------------------------------------------------ bugs of DRAM
# Blocks that are retained for agents' next turns, and blocks that engines share.


def _good_if_fetched(
    self: ReadQueue, task: ReadTask, position: int, slot: int, track: str
) -> ReadOutcome:
    """``ReadQueue._read`` that reports every prefetched block as good."""
    outcome = _read(self, task, position, slot, track)
    return ReadOutcome(outcome.bytes_read) if task.request_id == NO_REQUEST else outcome


def _allocated_without_eviction(self: SlotPool, key: BlockKey) -> int | None:
    """``SlotPool.allocate_for`` that leases a slot without evicting its block."""
    if self._free or self._waiting or not self.cached.would_evict_for(key):
        return _allocate_for(self, key)
    slot = self.cached._next()
    self.cached.touch(slot)
    self._ref_count[slot], self._writer[slot] = 1, NO_REQUEST
    return slot


def _sharing(is_shared: Callable[[ReadOutcome, bool], bool]) -> Callable[..., ReadOutcome]:
    """Return a ``NodeDramStorage.read`` that shares a block if ``is_shared(outcome, whole)``."""

    def read(
        self: NodeDramStorage, key: BlockKey, destination: memoryview, *, whole: bool = True
    ) -> ReadOutcome:
        if (found := self.dram.read(key, destination, whole=whole)) is not None:
            return found
        outcome = self.inner.read(key, destination, whole=whole)
        if is_shared(outcome, whole):
            self.dram.add(key, destination)
        return outcome

    return read


_read, _allocate_for = ReadQueue._read, SlotPool.allocate_for


# --------------------------------------------------------------------------------- bugs of weights
# Updates of the weights of running engines.


def _open_of_first_weights(
    surroundings: Surroundings,
) -> Callable[[EngineSettings, StoreNamespace], BlockStorage]:
    return lambda settings, namespace: surroundings.open_storage(settings, namespace.with_weights())


def _member_of_first_storage(
    self: Membership,
    *arguments: Any,  # noqa: ANN401 - those of ``Membership``
    **named: Any,  # noqa: ANN401 - those of ``Membership``
) -> None:
    own = named["surroundings"]
    named["surroundings"] = replace(own, open_storage=_open_of_first_weights(own))
    _member(self, *arguments, **named)


def _any_weights(
    hello: Register,
    namespace: StoreNamespace | None,
    *others: Any,  # noqa: ANN401 - those of ``check_registration``
) -> None:
    """``registry.check_registration`` that compares everything but the version of the weights."""
    alike = None if namespace is None else namespace.with_weights(hello.namespace.weights)
    _check_registration(hello, alike, *others)


def _cleared_once(self: StoredChains) -> None:
    """``StoredChains.clear`` that changes nothing but a new object."""
    if "_writers" not in self.__dict__:
        _clear(self)


_check_registration, _clear = registry.check_registration, StoredChains.clear
_member = Membership.__init__

#: By name, in the order of docs/reference/simulated-faults.md.
WEIGHT_BUGS: dict[str, PlantedBug] = {
    "weights-unnamed": PlantedBug(
        "an engine uses the stored blocks of the weights that it was started with for ever",
        replaced(Membership, "__init__", _member_of_first_storage),
    ),
    "weights-mixed": PlantedBug(
        "an engine joins with other weights than the cluster's",
        replaced(registry, "check_registration", _any_weights),
    ),
    "chains-outlive-weights": PlantedBug(
        "the scheduler takes chains that were stored with former weights for stored",
        replaced(StoredChains, "clear", _cleared_once),
    ),
}

#: By name, in the order of docs/reference/simulated-faults.md.
DRAM_BUGS: dict[str, PlantedBug] = {
    "retention-unending": PlantedBug(
        "the retention of an agent's blocks does not expire",
        replaced(Retention, "expire", lambda self, now_ns: None),
    ),
    "prefetched-unverified": PlantedBug(
        "a prefetched block is cached even if its read failed",
        replaced(ReadQueue, "_read", _good_if_fetched),
    ),
    "prefetched-over-cached": PlantedBug(
        "a prefetched block takes a slot without removing the slot's block from the cache",
        replaced(SlotPool, "allocate_for", _allocated_without_eviction),
    ),
    "shared-unverified": PlantedBug(
        "a block is shared with the engines of the machine after its read failed",
        replaced(NodeDramStorage, "read", _sharing(lambda outcome, whole: whole)),
    ),
    "shared-in-part": PlantedBug(
        "a block that was read without its window layers is shared as complete",
        replaced(NodeDramStorage, "read", _sharing(lambda outcome, whole: outcome.is_good)),
    ),
    "shared-unbounded": PlantedBug(
        "nothing is evicted from shared DRAM",
        replaced(NodeDram, "_make_room", lambda self, key: None),
    ),
}


# ------------------------------------------------------------------------------ bugs of front ends
# Separate front ends, and changes of roles.


def _engines_lost_only(self: RemoteScheduling, reason: str) -> None:
    self.engines.clear(self._away(reason))


def _begun_once(self: RemoteRequest) -> RequestOrder | None:
    return None if self._begun_in else _not_begun(self)


def _twice_as_many(self: Roles, role: Role) -> list[tuple[EngineState, ...]]:
    return 2 * _nodes(self, role)


def _changes_unnumbered(
    self: FrontEndServer,
    front_end: Any,  # noqa: ANN401
    message: link_messages.SchedulerMessage,
) -> None:
    """``FrontEndServer._send`` that does not resend the changes of engines."""
    if front_end.live and isinstance(message, link_messages.EnginesChanged):
        self._post(front_end, front_end.talk.send_lossy(message))
    else:
        _send(self, front_end, message)


_not_begun, _nodes, _send = RemoteRequest.not_begun, Roles.nodes, FrontEndServer._send
#: An attribute that is always false.
_NEVER = property(lambda self: False, lambda self, value: None)

#: By name, in the order of the reference.
FRONT_END_BUGS: dict[str, PlantedBug] = {
    "front-end-attempts-stay": PlantedBug(
        "a front end's attempts stay at the scheduler after its session has ended",
        replaced(FrontEndSession, "close", lambda self, reason: None),
    ),
    "front-end-unwatched": PlantedBug(
        "a silent front end is not declared lost",
        replaced(FrontEndServer, "_check_liveness", lambda self: None),
    ),
    "calls-keep-waiting": PlantedBug(
        "a front end goes on waiting for answers of a lost scheduler",
        replaced(RemoteScheduling, "_ended", _engines_lost_only),
    ),
    "decoding-ends": PlantedBug(
        "a decoding stream ends when the scheduler that has placed it ends",
        lambda: mock.patch.object(RemoteAttempt, "decoding", _NEVER, create=True),
    ),
    "unannounced": PlantedBug(
        "a front end does not report its requests to the next scheduler",
        replaced(RemoteRequest, "not_begun", _begun_once),
    ),
    "engines-unnumbered": PlantedBug(
        "a front end is not sent again which engines have joined or were lost",
        replaced(FrontEndServer, "_send", _changes_unnumbered),
    ),
    "unit-not-left": PlantedBug(
        "a request that is retried in another unit does not end in the former one",
        replaced(UnitRequest, "_leave", lambda self: None),
    ),
    "unit-charged": PlantedBug(
        "a request counts at its unit after its end",
        replaced(UnitPolicy, "end", lambda self, request_id: None),
    ),
    "undrained": PlantedBug(
        "a terminated engine does not drain its requests",
        replaced(Membership, "drain", lambda self, reason, drained: drained()),
    ),
    "last-of-role": PlantedBug(
        "the last engine of a role may change its role",
        replaced(Roles, "nodes", _twice_as_many),
    ),
    "size-kept": PlantedBug(
        "a resized group counts as back with its old number of ranks",
        replaced(Roles, "_all_back", lambda self, new: len(new) == len(self._epochs)),
    ),
}


# ------------------------------------------------------------------------------------ bugs of legs
# Requests in two legs, which a proxy of others sends to engines.


def _freed_when_late(
    self: FrontEndSession,
    name: str,
    attempt: EngineAttempt,
    listener: Any,  # noqa: ANN401 - the one of ``FrontEndSession``
) -> None:
    """``FrontEndSession._own`` that frees a first leg's slots after ``second_leg_timeout_s``."""
    _own(self, name, attempt, listener)
    scheduler = self._scheduler

    def free() -> None:
        if attempt._placed and scheduler.exchange.get(name) is attempt:
            scheduler.releases.release(attempt.decode_engine.engine_id, name, "it is late")

    if attempt._order.handover:
        limit_s = scheduler.settings.second_leg_timeout_s
        asyncio.get_running_loop().call_later(limit_s, free)


_own = FrontEndSession._own


def _answered_at_once(self: Fetches, request: Assign) -> None:
    """``Fetches.begin`` that reports the KV as complete before it has arrived."""
    _begin_fetch(self, request)
    if (fetching := self._open.get(request.request_id)) is not None:
        grant = fetching.grant
        self._send(FetchDone(request.request_id, grant.slots, grant.cached))


async def _fetched_from_freed(
    self: EngineAttempt, source: EngineInfo, target: EngineInfo
) -> FetchDone:
    """``EngineAttempt._fetched`` that releases the source before its slots are read."""
    self._scheduler.releases.release(source.engine_id, self.attempt_id, "its KV is moved")
    return await _fetched(self, source, target)


def _fetched_from_any_process(self: Fetches, request: Assign) -> None:
    """``Fetches.begin`` for whichever process of the source is connected."""
    fetch = request.fetch
    if fetch is not None and (peer := self._peers._peers.get(fetch.engine_id)) is not None:
        fetch = msgspec.structs.replace(fetch, epoch=peer.epoch)
    _begin_fetch(self, msgspec.structs.replace(request, fetch=fetch))


def _not_lost_with_kv(self: EngineAttempt, engine_id: str, reason: str) -> None:
    """``EngineAttempt.engine_lost`` that ignores the loss of an engine with complete KV."""
    if not self._complete:
        _attempt_lost(self, engine_id, reason)


@contextlib.contextmanager
def _moved_from_restarted() -> Iterator[None]:
    """Plant all that is needed: the scheduler protects a move from it more than once."""
    with contextlib.ExitStack() as stack:
        for owner, name, other in (
            (EngineAttempt, "engine_lost", _not_lost_with_kv),
            (Dispatch, "move_begins", lambda self, request_id, engine_id: None),
            (Fetches, "begin", _fetched_from_any_process),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


_begin_fetch, _fetched = Fetches.begin, EngineAttempt._fetched
_attempt_lost = EngineAttempt.engine_lost


class _BlindWatch(CallWatch):
    """Notices no silent call."""

    async def _tick(self) -> None:
        """Do nothing."""


#: By name, in the order of the reference.
LEG_BUGS: dict[str, PlantedBug] = {
    "late-leg-freed": PlantedBug(
        "a DE's slots are freed when a second leg is due although the first one still writes there",
        replaced(FrontEndSession, "_own", _freed_when_late),
    ),
    "leg-of-another": PlantedBug(
        "a decode engine uses the KV of another prompt if a second leg names it",
        replaced(RequestSubmitter, "check_prompt", lambda self, request, transfer, prefix: None),
    ),
    "offer-unending": PlantedBug(
        "the slots of a request whose second leg does not come are never freed",
        replaced(Handovers, "withdraw", lambda self, attempt_id, reason: None),
    ),
    "leg-unwatched": PlantedBug(
        "an engine does not report that a leg waits for its core, which hangs",
        replaced(two_legs, "CallWatch", _BlindWatch),
    ),
    "own-call-unwatched": PlantedBug(
        "a prompt that a decode engine computes itself waits for its core, which hangs, for ever",
        replaced(two_legs.TwoLegs, "own_call", lambda self: contextlib.nullcontext()),
    ),
    "first-leg-unended": PlantedBug(
        "a second leg goes on waiting for a first leg that has failed",
        replaced(Handovers, "first_leg_ended", lambda self, attempt_id: None),
    ),
    "move-unawaited": PlantedBug(
        "a DE decodes a prompt that it moves from another DE before all of it has arrived",
        replaced(Fetches, "begin", _answered_at_once),
    ),
    "moved-from-freed": PlantedBug(
        "slots of a DE from which a prompt is moved are freed before they have been read",
        replaced(EngineAttempt, "_fetched", _fetched_from_freed),
    ),
    "moved-from-restarted": PlantedBug(
        "a prompt is moved from a DE that was restarted since it had the prompt",
        _moved_from_restarted,
    ),
}


# --------------------------------------------------------------------------- bugs of third engines


async def _freed_when_prepared(self: EngineAttempt) -> Prepared:
    """``EngineAttempt.prepare`` that releases third DEs before the PE has the request."""
    prepared = await _prepare(self)
    for third in self.thirds:
        self._scheduler.releases.release(third, self.attempt_id, "read")
    return prepared


async def _unconfirmed(self: EngineAttempt) -> None:
    """``EngineAttempt._thirds_held`` that waits for no answer."""
    self._drop_thirds("prefill done")


def _forgotten(self: EngineAttempt, reason: str) -> None:
    """``EngineAttempt._drop_thirds`` that releases nothing."""
    self.engines.difference_update(self.thirds)
    self.thirds = {}


_prepare = EngineAttempt.prepare

#: By name, in the order of the reference.
THIRD_BUGS: dict[str, PlantedBug] = {
    "third-freed-early": PlantedBug(
        "slots of a third decode engine are freed while a PE loads from them",
        lambda: mock.patch.multiple(
            EngineAttempt, prepare=_freed_when_prepared, _thirds_held=_unconfirmed
        ),
    ),
    "third-unconfirmed": PlantedBug(
        "a prefill counts although a third decode engine has not confirmed that it held its slots",
        replaced(EngineAttempt, "_thirds_held", _unconfirmed),
    ),
    "refused-third-holds": PlantedBug(
        "third decode engines that have granted their slots hold them when another one refuses",
        replaced(EngineAttempt, "_drop_thirds", _forgotten),
    ),
}


# --------------------------------------------------------------------------------- bugs of storage
# The file storage and its janitor.


def _written_in_place(
    self: PosixStorage, key: BlockKey, source: memoryview, origin: BlockOrigin
) -> tuple[bool, int]:
    """``PosixStorage._write_one`` without a temporary name."""
    if self.is_stored(key):
        return False, source.nbytes
    path = str(self.block_path(key))
    try:
        self._calls.makedirs(os.path.dirname(path), exist_ok=True)
        create_file(path, self._codec.encoded(key, self._order.of(source), origin), self._calls)
    except OSError as error:
        raise refused("write", path, source.nbytes, error, self._calls) from error
    return True, source.nbytes


def _skipping_unread(
    tree: ObjectTree, index: ChainIndex, taken: dict[str, int], now_s: float
) -> tuple[set[int], int]:
    """``janitor.apply_events`` that never applies events if it could not read them at first."""
    try:
        return apply_events(tree, index, taken, now_s)
    except StorageError:
        taken.update({writer: number for writer, number, _ in segments(tree)})
        raise


def _unprotected(
    index: ChainIndex, limits: StorageLimits, pins: Pins, now_s: float, earlier: Collection[str]
) -> Rows:
    return victims(index, msgspec.structs.replace(limits, protect_s=0.0), pins, now_s, earlier)


#: By name, in the order of docs/reference/simulated-faults.md.
STORAGE_BUGS: dict[str, PlantedBug] = {
    "checksum-ignored": PlantedBug(
        "a stored block's checksum is not verified",
        replaced(PlainVerifier, "defect", lambda self, key, header: None),
    ),
    "written-in-place": PlantedBug(
        "a block gets its name before it is complete",
        replaced(PosixStorage, "_write_one", _written_in_place),
    ),
    "stale-stays": PlantedBug(
        "a starting engine does not remove temporary files of exited processes",
        replaced(NamespaceDirectory, "_remove_stale", lambda self: None),
    ),
    "unlink-forgotten": PlantedBug(
        "a temporary name is not removed after its block got its name",
        replaced(NamespaceDirectory, "remove_temporary", lambda self, temporary: None),
    ),
    "lease-unchecked": PlantedBug(
        "a janitor continues after another one has acquired its lease",
        replaced(Lease, "_is_ours", lambda self, newest: True),
    ),
    "janitor-dead": PlantedBug(
        "no engine takes over from a janitor that has exited",
        replaced(Lease, "_is_stale", lambda self, term, content, now_s: False),
    ),
    "pins-ignored": PlantedBug(
        "pinned blocks are evicted like others",
        replaced(janitor, "read_pins", lambda tree: NO_PINS),
    ),
    "unprotected": PlantedBug(
        "recently used blocks are evicted like others",
        replaced(janitor, "victims", _unprotected),
    ),
    "events-forgotten": PlantedBug(
        "events that could not be read at first are never applied",
        replaced(janitor, "apply_events", _skipping_unread),
    ),
}


# --------------------------------------------------------------------------------- bugs of tenants
# Cache salts, and the quota of each tenant.


def _attempt_without_salt(self: RequestLife, job: Job) -> Any:  # noqa: ANN401
    """``RequestLife._one_attempt`` with keys that do not depend on the cache salt."""
    keys = block_keys(job.prompt_token_ids, BLOCK_TOKENS)
    return _one_attempt(self, msgspec.structs.replace(job, keys=tuple(keys)))


def _left_to_fullest(
    self: StorageLimits, stored: StoredBytes, namespace: str, tenant: str
) -> int | None:
    """``StorageLimits.left_bytes`` of the tenant that has stored most."""
    used = stored.by_tenant
    return _left_bytes(self, stored, namespace, max(used, key=used.__getitem__, default=tenant))


def _without_tenant_quota(
    index: ChainIndex, limits: StorageLimits, pins: Pins, now_s: float, earlier: Collection[str]
) -> Rows:
    some = msgspec.structs.replace(limits, tenant_quota_bytes=0)
    return victims(index, some, pins, now_s, earlier)


def _first_tenant(self: ChainIndex, name: str) -> int:
    """``ChainIndex._tenant`` that takes all tenants for the first one."""
    return 1 if len(self.tenants) > 1 else _tenant(self, name)


_tenant = ChainIndex._tenant
_one_attempt, _left_bytes = RequestLife._one_attempt, StorageLimits.left_bytes

#: By name, in the order of the reference.
TENANT_BUGS: dict[str, PlantedBug] = {
    "salt-ignored": PlantedBug(
        "the keys of blocks do not depend on the cache salt",
        replaced(KeyExtras, "_own", lambda self, begin, end, block_tokens: {}),
    ),
    "hits-unsalted": PlantedBug(
        "the router looks up and stores a prompt's blocks under keys without the cache salt",
        replaced(RequestLife, "_one_attempt", _attempt_without_salt),
    ),
    "quota-of-another": PlantedBug(
        "every write counts against the quota of the tenant that has stored most",
        replaced(StorageLimits, "left_bytes", _left_to_fullest),
    ),
    "charged-to-another": PlantedBug(
        "the janitor charges the blocks of all tenants to one of them",
        replaced(ChainIndex, "_tenant", _first_tenant),
    ),
    "tenant-unlimited": PlantedBug(
        "the janitor evicts nothing of a tenant that exceeds its quota",
        replaced(janitor, "victims", _without_tenant_quota),
    ),
}


# ------------------------------------------------------------------------------ bugs of leadership
# Leader election by a lease.

#: Whether the store has not yet reported another holder.
_UNTIL_REPORTED = property(lambda self: self._until_s > float("-inf"))


async def _renew_until_reported(self: LeasedLeadership) -> str:
    """``LeasedLeadership._renew`` that does not check the clock."""
    while True:
        await asyncio.sleep(self._gap_s)
        sent_s = self._clock()
        renewed = await self._tried("renewed", self._store.renew())
        if renewed:
            self._granted(sent_s)
        elif renewed is not None:
            self._until_s = float("-inf")
            return f"the lease {self._name} is another's"


#: By name, in the order of the reference.
LEADERSHIP_BUGS: dict[str, PlantedBug] = {
    "lease-outlived": PlantedBug(
        "a scheduler that cannot renew its lease continues until the store reports another holder",
        lambda: mock.patch.multiple(
            LeasedLeadership, held=_UNTIL_REPORTED, _renew=_renew_until_reported
        ),
    ),
    "lease-stolen": PlantedBug(
        "a lease is acquired without checking whether its holder has renewed it",
        replaced(KubernetesLease, "_unchanged", lambda self, lease: True),
    ),
    "lease-without-margin": PlantedBug(
        "a scheduler relies on its lease to the last moment, although clocks differ",
        replaced(leases, "_MARGIN", 0.0),
    ),
}


def _take_anything(
    self: Channel[Any, Any], envelope: Envelope[Any], now_s: float
) -> tuple[Any, list[Envelope[Any]]]:
    """``Channel.receive`` that handles every message on arrival, duplicates included."""
    while self._unacknowledged and self._unacknowledged[0][0] <= envelope.received:
        self._unacknowledged.popleft()
    self._received = max(self._received, envelope.number)
    return envelope.message, self._resent(now_s)


def _release_at_once(self: Releases, engine_id: str, attempt_id: str, reason: str) -> None:
    self._slots.pop(attempt_id, None)
    self._send(engine_id, Release(request_id=attempt_id, reason=reason))


def _same_name(self: RequestLife, job: Job) -> Any:  # noqa: ANN401
    """``RequestLife._one_attempt`` that gives all attempts the request's id."""
    attempt = Attempt(
        self._front_end,
        job,
        job.request_id,
        self._scheduled,
        self.ticket,
        self.record,
        self._emit,
        self._trace,
    )
    self._attempt = attempt
    return attempt.run()


def _behind_any(self: GrantRead, cached_blocks: int) -> HitRun | None:
    return _behind(self, max(cached_blocks, self.cached_blocks))


def _called_in_any_session(
    self: ActiveRequests, request_id: str, assignment: CallAssignment, now_ns: int
) -> None:
    present = msgspec.structs.replace(assignment, session=self._session)
    _add_called(self, request_id, present, now_ns)


def _computed_at_once(self: LayerStream, layer: int) -> None:
    """``LayerStream.computed`` that does not wait until the layer in its region has been sent."""
    self._computed.add(layer)
    if self._settings.overlap:
        self._send(layer, self._device.record())
    self._layer_start_ns = self._trace.now_ns()


def _any_lease(self: BlockBuffer, request_id: str, slots: Sequence[int]) -> bool:
    self.pin(slots)
    return True


def _freed_once_persisted(self: ActiveRequests, request_id: str) -> bool:
    """``ActiveRequests.done_with_buffer`` that does not wait for the copy into HBM."""
    with self._lock:
        request = self._active.get(request_id)
        return request is not None and request.persist_seen


def _over_at_once(
    stream: LayerStream, holder: BlockHolder
) -> tuple[PassOutcome, list[ChunkTransfers]]:
    """``end_stream`` that does not wait; without overlap it still sends."""
    if not stream._settings.overlap:
        stream.finish()
    return PassOutcome(dict(stream.failures), ()), []


async def _never_ticks(self: CallWatch) -> None:
    """``CallWatch._tick`` that notices nothing."""


def _dead_unless_shown(process: HostProcess, table: ProcessTable) -> bool:
    """``host_process._is_dead`` that takes the processes that ``/proc`` shows for all."""
    same_host = bool(process.host) and process.host == table.host()
    return same_host and table.start_ticks(process.pid) != process.start_ticks


_close = Exchange.close


def _close_and_remember(self: Exchange, attempt_id: str) -> None:
    """``Exchange.close`` that remembers the attempt's name."""
    self.__dict__.setdefault("_closed", set()).add(attempt_id)
    _close(self, attempt_id)


_sight = SimProcessTable.sight


def _sight_in_the_table_shown(self: SimProcessTable, pid: int) -> Sight:
    """``SimProcessTable.sight`` that asks the namespace that ``/proc`` shows."""
    if self._view is not ProcView.FOREIGN:
        return _sight(self, pid)
    return Sight.ALIVE if pid % 2 else Sight.ABSENT


#: An attribute that is always empty.
_NONE = property(lambda self: (), lambda self, value: None)
#: An attribute that is always true.
_ALWAYS = property(lambda self: True, lambda self, value: None)

_agents_of = Peers.agents_of
_add_called, _behind = ActiveRequests.add_called, GrantRead.behind


def _named_to_prefill_only(
    self: ControlServer, engine_id: str, peer_id: str
) -> EngineAddress | None:
    """``ControlServer.unnamed_peer`` that names no PE to a DE."""
    engine = self._registry.live(engine_id)
    is_prefill = engine is not None and engine.role is Role.PREFILL
    return _unnamed_peer(self, engine_id, peer_id) if is_prefill else None


_unnamed_peer = ControlServer.unnamed_peer


def _agents_of_any_process(self: Peers, engine_id: str, epoch: str) -> tuple[str, ...]:
    """``Peers.agents_of`` for whichever process of the engine is connected."""
    peer = self._peers.get(engine_id)
    return _agents_of(self, engine_id, epoch if peer is None else peer.epoch)


#: By name, in the order of docs/reference/simulated-faults.md.
PLANTED_BUGS: dict[str, PlantedBug] = {
    "call-silence-ignored": PlantedBug(
        "a call to an engine may be silent for ever",
        replaced(CallWatch, "_tick", _never_ticks),
    ),
    "slow-calls-broken-off": PlantedBug(
        "a call that is silent for long is broken off although its server has it",
        replaced(CallWatch, "_judge", lambda self, call, served: self._end(call, "it is silent")),
    ),
    "core-silence-ignored": PlantedBug(
        "an engine of which the core hangs is not declared lost",
        replaced(SuspectList, "call_waits", lambda self, engine, silent_s: None),
    ),
    "no-resend": PlantedBug(
        "frames lost by a reset are not resent",
        replaced(Channel, "_resent", lambda self, now_s: []),
    ),
    "duplicates-handled": PlantedBug(
        "a message that arrives twice is handled twice",
        replaced(Channel, "receive", _take_anything),
    ),
    "session-end-keeps": PlantedBug(
        "an engine does not drop its requests when its session ends",
        replaced(TrafficManager, "end_session", lambda self, reason: None),
    ),
    "peers-named-once": PlantedBug(
        "the peers of an engine are not named again in its next session",
        replaced(NamedPeers, "session_ends", lambda self, info, certain: None),
    ),
    "writer-unnamed": PlantedBug(
        "a DE is not sent which PEs may write to its buffer",
        replaced(ControlServer, "unnamed_peer", _named_to_prefill_only),
    ),
    "silence-ignored": PlantedBug(
        "a silent engine is not declared lost",
        replaced(Registry, "silent", lambda self, now_s, timeout_s: []),
    ),
    "ranks-apart": PlantedBug(
        "ranks of a group join, and are declared lost, one by one",
        lambda: mock.patch.multiple(
            Registry,
            group=lambda self, info: [self.get(info.engine_id)],
            waits_for=lambda self, info: None,
        ),
    ),
    "one-attempt-id": PlantedBug(
        "all attempts of a request have the same id",
        replaced(RequestLife, "_one_attempt", _same_name),
    ),
    "retry-forgets-tokens": PlantedBug(
        "an attempt after streamed tokens starts with the old prompt",
        replaced(Job, "continued", lambda self, generated: self),
    ),
    "freed-at-once": PlantedBug(
        "a DE's slots are freed before its PE has reported the end of its writes",
        replaced(Releases, "release_when_safe", _release_at_once),
    ),
    "no-quarantine": PlantedBug(
        "slots that a lost engine may still write to are freed at once",
        replaced(SlotPool, "quarantine", SlotPool.release),
    ),
    "in-doubt-unreported": PlantedBug(
        "a PE does not report the transfers that were in flight when its session ended",
        replaced(ActiveRequests, "unsettled", lambda self: ()),
    ),
    "no-death-confirmation": PlantedBug(
        "no engine is asked whether a lost process has exited",
        replaced(LivenessProbes, "ask", lambda self, writers: []),
    ),
    "epoch-ignored": PlantedBug(
        "a PE sends KV to a restarted DE although the request was placed on its former process",
        replaced(Peers, "agents_of", _agents_of_any_process),
    ),
    "table-grows": PlantedBug(
        "the scheduler remembers every attempt that has ended",
        replaced(Exchange, "close", _close_and_remember),
    ),
    "hidden-is-dead": PlantedBug(
        "a process that /proc does not show counts as dead",
        replaced(host_process, "_is_dead", _dead_unless_shown),
    ),
    "foreign-proc-trusted": PlantedBug(
        "process numbers are looked up in the table of another PID namespace",
        lambda: mock.patch.multiple(
            SimProcessTable, host=lambda self: self._host, sight=_sight_in_the_table_shown
        ),
    ),
    "host-name-only": PlantedBug(
        "temporary files belong to the machine of their writer's name, whatever its boot",
        replaced(posix, "file_owner_host", lambda calls: calls.uname().nodename),
    ),
    "released-in-pass": PlantedBug(
        "a request is released at its PE while a forward pass transfers its KV",
        replaced(ActiveRequests, "ask_release", lambda self, release: True),
    ),
    "call-taken-again": PlantedBug(
        "a PE serves a call that comes after the release of its request",
        replaced(TakenNumbers, "take", lambda self, number: True),
    ),
    "call-of-any-session": PlantedBug(
        "a PE serves a call that was assigned in a former session",
        replaced(ActiveRequests, "add_called", _called_in_any_session),
    ),
    "rank-unawaited": PlantedBug(
        "a PE reports a prompt's KV as sent when its first rank has sent it and others still send",
        replaced(follower, "end_stream", _over_at_once),
    ),
    "ranks-unnamed": PlantedBug(
        "a lost engine counts as dead when its first rank is dead",
        lambda: mock.patch.object(Rank, "other_processes", _NONE, create=True),
    ),
    "load-before-send": PlantedBug(
        "a layer is computed before the previous layer in its region has been sent",
        replaced(LayerStream, "computed", _computed_at_once),
    ),
    "next-pass-at-once": PlantedBug(
        "a pass loads its first layers before the last ones of the previous pass have been sent",
        replaced(RegionHandover, "when_left", lambda self, region, then: then()),
    ),
    "no-pins": PlantedBug(
        "slots are not pinned while they are read or written",
        lambda: mock.patch.multiple(
            BlockBuffer,
            pin=lambda self, slots: None,
            pin_to_write=lambda self, request_id, slot: self._pool.may_write(request_id, slot),
            unpin=lambda self, slots: None,
        ),
    ),
    "abandoned-read-continues": PlantedBug(
        "an abandoned read continues into the request's own slots",
        replaced(ReadQueue, "_replace_slots", lambda self, task: True),
    ),
    "late-slots-free": PlantedBug(
        "a request leaves its forward pass while abandoned transfers still move",
        replaced(LayerStream, "late", property(lambda self: [])),
    ),
    "slots-unchecked": PlantedBug(
        "a DE does not check that a request still holds the slots it decodes from",
        replaced(BlockBuffer, "pin_lease", _any_lease),
    ),
    "keys-ignored": PlantedBug(
        "a request is granted cached blocks without comparing their keys",
        replaced(CachedBlocks, "cached_slots", lambda self, keys: list(self._blocks)[: len(keys)]),
    ),
    "cached-once-read": PlantedBug(
        "a DE caches blocks as soon as they are read, although the PE may recompute them",
        lambda: mock.patch.object(ReadQueue, "_caches", _ALWAYS, create=True),
    ),
    "chain-unreported": PlantedBug(
        "the scheduler takes a chain for stored that a DE still writes",
        replaced(stored_chains, "_is_trusted", lambda writer, now_s: True),
    ),
    "read-behind-evicted": PlantedBug(
        "a DE reads what follows its cached blocks although it has evicted some of them",
        replaced(GrantRead, "behind", _behind_any),
    ),
    "append-over-lost-hit": PlantedBug(
        "a DE computes an append although a part of the hit before it could not be loaded",
        replaced(EngineAttempt, "_check_whole", lambda self, hit_blocks, short: None),
    ),
    "freed-before-copied": PlantedBug(
        "a DE's slots are freed before their KV has been copied into HBM",
        replaced(ActiveRequests, "done_with_buffer", _freed_once_persisted),
    ),
    "windows-unread": PlantedBug(
        "a shortened hit is used without the window layers of its last blocks",
        replaced(engine_attempt, "to_read_whole", lambda hits, whole_from: ()),
    ),
    "hbm-freed-early": PlantedBug(
        "HBM that a lost PE may still write to is freed at once",
        replaced(HbmReservations, "quarantine", HbmReservations.release),
    ),
    "hbm-reused": PlantedBug(
        "HBM is reused while a copy out of it, or a late transfer into it, is under way",
        replaced(EmulatedHbm, "hold", lambda self, hbm_blocks: None),
    ),
    "load-before-complete": PlantedBug(
        "a PE confirms a prompt before its KV has arrived, so that the DE's load ends too early",
        replaced(prefill_passes, "end_stream", _over_at_once),
    ),
    **DRAM_BUGS,
    **WEIGHT_BUGS,
    **STORAGE_BUGS,
    **TENANT_BUGS,
    **FRONT_END_BUGS,
    **LEG_BUGS,
    **THIRD_BUGS,
    **LEADERSHIP_BUGS,
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug within ``with``; none for an empty name.

    Raises ``ConfigError`` for an unknown name.
    """
    if not name:
        yield
        return
    if name not in PLANTED_BUGS:
        raise ConfigError(f"{{plant}} is {name!r}; choose one of {', '.join(PLANTED_BUGS)}")
    with PLANTED_BUGS[name].patch():
        yield
