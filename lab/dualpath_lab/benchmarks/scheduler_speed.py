"""Assignments per CPU-second of ``RequestScheduler`` alone, on one core.

The cost of an assignment includes submit, its share of fetches and reports, read_done, prefill_done
and finished.  Each round submits one request per engine, fetches for every group, ends the oldest
requests and reports for every engine.
"""

import time
from collections import deque
from typing import Annotated

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.core.settings import Setting, Settings
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineReport,
    EngineSpec,
    Fetch,
    Finished,
    PrefillEnded,
    ReadsDone,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler
from dualpath_sim.harness.experiment import Experiment, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

ENGINES_PER_NODE = 8
PROMPT_TOKENS = 32_768
HIT_TOKENS = 32_320
HBM_TOKENS = 600_000


class SchedulerSpeedSettings(Settings, frozen=True, kw_only=True):
    """Sizes of the cluster."""

    engines: Annotated[tuple[int, ...], Setting("engines", ge=1)] = (16, 384, 1152)
    assignments: Annotated[int, Setting("assignments that are timed", ge=1)] = 40_000
    repeat: Annotated[int, Setting("rounds", ge=1)] = 1


def cluster(engines: int, mode: Mode) -> tuple[RequestScheduler, list[EngineSpec]]:
    """Return a scheduler with a third of the engines in PE groups, one group per node."""
    scheduler = RequestScheduler(
        SchedulerSettings(mode=mode, alpha_tokens=1_000_000, beta_tokens=120_000)
    )
    specs = []
    for order in range(engines):
        node = order // ENGINES_PER_NODE
        role = Role.PREFILL if node % 3 == 0 else Role.DECODE
        spec = EngineSpec(f"e{order}", role, f"n{node}", f"g{node}", order, HBM_TOKENS)
        scheduler.apply(EngineJoined(spec))
        specs.append(spec)
    return scheduler, specs


def measure(engines: int, mode: Mode, assignments: int) -> Numbers:
    """Return assignments per CPU-second and CPU-seconds for joining all engines."""
    started = time.process_time()
    scheduler, specs = cluster(engines, mode)
    joined_s = time.process_time() - started
    groups = sorted({spec.group for spec in specs}, key=lambda name: int(name[1:]))
    tokens = dict.fromkeys((spec.engine_id for spec in specs), 0)
    live: deque[Assignment] = deque()
    done = submitted = 0
    started = time.process_time()
    while done < assignments:
        for _ in range(engines):
            scheduler.apply(Submitted(Request(f"r{submitted}", PROMPT_TOKENS, HIT_TOKENS, 256)))
            submitted += 1
        for group in groups:
            for assignment in scheduler.apply(Fetch(group)).assignments:
                for charge in map(assignment.at, assignment.sides):
                    tokens[charge.engine_id] += charge.tokens
                live.append(assignment)
        while len(live) > engines // 3:
            done += 1
            _end(scheduler, live.popleft(), tokens)
        for spec in specs:
            scheduler.apply(_report(spec, tokens))
    rate = done / (time.process_time() - started)
    return {"assignments_per_cpu_s": rate, "join_cpu_s": joined_s}


def _end(scheduler: RequestScheduler, assignment: Assignment, tokens: dict[str, int]) -> None:
    scheduler.apply(ReadsDone(assignment.request_id))
    scheduler.apply(PrefillEnded(assignment.request_id))
    scheduler.apply(Finished(assignment.request_id))
    for charge in map(assignment.at, assignment.sides):
        tokens[charge.engine_id] -= charge.tokens


def _report(spec: EngineSpec, tokens: dict[str, int]) -> EngineReport:
    load = tokens[spec.engine_id]
    return EngineReport(
        spec.engine_id,
        Load(
            unfinished_requests=load // PROMPT_TOKENS,
            unfinished_tokens=load,
            read_queue_tokens=0,
            free_hbm_tokens=spec.hbm_tokens - load,
            free_buffer_tokens=0,
        ),
    )


SCHEDULER_SPEED = Experiment(
    name="scheduler-speed",
    title="Assignments per CPU-second of the request scheduler",
    settings=SchedulerSpeedSettings(),
    result=Numbers,
    stages=lambda settings, progress: one_stage(
        {
            f"{engines:,} engines, {mode.value}": (engines, mode)
            for engines in settings.engines
            for mode in (Mode.DUALPATH, Mode.SPLIT, Mode.ROUND_ROBIN)
        },
        lambda case, number: measure(*case, settings.assignments),
    ),
    draw=numbers_page(
        "One core",
        [
            Column("assignments/CPU-s", "assignments_per_cpu_s", "{:,.0f}", tolerance=0.15),
            Column("join CPU-s", "join_cpu_s", "{:.3f}"),
        ],
    ),
)
