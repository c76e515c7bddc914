"""Pages that start a cluster of emulated engines: their commands, then a replay of agents."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs_blocks import Block
from tests.e2e.emulated_reader import Reader
from tests.e2e.typed_pages import curl, types

from dualpath.launch.process import Supervisor
from dualpath.transport.nixl import nixl_package

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl


ROUTER = types("dualpath", "emulate", "router")


def scheduler(block: Block) -> bool:
    """Select the scheduler with light front ends."""
    one = types("dualpath", "scheduler")(block) and "emulate" in block.text
    return one and not units(block)


def units(block: Block) -> bool:
    """Select two units of emulated engines and their front end."""
    return types("dualpath", "scheduler")(block) and "5710" in block.text


def drain(block: Block) -> bool:
    """Select the calls that drain a scheduler."""
    return types("curl")(block) and "/dualpath/v1/drain" in block.text


def emulated(block: Block) -> bool:
    """Select every cluster of the page but the one whose prompt takes minutes."""
    return block.language == "console" and "million.jsonl" not in block.text


def has_hits(replayed: str) -> bool:
    """Whether the second turn loaded the blocks that the first had stored."""
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


def test_a_front_end_of_two_units_serves_agents_also_while_one_drains_or_is_lost(
    tmp_path: Path,
) -> None:
    with Supervisor() as processes:
        reader = Reader(tmp_path, processes)
        *_, replay = reader.pages.commands("emulate.md", ROUTER)
        started = [reader.types(words) for words in reader.pages.commands("scale-out.md", units)]
        reader.waits()
        assert reader.alive() == ["decode", "decode", "prefill", "prefill"]
        assert has_hits(reader.replays(replay))
        begin, look, end = reader.pages.commands("restart.md", drain)
        assert json.loads(curl(begin)) == {"draining": True, "waiting": 0, "running": 0}
        assert json.loads(curl(look))["draining"]
        assert has_hits(reader.replays(replay))
        placed = len(json.loads(curl(look))["assignments"])
        assert json.loads(curl(end)) == {"draining": False, "waiting": 0, "running": 0}
        assert len(json.loads(curl(look))["assignments"]) == placed
        for process in started[:3]:  # the scheduler of the first unit, and its engines
            process.kill()
        assert has_hits(reader.replays(replay))
