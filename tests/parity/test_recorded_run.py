"""Live system and simulator decide alike: logs of real engines, made by ``record_run``.

The story of every log: agents were replayed against real vLLM engines; the router's scheduler was
recorded.  The same events are applied again, to a fresh live scheduler and to the simulator's
compiled one, and every effect must be the recorded one: engines, numbers, runs of hits and three
reasons.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.parity.compiled_driver import CompiledScheduler, before_losses

from dualpath.core.cluster import Role
from dualpath.core.modes import Handover, Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.policy.event_log import Entry, EventLog, assignments, difference, encode_line
from dualpath.policy.events import (
    Assignment,
    Charge,
    Effects,
    EngineLost,
    EngineReport,
    Fetch,
    Finished,
    SlotsGranted,
    Submitted,
)
from dualpath.router.scheduler.event_recorder import read_event_log

FOLDER = Path(__file__).parent / "recorded"
LOGS = {path.name.split(".")[0]: read_event_log(path) for path in sorted(FOLDER.glob("*.xz"))}

every_log = pytest.mark.parametrize("name", LOGS)


@every_log
def test_the_live_scheduler_decides_again_as_it_was_recorded(name):
    assert difference(LOGS[name]) is None


# The first one to run compiles for half a minute of CPU.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(LOGS.keys() - {"dualpath-cached"}))
def test_the_simulators_compiled_scheduler_decides_as_the_live_one_did(name):
    log = before_losses(LOGS[name])
    assert difference(log, CompiledScheduler(log)) is None
    assert len(assignments(log)) >= (20 if name == "dualpath-engine-lost" else 80)


# ---------------------------------------------------------------- what the logs have in them


def reasons(log: EventLog) -> set[str]:
    return {r for a in assignments(log) for r in (a.pe_reason, a.de_reason, a.read_reason)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "dualpath",
            "short-queue long-queue low-token_min-seq high-token_min-tok no-hit shorter-queue tie",
        ),
        (
            "split",
            "short-queue long-queue low-token_min-seq high-token_min-tok "
            "no-hit split shorter-queue",
        ),
        ("round-robin", "round-robin no-hit"),
    ],
)
def test_every_reason_that_a_mode_can_give_occurs(name, expected):
    assert LOGS[name].begin.settings.mode is Mode(name)
    assert reasons(LOGS[name]) >= {reason.replace("_", " ") for reason in expected.split()}


@every_log
def test_the_runs_were_busy(name):
    log = LOGS[name]
    decided = assignments(log)
    assert len(decided) >= 80
    assert len({a.prefill_engine for a in decided}) == len({a.decode_engine for a in decided}) == 3
    assert len({e.event.group for e in log.entries if isinstance(e.event, Fetch)}) == 4
    sides = Counter(run.side for a in decided for run in a.reads)
    assert min(sides[Role.PREFILL], sides[Role.DECODE]) >= 10
    assert waited(log) >= 10


def waited(log: EventLog) -> int:
    """Requests that the first fetches after their submission did not place."""
    tries: Counter[str] = Counter()
    waiting: set[str] = set()
    for entry in log.entries:
        if isinstance(entry.event, Submitted):
            waiting.add(entry.event.request.request_id)
        elif isinstance(entry.event, Fetch):
            waiting -= {a.request_id for a in entry.effects.assignments}
            tries.update(waiting)
    return sum(count >= 8 for count in tries.values())


def test_one_run_cached_what_agents_came_back_for():
    """Their hits came from the DRAM of the DE, of the PE behind it, and in part from storage."""
    decided = assignments(LOGS["dualpath-cached"])
    assert [a.read_reason for a in decided].count("kept") >= 40
    assert "kept" in {a.de_reason for a in decided}
    sources = {tuple((run.side, run.cached) for run in a.reads) for a in decided}
    assert sources >= {
        ((Role.DECODE, True),),
        ((Role.DECODE, True), (Role.PREFILL, False)),
        ((Role.DECODE, True), (Role.DECODE, False)),
        ((Role.DECODE, True), (Role.PREFILL, True), (Role.PREFILL, False)),
        ((Role.PREFILL, False),),
        ((Role.DECODE, False),),
    }
    assert all(a.read_reason == "kept" for a in decided if a.reads and all_cached(a))


def test_in_that_run_decode_engines_had_let_go_of_what_requests_were_to_find():
    entries = LOGS["dualpath-cached"].entries
    grants = [entry for entry in entries if isinstance(entry.event, SlotsGranted)]
    replanned = [assignment for entry in grants for assignment in entry.effects.assignments]
    assert len(grants) > len(replanned) >= 5
    assert {a.read_reason for a in replanned} == {"shorter-queue", "tie"}


@pytest.mark.parametrize("name", sorted(LOGS.keys() - {"dualpath-cached"}))
def test_the_others_read_every_hit_from_storage(name):
    assert not any(run.cached for a in assignments(LOGS[name]) for run in a.reads)


def all_cached(assignment: Assignment) -> bool:
    return all(run.cached for run in assignment.reads)


def test_one_run_lost_an_engine_with_requests_on_it():
    log = LOGS["dualpath-engine-lost"]
    (loss,) = [entry for entry in entries_of(log, EngineLost) if entry.effects.lost_requests]
    after = log.entries[log.entries.index(loss) :]
    again = {e.event.request.request_id for e in after if isinstance(e.event, Submitted)}
    assert again
    fetched = [e for e in after if isinstance(e.event, Fetch)]
    assert isinstance(loss.event, EngineLost)
    lost = loss.event.engine_id
    assert any(a.decode_engine == lost for e in fetched for a in e.effects.assignments)


@every_log
def test_a_log_names_no_place_of_the_run(name):
    log = LOGS[name]
    text = b"".join(encode_line(line) for line in (log.begin, *log.entries)).decode()
    values = set(re.findall(r'"(?:\w*_id|\w+_engine|node|group)":"([^"]*)"', text))
    assert all(re.fullmatch(r"(r|[pd]e-|node-|[pd]e-group-)\d+", value) for value in values)
    assert not re.search(r"/|\\\\|://|\d+\.\d+\.\d+\.\d+", text)


# ---------------------------------------------------------------- the comparison can fail


def changed(log: EventLog, change: Callable[[Entry], Entry | None]) -> EventLog:
    """Return the log with other entries; None leaves one out."""
    entries = (change(entry) for entry in log.entries)
    return EventLog(log.begin, tuple(entry for entry in entries if entry is not None))


def entries_of(log: EventLog, kind: type) -> list[Entry]:
    return [entry for entry in log.entries if isinstance(entry.event, kind)]


OTHER = {
    "request_id": "r999",
    "prefill_engine": "pe-9",
    "decode_engine": "de-9",
    "reads": (HitRun(Role.PREFILL, BlockRun(0, 1)),),
    "pe_reason": "round-robin",
    "de_reason": "round-robin",
    "read_reason": "oracle",
    "prefill_tokens": 1,
    "decode_tokens": 1,
    "prefill_read_tokens": 1,
    "decode_read_tokens": 1,
    "recompute_tokens": 1,
    "unstored_tokens": 1,
    "handover": Handover.HBM,
    "handover_reason": "hbm-full",
    "thirds": (Charge("de-9", 0, 1),),
}


@pytest.mark.parametrize("field", Assignment.__struct_fields__)
def test_a_changed_decision_is_found(field):
    log = before_losses(LOGS["dualpath"])
    decided = [entry for entry in entries_of(log, Fetch) if entry.effects.assignments]
    fetch = decided[len(decided) // 2]
    first, *rest = fetch.effects.assignments
    other = msgspec.structs.replace(first, **{field: OTHER[field]})
    wrong = Entry(fetch.event, Effects((other, *rest)))
    tampered = changed(log, lambda entry: wrong if entry is fetch else entry)
    found = difference(tampered)
    assert found is not None
    line = log.entries.index(fetch) + 2
    assert found.startswith(f"line {line}: recorded Entry(event=Fetch(")


def test_a_changed_load_is_found():
    def overloaded(entry: Entry) -> Entry:
        if isinstance(entry.event, EngineReport) and entry.event.engine_id == "pe-0":
            load = msgspec.structs.replace(entry.event.load, unfinished_tokens=1_000_000)
            return Entry(msgspec.structs.replace(entry.event, load=load))
        return entry

    tampered = changed(before_losses(LOGS["dualpath"]), overloaded)
    assert difference(tampered)


def test_unreported_cached_blocks_are_found():
    def unheard(entry: Entry) -> Entry:
        if isinstance(entry.event, Submitted):
            return Entry(Submitted(msgspec.structs.replace(entry.event.request, cached=())))
        return entry

    tampered = changed(before_losses(LOGS["dualpath-cached"]), unheard)
    assert difference(tampered)


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_request_left_out_is_found(position):
    log = before_losses(LOGS["dualpath"])
    left_out = entries_of(log, Submitted)[position]
    tampered = changed(log, lambda entry: None if entry is left_out else entry)
    assert difference(tampered)


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_request_that_never_ends_is_found(position):
    log = LOGS["dualpath"]
    left_out = entries_of(log, Finished)[position]
    assert difference(changed(log, lambda entry: None if entry is left_out else entry))
