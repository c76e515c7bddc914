"""How many messages a turn takes at the scheduler, of which each costs it CPU time.

Counted are the messages with a number in a session: heartbeats, and reports without events, come at
intervals and not by turns.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from tests.front_end_links import link_server
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import expected, job
from tests.unit.test_router_front_ends import far

from dualpath.core.control import Envelope, Message
from dualpath.core.modes import Mode
from dualpath.core.sessions import Channel

pytestmark = pytest.mark.virtual_time

MOST = 15
PROMPT, OTHER = list(range(100, 118)), list(range(500, 518))
_send = Channel.send


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the numbered messages of all sessions by type."""
    counts: Counter[str] = Counter()

    def send(self: Channel[Any, Any], message: Message, now_s: float) -> Envelope[Any]:
        counts[type(message).__name__] += 1
        return _send(self, message, now_s)

    with mock.patch.object(Channel, "send", send):
        yield counts


async def messages(prompts: Sequence[Sequence[int]], mode: Mode) -> Counter[str]:
    """Return the messages of the last of some turns, of a front end that is its own process."""
    async with (
        cluster(mode=mode.value) as made,
        link_server(made.service.scheduler) as opened,
        far(made, opened, "f") as one,
    ):
        for number, prompt in enumerate(prompts):
            await asyncio.sleep(1.0)
            with counted() as counts:
                work = one.front_end.submit(job(f"turn-{number}", prompt))
                tokens = [token async for event in work for token in event.token_ids]
                await asyncio.sleep(1.0)
            assert tokens == expected(prompt, 6)
        return counts


FRONT_END = {"BeginAttempt": 1, "AttemptCall": 1, "CallResult": 2, "EndRequest": 1}
LOOKUP = {"Lookup": 1, "LookupDone": 1}


async def test_a_turn_without_a_hit() -> None:
    counts = await messages([PROMPT, OTHER], Mode.DUALPATH)
    assert counts.total() <= MOST
    engines = {"Assign": 1, "Reserved": 1, "PrefillDone": 1}
    assert {k: n for k, n in counts.items() if k not in ("Report", "AttemptEvents", "Retain")} == {
        **FRONT_END, **LOOKUP, **engines
    }  # fmt: skip


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.BASIC, Mode.SPLIT])
async def test_a_turn_with_stored_blocks(mode: Mode) -> None:
    counts = await messages([PROMPT, PROMPT], mode)
    assert counts["ReadDone"] >= 1
    assert counts["Sync"] == counts["Release"] == counts["Persist"] == counts["Read"] == 0
    assert counts.total() <= MOST
