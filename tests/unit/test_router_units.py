"""Front ends of two units, schedulers with engines of their own: affinity, losses, drains."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.unit.router_fakes import NAMESPACE, WITHOUT_WINDOWS, expected, job, keys_of
from tests.unit_clusters import TwoUnits, UnitCluster, answer, two_units, until

from dualpath.core.cluster import Role
from dualpath.core.control import Lookup
from dualpath.core.errors import EngineLostError
from dualpath.core.session_hints import SessionHints
from dualpath.router.engines import missing_engines
from dualpath.router.linked_front_end import LinkedFrontEnd

pytestmark = pytest.mark.virtual_time


def prompt_of(number: int, tokens: int = 17) -> list[int]:
    return [1 + (number * 31 + i * 7) % 1000 for i in range(tokens)]


async def several(service: LinkedFrontEnd, numbers: Sequence[int], label: str = "r") -> None:
    """Send requests at once, each of another session; all answers are right."""
    prompts = [prompt_of(number) for number in numbers]
    answers = await asyncio.gather(
        *(
            answer(service, job(f"{label}{n}", prompt))
            for n, prompt in zip(numbers, prompts, strict=True)
        )
    )
    assert answers == [expected(prompt, 6) for prompt in prompts]


async def turns(
    service: LinkedFrontEnd, name: str, number: int, count: int, session_id: str = ""
) -> None:
    """Run turns of a session: each prompt is the one before, its answer and more."""
    prompt = prompt_of(number)
    for turn in range(count):
        hints = SessionHints(session_id=session_id)
        tokens = await answer(service, job(f"{name}-{turn}", prompt, hints=hints))
        assert tokens == expected(prompt, 6)
        prompt = [*prompt, *tokens, 5, 6, 7, 8]


async def test_sessions_are_spread_over_units_and_each_stays_where_it_began() -> None:
    async with two_units() as made, made.front_end() as service:
        for number in range(4):
            first = len(made.calls.decodes)
            await turns(service, f"unnamed {number}", number, 4)
            assert len(set(made.decoded_in()[first:])) == 1
        for number in range(8):
            first = len(made.calls.decodes)
            await turns(service, f"named {number}", 50 + number, 2, session_id=f"s{number}")
            assert len(set(made.decoded_in()[first:])) == 1
        assert set(made.decoded_in()) == {"a", "b"}
        for unit in (made.a, made.b):
            await unit.nothing_is_left()


async def test_requests_at_once_are_divided_between_the_units() -> None:
    async with two_units() as made, made.front_end() as service:
        await several(service, range(8))
        assert sorted(made.decoded_in()) == [*"aaaabbbb"]


async def test_a_unit_serves_what_the_other_one_has_stored() -> None:
    async with two_units() as made, made.front_end() as service:
        made.a.scheduler.drain(draining=True)
        await until(lambda: service.links["a:1"].load.draining)
        await turns(service, "one", 1, 1)
        made.a.scheduler.drain(draining=False)
        made.b.scheduler.drain(draining=True)
        await until(lambda: service.links["b:1"].load.draining)
        await turns(service, "other", 1, 1)
        assert made.decoded_in() == ["b", "a"]
        assert service.records[-1].hit_tokens == 16


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_streams_of_a_killed_unit_are_retried_by_the_other_one(stage: str) -> None:
    async with two_units() as made, made.front_end() as service:
        made.calls.gates[stage] = asyncio.Event()
        made.calls.gate_after_tokens = 2
        running = asyncio.create_task(several(service, range(8)))
        await until(lambda: service.admission.placed == 8)
        await made.a.kill()
        made.calls.gates.pop(stage).set()
        await running
        assert {record.outcome for record in service.records} == {"finished"}
        assert max(record.attempts for record in service.records) == 2
        # New requests go to the other unit, also while the front end has no proof of the loss.
        done = len(made.calls.decodes)
        await several(service, range(8, 16))
        assert set(made.decoded_in()[done:]) == {"b"}
        await until(lambda: not service.links["a:1"].session)
        assert "unit a:1" in next(iter(service.registry.waits()))
        await made.b.nothing_is_left()


async def test_a_unit_that_is_back_is_used_again() -> None:
    async with two_units() as made, made.front_end() as service:
        await made.a.kill()
        await until(lambda: not service.links["a:1"].session)
        await several(service, range(4))
        assert set(made.decoded_in()) == {"b"}
        await made.a.start()
        await until(lambda: service.links["a:1"].engines.alive(Role.DECODE))
        await several(service, range(10, 18))
        assert sorted(made.decoded_in()[4:]) == [*"aaaabbbb"]
        for unit in (made.a, made.b):
            await unit.nothing_is_left()


async def test_a_stream_that_decodes_outlives_its_scheduler_if_its_engine_lives() -> None:
    async with two_units() as made, made.front_end() as service:
        made.calls.gates["decode"] = asyncio.Event()
        made.calls.gate_after_tokens = 2
        running = asyncio.create_task(several(service, range(2)))
        await until(lambda: len(made.calls.decodes) == 2)
        await made.calls.entered["decode"].wait()
        made.a.made.service.kill()
        await until(lambda: not service.links["a:1"].session)
        made.calls.gates.pop("decode").set()
        await running
        assert [record.attempts for record in service.records] == [1, 1]


async def test_a_scheduler_that_restarts_alone_gets_its_requests_back() -> None:
    async with two_units() as made, made.front_end() as service:
        link = service.links["a:1"]
        former = link.session
        made.a.made.service.kill()
        await made.a.start_scheduler()
        await until(lambda: link.session not in ("", former) and len(link.engines.alive()) == 2)
        await several(service, range(8))
        assert set(made.decoded_in()) == {"a", "b"}


async def test_requests_that_wait_in_a_unit_without_engines_of_a_role_go_to_the_other_one() -> None:
    async with two_units(hbm_tokens=30) as made, made.front_end() as service:
        made.calls.gates["decode"] = asyncio.Event()
        running = asyncio.create_task(several(service, range(8)))
        # The HBM of each decode engine holds one request: three wait in each unit's queue.
        await until(lambda: len(made.calls.prefills) == 2)
        await asyncio.sleep(1.0)
        await made.a.kill_engines(Role.PREFILL)
        made.calls.gates.pop("decode").set()
        await running
        assert {record.outcome for record in service.records} == {"finished"}


async def test_without_a_unit_that_serves_requests_that_wait_end_after_a_limit() -> None:
    async with two_units(hbm_tokens=30) as made, made.front_end() as service:
        made.calls.gates["decode"] = asyncio.Event()
        running = [asyncio.create_task(several(service, [n])) for n in range(8)]
        await until(lambda: len(made.calls.prefills) == 2)
        await asyncio.sleep(1.0)
        for unit in (made.a, made.b):
            await unit.kill_engines(Role.PREFILL)
        ends = await asyncio.gather(*running[2:], return_exceptions=True)
        assert {type(end) for end in ends} == {EngineLostError}
        assert all("0 of 1 prefill, 0 of 1 decode" in str(end) for end in ends), ends
        waited_s = {(record.end_s or 0.0) - record.start_s for record in service.records}
        assert max(waited_s) < service.settings.engine_wait_s + 2.0
        made.calls.gates.pop("decode").set()
        await asyncio.gather(*running[:2])


async def test_an_attempt_that_failed_in_a_unit_is_repeated_in_the_other_one() -> None:
    async with two_units() as made, made.front_end() as service:
        made.calls.errors.append(EngineLostError("the test says so"))
        await several(service, [1])
        first, second = (engine_id[1] for engine_id in made.calls.prefills)
        assert {first, second} == {"a", "b"}


async def test_a_hit_that_was_evicted_is_no_failure_and_the_session_stays() -> None:
    """Its decode engine was to compute the append, and needs a prefill engine now."""
    made, prompt = TwoUnits(), prompt_of(1)
    for unit in (made.a, made.b):
        unit.settings = msgspec.structs.replace(unit.settings, append_at_decode_tokens=4)
        await unit.start(namespace=WITHOUT_WINDOWS)
    async with made.front_end() as service:
        for unit in (made.a, made.b):
            name = f"d{unit.name}0"
            await unit.made.caches(name, keys_of(prompt))
            made.calls.engines[name].read_limit = lambda read: (2, "missing")
            made.calls.engines[f"p{unit.name}0"].read_limit = lambda read: (2, "missing")
        await several(service, [1])
        assert service.records[0].attempts == 2
        (prefill,), (decode,) = made.calls.prefills, made.calls.decodes
        attempts = service.exposition().decode()
        assert f'unit_attempts_total{{reason="load",unit="{prefill[1]}:1"}} 1.0' in attempts
        assert f'unit_attempts_total{{reason="affinity",unit="{prefill[1]}:1"}} 1.0' in attempts
        assert decode[1] == prefill[1]
    for unit in (made.a, made.b):
        await unit.stop()


async def test_a_session_that_comes_back_from_another_unit_is_looked_up() -> None:
    """Its unit does not know what the other one has stored; a turn that stays needs no look-up."""
    async with two_units() as made, made.front_end() as service:
        for engine in made.calls.engines.values():
            engine.reports_stored = True

        def look_ups() -> Counter[str]:
            received = [
                (e.engine_id[1], m) for e in made.calls.engines.values() for m in e.received
            ]
            return Counter(unit for unit, message in received if isinstance(message, Lookup))

        async def moves_to(unit: UnitCluster) -> None:
            for each in (made.a, made.b):
                each.scheduler.drain(draining=each is not unit)
            links = service.links
            await until(lambda: [links[f"{n}:1"].load.draining for n in "ab"].count(True) == 1)
            await until(lambda: not links[f"{unit.name}:1"].load.draining)

        prompt, hits = prompt_of(1), []
        for number, unit in enumerate((made.a, made.a, made.b, made.a)):
            await moves_to(unit)
            before = look_ups()
            tokens = await answer(service, job(f"turn {number}", prompt))
            assert tokens == expected(prompt, 6)
            assert look_ups() - before == ({} if number == 1 else {unit.name: 1})
            hits.append(service.records[-1].hit_tokens)
            prompt = [*prompt, *tokens, 5, 6, 7, 8]
            await asyncio.sleep(1.0)
        assert made.decoded_in() == ["a", "a", "b", "a"]
        assert hits == [0, 16, 24, 36]


async def test_after_two_failures_it_is_known_which_engines_of_both_units_live() -> None:
    async with two_units() as made, made.front_end() as service:
        made.calls.errors.extend(EngineLostError("the test says so") for _ in range(3))
        with pytest.raises(EngineLostError, match="failed 3 times"):
            await several(service, [1])
        await several(service, [2])


async def test_a_draining_unit_gets_no_new_requests_and_ends_those_it_has() -> None:
    async with two_units() as made, made.front_end() as service:
        made.calls.gates["decode"] = asyncio.Event()
        running = asyncio.create_task(several(service, range(4)))
        await until(lambda: service.admission.placed == 4)
        assert made.a.scheduler.drain(draining=True) == {
            "draining": True,
            "waiting": 0,
            "running": 2,
        }
        assert made.a.scheduler.status()["draining"]
        assert made.a.scheduler.dashboard.report()["draining"]
        await asyncio.sleep(1.0)
        made.calls.gates.pop("decode").set()
        await running
        done = len(made.calls.decodes)
        await several(service, range(4, 8))
        assert set(made.decoded_in()[done:]) == {"b"}
        assert made.a.scheduler.counts() == (0, 0)
        # With the other unit lost, it serves.
        await made.b.kill()
        await until(lambda: not service.links["b:1"].session)
        await several(service, [8])
        assert made.decoded_in()[-1] == "a"
        made.a.scheduler.drain(draining=False)
        assert "draining" not in made.a.scheduler.status()
        assert "draining" not in made.a.scheduler.dashboard.report()


async def test_a_front_end_starts_while_a_unit_is_down_and_uses_it_once_it_is_up() -> None:
    made = TwoUnits()
    await made.b.start()
    async with made.front_end(waits_for=["b"]) as service:
        assert service.unready() is None
        await several(service, range(4))
        assert set(made.decoded_in()) == {"b"}
        await made.a.start()
        await until(lambda: service.links["a:1"].engines.alive(Role.DECODE))
        await several(service, range(10, 14))
        assert set(made.decoded_in()[4:]) == {"a", "b"}
    for unit in (made.a, made.b):
        await unit.stop()


async def test_a_front_end_is_not_ready_while_no_unit_has_engines_of_both_roles() -> None:
    made = TwoUnits()
    await made.a.start(decode=0)
    await made.b.start(prefill=0)
    async with made.front_end(waits_for=[]) as service:
        await until(lambda: service.links["a:1"].session and service.links["b:1"].session)
        reason = service.unready() or ""
        assert "unit a:1: no live decode engine" in reason
        assert "unit b:1: no live prefill engine" in reason
        await made.a.add("da0", Role.DECODE)
        await service.wait_ready(1, 1, 10.0)
        assert service.unready() is None
        await several(service, range(2))
        assert set(made.decoded_in()) == {"a"}
    for unit in (made.a, made.b):
        await unit.stop()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "basic"}, "has mode basic and others have dualpath"),
        ({"namespace": msgspec.structs.replace(NAMESPACE, model="other")}, "of another model"),
    ],
)
async def test_a_unit_of_another_mode_or_model_is_not_used(
    options: dict[str, Any], reason: str
) -> None:
    made = TwoUnits()
    await made.a.start()
    async with made.front_end(waits_for=["a"]) as service:
        await made.b.start(**options)
        await until(lambda: service.links["b:1"].session)
        await asyncio.sleep(1.0)
        await several(service, range(4))
        assert set(made.decoded_in()) == {"a"}
        (other,) = (one for one in service.status()["units"] if one["unit"] == "b:1")
        assert not other["serves"]
        assert reason in other["missing"]
    for unit in (made.a, made.b):
        await unit.stop()


async def test_two_front_ends_divide_by_what_units_have_of_the_other_one() -> None:
    async with two_units() as made, made.front_end() as one:
        made.calls.gates["decode"] = asyncio.Event()
        made.b.scheduler.drain(draining=True)
        await until(lambda: one.links["b:1"].load.draining)
        running = asyncio.create_task(several(one, range(4)))
        await until(lambda: one.admission.placed == 4)
        made.b.scheduler.drain(draining=False)
        async with made.front_end("g") as other:
            await until(lambda: other.links["a:1"].load.others_tokens == 4 * 17)
            assert one.links["a:1"].load.others_tokens == 0
            done = asyncio.create_task(several(other, range(10, 14), "other"))
            await until(lambda: other.admission.placed == 4)
            made.calls.gates.pop("decode").set()
            await asyncio.gather(running, done)
            assert made.decoded_in().count("b") == 4
            await until(lambda: one.links["a:1"].load.others_tokens == 0)


async def test_hints_reach_the_unit_that_had_the_sessions_last_turn() -> None:
    def known(unit: UnitCluster) -> bool:
        return ("", "agent") in unit.scheduler.sessions._warmth

    async with two_units() as made, made.front_end() as service:
        await turns(service, "one", 1, 1, session_id="agent")
        assert known(made.a) != known(made.b)
        assert await service.hint_session("", "agent", SessionHints(retain_s=9.0))
        assert not await service.hint_session("", "nobody", SessionHints(retain_s=9.0))
    # Another front end does not know where the session is.
    async with made.front_end(waits_for=[]) as other:
        with pytest.raises(EngineLostError, match="is not connected"):
            await other.hint_session("", "agent", SessionHints(done=True))


async def test_status_and_metrics_show_both_units() -> None:
    async with two_units() as made, made.front_end() as service:
        made.calls.gates["decode"] = asyncio.Event()
        running = asyncio.create_task(several(service, range(2)))
        await until(lambda: service.admission.placed == 2)
        status = service.status()
        assert status["scheduler"] == "tcp://a:1,tcp://b:1"
        assert status["scheduler_missing"] is None
        assert {engine["unit"]: engine["engine_id"] for engine in status["engines"]} == {
            "a:1": "da0",
            "b:1": "db0",
        }
        load = {
            "serves": True,
            "missing": None,
            "silent": False,
            "draining": False,
            "prefill_engines": 1,
            "decode_engines": 1,
            "capacity_tokens": 100_000,
            "own_prompt_tokens": 17,
            "others_prompt_tokens": 0,
            "load": 0.0,
        }
        assert status["units"] == [{"unit": "a:1", **load}, {"unit": "b:1", **load}]
        text = service.exposition().decode()
        for name in ("a:1", "b:1"):
            assert f'dualpath:unit_attempts_total{{reason="load",unit="{name}"}} 1.0' in text
            assert f'dualpath:unit_serves{{unit="{name}"}} 1.0' in text
        made.calls.gates.pop("decode").set()
        await running
        await made.a.kill()
        await until(lambda: not service.links["a:1"].session)
        assert 'dualpath:unit_serves{unit="a:1"} 0.0' in service.exposition().decode()
        assert "is lost" in service.status()["units"][0]["missing"]


async def test_with_one_scheduler_status_and_metrics_name_no_units() -> None:
    async with two_units() as made, made.front_end(units=["a"]) as service:
        await several(service, [1])
        status = service.status()
        assert status["scheduler"] == "tcp://a:1"
        assert "units" not in status
        assert all("unit" not in engine for engine in status["engines"])
        assert b"unit" not in service.exposition()


async def test_if_all_units_are_lost_requests_wait_for_the_first_that_is_back() -> None:
    async with two_units() as made, made.front_end() as service:
        for unit in (made.a, made.b):
            await unit.kill()
        await until(lambda: not any(link.session for link in service.links.values()))
        assert "scheduler at tcp://a:1 is lost" in (missing_engines(service.registry) or "")
        assert "tcp://b:1" in service.status()["scheduler_missing"]
        running = asyncio.create_task(several(service, range(4)))
        await asyncio.sleep(1.0)
        await made.b.start()
        await running
        assert set(made.decoded_in()) == {"b"}
        assert keys_of(prompt_of(1))[0] in made.stored
