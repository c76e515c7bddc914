"""The replay client against a small server that streams exactly as vLLM 0.32 does."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.unit.workload_server import (
    BLOCK_TOKENS,
    VOCABULARY,
    FakeServer,
    Recorder,
    TickingClock,
    agent,
    run,
    stream,
)

from dualpath.core.errors import ConfigError, EngineLostError
from dualpath.core.names import name_problem
from dualpath.core.request import Round, Trajectory
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn, SubAgent
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.replay.client import ReplayOptions, replay, sent_name
from dualpath.workload.replay.report import compare
from dualpath.workload.replay.result import Isolation, ReplayResult, SentHints, ToolDelays


def test_every_prompt_is_sent_and_generated_tokens_plus_the_append():
    server = FakeServer()

    result = run(server, [agent("a", (10, 3), (5, 2), (7, 4))])

    first, second, third = (body["prompt"] for body in server.bodies)
    assert [len(first), len(second), len(third)] == [10, 18, 27]
    answer = [(sum(first) + i) % VOCABULARY for i in range(3)]
    assert second[:13] == first + answer
    assert third[:18] == second
    assert not result.failed


def test_the_request_asks_for_exactly_the_recorded_tokens_in_vllms_own_fields():
    server = FakeServer()

    run(server, [agent("a", (10, 3))])

    body = server.bodies[0]
    assert body.pop("prompt")
    assert len(body.pop("cache_salt")) == 32
    assert body == {
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


def test_times_follow_from_the_arrival_of_the_tokens():
    # The clock ticks at: run start, agent start, sent, then once per chunk with tokens.
    turn = run(FakeServer(), [agent("a", (10, 5))]).turns[0]

    assert (turn.ttft_s, turn.ttst_s, turn.tpot_s, turn.latency_s) == (1.0, 1.0, 1.0, 5.0)
    assert turn.start_s == 2.0


def test_one_and_two_token_turns_have_no_later_gaps():
    one, two = run(FakeServer(), [agent("a", (10, 1), (3, 2))]).turns

    assert (one.ttft_s, one.ttst_s, one.tpot_s) == (1.0, None, None)
    assert (two.ttft_s, two.ttst_s, two.tpot_s) == (1.0, 1.0, None)


def test_actual_hits_equal_ideal_hits_with_an_unlimited_store():
    rounds = [(10, 3), (5, 2), (1, 6), (9, 1)]

    result = run(FakeServer(), [agent("a", *rounds), agent("b", *rounds)])

    assert [t.hit_tokens for t in result.turns] == [t.ideal_hit_tokens for t in result.turns]
    assert result.summary.hit_rate == result.summary.ideal_hit_rate
    assert result.summary.hit_tokens == sum(t.ideal_hit_tokens for t in result.turns) > 0


def test_an_edited_context_hits_only_its_retained_prefix():
    session = TokenSession(
        Trajectory("a", (Round(16, 4), Round(8, 2), Round(3, 2))), (None, 9, None)
    )
    server = FakeServer()

    result = run(server, [session])

    assert server.bodies[1]["prompt"][:9] == server.bodies[0]["prompt"][:9]
    assert [t.ideal_hit_tokens for t in result.turns] == [0, 8, 16]
    assert [t.hit_tokens for t in result.turns] == [0, 8, 16]
    assert [t.context_tokens for t in result.turns] == [0, 9, 19]


def test_server_facts_and_counter_differences_are_reported():
    result = run(FakeServer(), [agent("a", (8, 5), (4, 4))])

    assert (result.setting.mode, result.setting.mode_note) == ("dualpath", "a note")
    assert result.setting.snic_bytes_per_s == 1e8
    assert result.setting.block_tokens == BLOCK_TOKENS
    assert result.server is not None
    assert result.server.hit_tokens == 12
    assert result.server.path_bytes == {"pe_path": 120}
    assert result.server.snic_read_bytes == {"pe-0": 0}
    assert result.server.recomputed_tokens is None


def test_a_plain_vllm_endpoint_leaves_unknown_fields_empty():
    result = run(FakeServer(status=False, details=False), [agent("a", (8, 4), (4, 4))])

    assert result.server is None
    assert result.setting.mode is None
    assert result.setting.block_tokens == 64
    assert result.summary.hit_tokens is None
    assert not result.failed


def test_random_tokens_are_in_the_vocabulary_that_the_server_reports():
    server = FakeServer()

    run(server, [agent("a", (300, 1))])

    prompt = server.bodies[0]["prompt"]
    assert min(prompt) >= VOCABULARY // 2
    assert max(prompt) < VOCABULARY


def test_isolation_separates_sessions_or_runs_or_nothing():
    sessions = [agent("a", (8, 1)), agent("b", (8, 1))]
    salts = {}
    for isolation in Isolation:
        server = FakeServer()
        run(server, sessions, isolation=isolation, run_id="r")
        salts[isolation] = [body.get("cache_salt") for body in server.bodies]

    assert len(set(salts[Isolation.SESSION])) == 2
    assert salts[Isolation.RUN] == ["r", "r"]
    assert salts[Isolation.NONE] == [None, None]


def test_recorded_tool_delays_are_awaited_only_on_request():
    sessions = [agent("a", (8, 1), (4, 1), delay_s=2.5)]
    without, with_delays = TickingClock(), TickingClock()

    run(FakeServer(), sessions, without)
    run(FakeServer(), sessions, with_delays, tool_delays=ToolDelays.RECORDED)

    assert without.slept_s == []
    assert with_delays.slept_s == [2.5, 2.5]


@pytest.mark.parametrize("given", SentHints)
def test_agents_send_session_hints_only_on_request(given: SentHints):
    server, sessions = FakeServer(), [agent("a/1", (8, 1), (4, 1), delay_s=2.5)]

    run(
        server,
        sessions,
        tool_delays=ToolDelays.RECORDED,
        isolation=Isolation.RUN,
        run_id="r",
        session_hints=given,
    )

    named = given is not SentHints.NONE
    assert [body.get("session_id") for body in server.bodies] == ["a/1" if named else None] * 2
    pauses = [("POST", "a/1", {"next_turn_s": 2.5, "cache_salt": "r"})] * 2
    end = [("DELETE", "a/1", {"cache_salt": "r"})]
    assert server.hints == (pauses if given is SentHints.PAUSES else []) + (end if named else [])


def test_an_endpoint_without_session_hints_serves_agents_that_send_them():
    server = FakeServer(status=False)
    result = run(server, [agent("a", (8, 1), (4, 1))], session_hints=SentHints.NAMES)
    assert result.summary.turns_failed == 0
    assert server.hints == []


def test_poisson_arrivals_are_seeded_and_spread():
    sessions = [agent(name, (8, 1)) for name in "abc"]
    starts = []
    for seed in (1, 1, 2):
        clock = TickingClock()
        run(FakeServer(), sessions, clock, agents_per_s=0.5, seed=seed)
        starts.append(clock.slept_s)

    assert starts[0] == starts[1] != starts[2]
    assert starts[0] == sorted(starts[0])
    assert len(starts[0]) == 3


def test_additional_agents_repeat_a_trajectory_after_a_synthetic_round():
    server = FakeServer()

    result = run(server, [agent("a", (8, 2), (4, 2))], agents=2)

    by_session = {name: [t for t in result.turns if t.session_id == name] for name in ("a", "a+1")}
    assert [t.prompt_tokens for t in by_session["a"]] == [8, 14]
    assert [t.prompt_tokens for t in by_session["a+1"]] == [64, 73, 79]
    assert [t.generated_tokens for t in by_session["a+1"]] == [1, 2, 2]
    assert by_session["a+1"][1].hit_tokens == by_session["a+1"][1].ideal_hit_tokens == 64


def test_the_served_context_limit_cuts_the_trajectory():
    result = run(FakeServer(), [agent("a", (4000, 90), (3, 50), (3, 5))])

    assert [t.generated_tokens for t in result.turns] == [90, 3]
    assert result.summary.sessions_truncated == 1
    assert not result.failed


def test_a_first_prompt_beyond_the_limit_is_counted_not_hidden():
    result = run(FakeServer(), [agent("a", (5000, 1)), agent("b", (8, 1))])

    assert result.summary.sessions_without_turn == 1
    assert result.summary.turns == 1


def test_a_failed_turn_ends_only_its_agent_and_has_the_servers_message():
    async def refuse_long(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if len(body["prompt"]) < 20:
            return None
        error = {"message": "too long for me", "type": "BadRequestError", "code": 400}
        return web.json_response({"error": error}, status=400)

    server = FakeServer(fault=refuse_long)
    result = run(server, [agent("a", (10, 2), (10, 2), (10, 2)), agent("b", (4, 2), (4, 2))])

    assert result.failed
    assert (result.summary.turns_failed, result.summary.sessions_failed) == (1, 1)
    assert [t.error is None for t in result.turns if t.session_id == "b"] == [True, True]
    failed = next(t for t in result.turns if t.error)
    assert "HTTP 400: too long for me" in str(failed.error)
    assert len([t for t in result.turns if t.session_id == "a"]) == 2


TOKEN = {"choices": [{"index": 0, "text": "x", "token_ids": [1]}]}


@pytest.mark.parametrize(
    ("chunks", "done", "message"),
    [
        ([TOKEN, {"error": {"message": "engine died", "code": 500}}], True, "engine died"),
        ([TOKEN], True, "1 of 3 tokens were generated"),
        ([TOKEN], False, "ended after 1 tokens without"),
        ([{"choices": [{"index": 0, "text": "x"}]}], True, "return_token_ids"),
        ([TOKEN, {"choices": 3}], True, "unreadable chunk"),
    ],
)
def test_a_broken_stream_is_a_failed_turn(chunks: list[dict[str, Any]], done: bool, message: str):
    async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, chunks, done)

    result = run(FakeServer(fault=broken), [agent("a", (10, 3))])

    assert message in str(result.turns[0].error)
    assert result.failed


def test_a_connection_closed_in_mid_stream_is_a_failed_turn():
    async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"index": 0, "token_ids": [1]}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    result = run(FakeServer(fault=cut), [agent("a", (10, 3))])

    assert "connection failed" in str(result.turns[0].error)


def test_a_silent_server_exceeds_the_read_timeout():
    async def silent(request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    result = run(FakeServer(fault=silent), [agent("a", (10, 3))], read_timeout_s=0.05)

    assert "read timeout" in str(result.turns[0].error)


def test_a_missing_server_is_reported_at_once():
    with pytest.raises(EngineLostError, match="check that the server is running"):
        asyncio.run(replay([agent("a", (8, 1))], "http://127.0.0.1:9", ReplayOptions()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "other"}, "'other' is not served.*it serves tiny"),
        ({"agents": 0}, "agents is 0"),
        ({"agents_per_s": -1.0}, "agents_per_s is -1"),
        ({"scale_append": 0.0}, "scale_append is 0"),
        ({"max_turns": -2}, "max_turns is -2"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"block_tokens": -1}, "block_tokens is -1"),
        ({"read_timeout_s": 0.0}, "read_timeout_s is 0"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_sent(
    options: dict[str, Any], message: str
):
    server = FakeServer()

    with pytest.raises(ConfigError, match=message):
        run(server, [agent("a", (8, 1))], **options)
    assert server.bodies == []


def test_progress_counts_turns_agents_and_hits():
    recorder = Recorder()

    async def whole() -> None:
        async with FakeServer().running() as endpoint:
            await replay(
                [agent("a", (8, 5), (3, 4))],
                endpoint,
                ReplayOptions(),
                progress=recorder,
                clock=TickingClock(),
            )

    asyncio.run(whole())

    last = recorder.states[-1]
    assert (last.turns_done, last.turns_total) == (2, 2)
    assert (last.sessions_done, last.sessions_total) == (1, 1)
    assert (last.prompt_tokens, last.hit_tokens) == (24, 12)
    assert "hit 50.0%" in last.line("dualpath")


def test_equal_seeds_give_equal_runs():
    sessions = [agent("a", (8, 4), (4, 4))]
    runs = [run(FakeServer(), sessions, seed=seed) for seed in (3, 3, 4)]

    digests = [[t.generated_digest for t in result.turns] for result in runs]
    assert digests[0] == digests[1] != digests[2]


def test_a_server_that_dies_after_the_run_costs_only_its_counters(
    caplog: pytest.LogCaptureFixture,
):
    class Dying(FakeServer):
        asked = 0

        async def status(self, request: web.Request) -> web.Response:
            self.asked += 1
            return await super().status(request) if self.asked == 1 else web.Response(status=500)

    result = run(Dying(), [agent("a", (8, 2))])

    assert result.server is None
    assert result.summary.turns == 1
    assert "counters after the run are missing" in caplog.text


def test_sub_agents_run_in_parallel_to_their_parent_and_count_for_its_session():
    helper = BlockSession("w/h", 4, (BlockTurn(8, 2, ((1, 1), (9, 9))),), (), "w")
    session = BlockSession(
        "w",
        4,
        (BlockTurn(8, 3, ((1, 2),)), BlockTurn(16, 1, ((1, 4),))),
        (SubAgent(0, helper),),
    )

    result = run(FakeServer(), [session])

    by_conversation = {turn.conversation_id: turn for turn in result.turns}
    assert set(by_conversation) == {"w", "w/h"}
    assert {turn.session_id for turn in result.turns} == {"w"}
    assert by_conversation["w/h"].hit_tokens == 4
    assert by_conversation["w"].hit_tokens == by_conversation["w"].ideal_hit_tokens == 8
    assert (result.summary.sessions, result.summary.turns) == (1, 3)


async def _interrupted(*, partial: bool) -> ReplayResult:
    """Cancel a replay whose first turn has ended and whose second one gets no answer."""
    asked = asyncio.Event()

    async def silent_after_the_first(request: web.Request, body: dict[str, Any]) -> None:
        if len(server.bodies) > 1:
            asked.set()
            await asyncio.Event().wait()

    server = FakeServer(fault=silent_after_the_first)
    async with server.running() as endpoint:
        sessions = [agent("a", (10, 3), (5, 2))]
        running = asyncio.create_task(replay(sessions, endpoint, ReplayOptions(), partial=partial))
        await asked.wait()
        running.cancel()
        return await running


async def test_an_interrupted_replay_returns_the_turns_that_have_ended():
    result = await _interrupted(partial=True)
    assert (result.interrupted, result.summary.turns, result.summary.turns_failed) == (True, 1, 0)
    assert result.summary.jct_s > 0
    assert result.server is not None
    assert any("interrupted" in line for line in compare([result]).warnings)


async def test_a_cancelled_replay_ends_unless_what_it_has_is_wanted():
    with pytest.raises(asyncio.CancelledError):
        await _interrupted(partial=False)


def test_counters_come_from_the_scheduler_where_front_ends_serve(
    caplog: pytest.LogCaptureFixture,
):
    class FrontEnd(FakeServer):
        async def status(self, request: web.Request) -> web.Response:
            return web.json_response({"front_end": "f0", "mode": "dualpath"})

    front_end, scheduler = FrontEnd(), FakeServer()

    async def play(*, cluster: bool) -> ReplayResult:
        async with front_end.running() as endpoint, scheduler.running() as counters:
            own = counters if cluster else ""
            sessions = [agent("a", (8, 2))]
            return await replay(sessions, endpoint, ReplayOptions(), cluster_endpoint=own)

    assert "--cluster-endpoint" not in caplog.text
    result = asyncio.run(play(cluster=True))
    assert result.server is not None
    assert result.server.path_bytes == {"pe_path": 0}
    assert "--cluster-endpoint" not in caplog.text
    asyncio.run(play(cluster=False))
    assert "give the scheduler's HTTP address" in caplog.text
    assert "--cluster-endpoint" in caplog.text


@pytest.mark.parametrize(
    "name", ["a/1", "x" * 300, "a\nb", "..", ".", "", "half \ud800", "\u202ebackwards"]
)
def test_a_session_of_any_name_gets_one_that_a_router_takes(name: str):
    sent = sent_name(name)
    assert name_problem(sent) is None
    assert sent not in ("", ".", "..")
    assert sent == sent_name(name) != sent_name(f"{name}2")
    assert (sent == name) == (name == "a/1")
