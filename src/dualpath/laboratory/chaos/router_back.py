"""How long a cluster is without a router after a kill, step by step.  Pure."""

from collections.abc import Iterator, Sequence

import msgspec

from dualpath.laboratory.chaos.load import Turn
from dualpath.laboratory.chaos.matrix import Component, Fault
from dualpath.laboratory.chaos.strike import InjectedFault


class RouterRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from a kill of the router until each step of its recovery.

    Until the next router answers; until all engines have registered; until the request whose first
    token is the earliest was sent; until that token arrived.
    """

    answers_s: float
    engines_s: float
    asked_s: float
    token_s: float


def router_recoveries(
    turns: Sequence[Turn], made: Sequence[InjectedFault]
) -> Iterator[RouterRecovery]:
    """Yield the recovery after each kill of a router.

    A kill is left out if another fault hit the next router before a token arrived.
    """
    hit = [fault for fault in made if fault.planned.component is Component.ROUTER]
    for fault in hit:
        if fault.planned.fault is not Fault.KILL:
            continue
        first = first_token_after(turns, fault.begin_s)
        if first is None:
            continue
        begin_s, token_s = first
        if any(fault.begin_s < other.begin_s < token_s for other in hit):
            continue
        yield RouterRecovery(
            answers_s=(fault.answered_s or fault.end_s) - fault.begin_s,
            engines_s=fault.end_s - fault.begin_s,
            asked_s=begin_s - fault.begin_s,
            token_s=token_s - fault.begin_s,
        )


def first_token_after(turns: Sequence[Turn], since_s: float) -> tuple[float, float] | None:
    """Return (sent, first token) of the turn, among those sent after ``since_s``, that is first."""
    found = [
        (turn.answer.first_token_s, turn.begin_s)
        for turn in turns
        if turn.begin_s > since_s and turn.answer.first_token_s is not None
    ]
    if not found:
        return None
    token_s, begin_s = min(found)
    return begin_s, token_s
