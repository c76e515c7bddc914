"""Pages that start a cluster of emulated engines, typed as they stand; then agents are replayed."""

import http.client
import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.docs_blocks import Block
from tests.e2e.typed_pages import TypedPages, types
from tests.guard import GUARD_S

from dualpath.ops.launch.process import Supervisor

pytest.importorskip("nixl_cu12")
pytestmark = pytest.mark.nixl

#: The reader's own: small, since a block of this model is 16 MB.
TRACE = '{"session_id": "a", "rounds": [[256, 20], [30, 10]]}\n'
ENGINES = {"prefill", "decode"}


ROUTER = types("dualpath", "emulate", "router")


def scheduler(block: Block) -> bool:
    """Want a scheduler with front ends that are light."""
    return types("dualpath", "scheduler")(block) and "emulate" in block.text


def emulated(block: Block) -> bool:
    """Want every cluster of the page."""
    return block.language == "console"


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


def has_hits(replayed: str) -> bool:
    """Whether the second turn loaded what the first had stored."""
    return re.search(r"hit rate +│ +[1-9][0-9.]*%", replayed) is not None


def test_a_cluster_of_emulated_engines_serves_agents(tmp_path: Path) -> None:
    with Supervisor() as processes:
        reader = Reader(tmp_path, processes)
        replays = []
        for words in reader.pages.commands("emulate.md", emulated):
            if words[1] == "replay":
                replays.append(words)
            else:
                reader.types(words)
        reader.waits()
        assert reader.alive() == ["decode", "prefill", "prefill"]
        (replay,) = replays
        assert has_hits(reader.replays(replay))


@pytest.mark.parametrize("front_ends", [ROUTER, scheduler], ids=["of a router", "each by itself"])
def test_front_ends_without_vllm_serve_agents(
    front_ends: Callable[[Block], bool], tmp_path: Path
) -> None:
    with Supervisor() as processes:
        reader = Reader(tmp_path, processes)
        _, *engines, replay = reader.pages.commands("emulate.md", ROUTER)
        for words in (*reader.pages.commands("scale-out.md", front_ends), *engines):
            reader.types(words)
        reader.waits()
        assert has_hits(reader.replays(replay))
