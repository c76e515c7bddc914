"""A front end of two units with emulated engines over one storage: every byte is checked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.emulated_cluster import Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.modes import Mode
from dualpath.router.linked_front_end import LinkedFrontEnd
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath_lab.emulated.router_server import emulated_front_end

ROUTER = RouterSettings(mode=Mode.DUALPATH, front_ends_port=0, engine_timeout_s=3.0)
#: Streams of this many tokens take seconds at this speed.
TOKENS, SLOW = 100, 0.1


class Clients:
    """Clients of the front end of two units."""

    def __init__(self, endpoint: str, service: LinkedFrontEnd, made: Cluster) -> None:
        self.endpoint, self.service, self._http = endpoint, service, made.http

    async def ask(self, prompt: Sequence[int], tokens: int, session: str) -> tuple[list[int], int]:
        """Return generated tokens and hit tokens of a turn of a session."""
        body = {"prompt": list(prompt), "max_tokens": tokens, "session_id": session}
        async with (
            asyncio.timeout(GUARD_S),
            self._http.post(f"{self.endpoint}/v1/completions", json=body) as response,
        ):
            answer: Any = msgspec.json.decode(await response.read())
            assert response.status == 200, answer
        hits = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], hits


@contextlib.asynccontextmanager
async def clients(one: Cluster, other: Cluster) -> AsyncIterator[Clients]:
    addresses = [made.service.scheduler.front_ends.address for made in (one, other)]
    link = LinkSettings(scheduler=",".join(addresses), front_end_name="f")
    async with emulated_front_end(ROUTER, link, "127.0.0.1", 0) as (endpoint, service):
        await service.wait_ready(2, 2, GUARD_S)
        yield Clients(endpoint, service, one)


def decoded(made: Cluster) -> int:
    """Return the requests that a unit has placed."""
    return len(made.service.status()["assignments"])


async def test_sessions_stay_in_their_unit_and_hit_what_either_unit_has_stored(
    tmp_path: Path,
) -> None:
    async with (
        cluster(tmp_path, Mode.DUALPATH, router=ROUTER) as one,
        cluster(tmp_path, Mode.DUALPATH, router=ROUTER) as other,
        clients(one, other) as front,
    ):
        prompts = [[agent, *range(1, 38)] for agent in range(1, 9)]
        first = await asyncio.gather(
            *(front.ask(prompt, 9, f"agent {n}") for n, prompt in enumerate(prompts))
        )
        assert [hits for _, hits in first] == [0] * 8
        placed = decoded(one), decoded(other)
        assert min(placed) > 0
        for made in (one, other):
            await made.stored()
        turns = [[*p, *tokens, 7, 8] for p, (tokens, _) in zip(prompts, first, strict=True)]
        # One after the other: a loaded unit would lose some of its sessions.
        second = [await front.ask(turn, 1, f"agent {n}") for n, turn in enumerate(turns)]
        # All but the last token of a turn has KV: 38 + 8 of them fill 11 blocks.
        assert [hits for _, hits in second] == [44] * 8
        assert (decoded(one), decoded(other)) == (2 * placed[0], 2 * placed[1])
        for made in (one, other):
            await made.stored()
        for made in (one, other):
            # It reads what the other one has stored: all 12 blocks of the turn's prompt.
            assert [(await made.ask(turn, 1))[1] for turn in turns] == [48] * 8
            await made.idle()
            assert made.counts(1) == 0


@pytest.mark.parametrize("tier", [True, False], ids=["dram", "storage"])
async def test_streams_of_a_unit_that_ends_are_continued_by_the_other_one(
    tmp_path: Path, *, tier: bool
) -> None:
    router = msgspec.structs.replace(ROUTER, dram_tier=tier)
    async with contextlib.AsyncExitStack() as stack:
        made = [contextlib.AsyncExitStack() for _ in range(2)]
        one, other = [
            await each.enter_async_context(
                cluster(tmp_path, Mode.DUALPATH, router=router, speedup=SLOW)
            )
            for each in made
        ]
        stack.push_async_callback(made[0].aclose)
        front = await stack.enter_async_context(clients(one, other))
        prompts = [[agent, *range(1, 38)] for agent in range(1, 9)]
        running = [
            asyncio.create_task(front.ask(prompt, TOKENS, f"agent {n}"))
            for n, prompt in enumerate(prompts)
        ]
        async with asyncio.timeout(GUARD_S):
            while min(decoded(one), decoded(other)) == 0 or not front.service.running:
                await asyncio.sleep(0.01)
        await made[1].aclose()
        answers = [tokens for tokens, _ in await asyncio.gather(*running)]
        assert {record.outcome for record in front.service.records} == {"finished"}
        assert any(record.attempts > 1 for record in front.service.records)
        assert answers[0] == (await one.ask(prompts[0], TOKENS))[0]
        assert [len(tokens) for tokens in answers] == [TOKENS] * 8
        await one.idle()
        assert one.counts(1) == 0
