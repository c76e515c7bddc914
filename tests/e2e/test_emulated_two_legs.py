"""Emulated engines behind a proxy that sends both legs itself; every byte of KV is verified."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY, Cluster, cluster, engine_settings
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.modes import Handover, Mode
from dualpath.engine.control.surroundings import LIVE
from dualpath.engine.counters import Counter
from dualpath.router.settings import RouterSettings
from dualpath.router.token_api.wire import GENERATE_PATH
from dualpath.router.two_legs import EXPECTED_NEW_TOKENS
from dualpath.transport.nixl import nixl_package
from dualpath_lab.emulated.process import emulated_engine

PROMPT = list(range(1, 41))
FIRST = {"do_remote_decode": True, "do_remote_prefill": False}


class Legs:
    """The proxy; ``made`` is the cluster, whose own router gives the answers to compare with."""

    def __init__(self, made: Cluster) -> None:
        self.made = made

    async def send(
        self,
        engine_id: str,
        prompt: Sequence[int],
        tokens: int,
        params: dict[str, Any],
        request_id: str = "",
    ) -> tuple[int, dict[str, Any]]:
        body = {
            "request_id": "",
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": tokens},
            "kv_transfer_params": params,
        }
        url = self.made.engines[engine_id].api_url + GENERATE_PATH
        headers = {"X-Request-Id": request_id} if request_id else {}
        async with (
            asyncio.timeout(GUARD_S),
            self.made.http.post(url, json=body, headers=headers) as response,
        ):
            return response.status, await response.json()

    async def both(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], int]:
        """Return the second leg's tokens, and the tokens that the first leg has found."""
        status, answer = await self.send("prefill-0", prompt, tokens, FIRST)
        assert status == 200, answer
        params = answer["kv_transfer_params"]
        status, answer = await self.send("decode-0", prompt, tokens, params)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"], params["remote_prefill_cached_tokens"]

    async def over(self) -> None:
        """Wait until nothing is left of any leg, at engines and at the scheduler."""
        await self.made.idle()
        handovers = self.made.service.scheduler.handovers
        await self.made.arrivals.until(lambda: len(handovers) == 0, GUARD_S)


@contextlib.asynccontextmanager
async def legs(
    folder: Path,
    mode: Mode,
    decode: int = 1,
    handover: Handover = Handover.BUFFER,
    *,
    moves: bool = True,
    transport: str = "",
) -> AsyncIterator[Legs]:
    """Run a cluster; transfers stay in this process without a ``transport``."""
    router = RouterSettings(
        mode=mode,
        front_ends_port=0,
        first_leg_timeout_s=0.1,
        second_leg_timeout_s=GUARD_S,
        handover=handover,
        move_kv=moves,
    )
    async with (
        cluster(folder, mode, 0, 0, router=router) as made,
        contextlib.AsyncExitStack() as stack,
    ):
        scheduler = made.service.scheduler
        names = [(Role.PREFILL, 0), *((Role.DECODE, number) for number in range(decode))]
        for role, number in names:
            name = f"{role.value}-{number}"
            settings = engine_settings(
                *(role, name, scheduler.server.address, folder, mode),
                two_leg_scheduler=scheduler.front_ends.address,
                transport=transport or "memory",
            )
            engine = emulated_engine(settings, LIVE if transport else made.surroundings)
            made.engines[name] = await stack.enter_async_context(engine)
        await made.service.wait_ready(1, decode, GUARD_S)
        yield Legs(made)


@pytest.mark.parametrize(
    ("mode", "handover"),
    [
        (Mode.SPLIT, Handover.BUFFER),
        (Mode.SPLIT, Handover.HBM),
        (Mode.DUALPATH, Handover.BUFFER),
        (Mode.BASIC, Handover.BUFFER),
    ],
)
async def test_turns_in_two_legs_find_what_earlier_turns_have_stored(
    mode: Mode, handover: Handover, tmp_path: Path
) -> None:
    async with legs(tmp_path / "kv", mode, handover=handover) as proxy:
        made = proxy.made
        answer, hits = await proxy.both(PROMPT, 12)
        assert hits == 0
        assert answer == (await made.ask(PROMPT, 12, cache_salt="other"))[0]
        await made.stored()
        turn = [*PROMPT, *answer, *range(100, 120)]
        again, hits = await proxy.both(turn, 7)
        assert hits == (len(PROMPT) + 12 - 1) // 4 * 4
        assert again == (await made.ask(turn, 7, cache_salt="other"))[0]
        await proxy.over()
        assert made.counts(0) > 0
        assert made.counts(1) == 0, "no wrong byte"


async def test_a_second_leg_may_generate_more_than_its_prompt_has_reserved_in_hbm(
    tmp_path: Path,
) -> None:
    """The first leg does not know how many tokens its second leg generates."""
    more = EXPECTED_NEW_TOKENS + 30
    async with legs(tmp_path / "kv", Mode.SPLIT, handover=Handover.HBM) as proxy:
        made = proxy.made
        answer, _ = await proxy.both(PROMPT, more)
        assert answer == (await made.ask(PROMPT, more, cache_salt="other"))[0]
        await made.idle()
        assert made.counts(1) == 0


async def test_both_legs_at_once_and_a_second_leg_with_another_prompt(tmp_path: Path) -> None:
    async with legs(tmp_path / "kv", Mode.SPLIT) as proxy:
        made = proxy.made
        params = {"do_remote_prefill": True}
        (status, _), (second_status, answer) = await asyncio.gather(
            proxy.send("prefill-0", PROMPT, 9, FIRST, "req-1"),
            proxy.send("decode-0", PROMPT, 9, params, "req-1"),
        )
        assert (status, second_status) == (200, 200), answer
        assert answer["choices"][0]["token_ids"] == (await made.ask(PROMPT, 9))[0]
        _, first = await proxy.send("prefill-0", PROMPT, 9, FIRST)
        other = [7, *PROMPT[1:]]
        status, refused = await proxy.send("decode-0", other, 9, first["kv_transfer_params"])
        assert (status, "send the same prompt" in refused["error"]["message"]) == (400, True)
        status, refused = await proxy.send("prefill-0", PROMPT, 9, params, "req-2")
        assert (status, "to a decode engine" in refused["error"]["message"]) == (400, True)
        await made.idle()
        assert made.counts(1) == 0


@pytest.mark.parametrize(
    ("mode", "handover", "transport"),
    [
        (Mode.SPLIT, Handover.BUFFER, ""),
        (Mode.BASIC, Handover.BUFFER, ""),
        (Mode.SPLIT, Handover.BUFFER, "memory"),
        pytest.param(Mode.SPLIT, Handover.BUFFER, "nixl", marks=pytest.mark.nixl),
        (Mode.SPLIT, Handover.HBM, ""),
    ],
)
async def test_kv_of_second_legs_at_another_engine_is_moved_there_unless_it_is_in_hbm(
    mode: Mode, handover: Handover, transport: str, tmp_path: Path
) -> None:
    if transport == "nixl":
        pytest.importorskip(nixl_package())
    async with legs(
        tmp_path / "kv", mode, decode=2, handover=handover, transport=transport
    ) as proxy:
        made, context, moved_blocks = proxy.made, list(PROMPT), 0
        for append in (7, 20):
            truth = (await made.ask(context, 9, cache_salt="other"))[0]
            _, first = await proxy.send("prefill-0", context, 9, FIRST)
            holder = first["kv_transfer_params"]["remote_engine_id"]
            (other,) = {"decode-0", "decode-1"} - {holder}
            status, answer = await proxy.send(other, context, 9, first["kv_transfer_params"])
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == truth
            moved_blocks += GEOMETRY.blocks_for(len(context))
            context += [*truth, *range(100, 100 + append)]
            await made.stored()
        await proxy.over()
        moved_bytes = sum(
            engine.plane.manager.counters.snapshot()[Counter.DE_TO_DE_BYTES]
            for engine in made.engines.values()
        )
        most_bytes = moved_blocks * GEOMETRY.full_block_bytes
        # What the other engine caches of the prompt is not moved.
        in_buffer = handover is Handover.BUFFER
        assert 0 < moved_bytes <= most_bytes if in_buffer else moved_bytes == 0
        assert made.counts(0) > 0
        assert made.counts(1) == 0, "no wrong byte"


async def test_second_legs_at_another_engine_are_passed_on_and_alone_are_prefilled_again(
    tmp_path: Path,
) -> None:
    async with legs(tmp_path / "kv", Mode.SPLIT, decode=2, moves=False) as proxy:
        made = proxy.made
        truth = (await made.ask(PROMPT, 9, cache_salt="other"))[0]
        _, first = await proxy.send("prefill-0", PROMPT, 9, FIRST)
        holder = first["kv_transfer_params"]["remote_engine_id"]
        (other,) = {"decode-0", "decode-1"} - {holder}
        status, answer = await proxy.send(other, PROMPT, 9, first["kv_transfer_params"])
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == truth
        assert made.service.scheduler.metrics.hit_tokens == 0, "nothing was prefilled again"
        await made.stored()
        alone = {"do_remote_prefill": True, "transfer_id": "no-first-leg"}
        _, answer = await proxy.send(holder, PROMPT, 9, alone)
        assert answer["choices"][0]["token_ids"] == truth
        await proxy.over()
        assert made.service.scheduler.metrics.hit_tokens > 0, "the first leg has stored blocks"
        assert made.counts(1) == 0, "no wrong byte"
