"""Which faults are drawn, and how a campaign summarizes the requests that overlapped them."""

from itertools import islice

import msgspec

from dualpath_lab.faults.injector import InjectedFault
from dualpath_lab.faults.load import Answer, Outcome, Turn
from dualpath_lab.faults.matrix import (
    FAULTS_OF,
    Component,
    Fault,
    PlannedFault,
    ProcessNames,
    Step,
    cells_of,
    planned_faults,
)
from dualpath_lab.faults.summary import RouterRecovery, summarize

CAST = ProcessNames("router", ("pe-0", "pe-1"), ("de-0",))
RANKS = ProcessNames("router", ("pe-0",), ("de-0",), ("pe-0/1",), ("de-0/1",))
DEADLINE_S = 30.0


def made(component: Component, fault: Fault, begin_s: float, end_s: float) -> InjectedFault:
    planned = PlannedFault(
        number=0,
        component=component,
        process="any",
        step=Step.READING,
        fault=fault,
        passes=1,
        lasts_s=0.0,
    )
    return InjectedFault(planned, begin_s, end_s)


def turn(begin_s: float, end_s: float, outcome: Outcome, token_s: float | None = None) -> Turn:
    return Turn(0, begin_s, end_s, 10, Answer(outcome, "why", first_token_s=token_s))


KILLED_PE = made(Component.PREFILL, Fault.KILL, 10, 12)
KILLED_ROUTER = made(Component.ROUTER, Fault.KILL, 20, 23)


def test_every_cell_is_drawn_once_before_any_is_repeated() -> None:
    cells = cells_of(tuple(Component))
    drawn = list(islice(planned_faults(5, CAST), 2 * cells))
    names = [(s.component, s.step, s.fault) for s in drawn]
    assert len(set(names[:cells])) == cells == len(set(names[cells:]))
    assert {f for f in Fault} == {s.fault for s in drawn}


def test_a_seed_draws_the_same_faults_and_another_seed_others() -> None:
    once, again, other = (list(islice(planned_faults(seed, CAST), 50)) for seed in (1, 1, 2))
    assert once == again != other


def test_a_fault_is_injected_into_a_process_that_passes_its_step() -> None:
    for planned in islice(planned_faults(0, CAST), 500):
        assert planned.fault in FAULTS_OF[planned.component]
        assert planned.process in CAST.passing(planned.component, planned.step)
    assert CAST.passing(Component.STORAGE, Step.PREFILLING) == ("pe-0", "pe-1")
    assert CAST.passing(Component.PREFILL, Step.DECODING) == ()


def test_front_ends_pass_the_steps_of_clients_instead_of_the_router() -> None:
    process_names = ProcessNames(
        "router", ("pe-0",), ("de-0",), front_ends=("front-end-0", "front-end-1")
    )
    drawn = list(
        islice(planned_faults(0, process_names, (Component.ROUTER, Component.FRONT_END)), 200)
    )
    passed = {c: {s.step for s in drawn if s.component is c} for c in Component}
    assert passed[Component.ROUTER] & passed[Component.FRONT_END] == set()
    assert passed[Component.ROUTER] | passed[Component.FRONT_END] == set(Step)
    alone = islice(planned_faults(0, CAST), 500)
    assert not [s for s in alone if s.component is Component.FRONT_END]


def test_components_and_faults_may_be_left_out() -> None:
    drawn = islice(planned_faults(0, CAST, (Component.STORAGE,), (Fault.SLOW,)), 300)
    assert {s.fault for s in drawn} == {*FAULTS_OF[Component.STORAGE]} - {Fault.SLOW}


def test_a_request_counts_in_the_cells_of_the_faults_it_overlapped() -> None:
    turns = [turn(9, 11, Outcome.WELL), turn(11, 21, Outcome.WELL), turn(30, 31, Outcome.WELL)]
    found = summarize(turns, [KILLED_PE, KILLED_ROUTER], DEADLINE_S)
    cells = {(cell.component, cell.step, cell.fault): cell for cell in found.matrix}
    pe = cells[Component.PREFILL, Step.READING, Fault.KILL]
    router = cells[Component.ROUTER, Step.READING, Fault.KILL]
    assert (pe.made, pe.outcomes) == (1, {Outcome.WELL: 2})
    assert router.outcomes == {Outcome.WELL: 1}
    assert found.outcomes == {Outcome.WELL: 3}


def test_a_lost_connection_is_explained_only_by_the_end_of_its_router() -> None:
    turns = [turn(9, 11, Outcome.CUT), turn(19, 21, Outcome.CUT)]
    found = summarize(turns, [KILLED_PE, KILLED_ROUTER], DEADLINE_S)
    assert found.outcomes == {Outcome.UNCLEAR: 1, Outcome.CUT: 1}
    assert found.bad_turns == 1


def test_with_front_ends_the_end_of_the_router_does_not_explain_a_lost_connection() -> None:
    killed = made(Component.FRONT_END, Fault.KILL, 10, 12)
    turns = [turn(9, 11, Outcome.CUT), turn(19, 21, Outcome.CUT)]
    found = summarize(turns, [killed, KILLED_ROUTER], DEADLINE_S, Component.FRONT_END)
    assert found.outcomes == {Outcome.CUT: 1, Outcome.UNCLEAR: 1}


def test_a_request_that_ends_after_its_deadline_is_late_whatever_its_outcome() -> None:
    found = summarize([turn(0, 40, Outcome.WELL), turn(0, 32, Outcome.WELL)], [], DEADLINE_S)
    assert found.outcomes == {Outcome.LATE: 1, Outcome.WELL: 1}


def test_an_error_after_one_fault_of_one_engine_is_a_lost_request() -> None:
    turns = [turn(9, 11, Outcome.CLEAR_ERROR), turn(11, 21, Outcome.CLEAR_ERROR)]
    found = summarize(turns, [KILLED_PE, KILLED_ROUTER], DEADLINE_S)
    assert found.lost_to_single_fault == ("PE, reading, SIGKILL: clear error: why",)


def test_an_error_after_silence_of_one_port_of_one_engine_is_a_lost_request() -> None:
    silent = made(Component.CONNECTION, Fault.DROP_HTTP, 10, 12)
    cut = made(Component.CONNECTION, Fault.RESET_CLIENTS, 30, 30)
    turns = [turn(9, 11, Outcome.CLEAR_ERROR), turn(29, 31, Outcome.CUT)]
    found = summarize(turns, [silent, cut], DEADLINE_S)
    assert found.lost_to_single_fault == ("connection, reading, dropped HTTP: clear error: why",)


def test_a_cell_counts_which_part_of_an_engine_was_hit() -> None:
    hit = msgspec.structs.replace(made(Component.DECODE, Fault.KILL_ONE, 1, 2), part="rank")
    (cell,) = summarize([], [hit, hit, KILLED_PE], DEADLINE_S).matrix[:1]
    assert (cell.made, cell.parts) == (2, {"rank": 2})


def test_recovery_of_a_router_ends_with_the_first_token_of_a_request_sent_after_the_kill() -> None:
    turns = [turn(19, 21, Outcome.WELL, 20.5), turn(21, 30, Outcome.WELL, 22.5)]
    (back,) = summarize(turns, [KILLED_ROUTER], DEADLINE_S).router_back
    assert back == RouterRecovery(answers_s=3, engines_s=3, asked_s=1, token_s=2.5)


def test_when_the_next_router_is_killed_before_it_served_only_the_last_kill_counts() -> None:
    again = made(Component.ROUTER, Fault.KILL, 24, 25)
    turns = [turn(23.5, 24, Outcome.CUT), turn(26, 30, Outcome.WELL, 27)]
    found = summarize(turns, [KILLED_ROUTER, again, KILLED_PE], DEADLINE_S).router_back
    assert [back.token_s for back in found] == [3]


def test_a_rank_is_hit_as_a_process_and_its_engine_ends_with_it() -> None:
    drawn = islice(planned_faults(0, RANKS, (Component.PREFILL_RANK, Component.DECODE_RANK)), 50)
    assert {(s.process, s.engine, s.component.failure_domain) for s in drawn} == {
        ("pe-0/1", "pe-0", Component.PREFILL),
        ("de-0/1", "de-0", Component.DECODE),
    }
    assert not any(
        s.component is Component.PREFILL_RANK for s in islice(planned_faults(0, CAST), 500)
    )
