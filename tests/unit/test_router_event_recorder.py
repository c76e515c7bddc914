"""The event log of a router: complete, harmless to serving, and refused where it is broken."""

import argparse
import asyncio
import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest
from tests.guard import GUARD_S
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import FakeCalls, expected, job, keys_of

from dualpath.cli import router as router_command
from dualpath.cli import serve
from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, ConfigError, EngineLostError, TraceError
from dualpath.core.modes import Mode
from dualpath.core.request import Request
from dualpath.launch import commands
from dualpath.policy import event_log
from dualpath.policy.event_log import Begin, Entry, assignments, difference, encode_line, replay
from dualpath.policy.events import (
    Effects,
    EngineJoined,
    EngineLost,
    EngineReport,
    EngineSpec,
    Event,
    Fetch,
    Finished,
    PrefillEnded,
    ReadsDone,
    SchedulerSettings,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler
from dualpath.router.scheduler.event_recorder import EventLogWriter, read_event_log
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings

SETTINGS = SchedulerSettings(mode=Mode.DUALPATH, alpha_tokens=1000, beta_tokens=5000)
BEGIN = Begin(version="0.1.0", settings=SETTINGS, format=event_log.FORMAT)
PE = EngineSpec("p0", Role.PREFILL, "n0", "prefill", 0, 100_000)
DE = EngineSpec("d0", Role.DECODE, "n1", "decode", 1, 100_000)


def recording(path: Path) -> RouterSettings:
    return RouterSettings(event_log=str(path))


@pytest.mark.virtual_time
async def test_a_router_records_every_decision_and_they_come_out_the_same_again(tmp_path):
    path = tmp_path / "events.jsonl"
    async with cluster(2, 2, settings=recording(path)) as made:
        prompts = [range(start, start + 17) for start in (0, 0, 100, 200, 300)]
        jobs = [job(f"r{number}", prompt) for number, prompt in enumerate(prompts)]
        first = await made.run(jobs[0])
        rest = await asyncio.gather(*(made.run(j) for j in jobs[1:]))
        assert [first, *rest] == [expected(prompt, 6) for prompt in prompts]
        noted = made.service.status()["assignments"]
    log = read_event_log(path)
    assert log.begin.settings.mode is Mode.DUALPATH
    kinds = {type(entry.event) for entry in log.entries}
    assert kinds >= {EngineJoined, Submitted, Fetch, ReadsDone, PrefillEnded, Finished}
    decided = [(a.request_id, a.prefill_engine, a.decode_engine) for a in assignments(log)]
    names = ("request_id", "prefill_engine", "decode_engine")
    assert decided == [tuple(note[name] for name in names) for note in noted]
    assert {request for request, _, _ in decided} == {"r0", "r1", "r2", "r3", "r4"}
    assert difference(log) is None


@pytest.mark.virtual_time
async def test_a_report_counts_a_request_once_its_engine_has_received_the_assign(tmp_path):
    """A PE that reads is sent a request after its DE has granted slots; the ledger adds it."""
    path = tmp_path / "events.jsonl"
    async with cluster(settings=recording(path)) as made:
        made.stored.update(keys_of(range(16)))
        prefill, decode = made.engines["p0"], made.engines["d0"]
        decode.unanswered.add(control.Assign)
        running = asyncio.create_task(made.run(job("r0", range(17))))
        asked = await decode.saw(control.Assign)
        prefill.report()
        await made.delivered(prefill)
        decode.unanswered.clear()
        decode.answer(asked)
        assert await running == expected(range(17), 6)
        await made.settled()
    reports = [e.event for e in read_event_log(path).entries if isinstance(e.event, EngineReport)]
    of_prefill = [r for r in reports if r.engine_id == "p0"]
    counted = {(r.uncounted, r.load.unfinished_requests) for r in of_prefill}
    assert counted == {(("r0",), 0), ((), 1), ((), 0)}


@pytest.mark.virtual_time
async def test_a_lost_engine_and_what_it_had_are_in_the_log(tmp_path):
    path = tmp_path / "events.jsonl"
    async with cluster(2, 1, settings=recording(path)) as made:
        hold = made.calls.gates["prefill"] = asyncio.Event()
        running = asyncio.create_task(made.run(job("r0", range(9))))
        await made.arrives("prefill")
        made.lose("p0", certain=True)
        hold.set()
        assert await running == expected(range(9), 6)
    log = read_event_log(path)
    lost = [entry for entry in log.entries if isinstance(entry.event, EngineLost)]
    assert lost == [Entry(EngineLost("p0"), Effects(lost_requests=("r0",)))]
    events = [entry.event for entry in log.entries]
    assert [e.request.request_id for e in events if isinstance(e, Submitted)] == ["r0", "r0.2"]
    assert difference(log) is None


@pytest.mark.virtual_time
async def test_without_the_setting_nothing_is_recorded():
    async with cluster() as made:
        await made.run(job("r0", range(9)))
        assert made.service.scheduler.event_log is None


class Recorded:
    """A scheduler with one PE and one DE that records its events."""

    def __init__(self, path: Path) -> None:
        self.writer = EventLogWriter(path)
        self.scheduler = RequestScheduler(SETTINGS)
        self.writer.begin(SETTINGS)
        self.apply(EngineJoined(PE))
        self.apply(EngineJoined(DE))

    def apply(self, event: Event) -> Effects:
        return self.writer.apply(self.scheduler, event)


def test_errors_reach_the_caller_and_the_log(tmp_path):
    recorded = Recorded(tmp_path / "log")
    with pytest.raises(BadRequestError):
        recorded.apply(Submitted(Request("r0", prompt_tokens=0, hit_tokens=0, max_new_tokens=1)))
    with pytest.raises(EngineLostError):
        recorded.apply(EngineLost("p7"))
    with pytest.raises(ConfigError):
        recorded.apply(EngineJoined(PE))
    recorded.writer.close()
    log = read_event_log(tmp_path / "log")
    assert [entry.refused for entry in log.entries] == [
        "",
        "",
        "BadRequestError",
        "EngineLostError",
        "ConfigError",
    ]
    assert difference(log) is None


@pytest.mark.virtual_time
async def test_fetches_while_no_request_waits_are_left_out(tmp_path):
    path = tmp_path / "log"
    async with cluster(settings=recording(path)) as made:
        await made.run(job("r0", range(9)))
    waiting = 0
    for entry in read_event_log(path).entries:
        waiting += isinstance(entry.event, Submitted)
        if isinstance(entry.event, Fetch):
            assert waiting
            waiting -= len(entry.effects.assignments)


def test_an_effect_of_another_scheduler_shows_and_ends_the_replay(tmp_path):
    recorded = Recorded(tmp_path / "log")
    recorded.apply(Submitted(Request("r0", prompt_tokens=10, hit_tokens=4, max_new_tokens=1)))
    recorded.apply(Fetch("prefill"))
    recorded.apply(Fetch("decode"))
    recorded.apply(Finished("r0"))
    recorded.writer.close()
    log = read_event_log(tmp_path / "log")
    basic = msgspec.structs.replace(SETTINGS, mode=Mode.BASIC)
    found = difference(log, RequestScheduler(basic))
    assert found is not None
    assert found.startswith("line 6: recorded Entry(event=Fetch(group='decode'")
    assert "read_reason='tie'" in found
    assert "read_reason='pe-only'" in found
    assert len(replay(log, RequestScheduler(basic))) == len(log.entries) - 1


async def test_a_file_that_cannot_be_written_ends_the_start(tmp_path):
    path = tmp_path / "missing" / "log"
    service = RouterService(recording(path), FakeCalls())
    with pytest.raises(ConfigError, match=r"missing/log.*choose another file"):
        await service.start()
    await service.stop()
    assert service.scheduler.server.address == ""


def test_a_full_disk_ends_recording_but_not_the_scheduler(caplog):
    recorded = Recorded(Path("/dev/full"))
    recorded.apply(Submitted(Request("r0", prompt_tokens=10, hit_tokens=0, max_new_tokens=1)))
    recorded.apply(Fetch("prefill"))
    assert recorded.apply(Fetch("decode")).assignments
    recorded.writer.close()
    assert "requests go on unrecorded" in caplog.text


def test_a_stalled_disk_ends_recording_and_blocks_no_request(tmp_path, caplog):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = EventLogWriter(path, waiting_events=8)
    with caplog.at_level(logging.ERROR):
        for _ in range(100_000):  # Far more than a pipe, the file's buffer and the queue hold.
            writer.write(Entry(Finished("r0")))
    assert "8 events wait for the disk" in caplog.text
    os.set_blocking(reader, True)
    got: list[bytes] = []
    drain = threading.Thread(target=lambda: got.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
    drain.start()
    writer.close()
    drain.join(GUARD_S)
    os.close(reader)
    assert set(b"".join(got).splitlines()) == {
        b'{"line":"event","event":{"event":"finished","request_id":"r0"}}'
    }


def log_of(*lines: bytes) -> list[bytes]:
    return [encode_line(BEGIN), *lines]


DONE = b'{"line":"event","event":{"event":"read_done","request_id":"r0"}}'
REPORT = (
    b'{"line":"event","event":{"event":"report","engine_id":"p0",'
    b'"load":{"unfinished_requests":0,"unfinished_tokens":%d,'
    b'"read_queue_tokens":0,"free_hbm_tokens":1,"free_buffer_tokens":0}}}'
)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], r"0 lines .* give the whole file"),
        ([DONE], r"does not begin .* give the whole file"),
        (log_of(DONE[:50]), r"line 2: .*cut off"),
        (log_of(DONE.replace(b',"request_id":"r0"', b"")), r"line 2: .*missing .* `request_id`"),
        (log_of(DONE.replace(b"read_done", b"nap")), r"line 2: Invalid value 'nap'"),
        (log_of(DONE.replace(b'"r0"', b'"r0","x":1')), r"line 2: .*unknown field `x`"),
        (log_of(b"\xff"), r"line 2: .*record the run again"),
        (log_of(REPORT % (1 << 61)), rf"line 2: {1 << 61} exceeds {1 << 60}; correct"),
        (log_of(REPORT % -(1 << 61)), rf"line 2: -{1 << 61} exceeds {1 << 60}; correct"),
        (log_of(encode_line(BEGIN)), r"line 2: a second 'begin', a log has 1; split"),
        (
            [encode_line(BEGIN).replace(b'"format":4', b'"format":9')],
            r"line 1: format 9 .* reads 4",
        ),
        ([b'{"event":"begin","format":2}'], r"line 1: format 2 or older, this version reads 4"),
        ([encode_line(BEGIN).replace(b"64", b"0")], r"block_tokens 0 must be at least 1"),
        ([encode_line(BEGIN).replace(b"dualpath", b"fast")], r"line 1: Invalid enum value 'fast'"),
    ],
)
def test_a_broken_log_is_refused_with_the_line_and_what_to_do(lines, words):
    with pytest.raises(TraceError, match=words):
        event_log.decode(lines)


def test_lines_come_back_as_they_were_written():
    entries = (
        Entry(EngineJoined(PE)),
        Entry(EngineLost("p0"), Effects(lost_requests=("r0",))),
        Entry(Submitted(Request("r1", 9, 4, 2)), refused="BadRequestError"),
    )
    lines = [encode_line(line) for line in (BEGIN, *entries)]
    assert event_log.decode(lines).entries == entries
    assert isinstance(event_log.decode(log_of(REPORT % 7)).entries[0].event, EngineReport)


def test_a_file_that_is_no_log_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_event_log(tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl.xz"
    broken.write_bytes(b"not xz")
    with pytest.raises(TraceError, match="cannot be read"):
        read_event_log(broken)


def test_the_commands_hand_the_file_on():
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    serve.add_parser(subparsers)
    router_command.add_parser(subparsers)
    args = parser.parse_args(["serve", "MODEL", "--storage", "kv", "--event-log", "log.jsonl"])
    command = commands.router_command(serve.cluster_settings(args), 8000, 5700)
    settings, _ = router_command.settings_of(parser.parse_args(command))
    assert settings.event_log == "log.jsonl"
