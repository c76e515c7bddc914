"""Pages that start a cluster of emulated engines: their commands, then a replay of agents."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs_blocks import Block
from tests.e2e.emulated_reader import Reader
from tests.e2e.typed_pages import types

from dualpath.launch.process import Supervisor
from dualpath.transport.nixl import nixl_package

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl


ROUTER = types("dualpath", "emulate", "router")


def scheduler(block: Block) -> bool:
    """Select the scheduler with light front ends."""
    return types("dualpath", "scheduler")(block) and "emulate" in block.text


def emulated(block: Block) -> bool:
    """Select every cluster of the page."""
    return block.language == "console"


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
