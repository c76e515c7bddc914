"""Which faults are drawn, and what a campaign makes of requests that met them."""

from itertools import islice

from dualpath.laboratory.chaos.account import Cell, account
from dualpath.laboratory.chaos.ask import Answer, Outcome
from dualpath.laboratory.chaos.load import Turn
from dualpath.laboratory.chaos.matrix import (
    FAULTS_OF,
    Cast,
    Component,
    Fault,
    Step,
    Strike,
    cells_of,
    strikes,
)
from dualpath.laboratory.chaos.router_back import RouterBack
from dualpath.laboratory.chaos.strike import Made

CAST = Cast("router", ("pe-0", "pe-1"), ("de-0",))
RANKS = Cast("router", ("pe-0",), ("de-0",), ("pe-0/1",), ("de-0/1",))
DEADLINE_S = 30.0


def made(component: Component, fault: Fault, begin_s: float, end_s: float) -> Made:
    strike = Strike(
        number=0,
        component=component,
        process="any",
        step=Step.READING,
        fault=fault,
        passes=1,
        lasts_s=0.0,
    )
    return Made(strike, begin_s, end_s)


def turn(begin_s: float, end_s: float, outcome: Outcome, token_s: float | None = None) -> Turn:
    return Turn(0, begin_s, end_s, 10, Answer(outcome, "why", first_token_s=token_s))


KILLED_PE = made(Component.PREFILL, Fault.KILL, 10, 12)
KILLED_ROUTER = made(Component.ROUTER, Fault.KILL, 20, 23)


def test_every_cell_comes_once_before_any_comes_again() -> None:
    cells = cells_of(tuple(Component))
    drawn = list(islice(strikes(5, CAST), 2 * cells))
    names = [(s.component, s.step, s.fault) for s in drawn]
    assert len(set(names[:cells])) == cells == len(set(names[cells:]))
    assert {f for f in Fault} == {s.fault for s in drawn}


def test_a_seed_draws_the_same_faults_and_another_seed_others() -> None:
    once, again, other = (list(islice(strikes(seed, CAST), 50)) for seed in (1, 1, 2))
    assert once == again != other


def test_a_fault_comes_in_a_process_that_passes_its_step() -> None:
    for strike in islice(strikes(0, CAST), 500):
        assert strike.fault in FAULTS_OF[strike.component]
        assert strike.process in CAST.passing(strike.component, strike.step)
    assert CAST.passing(Component.STORAGE, Step.PREFILLING) == ("pe-0", "pe-1")
    assert CAST.passing(Component.PREFILL, Step.DECODING) == ()


def test_front_ends_pass_the_steps_of_clients_in_the_place_of_their_router() -> None:
    cast = Cast("router", ("pe-0",), ("de-0",), front_ends=("front-end-0", "front-end-1"))
    drawn = list(islice(strikes(0, cast, (Component.ROUTER, Component.FRONT_END)), 200))
    passed = {c: {s.step for s in drawn if s.component is c} for c in Component}
    assert passed[Component.ROUTER] & passed[Component.FRONT_END] == set()
    assert passed[Component.ROUTER] | passed[Component.FRONT_END] == set(Step)
    alone = islice(strikes(0, CAST), 500)
    assert not [s for s in alone if s.component is Component.FRONT_END]


def test_components_and_faults_may_be_left_out() -> None:
    drawn = islice(strikes(0, CAST, (Component.STORAGE,), (Fault.SLOW,)), 300)
    assert {s.fault for s in drawn} == {*FAULTS_OF[Component.STORAGE]} - {Fault.SLOW}


def test_a_request_counts_in_the_cells_of_the_faults_it_met() -> None:
    turns = [turn(9, 11, Outcome.WELL), turn(11, 21, Outcome.WELL), turn(30, 31, Outcome.WELL)]
    found = account(turns, [KILLED_PE, KILLED_ROUTER], DEADLINE_S)
    pe = found.cells[Cell(Component.PREFILL, Step.READING, Fault.KILL)]
    router = found.cells[Cell(Component.ROUTER, Step.READING, Fault.KILL)]
    assert (pe.made, pe.outcomes) == (1, {Outcome.WELL: 2})
    assert router.outcomes == {Outcome.WELL: 1}
    assert found.outcomes == {Outcome.WELL: 3}


def test_a_broken_connection_is_explained_by_the_end_of_its_router_alone() -> None:
    turns = [turn(9, 11, Outcome.CUT), turn(19, 21, Outcome.CUT)]
    found = account(turns, [KILLED_PE, KILLED_ROUTER], DEADLINE_S)
    assert found.outcomes == {Outcome.UNCLEAR: 1, Outcome.CUT: 1}
    assert found.bad_turns == 1


def test_where_clients_ask_front_ends_no_end_of_the_router_explains_a_broken_connection() -> None:
    killed = made(Component.FRONT_END, Fault.KILL, 10, 12)
    turns = [turn(9, 11, Outcome.CUT), turn(19, 21, Outcome.CUT)]
    found = account(turns, [killed, KILLED_ROUTER], DEADLINE_S, Component.FRONT_END)
    assert found.outcomes == {Outcome.CUT: 1, Outcome.UNCLEAR: 1}


def test_what_ends_after_its_deadline_is_late_however_it_ends() -> None:
    found = account([turn(0, 40, Outcome.WELL), turn(0, 32, Outcome.WELL)], [], DEADLINE_S)
    assert found.outcomes == {Outcome.LATE: 1, Outcome.WELL: 1}


def test_an_error_after_one_fault_of_one_engine_is_a_lost_request() -> None:
    turns = [turn(9, 11, Outcome.CLEAR_ERROR), turn(11, 21, Outcome.CLEAR_ERROR)]
    found = account(turns, [KILLED_PE, KILLED_ROUTER], DEADLINE_S)
    assert found.lost_to_one == ("PE, reading, SIGKILL: clear error: why",)


def test_a_router_is_back_with_the_first_token_of_a_request_sent_after_its_end() -> None:
    turns = [turn(19, 21, Outcome.WELL, 20.5), turn(21, 30, Outcome.WELL, 22.5)]
    (back,) = account(turns, [KILLED_ROUTER], DEADLINE_S).router_backs
    assert back == RouterBack(answers_s=3, engines_s=3, asked_s=1, token_s=2.5)


def test_a_router_that_is_killed_before_it_served_counts_for_the_last_kill() -> None:
    again = made(Component.ROUTER, Fault.KILL, 24, 25)
    turns = [turn(23.5, 24, Outcome.CUT), turn(26, 30, Outcome.WELL, 27)]
    found = account(turns, [KILLED_ROUTER, again, KILLED_PE], DEADLINE_S).router_backs
    assert [back.token_s for back in found] == [3]


def test_a_rank_is_struck_as_a_process_and_its_engine_ends_with_it() -> None:
    drawn = islice(strikes(0, RANKS, (Component.PREFILL_RANK, Component.DECODE_RANK)), 50)
    assert {(s.process, s.engine, s.component.whole) for s in drawn} == {
        ("pe-0/1", "pe-0", Component.PREFILL),
        ("de-0/1", "de-0", Component.DECODE),
    }
    assert not any(s.component is Component.PREFILL_RANK for s in islice(strikes(0, CAST), 500))
