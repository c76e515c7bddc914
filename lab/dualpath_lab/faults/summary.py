"""Summary of a campaign: requests by outcome, faults by cell of the matrix.  Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dualpath_lab.faults.injector import InjectedFault
from dualpath_lab.faults.load import Outcome, Turn
from dualpath_lab.faults.matrix import Component, Fault, Step

# ------------------------------------------------------------------------------------- router back
# How long a cluster is without a router after a kill, step by step.  Pure.


class RouterRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from a kill of the router until each step of its recovery.

    Until the next router answers; until all engines have registered; until the request that gets
    the earliest first token was sent; until that token arrived.
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


#: A fault has effects for a little longer than it lasts: a silent engine times out later.
_EFFECT_S = 1.0
#: The router may report an exceeded deadline this much after it; a stopped router reports later.
_GRACE_S = 3.0
BAD = (Outcome.UNCLEAR, Outcome.LATE, Outcome.WRONG)
#: In an error message: ids of requests and epochs, and numbers that stand alone.
_IDS = re.compile(r"\b(cmpl-)?[0-9a-f]{12,}(\.\d+)?\b|:\d{4,5}\b")
_NUMBERS = re.compile(r"(?<![\w.-])\d+(\.\d+)?(?![\w.])")
_ENDS = frozenset({Fault.KILL, Fault.TERMINATE})


_Cell = tuple[Component, Step, Fault]


class CellCount(msgspec.Struct, kw_only=True):
    """Counts of one cell of the matrix: its faults, and the outcomes of overlapping requests.

    A request counts in every cell of which it overlapped a fault.  ``parts`` counts which process
    or thread of an engine was hit, in cells of which the faults hit one.
    """

    component: Component
    step: Step
    fault: Fault
    made: int = 0
    missed: int = 0
    damaged_blocks: int = 0
    outcomes: dict[Outcome, int] = msgspec.field(default_factory=dict)
    parts: dict[str, int] = msgspec.field(default_factory=dict)


class CampaignSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the requests of a whole campaign.

    ``lost_to_single_fault`` are requests that failed although they overlapped only one fault,
    which ended, stopped or cut off one engine; ``router_back`` are the times after kills of
    routers; ``examples`` counts error messages.  Those that were published in an older format lack
    what has a default.
    """

    outcomes: dict[Outcome, int]
    matrix: tuple[CellCount, ...]
    lost_to_single_fault: tuple[str, ...] = ()
    router_back: tuple[RouterRecovery, ...] = ()
    examples: dict[str, int] = {}

    @property
    def bad_turns(self) -> int:
        """Number of requests that were late, wrong, or ended without a clear error."""
        return sum(self.outcomes.get(outcome, 0) for outcome in BAD)


def summarize(
    turns: Sequence[Turn],
    made: Sequence[InjectedFault],
    deadline_s: float,
    client_side: Component = Component.ROUTER,
) -> CampaignSummary:
    """Summarize the requests ``turns`` under the faults ``made``.

    ``client_side`` is the component to which clients connect.
    """
    cells: dict[_Cell, CellCount] = {}
    for fault in made:
        component, step, kind = _cell(fault)
        cell = cells.setdefault(_cell(fault), CellCount(component=component, step=step, fault=kind))
        cell.made += 1
        cell.damaged_blocks += fault.damaged_blocks
        if fault.part:
            cell.parts[fault.part] = cell.parts.get(fault.part, 0) + 1
    outcomes: Counter[Outcome] = Counter()
    examples: Counter[str] = Counter()
    lost = []
    by_begin = sorted(made, key=lambda fault: fault.begin_s)
    for turn in turns:
        met = _met(turn, by_begin)
        outcome = _final_outcome(turn, met, deadline_s, client_side)
        outcomes[outcome] += 1
        # A lost connection has its cause in a fault that closes connections of clients.
        blamed = [f for f in met if outcome is not Outcome.CUT or _cuts_clients(f, client_side)]
        for name in {_cell(fault) for fault in blamed}:
            counts = cells[name].outcomes
            counts[outcome] = counts.get(outcome, 0) + 1
        if outcome not in (Outcome.WELL, Outcome.LEFT, Outcome.CUT):
            examples[f"{outcome.value}: {_without_ids(turn.answer.detail)}"] += 1
        if (
            len(met) == 1
            and _hits_one_engine(met[0])
            and outcome not in (Outcome.WELL, Outcome.LEFT)
        ):
            detail = _without_ids(turn.answer.detail)
            lost.append(f"{fault_name(met[0])}: {outcome.value}: {detail}")
    return CampaignSummary(
        outcomes=dict(outcomes),
        matrix=tuple(cells.values()),
        lost_to_single_fault=tuple(lost),
        router_back=tuple(router_recoveries(turns, made)),
        examples=dict(examples),
    )


def _without_ids(detail: str) -> str:
    """Replace ids and numbers in an error message, which differ from case to case."""
    return _NUMBERS.sub("N", _IDS.sub("ID", detail))


def _met(turn: Turn, made: Iterable[InjectedFault]) -> list[InjectedFault]:
    return [f for f in made if f.begin_s <= turn.end_s and turn.begin_s <= f.end_s + _EFFECT_S]


def _final_outcome(
    turn: Turn, met: Sequence[InjectedFault], deadline_s: float, client_side: Component
) -> Outcome:
    """Return the outcome of a turn, given the faults that it overlapped."""
    answer = turn.answer
    stopped_s = sum(
        f.planned.lasts_s
        for f in met
        if f.planned.component in (Component.ROUTER, client_side) and f.planned.fault is Fault.STOP
    )
    if answer.outcome is Outcome.WRONG:
        return Outcome.WRONG
    if turn.end_s - turn.begin_s > deadline_s + _GRACE_S + stopped_s:
        return Outcome.LATE
    if answer.outcome is Outcome.CUT and not any(
        _cuts_clients(fault, client_side) for fault in met
    ):
        return Outcome.UNCLEAR
    return answer.outcome


def _cuts_clients(fault: InjectedFault, client_side: Component) -> bool:
    planned = fault.planned
    return planned.fault is Fault.RESET_CLIENTS or (
        planned.component is client_side and planned.fault in _ENDS
    )


def _hits_one_engine(fault: InjectedFault) -> bool:
    """Whether the fault takes away one engine, or the connection to one."""
    planned = fault.planned
    if planned.component is Component.CONNECTION:
        return planned.fault is not Fault.RESET_CLIENTS
    return planned.component.is_engine


def _cell(fault: InjectedFault) -> _Cell:
    return fault.planned.component, fault.planned.step, fault.planned.fault


def fault_name(fault: InjectedFault) -> str:
    """Return component, step and fault as text."""
    planned = fault.planned
    return f"{planned.component.value}, {planned.step.value}, {planned.fault.value}"
