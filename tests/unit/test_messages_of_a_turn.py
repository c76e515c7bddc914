"""How many messages and bytes a turn takes at the scheduler, of which each costs it CPU time.

Counted are the messages with a number in a session: heartbeats, and reports without events, come at
intervals and not by turns.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from tests.front_end_links import link_server
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import expected, job, keys_of
from tests.unit.test_router_front_ends import far

from dualpath.core.control import Envelope, Message, encode
from dualpath.core.modes import Mode
from dualpath.core.session_hints import SessionHints
from dualpath.core.sessions import Channel
from dualpath.router.engine_calls import TokenEvent

pytestmark = pytest.mark.virtual_time

MOST = 15
PROMPT, OTHER = list(range(100, 118)), list(range(500, 518))
_send = Channel.send


class Sent:
    """The numbered messages of all sessions, encoded, by type."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.frames: list[tuple[str, bytes]] = []

    @property
    def size_bytes(self) -> int:
        return sum(len(frame) for _, frame in self.frames)

    def carrying(self, keys: Sequence[bytes]) -> Counter[str]:
        """Return how often ``keys`` were sent, in the mean of all, by the type of message.

        Single keys, as those of transfers, do not count among many.
        """
        found: Counter[str] = Counter()
        for kind, frame in self.frames:
            if copies := sum(map(frame.count, keys)):
                found[kind] += copies
        times = {kind: round(copies / len(keys)) for kind, copies in found.items()}
        return Counter({kind: often for kind, often in times.items() if often})


@contextlib.contextmanager
def counted() -> Iterator[Sent]:
    """Record what is sent."""
    sent = Sent()

    def send(self: Channel[Any, Any], message: Message, now_s: float) -> Envelope[Any]:
        envelope = _send(self, message, now_s)
        kind = type(message).__name__
        sent.counts[kind] += 1
        sent.frames.append((kind, encode(envelope)))
        return envelope

    with mock.patch.object(Channel, "send", send):
        yield sent


async def turns(
    prompts: Sequence[Sequence[int]],
    mode: Mode = Mode.DUALPATH,
    *,
    engines: int = 1,
    known: bool = False,
    **hints: float,
) -> tuple[list[Sent], list[tuple[str, str]]]:
    """Return what some turns send, of a front end that is its own process, and their engines.

    ``known``: reports of stored chains arrive.
    """
    each, given = [], SessionHints(**hints)  # type: ignore[arg-type]
    async with (
        cluster(engines, engines, mode=mode.value) as made,
        link_server(made.service.scheduler) as opened,
        far(made, opened, "f") as one,
    ):
        for engine in made.engines.values():
            engine.reports_stored = known
        for number, prompt in enumerate(prompts):
            await asyncio.sleep(1.0)
            with counted() as sent:
                work = one.front_end.submit(job(f"turn-{number}", prompt, hints=given))
                tokens = [token async for event in work for token in event.token_ids]
                await asyncio.sleep(1.0)
            assert tokens == expected(prompt, 6)
            each.append(sent)
        return each, list(zip(made.calls.prefills, made.calls.decodes, strict=True))


async def messages(
    prompts: Sequence[Sequence[int]], mode: Mode, *, known: bool = False
) -> Counter[str]:
    """Return the messages of the last of some turns."""
    each, _ = await turns(prompts, mode, known=known)
    return each[-1].counts


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


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.BASIC, Mode.SPLIT])
async def test_a_turn_behind_a_chain_that_its_engine_has_reported(mode: Mode) -> None:
    """Two messages fewer: nothing is looked up, and the report takes no message of its own."""
    next_prompt = [*PROMPT, *expected(PROMPT, 6), 7, 8, 9]
    asked = await messages([PROMPT, next_prompt], mode)
    counts = await messages([PROMPT, next_prompt], mode, known=True)
    assert counts == asked - Counter(LOOKUP)
    assert counts.total() <= MOST - 2


LONG = [3 + number % 900 for number in range(4 * 48)]
KEYS = keys_of(LONG)


async def test_keys_are_sent_once_to_the_scheduler_and_once_to_each_engine_that_reads() -> None:
    """The look-up of a first turn sends them once more.

    Neither the answer nor the order to retain the context sends those of the prompt again.
    """
    next_prompt = [*LONG, *expected(LONG, 6), 7, 8, 9]
    (first, second), _ = await turns([LONG, next_prompt], known=True, retain_s=30.0)
    assert first.counts["Retain"] == second.counts["Retain"] == 1
    assert first.carrying(KEYS) == {"BeginAttempt": 1, "Lookup": 1, "Assign": 1}
    assigned = second.counts["Assign"]
    assert second.carrying(KEYS) == {"BeginAttempt": 1, "Assign": assigned}
    lists = (1 + assigned) * len(keys_of(next_prompt)) * (2 + len(KEYS[0]))
    assert second.size_bytes - lists < 4500


async def test_a_prefill_engine_that_reads_gets_the_keys_of_what_it_reads() -> None:
    (_, second), _ = await turns([LONG, LONG], Mode.BASIC, known=True)
    sent = second.carrying(KEYS)
    assert sent == {"BeginAttempt": 1, "Assign": 2}


async def test_an_attempt_sends_no_key_that_an_earlier_one_has_sent() -> None:
    async with (
        cluster(decode=2) as made,
        link_server(made.service.scheduler) as opened,
        far(made, opened, "f") as one,
    ):
        made.calls.gates["decode"] = asyncio.Event()
        made.calls.gate_after_tokens = 5
        with counted() as sent:
            work = one.front_end.submit(job("a", LONG, max_new_tokens=12))
            tokens = asyncio.create_task(_all(work))
            await made.arrives("decode")
            made.lose(made.calls.decodes[0])
            await asyncio.sleep(0.5)
            made.calls.gates.pop("decode").set()
            assert await tokens == expected(LONG, 12)
            await asyncio.sleep(1.0)
        assert one.front_end.records[0].attempts == 2
        assert sent.counts["BeginAttempt"] == 2
        assert sent.carrying(KEYS)["BeginAttempt"] == 1
        generated = keys_of([*LONG, *expected(LONG, 12)])[len(KEYS) :]
        assert sent.carrying(generated[:1]) == {"BeginAttempt": 1, "Lookup": 1, "Assign": 1}


async def _all(work: AsyncIterator[TokenEvent]) -> list[int]:
    return [token async for event in work for token in event.token_ids]


async def test_a_turn_does_not_take_more_messages_in_a_larger_cluster() -> None:
    """Only the first turn that two engines share names the DE to a PE that reads nothing."""
    others = [[number, *OTHER[1:]] for number in range(200, 212)]
    (_, alone), _ = await turns([OTHER, others[0]], Mode.BASIC)
    each, placed = await turns(others, Mode.BASIC, engines=3)  # It places requests in turn.
    met: set[tuple[str, str]] = set()
    for sent, pair in zip(each, placed, strict=True):
        first = Counter() if pair in met else Counter({"PeerUp": 1, "Synced": 1})
        assert sent.counts == alone.counts + first
        met.add(pair)
    assert len(met) == 3
