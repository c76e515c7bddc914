"""A reader of pages who types their commands into terminals; the engines are emulated."""

import http.client
import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.e2e.plain_engine import until
from tests.e2e.typed_pages import TypedPages, curl, types
from tests.guard import GUARD_S

from dualpath.cli.main import main
from dualpath.launch.process import SpawnedProcess, Supervisor, local

#: The reader's own: small, since a block of the page's model is 16 MB.
TRACE = '{"session_id": "a", "rounds": [[256, 20], [30, 10]]}\n'
ENGINES = {"prefill", "decode"}


class Reader:
    """Types pages into terminals, one for each command that serves."""

    def __init__(self, folder: Path, processes: Supervisor) -> None:
        (folder / "trace.jsonl").write_text(TRACE)
        self.pages = TypedPages(folder, also={"examples/agents.jsonl": "trace.jsonl"})
        self.engines: list[str] = []
        self._processes = processes

    def serves_one_of_each(
        self, router_options: Sequence[str] = (), engine_options: Sequence[str] = ()
    ) -> None:
        """Start 1P1D as the page on emulated engines does, named as `dualpath serve` names it."""
        router, prefill, decode, _ = self.pages.commands(
            "emulate.md", types("dualpath", "emulate", "router")
        )
        self.types([*router, *router_options])
        self.types([*prefill, "--engine-id", "pe-0", *engine_options])
        self.types([*decode, "--engine-id", "de-0", *engine_options])
        self.waits()

    def types(self, words: list[str]) -> SpawnedProcess:
        """Start what serves."""
        name = f"{len(self._processes.processes)}-{'-'.join(words[1:3])}"
        is_engine = not ENGINES.isdisjoint(words)
        if is_engine:
            self.engines.append(name)
        return self._processes.add(self.pages.spawn(name, words), ends_last=not is_engine)

    def asks(self, *options: str, port: str = "8000", **fields: object) -> None:
        """Send a prompt of four blocks, as `curl` would, to a port that pages name."""
        body = json.dumps({"prompt": list(range(1, 257)), "max_tokens": 4, **fields})
        url = f"http://127.0.0.1:{self.pages.port(port)}/v1/completions"
        curl(["curl", url, "-H", "Content-Type: application/json", "-d", body, *options])

    def waits_for_blocks(self, count: int) -> None:
        """Wait until storage has so many blocks of requests, which engines write after answers."""
        until(lambda: len(self.pages.stored()) >= count, f"{count} stored blocks")

    def waits(self) -> None:
        """Wait until all engines are up and requests can be placed."""
        for name in self.engines:
            self._processes.process(name).wait_for_line("dualpath ", GUARD_S)
        self._processes.wait_until_ready(self._missing, GUARD_S)

    def replays(self, words: list[str]) -> str:
        """Run a command that ends by itself; return its output."""
        replay = self.pages.spawn("replay", words)
        assert replay.wait(GUARD_S) == 0, replay.log_tail()
        return replay.output()

    def ends(self) -> None:
        """End everything in order."""
        self._processes.end()

    def router_pid(self) -> int:
        """Return the process that was started first."""
        return local(self._processes.processes[0]).pid

    def alive(self) -> list[str]:
        """Return the roles of the engines that the router knows."""
        code, status = self._get("/dualpath/v1/status")
        assert code == 200, status
        engines = json.loads(status)["engines"]
        return sorted(engine["role"] for engine in engines if engine["alive"])

    def _missing(self) -> str:
        """Return what is not up yet: ``/health`` is 200 from one engine of each role on."""
        try:
            status, text = self._get("/health")
            if status == 200 and self._get("/dualpath/v1/status")[0] == 401:
                return ""  # With a key only its holder can count engines.
            registered = len(self.alive()) if status == 200 else 0
        except OSError as error:
            return f"no server answers ({error})"
        if status != 200:
            return text
        started = len(self.engines)
        return "" if registered >= started else f"{registered} of {started} engines registered"

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(urlsplit(self.pages.endpoint).netloc, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def runs(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a `dualpath` command that ends by itself; return its output."""
    assert words[0] == "dualpath"
    assert main(words[1:]) == 0, words
    output = capsys.readouterr().out
    assert output
    return output
