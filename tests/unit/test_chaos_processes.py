"""Fault injection into a process: failpoints, a faulty disk, connection resets."""

import asyncio
import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.guard import GUARD_S

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage import factory
from dualpath.storage.node_dram import NodeDram
from dualpath.storage.posix import PosixStorage
from dualpath_lab.faults.campaign import count_wrong_kv
from dualpath_lab.faults.cluster import Relay, port_sockets
from dualpath_lab.faults.engine_kinds import EmulatedEngines
from dualpath_lab.faults.failpoint_channel import DiskFault, FailpointClient, FailpointServer
from dualpath_lab.faults.failpoints import FAILPOINTS, EngineKind, Failpoint, install_failpoints
from dualpath_lab.faults.injector import block_files, corrupt, part_name
from dualpath_lab.faults.load import AnswerChecker, Outcome
from dualpath_lab.faults.matrix import CORRUPTIONS, Component, Fault, ProcessNames, Step
from dualpath_lab.faults.settings import EmulatedEnginesSettings
from dualpath_lab.faults.tested_process import BlockCounter, FaultyDisk, loaded_blocks

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=512)
KEYS = block_keys(range(16), 4)
DATA = [memoryview(bytes([i]) * GEOMETRY.full_block_bytes) for i in range(4)]


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize("block_tokens", [1, 16, 40])
def test_shared_dram_holds_as_many_blocks_as_the_option_says(
    tmp_path: Path, block_tokens: int
) -> None:
    settings = EmulatedEnginesSettings(shared_blocks=1, block_tokens=block_tokens, layers=1)
    block_bytes = int(block_tokens * settings.kv_bytes_per_token)
    geometry = BlockGeometry.uniform(1, block_tokens, block_bytes)
    dram = NodeDram(tmp_path, StoreNamespace("m", "f", "l", geometry), settings.shared_bytes)
    block = memoryview(bytes(block_bytes))
    dram.add(KEYS[0], block)
    assert dram.read(KEYS[0], memoryview(bytearray(block_bytes)), whole=True) is not None


# ---------------------------------------------------------------------- steps


def test_every_step_of_every_component_has_a_failpoint() -> None:
    alone = ProcessNames("router", ("pe",), ("de",), ("pe/1",), ("de/1",))
    apart = ProcessNames("router", ("pe",), ("de",), front_ends=("front end",))
    for component, points in FAILPOINTS[EngineKind.EMULATED].items():
        process_names = apart if component is Component.FRONT_END else alone
        wanted = {step for step in Step if process_names.passing(component, step)}
        in_a_file = {Step.PERSISTING} if component is Component.DECODE else set()
        assert wanted <= {point.step for point in points} | in_a_file


def test_all_failpoints_name_functions_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for points in FAILPOINTS[EngineKind.EMULATED].values():
        for point in points:
            module, _, path = point.function.partition(":")
            monkeypatch.setattr(f"{module}.{path}", lambda *args: None)  # raises if it is not there


class Steps:
    """Stands for a class of the system with a failpoint."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def handle(self, message: object) -> None:
        self.done.append(message)


def test_a_step_is_reached_before_its_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "handle", Steps.handle)
    steps = Steps()
    seen: list[tuple[Step, int]] = []
    point = Failpoint(Step.READING, f"{__name__}:Steps.handle", "int")
    install_failpoints((point,), lambda step: seen.append((step, len(steps.done))))
    steps.handle(1)
    steps.handle("other")
    steps.handle(2)
    assert seen == [(Step.READING, 0), (Step.READING, 2)]


def test_a_failpoint_without_its_function_is_an_error_at_once() -> None:
    point = Failpoint(Step.READING, f"{__name__}:Steps.gone")
    with pytest.raises(ConfigError, match=r"step 'reading' is .*Steps.gone"):
        install_failpoints((point,), lambda step: None)


async def test_a_process_pauses_at_the_step_until_it_is_resumed(tmp_path: Path) -> None:
    async with FailpointServer(tmp_path / "gates") as watch, asyncio.timeout(GUARD_S):
        gate = await connected(watch, tmp_path / "gates")
        reaching = asyncio.create_task(watch.pause_at("pe-0", Step.READING, 2, GUARD_S))
        await until(lambda: gate.expects(Step.READING))
        gate.reached(Step.DECODING)
        gate.reached(Step.READING)  # the first pass of two
        passing = asyncio.create_task(asyncio.to_thread(gate.reached, Step.READING))
        paused = await reaching
        assert paused is not None
        assert paused.pid == os.getpid()
        assert not passing.done()
        paused.resume()
        await passing


async def test_a_thread_that_hangs_at_a_step_does_not_disarm_the_next_one(tmp_path: Path) -> None:
    async with FailpointServer(tmp_path / "gates") as watch, asyncio.timeout(GUARD_S):
        gate = await connected(watch, tmp_path / "gates")
        paused, passing = [], []
        for step in (Step.READING, Step.DECODING):
            reaching = asyncio.create_task(watch.pause_at("pe-0", step, 1, GUARD_S))
            await until(lambda step=step: gate.expects(step))
            passing.append(asyncio.create_task(asyncio.to_thread(gate.reached, step)))
            paused.append(await reaching)
        first, second = paused
        assert first is not None
        assert second is not None
        second.resume()
        await passing[1]
        assert not passing[0].done()
        first.resume()
        await passing[0]


async def test_a_step_that_is_not_reached_is_disarmed(tmp_path: Path) -> None:
    async with FailpointServer(tmp_path / "gates") as watch, asyncio.timeout(GUARD_S):
        gate = await connected(watch, tmp_path / "gates")
        assert await watch.pause_at("pe-0", Step.READING, 1, 0.0) is None
        await until(lambda: not gate.expects(Step.READING))
        watch.set_disk_fault(DiskFault(Fault.FULL))  # sent after it on the same connection
        await until(lambda: gate.disk.fault is Fault.FULL)
        gate.reached(Step.READING)  # does not wait


async def connected(watch: FailpointServer, path: Path) -> FailpointClient:
    gate = FailpointClient(path, "pe-0")
    watch.set_disk_fault(DiskFault(Fault.SLOW))
    await until(lambda: gate.disk.fault is Fault.SLOW)
    return gate


async def until(true: object) -> None:
    assert callable(true)
    while not true():
        await asyncio.sleep(0)


# ---------------------------------------------------------------------- storage


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[DiskFault]:
    """Faults of this process's disk, of which the last entry is the current one."""
    faults = [DiskFault()]
    monkeypatch.setattr(factory, "PosixStorage", PosixStorage)
    FaultyDisk(
        lambda: faults[-1], lambda step: None, lambda step: False, random.Random(0)
    ).install()
    return faults


@pytest.fixture
def storage(tmp_path: Path, disk: list[DiskFault]) -> PosixStorage:
    return opened(tmp_path)


def opened(folder: Path) -> PosixStorage:
    """Open the storage under a folder as an engine does."""
    storage = factory.open_storage(folder / "kv", StoreNamespace("m", "f", "l", GEOMETRY))
    assert isinstance(storage, PosixStorage)
    return storage


def read(storage: PosixStorage, place: int) -> str | None:
    return storage.read(KEYS[place], memoryview(bytearray(GEOMETRY.full_block_bytes))).reason


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault.FULL, errno.ENOSPC),
        (Fault.READ_ONLY, errno.EROFS),
        (Fault.IO_ERROR, errno.EIO),
    ],
)
def test_a_disk_that_refuses_writes_is_reported_and_works_again_afterwards(
    storage: PosixStorage, disk: list[DiskFault], fault: Fault, code: int
) -> None:
    disk.append(DiskFault(fault))
    with pytest.raises(StorageError, match=os.strerror(code)):
        storage.write(KEYS[:1], DATA[:1])
    disk.append(DiskFault())
    assert not storage.is_stored(KEYS[0])
    assert storage.write(KEYS, DATA).new == 4
    disk.append(DiskFault(fault))
    assert read(storage, 0) == ("read error: Input/output error" if code == errno.EIO else None)


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.READ_ONLY])
def test_an_engine_starts_on_a_disk_that_refuses_writes_and_reads_stored_blocks(
    storage: PosixStorage, disk: list[DiskFault], fault: Fault
) -> None:
    storage.write(KEYS, DATA)
    disk.append(DiskFault(fault))
    assert read(opened(storage.path.parent.parent), 0) is None


def test_a_process_may_die_when_half_of_a_block_is_written(
    tmp_path: Path, disk: list[DiskFault]
) -> None:
    sizes: list[int] = []

    def look(step: Step) -> None:
        (half,) = (disk_storage.path / "tmp").iterdir()
        sizes.append(half.stat().st_size)

    expected: list[Step] = []
    FaultyDisk(DiskFault, look, expected.__contains__, random.Random(0)).install()
    disk_storage = opened(tmp_path)
    expected.append(Step.PERSISTING)
    assert disk_storage.write(KEYS[:1], DATA[:1]).new == 1
    assert min(sizes) < 4096 < max(sizes) < 4096 + GEOMETRY.full_block_bytes
    assert read(disk_storage, 0) is None


@pytest.mark.parametrize("fault", sorted(CORRUPTIONS))
def test_damage_is_found_when_a_block_is_read(
    storage: PosixStorage, fault: Fault, tmp_path: Path
) -> None:
    storage.write(KEYS, DATA)
    files = block_files(tmp_path / "kv", KEYS)
    assert len(files) == 4
    # The seed avoids the padding after a header: its bits are not verified.
    assert corrupt(files[:2], fault, random.Random(3)) == 2
    found = [read(storage, place) for place in range(4)]
    assert None not in found[:2]
    assert found[2:] == [None, None]


def test_counts_of_loaded_blocks_survive_the_process(tmp_path: Path) -> None:
    one, other = BlockCounter(tmp_path / "pe-0-1"), BlockCounter(tmp_path / "pe-0-2")
    for good in (True, True, False):
        one.add(good=good)
    other.add(good=True)
    assert loaded_blocks(tmp_path) == (3, 1)


# ---------------------------------------------------------------------- logs

WRONG = "KV of 2 prompt blocks (0, 1) is wrong in pe_hbm; this is a bug in the data path, save"


def test_wrong_kv_of_an_attempt_that_had_failed_before_is_counted_apart(tmp_path: Path) -> None:
    engine, router = tmp_path / "pe-0.log", tmp_path / "router-0.log"
    engine.write_text(
        f"ERROR request cmpl-a1: {WRONG}\nERROR request cmpl-b2.2: {WRONG}\n"
        f"ERROR request cmpl-c3: {WRONG}\n"
    )
    router.write_text(
        f"request cmpl-a1: attempt 1 failed after 0 tokens, trying again: pe-0 is lost\n"
        f"request cmpl-b2: attempt 1 failed after 0 tokens, trying again: pe-0 is lost\n"
        f"request cmpl-c3: attempt 1 failed after 0 tokens, trying again: request cmpl-c3: {WRONG}"
    )
    assert count_wrong_kv([engine], [router]) == (2, 1)


# ---------------------------------------------------------------------- connections and answers


async def test_a_reset_is_seen_at_both_ends_and_new_connections_work() -> None:
    reset: asyncio.Future[type[BaseException] | None] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while received := await reader.readline():
                writer.write(received)
        except ConnectionResetError as error:
            reset.set_result(type(error))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Relay(server.sockets[0].getsockname()[1]) as relay, asyncio.timeout(GUARD_S):
        host, _, port = relay.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"before\n")
        assert await reader.readline() == b"before\n"
        assert relay.reset() == 1
        with pytest.raises(ConnectionResetError):
            await reader.readline()
        assert await reset is ConnectionResetError
        reader, again = await asyncio.open_connection(host, int(port))
        again.write(b"after\n")
        assert await reader.readline() == b"after\n"
        for open_one in (writer, again):
            open_one.close()


async def test_dropped_packets_arrive_only_when_the_drop_is_over() -> None:
    """What the client sends meanwhile is still missing when a later message elsewhere is here."""
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            received.put_nowait(line)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Relay(port) as dropped, Relay(port) as other, asyncio.timeout(GUARD_S):
        writers = []
        for relay in (dropped, other):
            host, _, number = relay.address.partition(":")
            writers.append((await asyncio.open_connection(host, int(number)))[1])
            writers[-1].write(b"before\n")
            assert await received.get() == b"before\n"
        async with dropped.drop_packets():
            for writer, line in zip(writers, (b"lost\n", b"passed\n"), strict=True):
                writer.write(line)
            assert await received.get() == b"passed\n"
            assert received.empty()
        assert await received.get() == b"lost\n"
        for writer in writers:
            writer.close()


def test_sockets_of_a_port_are_found_in_another_process() -> None:
    script = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert len(list(port_sockets(process.pid, port))) == 1
        assert list(port_sockets(process.pid, port + 1)) == []
        process.communicate()


def test_processes_of_a_vllm_engine_are_named_by_their_titles() -> None:
    with subprocess.Popen(
        ["VLLM::EngineCore"],
        executable="/bin/cat",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as core:
        assert core.stdin is not None
        assert core.stdout is not None
        core.stdin.write(b"runs\n")
        assert core.stdout.readline() == b"runs\n"  # from here on it has its title
        assert part_name(core.pid, core.pid, EngineKind.VLLM) == "HTTP server"
        assert part_name(core.pid, 1, EngineKind.VLLM) == "engine core"
        assert part_name(os.getpid(), 1, EngineKind.VLLM) == "rank"
        assert part_name(core.pid, core.pid, EngineKind.EMULATED) == "first rank"
        core.stdin.close()


def events(*payloads: str) -> bytes:
    return b"".join(f"data: {payload}\n\n".encode() for payload in payloads)


PROMPT = [1, 2, 3]
KNOWN = EmulatedEngines(EmulatedEnginesSettings())
TOKENS = [token for token, _ in zip(KNOWN.expected_tokens(PROMPT), range(3), strict=False)]
FIRST = f'{{"choices": [{{"token_ids": {TOKENS[:2]}}}]}}'
LAST = f'{{"choices": [{{"token_ids": {TOKENS[2:]}}}]}}'
USAGE = '{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}'


@pytest.mark.parametrize(
    ("stream", "outcome", "tokens"),
    [
        (events(FIRST, LAST, USAGE, "[DONE]"), Outcome.WELL, 3),
        (events(FIRST, "[DONE]"), Outcome.WRONG, 2),
        (events(FIRST, FIRST, "[DONE]"), Outcome.WRONG, 2),
        (events(FIRST, LAST, LAST, "[DONE]"), Outcome.WRONG, 3),
        (events(FIRST, '{"error": {"message": "lost"}}', "[DONE]"), Outcome.CLEAR_ERROR, 2),
        (events(FIRST), Outcome.CUT, 2),
    ],
)
def test_an_answer_is_well_only_if_all_its_tokens_are_right(
    stream: bytes, outcome: Outcome, tokens: int
) -> None:
    checker = AnswerChecker(3, KNOWN.expected_tokens(PROMPT), lambda: 7.0)
    checker.feed(stream)
    answer = checker.answer()
    assert (answer.outcome, len(answer.token_ids)) == (outcome, tokens)
    assert answer.first_token_s == 7.0
    assert answer.cached_tokens == (2 if outcome is Outcome.WELL else 0)
