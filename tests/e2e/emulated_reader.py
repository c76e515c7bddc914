"""A reader of pages, who types what they show into terminals; the engines are emulated."""

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

from tests.e2e.typed_pages import TypedPages
from tests.guard import GUARD_S

from dualpath.ops.launch.process import Supervisor

#: The reader's own: small, since a block of the page's model is 16 MB.
TRACE = '{"session_id": "a", "rounds": [[256, 20], [30, 10]]}\n'
ENGINES = {"prefill", "decode"}


class Reader:
    """Types pages into terminals, one for each command that serves."""

    def __init__(self, folder: Path, processes: Supervisor) -> None:
        (folder / "trace.jsonl").write_text(TRACE)
        self.pages = TypedPages(folder)
        self.engines: list[str] = []
        self._processes = processes

    def types(self, words: list[str]) -> None:
        """Start what serves."""
        name = f"{len(self._processes.processes)}-{'-'.join(words[1:3])}"
        is_engine = not ENGINES.isdisjoint(words)
        if is_engine:
            self.engines.append(name)
        self._processes.add(self.pages.spawn(name, words), ends_last=not is_engine)

    def waits(self) -> None:
        """Wait until all engines are up and requests can be placed."""
        for name in self.engines:
            self._processes.process(name).wait_for_line("dualpath ", GUARD_S)
        self._processes.wait_until_ready(self._missing, GUARD_S)

    def replays(self, words: list[str]) -> str:
        """Run a command that ends by itself; return what it said."""
        replay = self.pages.spawn("replay", words)
        assert replay.wait(GUARD_S) == 0, replay.log_tail()
        return replay.output()

    def alive(self) -> list[str]:
        """Return the roles of the engines that the router knows."""
        engines = json.loads(self._get("/dualpath/v1/status")[1])["engines"]
        return sorted(engine["role"] for engine in engines if engine["alive"])

    def _missing(self) -> str:
        try:
            status, text = self._get("/health")
        except OSError as error:
            return f"nobody answers ({error})"
        return "" if status == 200 else text

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(urlsplit(self.pages.endpoint).netloc, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()
