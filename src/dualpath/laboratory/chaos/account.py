"""What a campaign comes to: requests by how they ended, faults by cell of the matrix.  Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dualpath.laboratory.chaos.ask import Outcome
from dualpath.laboratory.chaos.load import Turn
from dualpath.laboratory.chaos.matrix import Component, Fault, Step
from dualpath.laboratory.chaos.router_back import RouterBack, router_backs
from dualpath.laboratory.chaos.strike import Made

#: A fault is felt a little longer than it lasts: an engine is missed only after its time-out.
_FELT_S = 1.0
#: Beyond its deadline a request may still be told so; a stopped router tells nobody anything.
_GRACE_S = 3.0
BAD = (Outcome.UNCLEAR, Outcome.LATE, Outcome.WRONG)
#: Of a message: names of requests and epochs, and numbers that stand alone.
_IDS = re.compile(r"\b(cmpl-)?[0-9a-f]{12,}(\.\d+)?\b|:\d{4,5}\b")
_NUMBERS = re.compile(r"(?<![\w.-])\d+(\.\d+)?(?![\w.])")
_ENDS = frozenset({Fault.KILL, Fault.TERMINATE})


class Cell(msgspec.Struct, frozen=True):
    """One cell of the matrix."""

    component: Component
    step: Step
    fault: Fault


class CellCount(msgspec.Struct):
    """What happened around the faults of one cell.

    A request counts in every cell whose faults it met.
    """

    made: int = 0
    missed: int = 0
    damaged_blocks: int = 0
    outcomes: dict[Outcome, int] = msgspec.field(default_factory=dict)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A whole campaign in numbers.

    ``lost_to_one`` are requests that ended badly though they met one fault alone, which ended or
    stopped one engine; ``router_backs`` tell how the next router followed one that was killed.
    """

    outcomes: Mapping[Outcome, int]
    cells: Mapping[Cell, CellCount]
    lost_to_one: tuple[str, ...]
    router_backs: tuple[RouterBack, ...]
    examples: Mapping[str, int]

    @property
    def bad_turns(self) -> int:
        """Requests that were late, wrong, or ended without a clear word."""
        return sum(self.outcomes.get(outcome, 0) for outcome in BAD)


def account(
    turns: Sequence[Turn],
    made: Sequence[Made],
    deadline_s: float,
    entrance: Component = Component.ROUTER,
) -> Account:
    """Return what came of ``turns`` under the faults ``made``; clients ask at ``entrance``."""
    cells: dict[Cell, CellCount] = {}
    for fault in made:
        cell = cells.setdefault(_cell(fault), CellCount())
        cell.made += 1
        cell.damaged_blocks += fault.damaged_blocks
    outcomes: Counter[Outcome] = Counter()
    examples: Counter[str] = Counter()
    lost = []
    by_begin = sorted(made, key=lambda fault: fault.begin_s)
    for turn in turns:
        met = _met(turn, by_begin)
        outcome = _judged(turn, met, deadline_s, entrance)
        outcomes[outcome] += 1
        # Who was cut off met other faults by chance.
        blamed = [f for f in met if outcome is not Outcome.CUT or _cuts_clients(f, entrance)]
        for name in {_cell(fault) for fault in blamed}:
            counts = cells[name].outcomes
            counts[outcome] = counts.get(outcome, 0) + 1
        if outcome not in (Outcome.WELL, Outcome.LEFT, Outcome.CUT):
            examples[f"{outcome.value}: {_kind_of(turn.answer.detail)}"] += 1
        if (
            len(met) == 1
            and _ends_an_engine(met[0])
            and outcome not in (Outcome.WELL, Outcome.LEFT)
        ):
            lost.append(f"{named(met[0])}: {outcome.value}: {_kind_of(turn.answer.detail)}")
    return Account(
        outcomes=dict(outcomes),
        cells=cells,
        lost_to_one=tuple(lost),
        router_backs=tuple(router_backs(turns, made)),
        examples=dict(examples),
    )


def _kind_of(detail: str) -> str:
    """Return an error without what is different every time: ids and numbers."""
    return _NUMBERS.sub("N", _IDS.sub("ID", detail))


def _met(turn: Turn, made: Iterable[Made]) -> list[Made]:
    return [f for f in made if f.begin_s <= turn.end_s and turn.begin_s <= f.end_s + _FELT_S]


def _judged(turn: Turn, met: Sequence[Made], deadline_s: float, entrance: Component) -> Outcome:
    """Return how a turn ended, knowing what was done to it."""
    answer = turn.answer
    stopped_s = sum(
        f.strike.lasts_s
        for f in met
        if f.strike.component in (Component.ROUTER, entrance) and f.strike.fault is Fault.STOP
    )
    if answer.outcome is Outcome.WRONG:
        return Outcome.WRONG
    if turn.end_s - turn.begin_s > deadline_s + _GRACE_S + stopped_s:
        return Outcome.LATE
    if answer.outcome is Outcome.CUT and not any(_cuts_clients(fault, entrance) for fault in met):
        return Outcome.UNCLEAR
    return answer.outcome


def _cuts_clients(fault: Made, entrance: Component) -> bool:
    strike = fault.strike
    return strike.fault is Fault.RESET_CLIENTS or (
        strike.component is entrance and strike.fault in _ENDS
    )


def _ends_an_engine(fault: Made) -> bool:
    return fault.strike.component.is_engine


def _cell(fault: Made) -> Cell:
    return Cell(fault.strike.component, fault.strike.step, fault.strike.fault)


def named(fault: Made) -> str:
    """Return component, step and fault in words."""
    strike = fault.strike
    return f"{strike.component.value}, {strike.step.value}, {strike.fault.value}"
