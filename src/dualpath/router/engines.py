"""The engines of a cluster, as far as the life of a request needs them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import GroupRank, HostProcess, Role, Writer, rank_mark
from dualpath.core.control import NodeDramShare
from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.core.rates import Rates


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's registration without its address; ``order`` is its rank of first arrival.

    ``unsettled``, ``quarantined`` and ``writers`` are the in-doubt attempts of earlier sessions.
    """

    engine_id: str
    epoch: str
    role: Role
    node: str
    group: str
    api_url: str
    process: HostProcess
    order: int
    hbm_tokens: int
    buffer_tokens: int
    snic_bytes_per_s: float | None = None
    limits: dict[str, Any] = {}
    rates: Rates = Rates()
    unsettled: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    writers: tuple[Writer, ...] = ()
    dp: GroupRank | None = None
    node_dram: NodeDramShare | None = None

    @property
    def writer(self) -> Writer:
        """This process as one that may write into others' buffers."""
        return Writer(self.engine_id, self.epoch, self.process)

    @property
    def unit(self) -> str:
        """The unit that starts and ends with it: the engine, or all ranks of its group."""
        return self.engine_id.removesuffix(rank_mark(self.dp.rank)) if self.dp else self.engine_id


class LiveEngines:
    """Live engines by id; what is derived from all of them is computed once a change."""

    def __init__(self) -> None:
        self._infos: dict[str, EngineInfo] = {}
        self._by_role: dict[Role | None, tuple[EngineInfo, ...]] = {}
        self._limits: dict[str, int | None] = {}

    def put(self, info: EngineInfo) -> None:
        """Add an engine, or replace what is known of it."""
        if self._infos.get(info.engine_id) is not info:
            self._infos[info.engine_id] = info
            self._changed()

    def remove(self, engine_id: str) -> None:
        """Remove an engine; does nothing if it is unknown."""
        if self._infos.pop(engine_id, None) is not None:
            self._changed()

    def clear(self) -> None:
        """Remove all engines."""
        self._infos.clear()
        self._changed()

    def get(self, engine_id: str) -> EngineInfo | None:
        """Return an engine by its id."""
        return self._infos.get(engine_id)

    def all(self, role: Role | None = None) -> tuple[EngineInfo, ...]:
        """Return the engines (of one role), by arrival."""
        if (known := self._by_role.get(role)) is None:
            infos = sorted(self._infos.values(), key=lambda info: info.order)
            known = self._by_role[role] = tuple(i for i in infos if role in (None, i.role))
        return known

    def limit(self, name: str) -> int | None:
        """See ``KnownEngines``."""
        if name not in self._limits:
            values = [info.limits.get(name) for info in self._infos.values()]
            self._limits[name] = min((v for v in values if isinstance(v, int)), default=None)
        return self._limits[name]

    def _changed(self) -> None:
        self._by_role.clear()
        self._limits.clear()


class KnownEngines(Protocol):
    """The engines of a cluster at present."""

    @property
    def mode(self) -> Mode | None:
        """Their mode; None before any has joined."""
        ...

    @property
    def namespace(self) -> StoreNamespace | None:
        """The namespace of their KV; None before any has joined."""
        ...

    def alive(self, role: Role | None = None) -> Sequence[EngineInfo]:
        """Return the live engines (of one role), by arrival."""
        ...

    def limit(self, name: str) -> int | None:
        """Return the smallest value of an integer limit over live engines, None if unstated."""
        ...

    def waits(self) -> Iterable[str]:
        """Return what registered engines wait for that are not live, once each."""
        ...


def missing_engines(engines: KnownEngines) -> str | None:
    """Return why no request can be served at present, None if one can."""
    missing = [role.value for role in Role if not engines.alive(role)]
    if not missing:
        return None
    reason = (
        f"no live {' and no live '.join(missing)} engine; start one that registers with the router"
    )
    return "; ".join((reason, *engines.waits()))


def is_alive(engines: KnownEngines, info: EngineInfo) -> bool:
    """Whether this process of an engine has a session."""
    return any(
        one.engine_id == info.engine_id and one.epoch == info.epoch
        for one in engines.alive(info.role)
    )


def geometry(engines: KnownEngines) -> BlockGeometry:
    """Return the shape of the engines' blocks; raises ``EngineLostError`` before any has joined."""
    if engines.namespace is None:
        raise EngineLostError("no engine has registered yet, at least 1P1D is needed; start it")
    return engines.namespace.geometry


class Membership:
    """Wakes tasks that wait for engines; ``changed`` is called when one joins or is lost."""

    def __init__(self, engines: KnownEngines) -> None:
        self._engines = engines
        self._changed = asyncio.Event()
        #: Called at each change with the engines that have joined, and those that were lost.
        self.listeners: list[Callable[[Sequence[EngineInfo], Sequence[EngineInfo]], None]] = []

    def changed(self, joined: Sequence[EngineInfo] = (), lost: Sequence[EngineInfo] = ()) -> None:
        """Notify the listeners and wake the waiters."""
        for listener in self.listeners:
            listener(joined, lost)
        self._changed.set()
        self._changed = asyncio.Event()

    def next_change(self) -> Awaitable[object]:
        """Return what ends when the next engine after this call joins or is lost."""
        return self._changed.wait()

    async def wait(self, prefill: int, decode: int, timeout_s: float, address: str) -> None:
        """Wait for live engines; raises ``DeadlineError`` with what is missing.

        ``address`` is where the missing ones have to register.
        """
        wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
        try:
            async with asyncio.timeout(timeout_s):
                while any(len(self._engines.alive(r)) < n for r, n in wanted.items()):
                    await self._changed.wait()
        except TimeoutError:
            there = ", ".join(
                f"{len(self._engines.alive(role))} of {count} {role.value}"
                for role, count in wanted.items()
            )
            raise DeadlineError(
                f"live engines after {timeout_s:g} s: {there}; start the missing ones with the "
                f"router's control address {address}"
            ) from None


class MissingRole:
    """Calls ``late`` with the reason when a role has had no live engine for ``wait_s``.

    Attempts that wait for their engines then would wait until their deadline.  ``wait`` is
    ``Scheduling.wait_for_engines``; ``membership`` notifies of changes of ``engines``.
    """

    def __init__(
        self,
        engines: KnownEngines,
        membership: Membership,
        wait: Callable[[int, int, float], Awaitable[None]],
        wait_s: float,
        late: Callable[[str], None],
    ) -> None:
        self._engines, self._wait, self._wait_s, self._late = engines, wait, wait_s, late
        self._waiting: asyncio.Task[None] | None = None
        membership.listeners.append(self._changed)

    def stop(self) -> None:
        """Stop a wait that is under way; idempotent."""
        if self._waiting is not None:
            self._waiting.cancel()

    def _changed(self, joined: Sequence[EngineInfo], lost: Sequence[EngineInfo]) -> None:
        if self._waiting is None and missing_engines(self._engines) is not None:
            self._waiting = asyncio.create_task(self._until_late(), name="wait for a role")

    async def _until_late(self) -> None:
        try:
            await self._wait(1, 1, self._wait_s)
        except DeadlineError as error:
            self._late(str(error))
        finally:
            self._waiting = None
