"""Two legs of a request, sent by another proxy: each engine is its own front end."""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.control_network import ControlNetwork
from tests.front_end_links import LinkServer, link_server
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import expected, job, keys_of

from dualpath.core.cluster import Role
from dualpath.core.control import PrefillDone, Sync
from dualpath.core.errors import (
    BadRequestError,
    DeadlineError,
    DualPathError,
    EngineLostError,
    PromptTooLongError,
    TransportError,
)
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.settings import EngineSettings
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.remote import REGISTERED_AGAIN_S
from dualpath.router.scheduling import HandedOver
from dualpath.router.settings import RouterSettings
from dualpath.router.two_legs import Prompt, SecondLeg, TwoLegs, handover_name, leg_parameters

pytestmark = pytest.mark.virtual_time
PROMPT = list(range(1, 18))
#: What proxies send with a first leg (vLLM's toy_proxy_server.py).
FIRST: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Of virtual time, for one test.
LIMIT_S = 300.0
SETTINGS = RouterSettings()
#: Second legs at another decode engine than the KV are passed on.
PASSING = RouterSettings(move_kv=False)


class Answer(NamedTuple):
    """A second leg's tokens, and why its engine has computed the prompt itself, if so."""

    tokens: list[int]
    alone: DualPathError | None


class Engines:
    """The engines of a cluster, with a front end at each; the test is the proxy."""

    def __init__(self, made: Cluster, opened: LinkServer) -> None:
        self.made, self.opened = made, opened
        self.legs: dict[str, TwoLegs] = {}
        #: Second legs that an engine has passed on, to which one and why the KV was not moved.
        self.passed_on: list[tuple[str, str, str]] = []
        #: Where the KV of second legs comes from.
        self.origins: list[str] = []

    def open(self, engine_id: str, role: Role) -> TwoLegs:
        settings = EngineSettings(
            role=role,
            engine_id=engine_id,
            router="tcp://127.0.0.1:1",
            two_leg_scheduler="tcp://127.0.0.1:2",
            api_url="http://127.0.0.1:3",
            storage="unused",
        )
        legs = TwoLegs(settings, self.opened.network.connect())
        legs.start()
        self.legs[engine_id] = legs
        return legs

    async def first(
        self,
        engine_id: str,
        prompt: list[int],
        request_id: str = "",
        **params: Any,
    ) -> dict[str, Any] | None:
        made = self.made

        async def compute(transfer: PrefillTransfer) -> bool:
            info = made.service.scheduler.engine(engine_id)
            event = await made.calls.prefill(info, job("leg", prompt, 1), transfer)
            return event.finish_reason == "length"

        given = leg_parameters(FIRST | params)
        return await self.legs[engine_id].prefill(Prompt(prompt), given, request_id, compute)

    async def second(
        self,
        engine_id: str,
        prompt: list[int],
        count: int,
        params: Mapping[str, Any],
        request_id: str = "",
    ) -> Answer:
        made = self.made
        info = made.service.scheduler.engine(engine_id)
        try:
            attempt = await self.legs[engine_id].take(leg_parameters(params), request_id)
        except DualPathError as error:
            return Answer(expected(prompt, count), error)
        if isinstance(attempt, HandedOver):
            holder = attempt.decode.engine_id
            self.passed_on.append((engine_id, holder, attempt.note))
            return await self.second(holder, prompt, count, params, request_id)
        self.origins.append(
            attempt.origin.removeprefix(f"transferred; {attempt.transfer.request_id}")
        )
        return Answer(await self._decode(info, prompt, count, attempt), None)

    async def moving(self) -> "asyncio.Task[Answer]":
        """Begin a second leg: d1 fetches the prompt from d0 and waits for its ``fetches``."""
        params = await self.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        target = self.made.engines["d1"]
        target.fetches.clear()
        second = asyncio.create_task(self.second("d1", PROMPT, 6, params))
        while not target.fetched:
            await asyncio.sleep(0.01)
        return second

    async def again(
        self, engine_id: str, prompt: list[int], count: int, **params: Any
    ) -> tuple[list[int], str]:
        """Serve a second leg without an attempt; return its tokens and where its KV comes from."""
        made = self.made
        info = made.service.scheduler.engine(engine_id)

        async def compute(engine: EngineInfo, transfer: PrefillTransfer) -> None:
            await made.calls.prefill(engine, job("leg", prompt, 1), transfer)

        given = leg_parameters(params)
        leg = await self.legs[engine_id].prefill_elsewhere(Prompt(prompt), given, compute)
        found = f"{leg.origin}, {leg.hit_tokens} hits"
        return await self._decode(info, prompt, count, leg), found

    async def _decode(
        self, info: EngineInfo, prompt: list[int], count: int, attempt: SecondLeg
    ) -> list[int]:
        made = self.made
        reason = "failed"
        tokens: list[int] = []
        try:
            stream = made.calls.decode(info, job("leg", prompt, count), attempt.transfer, ())
            async for event in stream:
                attempt.decoding_started()
                tokens += event.token_ids
            reason = "finished"
        finally:
            attempt.close(reason)
        return tokens

    async def both(self, prefill: str, decode: str, prompt: list[int], count: int) -> Answer:
        """Send one leg after the other, as vLLM's example proxy does."""
        params = await self.first(prefill, prompt)
        assert params is not None
        return await self.second(decode, prompt, count, params)

    async def nothing_is_left(self) -> None:
        await self.made.settled()
        scheduler = self.made.service.scheduler
        assert scheduler.releases.held == 0
        assert scheduler.dispatch.idle()
        assert len(scheduler.handovers) == 0
        assert len(scheduler.exchange) == 0
        assert scheduler.counts() == (0, 0)
        assert self.opened.server.counts() == (0, 0)


@contextlib.asynccontextmanager
async def engines(
    prefill: int = 1,
    decode: int = 1,
    network: ControlNetwork | None = None,
    settings: RouterSettings = SETTINGS,
    **options: Any,
) -> AsyncIterator[Engines]:
    async with (
        asyncio.timeout(LIMIT_S),
        cluster(prefill, decode, settings=settings, **options) as made,
        link_server(made.service.scheduler, network) as opened,
    ):
        every = Engines(made, opened)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for number in range(count):
                every.open(f"{role.value[0]}{number}", role)
        try:
            yield every
        finally:
            for legs in every.legs.values():
                await legs.stop()


async def test_a_request_in_two_legs_gets_its_tokens_and_later_turns_find_its_blocks() -> None:
    async with engines() as every:
        params = await every.first("p0", PROMPT)
        assert params is not None
        assert params["do_remote_prefill"]
        assert not params["do_remote_decode"]
        assert (params["remote_engine_id"], params["remote_host"]) == ("d0", "d0")
        assert params["remote_prefill_cached_tokens"] == 0
        assert await every.second("d0", PROMPT, 6, params) == Answer(expected(PROMPT, 6), None)
        await every.nothing_is_left()
        assert set(keys_of(PROMPT)) <= every.made.stored, "the prompt is persisted as always"
        turn = [*PROMPT, *expected(PROMPT, 6), 5, 6, 7]
        again = await every.first("p0", turn)
        assert again is not None
        assert again["remote_prefill_cached_tokens"] == 16
        assert (await every.second("d0", turn, 4, again)).tokens == expected(turn, 4)
        await every.nothing_is_left()
        metrics = every.made.service.scheduler.metrics
        assert (metrics.prompt_tokens, metrics.hit_tokens) == (len(PROMPT) + len(turn), 16)


async def test_the_prefill_engine_is_the_one_that_the_proxy_chose() -> None:
    async with engines(prefill=3) as every:
        for number in (2, 2, 1, 0, 2):
            assert (await every.both(f"p{number}", "d0", PROMPT, 3)).alone is None
        assert every.made.calls.prefills == ["p2", "p2", "p1", "p0", "p2"]
        placed = every.made.service.scheduler.dispatch.recent
        assert {p.assignment.pe_reason for p in placed if p.assignment is not None} == {"given"}


async def test_a_first_leg_may_name_the_decode_engine() -> None:
    async with engines(decode=3) as every:
        for name in ("d2", "d1", "d1"):
            params = await every.first("p0", PROMPT, remote_engine_id=name)
            assert params is not None
            assert (await every.second(name, PROMPT, 3, params)).alone is None
        assert every.made.calls.decodes == ["d2", "d1", "d1"]
        await every.nothing_is_left()


async def test_a_decode_engine_that_is_unknown_is_no_reason_to_refuse_a_first_leg() -> None:
    async with engines() as every:
        params = await every.first("p0", PROMPT, remote_engine_id="elsewhere")
        assert params is not None
        assert params["remote_engine_id"] == "d0"
        assert (await every.second("d0", PROMPT, 3, params)).alone is None


async def test_the_id_of_a_request_may_name_the_decode_engine_by_its_address() -> None:
    async with engines(decode=3) as every:
        addresses = {
            info.engine_id: urlsplit(info.api_url).netloc
            for info in every.made.service.scheduler.engines.alive(Role.DECODE)
        }
        for name in ("d2", "d1", "d2"):
            # As vLLM's router writes it.
            header = f"___prefill_addr_p0:8100___decode_addr_{addresses[name]}_{uuid.uuid4().hex}"
            params = await every.first("p0", PROMPT, header)
            assert params is not None
            assert params["remote_engine_id"] == name
            assert (await every.second(name, PROMPT, 3, params, header)).alone is None
        for header in ("___decode_addr_elsewhere:1_" + 32 * "0", "___decode_addr_d2", "d2"):
            params = await every.first("p0", PROMPT, header)
            assert params is not None
            holder = params["remote_engine_id"]
            assert (await every.second(holder, PROMPT, 3, params, header)).alone is None
        await every.nothing_is_left()


@pytest.mark.parametrize("named", ["transfer_id", "header"])
async def test_both_legs_may_be_sent_at_once_and_the_attempt_goes_where_the_second_one_waits(
    named: str,
) -> None:
    async with engines(decode=3) as every:
        params = {"transfer_id": "xfer-1"} if named == "transfer_id" else {}
        header = "" if params else "req-1"
        second = asyncio.create_task(
            every.second("d2", PROMPT, 6, {"do_remote_prefill": True, **params}, header)
        )
        while not every.made.service.scheduler.handovers.waits_at(header or "xfer-1"):
            await asyncio.sleep(0.01)
        await every.first("p0", PROMPT, header, **params)
        assert await second == Answer(expected(PROMPT, 6), None)
        assert every.made.calls.decodes == ["d2"]
        await every.nothing_is_left()


async def test_a_second_leg_waits_for_a_first_leg_that_runs_however_long_it_takes() -> None:
    async with engines() as every:
        gate = every.made.calls.gates["prefill"] = asyncio.Event()
        first = asyncio.create_task(every.first("p0", PROMPT, "req-1"))
        await every.made.arrives("prefill")
        second = asyncio.create_task(every.second("d0", PROMPT, 6, {}, "req-1"))
        await asyncio.sleep(10 * SETTINGS.first_leg_timeout_s)
        gate.set()
        assert await first is not None
        assert (await second).alone is None
        await every.nothing_is_left()


async def test_a_second_leg_alone_is_computed_by_its_engine_after_a_limit() -> None:
    async with engines() as every:
        start_s = asyncio.get_running_loop().time()
        answer = await every.second("d0", PROMPT, 6, {}, "req-1")
        waited_s = asyncio.get_running_loop().time() - start_s
        assert isinstance(answer.alone, DeadlineError)
        assert "first leg 'req-1'" in str(answer.alone)
        assert waited_s < 2 * SETTINGS.first_leg_timeout_s
        nameless = await every.second("d0", PROMPT, 6, {"do_remote_prefill": True})
        assert isinstance(nameless.alone, BadRequestError)
        await every.nothing_is_left()


async def test_a_second_leg_that_never_comes_leaves_nothing_behind() -> None:
    async with engines() as every:
        params = await every.first("p0", PROMPT)
        assert params is not None
        assert len(every.made.service.scheduler.handovers) == 1
        assert not every.made.engines["d0"].idle()
        await asyncio.sleep(SETTINGS.second_leg_timeout_s + 1)
        await every.nothing_is_left()
        late = await every.second("d0", PROMPT, 6, params)
        assert isinstance(late.alone, DeadlineError)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_kv_of_a_second_leg_at_another_decode_engine_is_moved_there_or_the_leg_is_passed_on(
    at_once: bool, moves: bool
) -> None:
    async with engines(decode=2, settings=SETTINGS if moves else PASSING) as every:
        header = "req-1" if at_once else ""
        calls = every.made.calls
        gate = calls.gates["prefill"] = asyncio.Event()
        first = asyncio.create_task(every.first("p0", PROMPT, header, remote_engine_id="d0"))
        await every.made.arrives("prefill")
        decoding = calls.gates["decode"] = asyncio.Event()
        if at_once:
            second = asyncio.create_task(every.second("d1", PROMPT, 6, {}, header))
            await asyncio.sleep(0.5)
            gate.set()
        else:
            gate.set()
            params = await first
            assert params is not None
            second = asyncio.create_task(every.second("d1", PROMPT, 6, params))
        await every.made.arrives("decode")
        await every.made.delivered(every.made.engines["d0"])
        assert every.made.engines["d0"].idle() is moves, "a moved prompt has left it"
        decoding.set()
        assert await second == Answer(expected(PROMPT, 6), None)
        await first
        named = {
            name: [
                all(agent.metadata for agent in peer.agents)
                for peer in every.made.engines[name].named_peers()
                if peer.role is Role.DECODE
            ]
            for name in ("d0", "d1")
        }
        # It connects to the one that it reads from, which needs to know nothing of it.
        assert named == {"d0": [], "d1": [True] if moves else []}
        if moves:
            assert (every.passed_on, every.origins) == ([], ["; moved from d0"])
        else:
            assert (every.passed_on, every.origins) == ([("d1", "d0", "move_kv is off")], [""])
        assert calls.decodes == ["d1" if moves else "d0"]
        assert calls.prefills == ["p0"], "the prompt is prefilled once"
        await every.nothing_is_left()


async def test_a_turn_behind_a_moved_prompt_finds_what_both_decode_engines_have_stored() -> None:
    async with engines(decode=2) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        answer = await every.second("d1", PROMPT, 6, params)
        await every.nothing_is_left()
        assert set(keys_of(PROMPT)) <= every.made.stored
        turn = [*PROMPT, *answer.tokens, 5, 6, 7]
        again = await every.first("p0", turn, remote_engine_id="d0")
        assert again is not None
        assert again["remote_prefill_cached_tokens"] == 16
        assert (await every.second("d1", turn, 4, again)).tokens == expected(turn, 4)
        await every.nothing_is_left()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_moved_prompt_is_looked_up_as_its_former_decode_engine_may_not_have_stored_it(
    refused: bool,
) -> None:
    async with engines(decode=2) as every:
        for engine in every.made.engines.values():
            engine.reports_stored = True
        every.made.engines["d0"].is_refused = refused
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        await every.second("d1", PROMPT, 6, params)
        await every.nothing_is_left()
        await asyncio.sleep(1.0)
        again = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert again is not None
        assert again["remote_prefill_cached_tokens"] == (0 if refused else 16)
        assert (await every.second("d1", PROMPT, 6, again)).tokens == expected(PROMPT, 6)
        await every.nothing_is_left()


async def test_a_leg_is_passed_on_if_the_decode_engine_that_got_it_has_no_room_in_hbm() -> None:
    # The HBM of an engine holds one leg.
    async with engines(decode=2, hbm_tokens=300) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert await every.first("p0", [5, *PROMPT], remote_engine_id="d1") is not None
        assert params is not None
        assert (await every.second("d1", PROMPT, 6, params)).tokens == expected(PROMPT, 6)
        ((got, holder, note),) = every.passed_on
        assert (got, holder, "has no room now for" in note) == ("d1", "d0", True)
        assert not every.made.engines["d1"].fetched
        await asyncio.sleep(SETTINGS.second_leg_timeout_s + 1)
        await every.nothing_is_left()


async def test_a_leg_is_passed_on_if_the_buffer_of_the_decode_engine_that_got_it_is_full() -> None:
    async with engines(decode=2, buffer_blocks=5) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert await every.first("p0", PROMPT[1:], remote_engine_id="d1") is not None
        assert params is not None
        assert (await every.second("d1", PROMPT, 6, params)).tokens == expected(PROMPT, 6)
        ((got, holder, note),) = every.passed_on
        assert (got, holder, "1 of 5 blocks are free" in note) == ("d1", "d0", True)
        await asyncio.sleep(SETTINGS.second_leg_timeout_s + 1)
        await every.nothing_is_left()


async def test_kv_that_could_not_be_moved_is_not_moved_again() -> None:
    async with engines(decode=2) as every:
        every.made.engines["d1"].fetch_failure = "the link is down"
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        taking = every.legs["d1"].take
        handed = [await taking(leg_parameters(params), "") for _ in range(2)]
        notes = [one.note for one in handed if isinstance(one, HandedOver)]
        assert "the link is down" in notes[0]
        assert notes[1:] == ["a move of this KV has failed before"]
        assert len(every.made.engines["d1"].fetched) == 1
        assert every.made.engines["d1"].idle()
        assert (await every.second("d0", PROMPT, 6, params)).alone is None
        await every.nothing_is_left()


@pytest.mark.parametrize("lost", ["d0", "d1"])
async def test_a_decode_engine_that_is_lost_during_a_move_ends_it(lost: str) -> None:
    async with engines(decode=2) as every:
        second = await every.moving()
        await every.made.engines[lost].kill()
        every.made.lose(lost, certain=True)
        assert isinstance((await second).alone, EngineLostError)
        every.made.engines["d1"].fetches.set()
        await every.made.revive(lost)
        assert await every.again("d1", PROMPT, 6) == (
            expected(PROMPT, 6),
            "prefilled by p0 again, 16 hits",
        )
        await every.nothing_is_left()


async def test_kv_is_not_used_if_its_source_does_not_confirm_that_its_session_lasts() -> None:
    async with engines(decode=2) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        # From here on it may have ended its session, and its slots may have other owners.
        every.made.engines["d0"].unanswered.add(Sync)
        answer = await every.second("d1", PROMPT, 6, params)
        assert isinstance(answer.alone, EngineLostError)
        assert not every.made.calls.decodes
        every.made.engines["d0"].unanswered.clear()
        await every.nothing_is_left()


async def test_a_client_that_leaves_during_a_move_releases_both_decode_engines() -> None:
    async with engines(decode=2) as every:
        second = await every.moving()
        second.cancel()
        await asyncio.wait([second])
        every.made.engines["d1"].fetches.set()
        await every.nothing_is_left()


async def test_a_front_end_that_ends_during_a_move_releases_both_decode_engines() -> None:
    async with engines(decode=2) as every:
        second = await every.moving()
        assert len(every.made.service.scheduler.handovers) == 1
        await every.legs["d1"].stop()
        await asyncio.wait([second])
        await every.nothing_is_left()


async def test_an_attempt_that_is_passed_on_in_vain_is_released_at_once() -> None:
    async with engines(decode=2, settings=PASSING) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        handed = await every.legs["d1"].take(leg_parameters(params), "")
        assert isinstance(handed, HandedOver)
        assert handed.decode.engine_id == "d0"
        assert not every.made.engines["d0"].idle()
        every.legs["d1"].withdraw(handed, "d0 does not answer")
        await every.nothing_is_left()
        assert await every.again("d1", PROMPT, 6) == (
            expected(PROMPT, 6),
            "prefilled by p0 again, 16 hits",
        )
        placed = every.made.service.scheduler.dispatch.recent[-1].assignment
        assert placed is not None
        assert (placed.decode_engine, placed.de_reason) == ("d1", "given")
        await every.nothing_is_left()


async def test_an_attempt_that_its_engine_has_taken_is_not_withdrawn() -> None:
    async with engines(decode=2, settings=PASSING) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        handed = await every.legs["d1"].take(leg_parameters(params), "")
        assert isinstance(handed, HandedOver)
        gate = every.made.calls.gates["decode"] = asyncio.Event()
        passed = asyncio.create_task(every.second("d0", PROMPT, 6, params))
        await every.made.arrives("decode")
        every.legs["d1"].withdraw(handed, "d0 does not answer d1")
        await asyncio.sleep(1)
        gate.set()
        assert await passed == Answer(expected(PROMPT, 6), None)
        await every.nothing_is_left()


async def test_a_client_that_leaves_while_its_leg_is_looked_for_releases_it_at_any_engine() -> None:
    for decode in ("d0", "d1"):
        async with engines(decode=2) as every:
            gate = every.made.calls.gates["prefill"] = asyncio.Event()
            given = {"transfer_id": "x", "remote_engine_id": "d0"}
            first = asyncio.create_task(every.first("p0", PROMPT, **given))
            await every.made.arrives("prefill")
            taking = every.legs[decode].take(leg_parameters({"transfer_id": "x"}), "")
            second = asyncio.create_task(taking)
            await asyncio.sleep(0.5)
            second.cancel()
            await asyncio.wait([second])
            gate.set()
            await first
            await every.nothing_is_left()


async def test_a_leg_that_its_engine_computes_without_kv_releases_the_kv_at_any_engine() -> None:
    for decode in ("d0", "d1"):
        async with engines(decode=2) as every:
            params = await every.first("p0", PROMPT, remote_engine_id="d0")
            assert params is not None
            await every.legs[decode].release(leg_parameters(params), "", "n is 2")
            await every.nothing_is_left()
            await every.legs[decode].release(leg_parameters(params), "", "n is 2, once more")


async def test_a_first_leg_whose_client_leaves_as_its_kv_is_offered_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engines() as every:
        handovers = every.made.service.scheduler.handovers
        offer, firsts = handovers.offer, list[asyncio.Task[Any]]()

        def cancelling(name: str, offered: Any) -> None:
            offer(name, offered)
            firsts[0].cancel()

        monkeypatch.setattr(handovers, "offer", cancelling)
        firsts.append(asyncio.create_task(every.first("p0", PROMPT)))
        await asyncio.wait(firsts)
        assert firsts[0].cancelled()
        await every.nothing_is_left()


async def test_a_leg_reserves_hbm_for_as_many_tokens_as_the_context_has_room_for() -> None:
    # 20 tokens hold the prompt, and fewer than the 256 that a leg expects behind it.
    async with engines(hbm_tokens=20) as every:
        answer = await every.both("p0", "d0", PROMPT, 3)
        assert answer == Answer(expected(PROMPT, 3), None)
        await every.nothing_is_left()


async def test_a_decode_engine_notices_that_the_one_with_the_kv_is_lost() -> None:
    async with engines(decode=2, settings=PASSING) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        handed = await every.legs["d1"].take(leg_parameters(params), "")
        assert isinstance(handed, HandedOver)
        lost = asyncio.create_task(every.legs["d1"].until_lost(handed.decode))
        await asyncio.sleep(2 * REGISTERED_AGAIN_S)
        assert not lost.done()
        await every.made.engines["d0"].kill()
        every.made.lose("d0", certain=True)
        await lost
        await every.made.revive("d0")
        await every.nothing_is_left()


async def test_an_engine_that_is_lost_twice_counts_as_lost_although_it_registers_again() -> None:
    async with engines() as every:
        legs, link = every.legs["d0"], every.legs["d0"]._link
        await link.wait_for_engines(1, 1, LIMIT_S)
        with legs.own_call() as call:
            assert call is not None
            assert call.engine.engine_id == "d0"
            stalls = asyncio.create_task(legs.stalls(call))
            for number in range(2):
                await asyncio.sleep(2 * REGISTERED_AGAIN_S)
                assert link.engines.live("d0", call.engine.epoch) is not None
                assert not stalls.done(), f"lost {number} times"
                every.made.lose("d0")
            call.heard()
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(EngineLostError, match="d0 is lost and has sent nothing for 20 s"):
                await stalls
            assert asyncio.get_running_loop().time() - began_s >= 20 - 1
        await asyncio.sleep(2 * REGISTERED_AGAIN_S)
        await every.nothing_is_left()


async def test_a_server_of_legs_without_a_scheduler_watches_no_call_of_its_own() -> None:
    async with engines() as every:
        with every.open("d7", Role.DECODE).own_call() as call:
            assert call is None


async def test_legs_load_only_as_much_as_they_may() -> None:
    async with engines(decode=2) as every:
        await every.both("p0", "d0", PROMPT, 6)
        loaded = []
        for tokens in (0, 9, 1000):
            params = await every.first("p0", PROMPT, max_load_tokens=tokens)
            assert params is not None
            loaded.append(params["remote_prefill_cached_tokens"])
            decode = params["remote_engine_id"]
            assert await every.second(decode, PROMPT, 6, params) == (expected(PROMPT, 6), None)
        assert loaded == [0, 8, 16]
        again = await every.again("d1", PROMPT, 6, max_load_tokens=5)
        assert again == (expected(PROMPT, 6), "prefilled by p0 again, 4 hits")
        await every.nothing_is_left()


async def test_a_decode_engine_without_room_has_nothing_prefilled_elsewhere() -> None:
    async with engines(hbm_tokens=16) as every:
        with pytest.raises(BadRequestError):
            await every.again("d0", PROMPT, 6)
        await every.nothing_is_left()
    async with engines(hbm_tokens=300) as every:
        params = await every.first("p0", PROMPT)
        assert params is not None
        with pytest.raises(EngineLostError, match="no room"):
            await every.again("d0", PROMPT, 6)
        assert (await every.second("d0", PROMPT, 6, params)).alone is None
        await every.nothing_is_left()


async def test_a_prefill_elsewhere_that_fails_releases_everything() -> None:
    async with engines() as every:
        every.made.calls.errors.append(EngineLostError("p0 does not answer"))
        with pytest.raises(EngineLostError, match="p0 does not answer"):
            await every.again("d0", PROMPT, 6)
        gate = every.made.calls.gates["prefill"] = asyncio.Event()
        left = asyncio.create_task(every.again("d0", PROMPT, 6))
        await every.made.arrives("prefill")
        left.cancel()
        await asyncio.wait([left])
        gate.set()
        await every.nothing_is_left()


async def test_a_decode_engine_that_dies_between_the_legs_takes_the_offer_with_it() -> None:
    async with engines(decode=2) as every:
        params = await every.first("p0", PROMPT, remote_engine_id="d0")
        assert params is not None
        await every.made.engines["d0"].kill()
        every.made.lose("d0", certain=True)
        assert (await every.second("d1", PROMPT, 6, params)).alone is not None
        await every.made.revive("d0")
        await every.nothing_is_left()


async def test_an_offer_outlives_the_front_end_that_has_made_it() -> None:
    async with engines() as every:
        params = await every.first("p0", PROMPT)
        assert params is not None
        await every.legs["p0"].stop()
        assert (await every.second("d0", PROMPT, 6, params)).alone is None
        await every.nothing_is_left()


async def test_a_front_end_that_ends_releases_its_first_leg_and_its_second_leg() -> None:
    for stage, engine_id in (("prefill", "p0"), ("decode", "d0")):
        async with engines() as every:
            gate = every.made.calls.gates[stage] = asyncio.Event()
            both = asyncio.create_task(every.both("p0", "d0", PROMPT, 6))
            await every.made.arrives(stage)
            await every.legs[engine_id].stop()
            both.cancel()
            gate.set()
            await asyncio.wait([both])
            await every.nothing_is_left()


async def test_a_client_that_leaves_ends_its_leg_wherever_it_is() -> None:
    async with engines() as every:
        gate = every.made.calls.gates["prefill"] = asyncio.Event()
        first = asyncio.create_task(every.first("p0", PROMPT, "req-1"))
        await every.made.arrives("prefill")
        first.cancel()
        await asyncio.wait([first])
        gate.set()
        await every.nothing_is_left()

        gate.clear()
        first = asyncio.create_task(every.first("p0", PROMPT, "req-2"))
        second = asyncio.create_task(every.second("d0", PROMPT, 6, {}, "req-2"))
        await asyncio.sleep(0.5)
        second.cancel()
        await asyncio.wait([second])
        gate.set()
        await first
        await asyncio.sleep(1)
        await every.nothing_is_left()


async def test_a_prefill_engine_that_dies_ends_the_first_leg_with_an_error() -> None:
    async with engines() as every:
        every.made.calls.gates["prefill"] = asyncio.Event()
        first = asyncio.create_task(every.first("p0", PROMPT))
        await every.made.arrives("prefill")
        await every.made.engines["p0"].kill()
        every.made.lose("p0", certain=True)
        with pytest.raises(EngineLostError, match="p0"):
            await first
        every.made.calls.gates.clear()
        await every.made.revive("p0")
        await every.nothing_is_left()


async def test_a_first_leg_that_waits_while_no_decode_engine_lives_ends_after_a_limit() -> None:
    async with engines(hbm_tokens=300) as every:
        params = await every.first("p0", PROMPT)  # the HBM of the decode engine holds one leg
        waits = asyncio.create_task(every.first("p0", [5, *PROMPT]))
        waiting = lambda: every.made.service.scheduler.dispatch.waiting  # noqa: E731
        await every.made.service.arrivals.until(lambda: waiting() == 1, LIMIT_S)
        await every.made.engines["d0"].kill()
        every.made.lose("d0")
        clock = asyncio.get_running_loop().time
        since_s = clock()
        with pytest.raises(EngineLostError, match="0 of 1 decode"):
            await waits
        assert clock() - since_s == pytest.approx(SETTINGS.engine_wait_s, abs=1.0)
        assert params is not None


async def test_a_prefill_engine_that_the_scheduler_does_not_know_gets_no_leg() -> None:
    async with engines() as every:
        every.open("p7", Role.PREFILL)
        with pytest.raises(EngineLostError, match=r"p7.*not in the cluster"):
            await every.first("p7", PROMPT)
        await every.nothing_is_left()


async def test_kv_that_does_not_arrive_ends_the_first_leg_with_the_reason() -> None:
    async with engines() as every:
        every.made.calls.send_failure = "link down"
        every.made.calls.gives_up_once = "abort"
        with pytest.raises(TransportError, match="link down"):
            await every.first("p0", PROMPT)
        # A second report would be taken for that of the next request.
        assert sum(isinstance(m, PrefillDone) for m in every.made.service.arrivals.messages) == 1
        await every.nothing_is_left()


async def test_an_answer_of_the_engine_without_tokens_is_not_offered() -> None:
    async with engines() as every:
        every.made.calls.gives_up_once = "error"
        assert await every.first("p0", PROMPT) is None
        await every.nothing_is_left()


async def test_the_later_of_two_second_legs_of_one_name_is_refused() -> None:
    async with engines() as every:
        first = asyncio.create_task(every.second("d0", PROMPT, 6, {}, "req-1"))
        await asyncio.sleep(0.1)
        other = await every.second("d0", PROMPT, 6, {}, "req-1")
        assert isinstance(other.alone, BadRequestError)
        assert await every.first("p0", PROMPT, "req-1") is not None
        assert (await first).alone is None
        await every.nothing_is_left()


async def test_requests_whose_names_are_equal_get_their_own_kv() -> None:
    async with engines() as every:
        prompts = [PROMPT, [*PROMPT, 99], [98, *PROMPT]]
        # A proxy passes the X-Request-Id of its client on, who sends the same one every time.
        answered = [await every.first("p0", prompt, "the-agent") for prompt in prompts]
        assert len(every.made.service.scheduler.handovers) == len(prompts)
        for prompt, params in zip(prompts, answered, strict=True):
            assert params is not None
            answer = await every.second("d0", prompt, 4, params, "the-agent")
            assert answer == Answer(expected(prompt, 4), None)
        assert every.made.calls.prefills == ["p0"] * len(prompts)
        await every.nothing_is_left()


async def test_a_first_leg_that_is_sent_again_replaces_the_former_one() -> None:
    async with engines() as every:
        assert await every.first("p0", PROMPT, "req-1") is not None
        params = await every.first("p0", PROMPT, "req-1")
        assert params is not None
        assert len(every.made.service.scheduler.handovers) == 1
        assert (await every.second("d0", PROMPT, 6, params)).alone is None
        await every.nothing_is_left()


async def test_a_prompt_that_no_decode_engine_can_hold_is_refused() -> None:
    async with engines(buffer_blocks=4) as every:
        with pytest.raises(PromptTooLongError, match="5 blocks"):
            await every.first("p0", PROMPT)
        await every.nothing_is_left()


async def test_many_requests_over_links_that_are_slow_and_reset() -> None:
    chance = random.Random(3)
    network = ControlNetwork(lambda: chance.choice((0.0, 0.01, 0.2)))
    async with engines(2, 2, network) as every:

        async def one(number: int) -> None:
            prompt = [number + 1, *PROMPT[number:]]
            name = f"d{number % 2}"
            header = f"req-{number}"
            if number % 3:
                params = await every.first(f"p{number % 2}", prompt, header, remote_engine_id=name)
                assert params is not None
                answer = await every.second(name, prompt, 6, params)
            else:
                _, answer = await asyncio.gather(
                    every.first(f"p{number % 2}", prompt, header),
                    every.second(name, prompt, 6, {}, header),
                )
            assert answer.tokens == expected(prompt, 6)

        runs = [asyncio.create_task(one(number)) for number in range(12)]
        for number in range(10):
            await asyncio.sleep(0.3)
            connection = list(every.legs.values())[number % 4]._link._connection
            connection.reset()  # type: ignore[attr-defined]
        await asyncio.gather(*runs)
        await asyncio.sleep(SETTINGS.second_leg_timeout_s)
        await every.nothing_is_left()


@pytest.mark.parametrize("seed", range(24))
async def test_faults_at_any_moment_cost_single_requests_and_leave_nothing_behind(
    seed: int,
) -> None:
    """Engines die, front ends end, connections are reset, clients leave, legs never come."""
    chance = random.Random(seed)
    network = ControlNetwork(lambda: chance.choice((0.0, 0.005, 0.1)))
    async with engines(2, 2, network) as every:
        calls = every.made.calls
        calls.gate_after_tokens = 2

        async def pause() -> None:
            await asyncio.sleep(chance.choice((0.0, 0.01, 0.3)))

        calls.pause = pause
        answers: list[tuple[list[int], list[int]]] = []

        async def one(number: int) -> None:
            prompt = [number + 1, *PROMPT[number % 9 :]]
            prefill, decode = f"p{chance.randrange(2)}", f"d{chance.randrange(2)}"
            header, kind = f"req-{number}", chance.choice(("in turn", "at once", "half", "other"))
            hint = {} if kind == "other" else {"remote_engine_id": decode}
            if kind in ("in turn", "half") and number % 2:
                header = "the-agent"  # A client's, that its proxy passes on.
            if kind == "at once":
                first = asyncio.create_task(every.first(prefill, prompt, header))
                await asyncio.sleep(chance.choice((0.0, 0.05)))
                answer = await every.second(decode, prompt, 6, {}, header)
                await asyncio.wait([first])
                first.exception()
            else:
                params = await every.first(prefill, prompt, header, **hint)
                if kind == "half" or params is None:
                    return
                answer = await every.second(decode, prompt, 6, params)
            tokens = answer.tokens
            if answer.alone is not None:
                tokens, _ = await every.again(decode, prompt, 6)
            answers.append((tokens, expected(prompt, 6)))

        async def fault() -> None:
            name = chance.choice(("p0", "p1", "d0", "d1"))
            kind = chance.choice(("engine", "front end", "reset", "reset"))
            if kind == "engine":
                await every.made.engines[name].kill()
                every.made.lose(name, certain=True)
                await asyncio.sleep(chance.choice((0.0, 0.5)))
                await every.made.revive(name)
            if kind in ("engine", "front end"):
                ended = every.legs[name]
                every.open(name, ended.role)
                await ended.stop()
            else:
                every.legs[name]._link._connection.reset()  # type: ignore[attr-defined]

        runs = []
        for number in range(16):
            runs.append(asyncio.create_task(one(number)))
            await asyncio.sleep(chance.choice((0.0, 0.02, 0.2)))
            if chance.random() < 0.4:
                await fault()
            if chance.random() < 0.15:
                chance.choice(runs).cancel()
        await asyncio.wait(runs)
        for run in runs:
            error = None if run.cancelled() else run.exception()
            assert error is None or isinstance(error, DualPathError), error
        assert all(tokens == truth for tokens, truth in answers)
        await asyncio.sleep(SETTINGS.second_leg_timeout_s + 1)
        await every.nothing_is_left()


def test_names_of_both_legs() -> None:
    both = leg_parameters({"remote_request_id": "a", "transfer_id": "b"})
    assert handover_name(both, "c") == "a"
    assert handover_name(leg_parameters({"transfer_id": "b"}), "c") == "b"
    assert handover_name(leg_parameters(None), "c") == "c"
    assert handover_name(leg_parameters({}), "") == ""
    forged = handover_name(leg_parameters({}), "a\nb")
    assert "\n" not in forged
    assert handover_name(leg_parameters({}), "x" * 1000) != handover_name(leg_parameters({}), "x")
    with pytest.raises(BadRequestError, match="do_remote_decode"):
        leg_parameters({"do_remote_decode": "perhaps"})
