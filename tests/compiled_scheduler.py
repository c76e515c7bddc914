"""The simulator's compiled scheduler as Python calls it: on state that is held.

That is how the loop of ``simulator.compiled.core`` calls it.  On a tuple of arrays that is passed
each function would be compiled once more, which takes longer than all that is tested with it.
numba's cache on disk stores what was compiled, as it does for the simulator itself: a later run
compiles only what has changed.
"""

from dualpath.policy.accounts import IntArray
from dualpath_sim.simulator.compiled import scheduler
from dualpath_sim.simulator.compiled.jit import cached, hold
from dualpath_sim.simulator.compiled.tables import SchedulerState


@cached
def submit(state: SchedulerState, request: int, prompt: int, hit: int, max_new: int) -> None:
    scheduler.submit(hold(state), request, prompt, hit, max_new)


@cached
def fetch_prefill(state: SchedulerState, group: int) -> int:
    return scheduler.fetch_prefill(hold(state), group)


@cached
def fetch_decode(state: SchedulerState, group: int) -> int:
    return scheduler.fetch_decode(hold(state), group)


@cached
def read_done(state: SchedulerState, request: int) -> None:
    scheduler.read_done(hold(state), request)


@cached
def prefill_done(state: SchedulerState, request: int) -> None:
    scheduler.prefill_done(hold(state), request)


@cached
def finished(state: SchedulerState, request: int) -> None:
    scheduler.finished(hold(state), request)


@cached
def report(
    state: SchedulerState,
    engine: int,
    left_out: IntArray,
    requests: int,
    tokens: int,
    read_tokens: int,
    free_hbm_tokens: int,
    unallocated_hbm_tokens: int,
) -> None:
    scheduler.report(
        hold(state),
        engine,
        left_out,
        requests,
        tokens,
        read_tokens,
        free_hbm_tokens,
        unallocated_hbm_tokens,
    )
