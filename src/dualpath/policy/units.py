"""Which unit serves a request: a *unit* is a scheduler with the engines registered with it.

Front ends may know several units over one storage (``router.scheduler.units``).  A prompt's stored
KV is a hit in every unit; what engines cache in DRAM is a hit in their own unit only.  So a session
stays at its unit as long as that unit can serve it and is not loaded much more than another one:

1. Of the units that serve, those are left out that are silent, that an operator drains, in which an
   attempt at this request has failed, or that have no buffer for its prompt; unless no others are
   left.
2. A session stays at its *home*, the unit of its last turn, if the home is among the rest and its
   load is at most ``SLACK`` above the least load.
3. Else a session with a name takes the first unit in an order that follows from its name alone, by
   the same limit: several front ends, which share no memory, choose the same unit.
4. Else the unit with the least load is taken.

A session is known by the name that its client gives it, or by its keys: a prompt that begins with
all blocks of an earlier prompt, or of an earlier one and its answer, continues it.

The *load* of a unit is the number of prompt tokens of the requests that it has, of all front ends,
divided by the tokens that the HBM of its decode engines holds.  Above 1, requests wait there.

No clock, no I/O, no randomness: front ends with equal calls make equal choices.
"""

import hashlib
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.recent import Recent

#: A session leaves its home if the home's load is larger than the least load by more than this: by
#: a quarter of what its decode engines hold.  Beyond, waiting there costs more than reading the
#: session's context from storage once.
SLACK = 0.25
#: Homes that are remembered, see ``Recent``: one for each session with a name, two for each turn of
#: one without.
MOST_HOMES = 1 << 16

AFFINITY, HASH, LOAD, NONE_SERVES = "affinity", "hash", "load", "none-serves"
#: Why a session's home was not taken.
HOME_LOST, HOME_SILENT, HOME_DRAINING, HOME_FAILED, HOME_SMALL, HOME_FULL = (
    *("home-lost", "home-silent", "home-draining", "home-failed", "home-small", "home-full"),
)
#: Reasons of choices.
UNIT_REASONS = (
    *(AFFINITY, HASH, LOAD, NONE_SERVES),
    *(HOME_LOST, HOME_SILENT, HOME_DRAINING, HOME_FAILED, HOME_SMALL, HOME_FULL),
)


class UnitState(msgspec.Struct, frozen=True):
    """What a front end knows of a unit.

    ``serves``: the front end has a session with its scheduler, and it has engines of both roles.
    ``silent``: its scheduler has no session or has sent nothing for several heartbeats.
    ``draining``: an operator has asked that it gets no new requests.  ``capacity_tokens`` ≥ 0 is
    what the HBM of its decode engines holds, ``others_tokens`` ≥ 0 the prompt tokens of the
    requests that it has of other front ends, ``longest_prompt_tokens`` the longest prompt that one
    of its buffers holds.
    """

    name: str
    serves: bool
    silent: bool = False
    draining: bool = False
    capacity_tokens: int = 1
    others_tokens: int = 0
    longest_prompt_tokens: int = 1 << 62


class Turn(msgspec.Struct, frozen=True):
    """A request that needs a unit; ``keys`` are those of its prompt's full blocks."""

    request_id: str
    prompt_tokens: int
    keys: Sequence[BlockKey] = ()
    tenant: str = ""
    session_id: str = ""


class UnitChoice(NamedTuple):
    """A unit, and why: one of ``UNIT_REASONS``."""

    unit: str
    reason: str


class UnitPolicy:
    """The choices of one front end; ``most_homes`` ≥ 1 are remembered, the latest used."""

    def __init__(self, most_homes: int = MOST_HOMES) -> None:
        #: By a session's tenant and name, or by the key of the last block of a prompt or answer.
        self._homes: Recent[Hashable, str] = Recent(most_homes)
        #: The unit and the prompt tokens of each request that has not ended.
        self._charged: dict[str, tuple[str, int]] = {}
        self._own_tokens: dict[str, int] = {}

    def choose(
        self, turn: Turn, units: Sequence[UnitState], failed: Collection[str] = ()
    ) -> UnitChoice:
        """Return the unit for the next attempt at a request, and count the request there.

        ``units`` ≥ 1 are all that are known, in any order; ``failed`` names those in which earlier
        attempts at the request have failed.
        """
        home = self._home(turn)
        choice = self._chosen(turn, units, failed, home)
        self.end(turn.request_id)
        self._charged[turn.request_id] = choice.unit, turn.prompt_tokens
        self._charge(choice.unit, turn.prompt_tokens)
        self._remember(turn, turn.keys, choice.unit)
        return choice

    def answered(self, turn: Turn, keys: Sequence[BlockKey]) -> None:
        """The request has an answer; ``keys`` are those of its prompt and its answer."""
        if (charged := self._charged.get(turn.request_id)) is not None:
            self._remember(turn, keys, charged[0])

    def end(self, request_id: str) -> None:
        """A request no longer counts at its unit; idempotent."""
        if (charged := self._charged.pop(request_id, None)) is not None:
            unit, tokens = charged
            self._charge(unit, -tokens)

    def home(self, tenant: str, session_id: str) -> str | None:
        """Return the unit of a named session's last turn, None if it is not known."""
        return self._homes.last([(tenant, session_id)])

    def load(self, unit: UnitState) -> float:
        """Return a unit's load, by what it reports and the requests of this front end."""
        tokens = unit.others_tokens + self._own_tokens.get(unit.name, 0)
        return tokens / max(unit.capacity_tokens, 1)

    def own_tokens(self, unit: str) -> int:
        """Return the prompt tokens of this front end's requests that a unit has."""
        return self._own_tokens.get(unit, 0)

    def _chosen(
        self, turn: Turn, units: Sequence[UnitState], failed: Collection[str], home: str | None
    ) -> UnitChoice:
        serving = [unit for unit in units if unit.serves]
        pool = serving or list(units)
        for may_take in (
            lambda unit: not unit.silent,
            lambda unit: not unit.draining,
            lambda unit: unit.name not in failed,
            lambda unit: unit.longest_prompt_tokens >= turn.prompt_tokens,
        ):
            pool = [unit for unit in pool if may_take(unit)] or pool
        loads = {unit.name: self.load(unit) for unit in pool}
        limit = min(loads.values()) + SLACK
        ranked = _ranked(turn, loads)
        if home is not None and loads.get(home, limit + 1) <= limit:
            unit, reason = home, AFFINITY
        elif home is None and turn.session_id:
            unit, reason = next(name for name in ranked if loads[name] <= limit), HASH
        else:
            unit = min(ranked, key=loads.__getitem__)
            reason = LOAD if home is None else _why_left(home, units, failed, loads)
        return UnitChoice(unit, reason if serving else NONE_SERVES)

    def _home(self, turn: Turn) -> str | None:
        if turn.session_id:
            return self.home(turn.tenant, turn.session_id)
        return self._homes.last(turn.keys)

    def _remember(self, turn: Turn, keys: Sequence[BlockKey], unit: str) -> None:
        self._homes.note([(turn.tenant, turn.session_id)] if turn.session_id else keys[-1:], unit)

    def _charge(self, unit: str, tokens: int) -> None:
        left = self._own_tokens.get(unit, 0) + tokens
        if left:
            self._own_tokens[unit] = left
        else:
            self._own_tokens.pop(unit, None)


def _ranked(turn: Turn, names: Iterable[str]) -> list[str]:
    """Return units in an order that is the session's own (rendezvous hashing).

    A unit that is added or removed changes the first place of few sessions.
    """
    session = f"{turn.tenant}\n{turn.session_id or turn.request_id}"

    def rank(name: str) -> bytes:
        return hashlib.blake2b(f"{name}\n{session}".encode(), digest_size=8).digest()

    return sorted(names, key=rank)


def _why_left(
    home: str, units: Sequence[UnitState], failed: Collection[str], loads: Iterable[str]
) -> str:
    """Return why a session leaves its home."""
    state = next((unit for unit in units if unit.name == home), None)
    if state is None or not state.serves:
        return HOME_LOST
    if home in loads:
        return HOME_FULL
    if state.silent:
        return HOME_SILENT
    if state.draining:
        return HOME_DRAINING
    return HOME_FAILED if home in failed else HOME_SMALL
