"""``Scheduling`` at a front end that knows several units: schedulers, each with its own engines.

The units have one storage, one model and one mode, and know nothing of each other.  Each attempt at
a request is made in one unit, which ``policy.units`` chooses; a unit's loss costs what the loss of
a scheduler and of its engines costs (``remote``, ``requests.request``), and the next attempt is
made in another unit.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.errors import SchedulerLostError
from dualpath.core.modes import Mode
from dualpath.core.session_hints import SessionHints
from dualpath.policy.units import AFFINITY, Turn, UnitChoice, UnitPolicy, UnitState
from dualpath.router.engines import EngineInfo, Membership, missing_engines
from dualpath.router.scheduler.remote import (
    EnginesView,
    RemoteAttempt,
    RemoteRequest,
    RemoteScheduling,
)
from dualpath.router.scheduling import Answered, AttemptListener, AttemptOrder, RequestOrder
from dualpath.router.waits import gather_or_cancel

logger = logging.getLogger(__name__)

#: A scheduler that has sent nothing for this long, four heartbeats, is not asked for more while
#: another one answers; its session ends after ``core.sessions.ROUTER_TIMEOUT_S``.
SILENT_S = 2.0
#: Of a unit whose engines take prompts of any length.
_ANY_LENGTH = 1 << 62


class Unit:
    """One unit as the front end knows it; ``other_mode`` is the reason if its mode is not ours."""

    def __init__(self, name: str, link: RemoteScheduling) -> None:
        self.name, self.link = name, link
        self.other_mode = ""
        self._decode_engines: Sequence[EngineInfo] = ()
        self._capacity_tokens = self._longest_prompt_tokens = 0

    @property
    def view(self) -> EnginesView:
        """The engines that its scheduler reports."""
        return self.link.engines

    def missing(self) -> str | None:
        """Return why it serves no requests, None if it does."""
        return self.other_mode or missing_engines(self.view)

    def state(self) -> UnitState:
        """Return what the choice of a unit depends on."""
        engines = self.view.alive(Role.DECODE)
        if engines is not self._decode_engines:  # The view returns the same tuple until it changes.
            self._decode_engines = engines
            self._capacity_tokens = sum(engine.hbm_tokens for engine in engines)
            self._longest_prompt_tokens = self._longest_prompt(engines)
        return UnitState(
            self.name,
            serves=self.missing() is None,
            silent=not self.link.session or self.link.silent_s > SILENT_S,
            draining=self.link.load.draining,
            capacity_tokens=self._capacity_tokens,
            others_tokens=self.link.load.others_tokens,
            longest_prompt_tokens=self._longest_prompt_tokens,
        )

    def _longest_prompt(self, engines: Iterable[EngineInfo]) -> int:
        namespace = self.view.namespace
        if self.view.mode is Mode.ORACLE or namespace is None:
            return _ANY_LENGTH
        block_tokens = namespace.geometry.block_tokens
        largest = max((engine.buffer_tokens for engine in engines), default=0)
        return largest // block_tokens * block_tokens


class UnitsView:
    """The ``KnownEngines`` of all units that serve: engines of both roles, and the common mode.

    ``adapters`` are those of all units, see ``EnginesView``.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.adapters = units[0].view.adapters
        #: That of the unit that was the first to have engines, as long as a unit has this mode.
        self.mode: Mode | None = None

    @property
    def namespace(self) -> StoreNamespace | None:
        """The namespace of their KV; None before any engine has joined."""
        return self._units[0].view.namespace

    @property
    def away(self) -> str:
        """Why no scheduler has a session; empty if one has."""
        reasons = [unit.view.away for unit in self._units]
        return "; ".join(reasons) if all(reasons) else ""

    def changed(self) -> None:
        """Compare the units after the engines of one have changed.

        All units have the namespace that was reported first: keys are made for it.
        """
        views = [unit.view for unit in self._units]
        namespace = next((view.namespace for view in views if view.namespace is not None), None)
        modes = [view.mode for view in views if view.mode is not None and view.alive()]
        if self.mode not in modes:
            self.mode = modes[0] if modes else self.mode
        for unit in self._units:
            unit.view.namespace = namespace
            other = unit.view.mode
            unit.other_mode = (
                f"unit {unit.name} has mode {other} and others have {self.mode}; start all engines "
                "in one mode"
                if unit.view.alive() and other not in (None, self.mode)
                else ""
            )

    def alive(self, role: Role | None = None) -> Sequence[EngineInfo]:
        """Return the live engines (of one role) of units that serve, unit by unit."""
        found = [unit.view.alive(role) for unit in self._units if unit.missing() is None]
        return found[0] if len(found) == 1 else [engine for each in found for engine in each]

    def waits(self) -> Sequence[str]:
        """Return why units do not serve."""
        missing = ((unit.name, unit.missing()) for unit in self._units)
        return [f"unit {name}: {reason}" for name, reason in missing if reason is not None]

    def limit(self, name: str) -> int | None:
        """Return the smallest value of an integer limit over units that serve, None if unstated."""
        limits = [unit.view.limit(name) for unit in self._units if unit.missing() is None]
        return min((limit for limit in limits if limit is not None), default=None)


class Units:
    """The units of one front end; ``links`` ≥ 2 are those to their schedulers, by unit.

    ``links`` have one ``ServedAdapters`` in common.  ``chosen`` is called with each choice of a
    unit, ``serves`` with a unit's name and whether it serves, whenever that may have changed.
    """

    def __init__(
        self,
        links: Mapping[str, RemoteScheduling],
        policy: UnitPolicy,
        chosen: Callable[[UnitChoice], None],
        serves: Callable[..., None],
    ) -> None:
        self.units = tuple(Unit(name, link) for name, link in links.items())
        self.policy = policy
        self.engines = UnitsView(self.units)
        self._by_name = {unit.name: unit for unit in self.units}
        self.membership = Membership(self.engines)
        self._chosen, self._serves = chosen, serves
        for unit in self.units:
            unit.link.membership.listeners.append(lambda joined, lost: self._changed())
        self.engines.changed()

    @property
    def caches_answers(self) -> bool:
        """Whether ``Answered`` is used by any unit."""
        return any(unit.link.caches_answers for unit in self.units)

    async def wait_for_engines(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for live engines of units that serve; raises ``DeadlineError``."""
        names = ", ".join(self._by_name)
        await self.membership.wait(prefill, decode, timeout_s, f"of one of the units {names}")

    def begin(self, order: RequestOrder) -> "UnitRequest":
        """Register a request that has arrived."""
        return UnitRequest(self, order)

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine."""
        for unit in self._with(engine):
            unit.link.suspect(engine, why, call_failed=call_failed)

    def call_waits(self, engine: EngineInfo, silent_s: float) -> None:
        """An engine has a call and has sent nothing for a while."""
        for unit in self._with(engine):
            unit.link.call_waits(engine, silent_s)

    async def await_liveness(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live.

        Engines of a unit without a session count as lost while another unit has one.
        """
        if not any(unit.link.session for unit in self.units):
            raise SchedulerLostError(self.engines.away)
        asked: dict[str, list[EngineInfo]] = {}
        for engine in engines:
            for unit in self._with(engine):
                asked.setdefault(unit.name, []).append(engine)
        await gather_or_cancel(
            *(self._by_name[name].link.await_liveness(own) for name, own in asked.items())
        )

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Apply a client's hints on a session where its last turn was; False if it is unknown.

        The session may have had its turns at another front end: then all units are asked.  Raises
        ``SchedulerLostError`` if none of them answers.
        """
        home = self.policy.home(tenant, session_id)
        errors: list[SchedulerLostError] = []
        # A silent scheduler comes last: its call may wait for its time limit.
        for unit in sorted(self.units, key=lambda unit: (unit.state().silent, unit.name != home)):
            try:
                if await unit.link.hint_session(tenant, session_id, hints):
                    return True
            except SchedulerLostError as error:
                errors.append(error)
        if len(errors) == len(self.units):
            raise errors[0]
        return False

    def choose(self, turn: Turn, failed: Sequence[str]) -> tuple[Unit, UnitChoice]:
        """Return the unit for the next attempt at a request, and why."""
        choice = self.policy.choose(turn, [unit.state() for unit in self.units], failed)
        self._chosen(choice)
        if failed:
            logger.info(
                "request %s: its next attempt is made in unit %s (%s)",
                *(turn.request_id, choice.unit, choice.reason),
            )
        return self._by_name[choice.unit], choice

    def status(self) -> list[dict[str, Any]]:
        """Return what this front end knows of each unit, for its status."""
        return [self._unit_status(unit) for unit in self.units]

    def _unit_status(self, unit: Unit) -> dict[str, Any]:
        state, view = unit.state(), unit.view
        return {
            "unit": unit.name,
            "serves": state.serves,
            "missing": unit.missing(),
            "silent": state.silent,
            "draining": state.draining,
            "prefill_engines": len(view.alive(Role.PREFILL)),
            "decode_engines": len(view.alive(Role.DECODE)),
            "capacity_tokens": state.capacity_tokens,
            "own_prompt_tokens": self.policy.own_tokens(unit.name),
            "others_prompt_tokens": state.others_tokens,
            "load": round(self.policy.load(state), 3) if state.serves else None,
        }

    def _with(self, engine: EngineInfo) -> list[Unit]:
        """Return the unit that has this process of an engine, or nothing if it is lost."""
        found = (u for u in self.units if u.view.live(engine.engine_id, engine.epoch) is not None)
        return list(found)

    def _changed(self) -> None:
        self.engines.changed()
        serve = [unit.missing() is None for unit in self.units]
        if any(serve):
            # Else what waits in a unit for its first engine of a role would wait for its deadline.
            for unit in self.units:
                if (why := unit.missing()) is not None:
                    unit.link.break_unplaced(f"unit {unit.name} does not serve: {why}")
        self.membership.changed()
        for unit, does in zip(self.units, serve, strict=True):
            self._serves(unit.name, serves=does)


class UnitRequest:
    """The ``ScheduledRequest`` of a front end that knows several units.

    The request begins in a unit with its first attempt there, and ends there with the first attempt
    in another one.
    """

    def __init__(self, units: Units, order: RequestOrder) -> None:
        self._units = units
        self._order = order
        self._turn: Turn | None = None
        #: The unit of the last attempt, the request there, and the attempt.
        self._unit = ""
        self._inner: RemoteRequest | None = None
        self._attempt: RemoteAttempt | None = None
        #: Units in which attempts have failed.
        self._failed: list[str] = []

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> RemoteAttempt:
        """Begin an attempt.  Raises ``BadRequestError`` if another one has its name."""
        request = self._order
        self._turn = Turn(
            request.request_id,
            order.prompt_tokens,
            request.keys,
            request.tenant,
            request.hints.session_id,
        )
        if self._attempt is not None and not self._attempt.hit_lost:
            self._failed.append(self._unit)
        unit, choice = self._units.choose(self._turn, self._failed)
        if self._inner is None or unit.name != self._unit:
            self._leave()
            self._inner = unit.link.begin(request)
        self._unit = unit.name
        if choice.reason != AFFINITY:
            # Its last turn may have been in another unit, which this one knows nothing of.
            order = msgspec.structs.replace(order, look_up=True)
        self._attempt = self._inner.attempt(order, listener)
        return self._attempt

    def _leave(self) -> None:
        """End the request in the unit of the last attempt."""
        if self._inner is not None:
            self._inner.end()

    async def ends_aborted(self) -> bool:
        """Return whether the request ends with the tokens it has, as the last unit reports."""
        return self._inner is not None and await self._inner.ends_aborted()

    def end(self, answered: Answered | None = None) -> None:
        """The request has ended, with an answer if ``answered`` is given; idempotent."""
        if self._turn is not None:
            if answered is not None:
                self._units.policy.answered(self._turn, answered.keys)
            self._units.policy.end(self._turn.request_id)
        if self._inner is not None:
            self._inner.end(answered)
