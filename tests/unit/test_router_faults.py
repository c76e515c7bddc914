"""Engines die, reads hang, clients leave: the request goes on or ends cleanly."""

import asyncio
import contextlib

import pytest
from tests.control_network import ControlNetwork
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import GUARD_S, expected, job, keys_of

from dualpath.core import control
from dualpath.core import control as request_messages
from dualpath.core.cluster import Role
from dualpath.core.control import Message
from dualpath.core.errors import (
    BadRequestError,
    DeadlineError,
    EngineLostError,
    PromptTooLongError,
    TransportError,
)
from dualpath.core.sessions import ROUTER_TIMEOUT_S
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(100, 118))
#: What makes an engine suspicious is not that it is silent.
PATIENT = RouterSettings(engine_timeout_s=GUARD_S)

#: No block of it is a hit of ``PROMPT``.
OTHER_PROMPT = list(range(500, 518))


def releases(made: Cluster, engine_id: str) -> list[request_messages.Release]:
    return [m for m in made.engines[engine_id].received if isinstance(m, request_messages.Release)]


async def test_a_pe_lost_in_prefill_is_replaced_by_another():
    async with cluster(prefill=2) as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        (lost,) = made.calls.prefills
        await made.service.saw(control.Report, 2)  # none is left that would look like life
        await made.engines[lost].kill()  # its silence is noticed after the failed call
        made.calls.gates["prefill"].set()
        assert await run == expected(PROMPT, 6)
        assert made.calls.prefills == [lost, "p1" if lost == "p0" else "p0"]
        assert made.service.status()["counters"]["retries"] == 1
        first, *_ = releases(made, "d0")
        assert (first.request_id, first.writer_certain) == ("a", False)
        assert "a" in made.engines["d0"].quarantined
        await made.revive(lost)  # a new epoch proves the old process dead
        await made.settled("d0")


async def test_a_de_lost_after_its_last_token_costs_nothing():
    async with cluster() as made:
        made.engines["d0"].tokens_come_first = True  # it has not reported the KV in its HBM
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        made.lose("d0", certain=True)
        assert made.service.status()["counters"]["retries"] == 0
        await made.settled("p0")
        assert made.service.scheduler.releases.held == 0


async def test_a_deregistered_pe_leaves_nothing_in_quarantine():
    async with cluster(prefill=2) as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        (lost,) = made.calls.prefills
        made.engines[lost].send(control.Deregister(reason="test"))
        other = "p1" if lost == "p0" else "p0"
        await made.engines[other].saw(control.PeerUp)
        made.calls.gates["prefill"].set()
        assert await run == expected(PROMPT, 6)
        assert all(release.writer_certain for release in releases(made, "d0"))
        await made.settled("d0", other)


@pytest.mark.parametrize("decoded", [1, 3])
async def test_a_de_lost_while_decoding_is_replaced_and_the_stream_goes_on(decoded):
    async with cluster(decode=2) as made:
        made.calls.gates["decode"], made.calls.gate_after_tokens = asyncio.Event(), decoded
        run = asyncio.create_task(made.events(job("a", PROMPT, max_new_tokens=8)))
        await made.arrives("decode")
        (lost,) = made.calls.decodes
        await made.engines[lost].saw(request_messages.Persist)
        await made.engines[lost].kill()
        made.calls.gate_after_tokens = 0
        made.calls.gates["decode"].set()
        made.lose(lost)
        events = await run
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 8)
        assert [e.cached_tokens is not None for e in events] == [True] + [False] * 7
        assert made.calls.transfers[1].prompt_tokens == len(PROMPT) + 1 + decoded
        assert made.calls.transfers[1].hit_blocks == len(PROMPT) // 4  # persisted by attempt 1
        await made.settled("p0")


async def test_a_prompt_that_has_outgrown_every_buffer_is_refused_at_once():
    async with cluster(decode=2, buffer_blocks=5) as made:  # 20 tokens; PROMPT has 18
        made.calls.gates["decode"], made.calls.gate_after_tokens = asyncio.Event(), 3
        run = asyncio.create_task(made.run(job("a", PROMPT, max_new_tokens=8)))
        await made.arrives("decode")
        (lost,) = made.calls.decodes
        made.lose(lost)
        with pytest.raises(PromptTooLongError, match=r"6 blocks of 4 tokens.* holds 5"):
            await run
        assert made.calls.decodes == [lost]
        assert len(made.calls.prefills) == 1


async def test_a_waiting_request_that_fits_no_engine_any_more_is_refused_and_blocks_no_other():
    settings = RouterSettings(beta_tokens=1)
    async with cluster(prefill=2, decode=0, settings=settings) as made:
        await made.add("d0", Role.DECODE, hbm_tokens=20)
        await made.add("d1", Role.DECODE)
        made.calls.gates["prefill"] = asyncio.Event()
        first, other = (
            asyncio.create_task(made.run(job(name, PROMPT[:4], max_new_tokens=2)))
            for name in ("first", "other")
        )
        while len(made.calls.prefills) < 2:  # beta: the PEs take no other until they are done
            await asyncio.sleep(0)
        large = asyncio.create_task(made.run(job("large", PROMPT)))
        small = asyncio.create_task(made.run(job("small", PROMPT[:5], max_new_tokens=2)))
        while made.service.scheduler.dispatch.waiting < 2:
            await asyncio.sleep(0)
        made.lose("d1")
        with pytest.raises(BadRequestError, match=r"needs 24 tokens.* engine holds 20; shorten"):
            await large
        assert not first.done()
        made.calls.gates["prefill"].set()
        assert await first == await other == expected(PROMPT[:4], 2)
        assert await small == expected(PROMPT[:5], 2)
        await made.settled("p0", "p1", "d0")


async def test_a_lost_pe_does_not_disturb_a_request_it_has_finished():
    async with cluster(prefill=2) as made:
        made.calls.gates["decode"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("decode")
        made.lose(made.calls.prefills[0])
        made.calls.gates["decode"].set()
        assert await run == expected(PROMPT, 6)
        assert made.service.status()["counters"]["retries"] == 0


async def test_the_only_pe_dies_and_the_request_waits_for_its_restart():
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        await made.engines["p0"].kill()
        made.lose("p0")
        made.calls.gates["prefill"].set()
        await made.revive("p0")
        assert await run == expected(PROMPT, 6)
        await made.settled()


async def test_waiting_requests_go_elsewhere_when_their_engine_is_lost():
    async with cluster(prefill=1, decode=1) as made:
        made.engines["d0"].unanswered.add(control.Lookup)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.engines["d0"].saw(control.Lookup)
        await made.engines["d0"].kill()
        made.lose("d0")  # the look-up is asked of the PE, placement waits for a DE
        await made.add("d1", Role.DECODE)
        assert await run == expected(PROMPT, 6)
        assert made.calls.decodes == ["d1"]


async def waits_behind_another(
    made: Cluster,
) -> tuple[asyncio.Task[list[int]], asyncio.Task[list[int]]]:
    """Return a request that decodes, and one that waits: the DE's HBM holds one of them."""
    made.calls.gates["decode"] = asyncio.Event()
    decodes = asyncio.create_task(made.run(job("decodes", PROMPT)))
    await made.arrives("decode")
    waits = asyncio.create_task(made.run(job("waits", PROMPT)))
    await made.service.arrivals.until(lambda: made.service.scheduler.dispatch.waiting == 1, GUARD_S)
    return decodes, waits


async def test_a_request_that_waits_for_a_role_without_engines_ends_as_a_new_one_does():
    limit_s = 20.0
    async with cluster(settings=RouterSettings(engine_wait_s=limit_s), hbm_tokens=30) as made:
        requests = await waits_behind_another(made)
        await made.engines["d0"].kill()
        made.lose("d0")
        clock = asyncio.get_running_loop().time
        since_s = clock()
        for request in (*requests, asyncio.create_task(made.run(job("new", PROMPT)))):
            with pytest.raises(EngineLostError, match="1 of 1 prefill, 0 of 1 decode"):
                await request
        assert clock() - since_s == pytest.approx(limit_s, abs=1.0)
        attempts = {record.request_id: record.attempts for record in made.service.records}
        assert attempts == {"decodes": 1, "waits": 1, "new": 0}
        made.calls.gates.pop("decode").set()
        await made.add("d1", Role.DECODE)
        assert await made.run(job("again", PROMPT)) == expected(PROMPT, 6)
        await made.settled("p0", "d1")


async def test_a_request_that_waits_keeps_its_attempt_if_an_engine_is_back_in_time():
    async with cluster(settings=RouterSettings(engine_wait_s=20.0), hbm_tokens=30) as made:
        requests = await waits_behind_another(made)
        for _ in range(RouterSettings().max_attempts + 1):
            await made.engines["p0"].kill()
            made.lose("p0")
            await asyncio.sleep(15.0)
            await made.revive("p0")
            await made.service.wait_ready(1, 1, GUARD_S)
        made.calls.gates.pop("decode").set()
        for request in requests:
            assert await request == expected(PROMPT, 6)
        assert {record.attempts for record in made.service.records} == {1}
        await made.settled()


async def test_a_failed_command_is_tried_again():
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        made.engines["d0"].send(request_messages.Failed(request_id="a", reason="transfer failed"))
        await made.engines["d0"].saw(request_messages.Release)
        made.calls.gates["prefill"].set()
        assert await run == expected(PROMPT, 6)
        await made.settled()


async def test_attempts_are_counted_and_the_last_failure_is_named():
    async with cluster(settings=RouterSettings(max_attempts=2)) as made:
        made.calls.errors.extend([TransportError("first fault"), TransportError("second fault")])
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.engines["p0"].saw(request_messages.Release)
        made.engines["p0"].report()  # it lives after all and is welcomed back
        with pytest.raises(EngineLostError, match=r"failed 2 times, at most 2.*second fault"):
            await run


async def test_a_refused_request_is_not_tried_again():
    async with cluster() as made:
        made.calls.errors.append(BadRequestError("temperature -1 is below 0; raise it"))
        with pytest.raises(BadRequestError, match="temperature"):
            await made.run(job("a", PROMPT))
        assert len(made.calls.prefills) == 1
        await made.settled()


async def test_a_deadline_ends_a_request_and_names_itself():
    async with cluster(settings=RouterSettings(request_deadline_s=7)) as made:
        made.calls.gates["prefill"] = asyncio.Event()  # never opened
        with pytest.raises(DeadlineError, match=r"not done after 7 s"):
            await made.run(job("a", PROMPT))
        await made.settled()
        assert made.service.records[0].outcome == "deadline"


async def test_without_engines_the_error_names_the_missing_ones():
    async with cluster(decode=0) as made:
        with pytest.raises(EngineLostError, match="1 of 1 prefill, 0 of 1 decode"):
            await made.run(job("a", PROMPT))
        with pytest.raises(DeadlineError, match="0 of 2 decode"):
            await made.service.wait_ready(1, 2, 10)
        await made.add("d0", Role.DECODE)
        await made.service.wait_ready(1, 1, GUARD_S)
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)


async def test_an_unanswered_read_makes_its_engine_suspicious():
    async with cluster(prefill=2, mode="basic", settings=PATIENT) as made:
        made.stored.update(keys_of(PROMPT))
        for name in ("p0", "p1"):
            made.engines[name].unanswered |= {request_messages.Read, control.Sync}
            made.engines[name].heartbeats = False
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        waits = [
            asyncio.create_task(made.engines[p].saw(request_messages.Read)) for p in ("p0", "p1")
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        silent = "p0" if waits[0].done() else "p1"
        made.engines["p1" if silent == "p0" else "p0"].unanswered.clear()
        assert await run == expected(PROMPT, 6)
        for wait in waits:
            wait.cancel()
        down = await made.engines["d0"].saw(control.PeerDown, lambda m: m.engine_id == silent)
        assert not down.certain


STAGES = ["lookup", "buffer", "read", "prefill", "decode"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(stage):
    async with cluster(mode="basic", buffer_blocks=5) as made:
        made.stored.update(keys_of(PROMPT))
        p0, d0 = made.engines["p0"], made.engines["d0"]
        left = list(d0.free)
        kinds: dict[str, type[Message]] = {"lookup": control.Lookup, "read": request_messages.Read}
        kind = kinds.get(stage)
        if stage == "buffer":
            d0.free.clear()
        elif kind is not None:
            p0.unanswered.add(kind)
            d0.unanswered.add(kind)
        else:
            made.calls.gates[stage] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        if kind is not None:
            await (d0 if stage == "lookup" else p0).saw(kind)
        elif stage == "buffer":
            await d0.saw(request_messages.Assign)
        else:
            await made.arrives(stage)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        if stage == "buffer":
            await d0.saw(request_messages.Release)
            d0.free.extend(left)
        p0.unanswered.clear()
        d0.unanswered.clear()
        await made.settled()
        status = made.service.status()
        assert (status["waiting"], status["running"]) == (0, 0)
        assert made.service.records[0].outcome == "cancelled"
        made.calls.gates.clear()
        assert await made.run(job("b", PROMPT)) == expected(PROMPT, 6)
        await made.settled()


async def test_the_de_holds_its_slots_until_the_pe_has_confirmed():
    async with cluster() as made:
        p0, d0 = made.engines["p0"], made.engines["d0"]
        made.calls.gates["prefill"] = asyncio.Event()
        p0.unanswered.add(request_messages.Release)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        run.cancel()
        release = await p0.saw(request_messages.Release)
        assert made.service.scheduler.releases.held == 1
        assert not releases(made, "d0")
        p0.answer(release)
        assert (await d0.saw(request_messages.Release)).writer_certain
        await made.settled()


async def test_the_assignment_of_a_pe_that_reads_nothing_comes_with_its_call():
    async with cluster() as made:
        p0 = made.engines["p0"]
        for number, prompt in enumerate([OTHER_PROMPT, PROMPT], 1):
            assert await made.run(job(f"turn {number}", prompt)) == expected(prompt, 6)
            assignment = made.calls.transfers[-1].assignment
            assert assignment is not None
            assert (assignment.session, assignment.number) == (p0.session.session, number)
        assert not [m for m in p0.received if isinstance(m, request_messages.Assign | control.Sync)]
        assert len([m for m in p0.received if isinstance(m, control.PeerUp)]) == 1
        await made.settled()


async def test_a_pe_is_called_only_once_it_knows_the_de():
    async with cluster() as made:
        p0 = made.engines["p0"]
        p0.unanswered.add(control.Sync)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        named = await p0.saw(control.PeerUp)
        assert named.call_id
        await asyncio.sleep(1.0)
        assert made.calls.prefills == []
        p0.unanswered.clear()
        p0.send(control.Synced(named.call_id))
        assert await run == expected(PROMPT, 6)
        await made.settled()


async def test_a_pe_that_has_an_earlier_attempt_of_the_name_is_sent_the_assignment_before():
    """It would refuse it; and its report on the earlier one does not count for this one."""
    async with cluster() as made:
        p0 = made.engines["p0"]
        p0.unsettled = ("a",)
        made.lose("p0")
        await p0.saw(control.Registered, lambda m: m.registration == 2)
        await made.run(job("first", OTHER_PROMPT))
        await made.run(job("a", PROMPT))
        of_a = made.calls.transfers[-1]
        assert of_a.assignment is None
        p0.send(control.Released("b"))
        await made.run(job("b", range(900, 918)))
        of_b = made.calls.transfers[-1]
        assert of_b.assignment is not None
        await made.settled()


async def test_a_call_that_comes_after_its_attempt_has_ended_is_refused():
    async with cluster() as made:
        p0 = made.engines["p0"]
        await made.run(job("first", OTHER_PROMPT))
        made.calls.gates["prefill"] = gate = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        while len(made.calls.transfers) < 2:
            await asyncio.sleep(0.01)
        run.cancel()
        late = made.calls.transfers[1]
        assert late.assignment is not None
        release = await p0.saw(request_messages.Release)
        assert release.assignment == late.assignment.number
        gate.set()
        prefill = made.service.registry.live("p0")
        assert prefill is not None
        with pytest.raises(TransportError, match="has ended the session"):
            await made.calls.prefill(prefill, job("a", PROMPT), late)
        await made.settled()


async def test_an_engine_that_neither_reads_nor_reports_a_full_buffer_fails_the_attempt():
    settings = RouterSettings(read_deadline_s=1.0, read_margin_s=1.0, max_attempts=1)
    async with cluster(settings=settings) as made:
        made.stored.update(keys_of(PROMPT))
        made.engines["p0"].unanswered.add(request_messages.Assign)
        with pytest.raises(EngineLostError, match="p0 has neither read 4 blocks nor reported"):
            await made.run(job("a", PROMPT))
        made.engines["p0"].unanswered.clear()
        await made.settled()


async def test_the_report_of_a_whole_prefill_confirms_as_well_that_the_pe_writes_no_more():
    async with cluster() as made:
        p0, d0 = made.engines["p0"], made.engines["d0"]
        made.calls.gates["prefill"] = asyncio.Event()
        p0.unanswered.add(request_messages.Release)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        run.cancel()
        await p0.saw(request_messages.Release)
        p0.send(request_messages.PrefillDone("a", failure="a transfer failed"))
        await made.delivered(d0)
        assert not releases(made, "d0")
        p0.send(request_messages.PrefillDone("a"))
        assert (await d0.saw(request_messages.Release)).writer_certain


async def test_a_pe_that_never_confirms_puts_the_slots_into_quarantine():
    async with cluster() as made:
        p0, d0 = made.engines["p0"], made.engines["d0"]
        made.calls.gates["prefill"] = asyncio.Event()
        p0.unanswered.add(request_messages.Release)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        run.cancel()
        release = await d0.saw(request_messages.Release)
        assert not release.writer_certain
        p0.answer(releases(made, "p0")[0])
        await d0.saw(request_messages.Release, lambda m: m.writer_certain)


async def test_stopping_the_router_ends_running_requests():
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        await made.service.stop()
        with pytest.raises(EngineLostError, match="router stops"):
            await run
        with pytest.raises(EngineLostError, match="router stops"):
            await made.run(job("b", PROMPT))


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_engine_that_gives_a_request_up_is_not_mistaken_for_its_end(reason):
    async with cluster() as made:
        made.calls.gives_up_once = reason
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert made.service.status()["counters"]["retries"] == 1


async def test_kv_that_did_not_arrive_is_never_decoded():
    async with cluster() as made:
        made.calls.send_failure = "cable pulled"
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert made.service.status()["counters"]["retries"] == 1
        assert len(made.calls.prefills) == 2
        assert len(made.calls.decodes) == 1


async def test_an_engine_that_takes_up_no_command_fails_the_attempt_and_another_follows():
    """No engine computes a request that it may not have counted."""
    async with cluster() as made:
        p0 = made.engines["p0"]
        p0.unanswered.add(control.Sync)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await p0.saw(control.Sync)
        p0.unanswered.clear()
        assert await run == expected(PROMPT, 6)
        assert [transfer.request_id for transfer in made.calls.transfers] == ["a.2"]
        (failure,) = made.service.records[0].failures
        assert "p0 has not taken up within 5 s" in failure
        await made.settled()


async def test_a_reset_of_the_connection_loses_no_command_and_no_answer():
    """Every message is under way for a while, and every connection is reset again and again."""
    network = ControlNetwork(delay=lambda: 0.02)
    async with cluster(network=network) as made:
        made.stored.update(keys_of(PROMPT))

        async def resets() -> None:
            while True:
                await asyncio.sleep(0.3)
                for engine in made.engines.values():
                    engine.connection.reset()

        resetting = asyncio.create_task(resets())
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        resetting.cancel()
        await made.settled()
        assert made.service.status()["counters"]["retries"] == 0


async def test_a_killed_router_leaves_nothing_at_engines():
    """Neither load nor slots: its successor could give none of them back."""
    network = ControlNetwork()
    async with cluster(network=network) as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        made.service.kill()
        with pytest.raises(EngineLostError):
            await run
        assert made.engines["d0"].leases
        await made.restart_router()
        await made.settled()
        assert all(not engine.quarantined for engine in made.engines.values())
        made.calls.gates.clear()
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)


async def test_slots_of_a_killed_router_stay_away_from_others_until_no_pe_is_left_to_write():
    network = ControlNetwork()
    async with cluster(prefill=2, network=network) as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        (writer,) = made.calls.prefills
        await made.engines[writer].kill()  # perhaps only stopped: its death is not confirmed
        made.service.kill()
        with pytest.raises(EngineLostError):
            await run
        d0 = made.engines["d0"]
        await made.restart_router()
        await made.service.wait_ready(1, 1, GUARD_S)
        assert list(d0.quarantined) == ["a"]
        made.calls.gates.clear()
        assert await made.run(job("b", PROMPT)) == expected(PROMPT, 6)
        assert list(d0.quarantined) == ["a"]
        await made.revive(writer)
        await made.settled()
        assert not d0.quarantined


async def test_an_engine_that_has_lost_its_router_holds_nothing_for_ever():
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        made.service.kill()
        with pytest.raises(EngineLostError):
            await run
        p0, d0 = made.engines["p0"], made.engines["d0"]
        assert p0.tenants
        assert d0.leases
        await asyncio.sleep(ROUTER_TIMEOUT_S + 1)
        assert [p0.tenants, d0.tenants, d0.leases] == [{}, {}, {}]
        assert list(d0.quarantined) == ["a"]
