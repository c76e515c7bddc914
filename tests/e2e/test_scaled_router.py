"""One router as several processes at one port: what each process's end loses, and shutdown."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.e2e.test_emulated_cluster import ENGINE, Processes
from tests.e2e.test_rolling_restart import until
from tests.guard import GUARD_S
from tests.tls_authority import tls_files

from dualpath.cli.main import main
from dualpath.launch.process import LocalProcess, SpawnedProcess
from dualpath.router.token_api.wire import EventLines

PROMPT = list(range(1, 41))
#: A step takes 2 ms of the model, and 20 ms at this speed-up.
SPEEDUP, LONG, LONGER = "0.1", 250, 800
RUNNING, FINISHED = "requests_running", 'requests_total{outcome="finished"}'


class Client:
    """One connection to one front end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))
        #: Name and process of the front end at its other end.
        self.front = ("", 0)
        self.tokens: list[int] = []
        self.under_way = asyncio.Event()

    async def front_end(self) -> tuple[str, int]:
        """Return name and process of the front end that serves it."""
        async with self._http.get(f"{self._url}/dualpath/v1/status") as answer:
            output = await answer.json()
            return output["front_end"], output["pid"]

    async def healthy(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with self._http.get(f"{self._url}/health") as answer:
                return answer.status == 200
        return False

    async def unfinished(self, engine_id: str) -> int:
        """Return how many requests an engine has, as the scheduler knows."""
        with contextlib.suppress(aiohttp.ClientError):
            async with self._http.get(f"{self._url}/dualpath/v1/status") as answer:
                engines = (await answer.json())["engines"]
                return next(
                    int(e["seq"]) for e in engines if e["engine_id"] == engine_id and e["alive"]
                )
        return 0

    async def metric(self, name: str) -> int:
        """Return a metric (a regular expression); any front end reports the sum over all."""
        async with self._http.get(f"{self._url}/metrics") as answer:
            found = re.findall(rf"^dualpath:{name} ([\d.]+)$", await answer.text(), re.M)
            return round(sum(map(float, found)))

    async def counts(self, name: str, number: int) -> None:
        """Wait until a metric has this value: a request is counted after its last token."""

        async def counted() -> bool:
            return await self.metric(name) == number

        await until(counted)

    async def stream(self, tokens: int = LONG) -> str:
        """Stream an answer into ``tokens``; return how it ended."""
        lines, body = EventLines(), {"prompt": PROMPT, "max_tokens": tokens, "stream": True}
        try:
            async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
                async for received in answer.content.iter_any():
                    for payload in lines.feed(received):
                        event = msgspec.json.decode(payload)
                        if "error" in event:
                            return str(event["error"]["message"])
                        for choice in event["choices"]:
                            self.tokens += choice["token_ids"]
                        if len(self.tokens) > 1:  # the DE's
                            self.under_way.set()
        except aiohttp.ClientError:
            return "cut off"
        return "whole" if lines.ended else "cut off"

    async def close(self) -> None:
        await self._http.close()


class Router:
    """`dualpath emulate router --front-ends 2` with engines; ``start`` starts one of these."""

    def __init__(
        self, process: LocalProcess, url: str, cluster_url: str, start: Callable[[str], None]
    ) -> None:
        self.process = process
        self.url = url
        self.cluster_url = cluster_url
        self.start = start

    @contextlib.asynccontextmanager
    async def clients_of_both(self) -> AsyncIterator[tuple[Client, Client]]:
        """A client of each front end; their ``front`` differ in name."""
        found: dict[str, Client] = {}
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(GUARD_S):
            while len(found) < 2:
                client = Client(self.url)
                stack.push_async_callback(client.close)
                if await client.healthy():
                    client.front = await client.front_end()
                name, _ = client.front
                if not name or found.setdefault(name, client) is not client:
                    await client.close()
                    await asyncio.sleep(0.02)
            one, other = found.values()
            yield one, other

    async def restart_front_end(self, name: str, pid: int) -> None:
        """Ask one to end, as an operator would; return when the next of its name serves."""
        os.kill(pid, signal.SIGTERM)

        async def back() -> bool:
            async with self.clients_of_both() as clients:
                return dict(client.front for client in clients)[name] != pid

        await until(back)

    def scheduler(self) -> int:
        """The scheduler's process; raises ``StopIteration`` while there is none."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return next(int(c) for c in children if b"\0scheduler\0" in command_of(int(c)))


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


async def scaled(
    folder: Path, processes: Processes, engines: Sequence[str] = ("prefill", "decode")
) -> Router:
    """Start it with engines of these names, which begin with their roles."""
    words = ("--port", "0", "--control-port", "0", "--front-ends", "2")
    process = processes.add(
        SpawnedProcess(
            "router",
            (sys.executable, "-m", "dualpath.cli.main", "emulate", "router", *words),
            folder / "router.log",
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ),
        ends_last=True,
    )
    line = await asyncio.to_thread(process.wait_for_line, "2 front ends", GUARD_S)
    url, cluster_url = re.findall(r"http://[\d.:]+\d", line)
    (control,) = re.findall(r"tcp://[\d.:]+\d", line)

    def start(name: str) -> None:
        engine = (*ENGINE, "--speedup", SPEEDUP, "--engine-id", name)
        processes.start(name, name.partition("-")[0], control, *engine)

    for name in engines:
        start(name)
    made = Router(process, url, cluster_url, start)
    probe = Client(cluster_url)
    await until(probe.healthy)
    await probe.close()
    return made


async def test_with_a_certificate_front_ends_and_scheduler_speak_https(
    tmp_path: Path, processes: Processes
) -> None:
    files = tls_files(tmp_path)
    words = ["--port", "0", "--control-port", "0", "--front-ends", "2"]
    words += ["--ssl-certfile", files.certificate, "--ssl-keyfile", files.key]
    process = processes.add(
        SpawnedProcess(
            "router",
            (sys.executable, "-m", "dualpath.cli.main", "emulate", "router", *words),
            tmp_path / "router.log",
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ),
        ends_last=True,
    )
    line = await asyncio.to_thread(process.wait_for_line, "2 front ends", GUARD_S)
    endpoint, cluster = re.findall(r"https://[\d.:]+\d", line)
    context = ssl.create_default_context(cafile=files.authority)
    async with aiohttp.ClientSession() as http:

        async def answered() -> bool:
            found = set()
            with contextlib.suppress(aiohttp.ClientConnectionError):
                for url in (f"{endpoint}/health", f"{cluster}/dualpath/v1/status"):
                    async with http.get(url, ssl=context) as answer:
                        found.add(answer.status)
            return found == {503, 200}  # no engine has joined

        await until(answered)


async def test_a_killed_front_end_ends_its_own_streams_only_and_is_back(
    tmp_path: Path, processes: Processes
) -> None:
    made = await scaled(tmp_path, processes)
    async with made.clients_of_both() as (dies, lives):
        name, pid = dies.front
        cut, whole = asyncio.create_task(dies.stream()), asyncio.create_task(lives.stream())
        await asyncio.gather(dies.under_way.wait(), lives.under_way.wait())
        probe = Client(made.url)
        await probe.counts(RUNNING, 2)
        await probe.close()
        os.kill(pid, signal.SIGKILL)
        assert await cut == "cut off"
        assert await whole == "whole"
        assert len(lives.tokens) == LONG
    async with made.clients_of_both() as back:
        found = dict(client.front for client in back)
        assert found[name] != pid
        again = Client(made.url)
        assert await again.stream() == "whole"
        assert again.tokens == lives.tokens
        await again.close()
        # Ended requests are counted over all front ends; unfinished ones of the dead one are lost.
        for client in back:
            await client.counts(FINISHED, 2)
            await client.counts(RUNNING, 0)
    # All of its processes log time and level.
    time, log = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", made.process.output()
    assert re.search(rf"{time} INFO \S+: decode engine decode joined", log, re.MULTILINE)
    assert re.search(rf"{time} WARNING \S+: front-end-\d exited with code -9", log, re.MULTILINE)


async def test_streams_that_decode_outlive_the_scheduler(
    tmp_path: Path, processes: Processes
) -> None:
    made = await scaled(tmp_path, processes)
    lost = made.scheduler()
    async with made.clients_of_both() as clients:
        streams = [asyncio.create_task(client.stream(LONGER)) for client in clients]
        await asyncio.gather(*(client.under_way.wait() for client in clients))
        os.kill(lost, signal.SIGKILL)
        probe = Client(made.cluster_url)
        await until(probe.healthy)
        assert made.scheduler() != lost

        # The next one does not know the decoding request, and counts it all the same.
        async def counted() -> bool:
            return await probe.unfinished("decode") == 2

        await until(counted)
        assert not any(stream.done() for stream in streams)
        # It does not hold up the engine, which has to finish its requests before it leaves.
        decode = processes.process("decode")
        decode.terminate()
        assert [await stream for stream in streams] == ["whole", "whole"]
        assert await asyncio.to_thread(decode.wait, GUARD_S) == 0, decode.log_tail()
        # Received tokens are in order and complete, and no request was sent twice.
        assert clients[0].tokens == clients[1].tokens
        assert len(clients[0].tokens) == LONGER
        assert [await client.metric("retries_total") for client in clients] == [0, 0]
        await probe.close()


async def test_a_drain_lets_streams_end_and_leaves_no_process(
    tmp_path: Path, processes: Processes
) -> None:
    made = await scaled(tmp_path, processes)
    scheduler = made.scheduler()
    async with made.clients_of_both() as clients:
        ids = [client.front[1] for client in clients]
        streams = [asyncio.create_task(client.stream()) for client in clients]
        await asyncio.gather(*(client.under_way.wait() for client in clients))
        made.process.terminate()
        assert [await stream for stream in streams] == ["whole", "whole"]
    assert await asyncio.to_thread(made.process.wait, GUARD_S) == 0, made.process.log_tail()
    assert [command_of(pid) for pid in (scheduler, *ids)] == [b""] * 3
    processes.end(hard=True)  # engines would wait for the next router


def test_a_port_that_another_server_has_is_not_shared(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        # Like another server with SO_REUSEPORT, which would get some of the clients.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["emulate", "router", "--front-ends", "2", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err


def test_a_first_start_that_is_refused_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ("--front-ends", "1", "--port", "0", "--control-port", port)
        assert main(["emulate", "router", *words]) == 2
    output = capfd.readouterr().err
    assert f"control address 127.0.0.1:{port} cannot be bound" in output
    assert "scheduler cannot be started" in output
