"""How long a cluster is without a router after a kill, and what that time is made of.  Pure."""

from collections.abc import Iterator, Sequence

import msgspec

from dualpath.laboratory.chaos.load import Turn
from dualpath.laboratory.chaos.matrix import Component, Fault
from dualpath.laboratory.chaos.strike import Made


class RouterBack(msgspec.Struct, frozen=True, kw_only=True):
    """One kill of a router, and the seconds from it until each thing was so.

    The next router answers; all engines are known to it; the first of its clients that gets a token
    asks; that token comes.
    """

    answers_s: float
    engines_s: float
    asked_s: float
    token_s: float


def router_backs(turns: Sequence[Turn], made: Sequence[Made]) -> Iterator[RouterBack]:
    """Yield what followed each kill of a router.

    Where another fault met the next router before a token came, the time is that fault's.
    """
    struck = [fault for fault in made if fault.strike.component is Component.ROUTER]
    for fault in struck:
        if fault.strike.fault is not Fault.KILL:
            continue
        first = first_after(turns, fault.begin_s)
        if first is None:
            continue
        begin_s, token_s = first
        if any(fault.begin_s < other.begin_s < token_s for other in struck):
            continue
        yield RouterBack(
            answers_s=(fault.answered_s or fault.end_s) - fault.begin_s,
            engines_s=fault.end_s - fault.begin_s,
            asked_s=begin_s - fault.begin_s,
            token_s=token_s - fault.begin_s,
        )


def first_after(turns: Sequence[Turn], since_s: float) -> tuple[float, float] | None:
    """Return begin and first token of the turn, sent since then, whose token came first."""
    found = [
        (turn.answer.first_token_s, turn.begin_s)
        for turn in turns
        if turn.begin_s > since_s and turn.answer.first_token_s is not None
    ]
    if not found:
        return None
    token_s, begin_s = min(found)
    return begin_s, token_s
