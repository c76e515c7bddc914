"""No table of router, front end or engine grows with the number of requests.

Each test plays some requests of one kind and then twice as many more.  In between and afterwards
it counts the entries of all tables.  Tables with a constant bound are full at the first count, as
``small_bounds`` makes their bounds smaller than the number of requests.
"""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY
from tests.emulated_cluster import Cluster as EmulatedCluster
from tests.emulated_cluster import cluster as emulated_cluster
from tests.front_end_links import link_server
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import job
from tests.unit.test_router_front_ends import Far, far
from tests.unit_clusters import two_units

from dualpath.core.blocks import block_keys, tenant_tag
from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.core.recent import Recent
from dualpath.core.session_hints import SessionHints
from dualpath.engine.buffer import block_buffer, dram_tier
from dualpath.policy.session_warmth import SessionMemory
from dualpath.router.engine_calls import Job
from dualpath.router.observe.dashboard import board
from dualpath.router.requests import front_end as front_ends
from dualpath.router.requests.front_end import FrontEnd
from dualpath.router.scheduler import dispatch
from dualpath.router.settings import RouterSettings
from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.tables import sizes

#: Requests before the first count.  Twice as many follow.
FEW = 40
#: A growth by fewer entries is none with the number of requests: bounded tables are smaller.
SLACK = FEW
#: Of every table with a constant bound.
SMALL = 6
#: Of each engine: fewer than the requests before the first count store.
BUFFER_BLOCKS = 24
#: Virtual time in which acknowledgements and releases have arrived.
SETTLED_S = 30.0
BLOCK_TOKENS = 4
API_KEY = "right"

#: The constants that bound tables, by module, and their values in these tests.
BOUNDS: dict[ModuleType, dict[str, int]] = {
    block_buffer: {"_EVICTED_PER_SLOT": 1, "_MAX_STALE": 1, "_SPARE": SMALL},
    dram_tier: {"MOST_PROMPT_KEYS": 10 * SMALL},
    front_ends: {"_RECENT_RECORDS": SMALL},
    dispatch: {"_RECENT_ASSIGNMENTS": SMALL},
    board: {"_RECENT_REQUESTS": SMALL, "_MAX_ENDED": SMALL, "_WINDOW_SAMPLES": 0},
}

#: Sends request number n of a kind.
Play = Callable[[Cluster, FrontEnd, int], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of tables that fewer requests reach than a test plays."""
    for module, names in BOUNDS.items():
        for name, small in names.items():
            monkeypatch.setattr(module, name, small)
    monkeypatch.setattr(board, "History", functools.partial(board.History, SMALL))
    for owner in (Recent, SessionMemory):
        monkeypatch.setattr(owner, "__init__", with_small_bound(owner.__init__))


def with_small_bound(begin: Callable[..., None]) -> Callable[..., None]:
    """Return an initialiser with a bound of few entries or blocks instead of the given one."""
    return lambda self, bound: begin(self, min(bound, SMALL))


def prompt_of(number: int, tokens: int = 9) -> list[int]:
    return [1 + (number * 31 + i * 7) % 1000 for i in range(tokens)]


def salted(number: int, salt: str, **more: object) -> Job:
    def keys_for(tokens):
        return tuple(block_keys(tokens, BLOCK_TOKENS, cache_salt=salt))

    plain = job(f"salted-{number}", prompt_of(0), 3, tenant=tenant_tag(salt), **more)
    return Job(
        **{name: getattr(plain, name) for name in plain.__struct_fields__}
        | {"keys": keys_for(plain.prompt_token_ids), "keys_for": keys_for}
    )


async def answered(front_end: FrontEnd, asked: Job) -> None:
    async for _ in front_end.submit(asked):
        pass


async def short(made: Cluster, front_end: FrontEnd, number: int) -> None:
    """A prompt below a block."""
    await answered(front_end, job(f"short-{number}", [1 + number % 900, 2], 2))


async def long(made: Cluster, front_end: FrontEnd, number: int) -> None:
    await answered(front_end, job(f"long-{number}", prompt_of(number, 17), 3))


async def failing(made: Cluster, front_end: FrontEnd, number: int) -> None:
    made.calls.errors.extend([EngineLostError("the call has failed")] * 9)
    with pytest.raises(DualPathError):
        await answered(front_end, job(f"failing-{number}", prompt_of(number), 3))
    made.calls.errors.clear()


async def retried(made: Cluster, front_end: FrontEnd, number: int) -> None:
    made.calls.errors.append(EngineLostError("the call has failed"))
    await answered(front_end, job(f"retried-{number}", prompt_of(number), 3))


async def abandoned(made: Cluster, front_end: FrontEnd, number: int) -> None:
    """Its client leaves after the first token."""
    stream = front_end.submit(job(f"abandoned-{number}", prompt_of(number), 6))
    async for _ in stream:
        break
    await stream.aclose()


async def abandoned_early(made: Cluster, front_end: FrontEnd, number: int) -> None:
    """Its client leaves before any token."""
    running = asyncio.create_task(answered(front_end, job(f"early-{number}", prompt_of(number), 6)))
    await asyncio.sleep(0.0005 * (number % 5))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def retaining(made: Cluster, front_end: FrontEnd, number: int) -> None:
    """A named session retains its KV for a day."""
    hints = SessionHints(session_id=f"agent-{number}", retain_s=86_400.0)
    await answered(front_end, job(f"retaining-{number}", prompt_of(number), 3, hints=hints))


async def done(made: Cluster, front_end: FrontEnd, number: int) -> None:
    """A session that ends with its only turn, and another that a later hint ends."""
    hints = SessionHints(session_id=f"done-{number}", done=True)
    await answered(front_end, job(f"done-{number}", prompt_of(number), 3, hints=hints))
    hints = SessionHints(session_id=f"later-{number}")
    await answered(front_end, job(f"later-{number}", prompt_of(number), 3, hints=hints))
    await front_end.hint_session("", f"later-{number}", SessionHints(done=True))


async def hinting_strangers(made: Cluster, front_end: FrontEnd, number: int) -> None:
    """A hint on a session that has had no turn."""
    assert not await front_end.hint_session("", f"stranger-{number}", SessionHints(retain_s=9.0))


async def of_a_tenant(made: Cluster, front_end: FrontEnd, number: int) -> None:
    hints = SessionHints(session_id="the same name")
    await answered(front_end, salted(number, f"tenant-{number}", hints=hints))


async def bad(made: Cluster, front_end: FrontEnd, number: int) -> None:
    """A request id with a line end, and a prompt that no buffer holds."""
    with pytest.raises(DualPathError):
        await answered(front_end, job(f"bad\n{number}", prompt_of(number)))
    with pytest.raises(DualPathError):
        await answered(front_end, job(f"huge-{number}", prompt_of(number, 900)))


KINDS: list[Play] = [
    *(short, long, failing, retried, abandoned, abandoned_early),
    *(retaining, done, hinting_strangers, of_a_tenant, bad),
]


@contextlib.asynccontextmanager
async def near_and_far(place: str) -> AsyncIterator[tuple[Cluster, FrontEnd, list[object]]]:
    """A cluster, a front end in its router's process or in one of its own, and their objects."""
    if place == "front end of units":
        async with two_units(prefill=2, decode=2) as both, both.front_end() as linked:
            yield both.a.made, linked, [linked]
        return
    async with cluster(2, 2) as made:
        if place == "router":
            yield made, made.service, [made.service]
            return
        async with link_server(made.service.scheduler) as opened, far(made, opened, "f") as one:
            assert isinstance(one, Far)
            yield made, one.front_end, [made.service, opened.server, one.front_end, one.link]


async def counted(made: Cluster, roots: list[object]) -> Counter[str]:
    await asyncio.sleep(SETTLED_S)
    # The engines here are fakes, but their sessions with the router are real.
    engines = [engine.session for engine in made.engines.values()]
    found = sizes([*roots, *engines])
    found["metrics"] = len(made.service.exposition().splitlines())
    return found


async def growing(play: Play, place: str) -> dict[str, tuple[int, int]]:
    """Return the tables that grow with requests of a kind, with both counts."""
    async with near_and_far(place) as (made, front_end, roots):
        for number in range(FEW):
            await play(made, front_end, number)
        before = await counted(made, roots)
        for number in range(FEW, 3 * FEW):
            await play(made, front_end, number)
        return growth(before, await counted(made, roots))


def growth(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    both = {name: (before[name], size) for name, size in after.items()}
    return {name: (few, more) for name, (few, more) in both.items() if more - few >= SLACK}


@pytest.mark.parametrize("place", ["router", "front end", "front end of units"])
@pytest.mark.parametrize("play", KINDS)
@pytest.mark.virtual_time
async def test_no_table_of_router_and_front_end_grows_with_requests(play: Play, place: str) -> None:
    assert await growing(play, place) == {}


@pytest.mark.parametrize("place", ["router", "front end"])
@pytest.mark.virtual_time
async def test_a_table_that_remembers_every_attempt_is_found(place: str) -> None:
    with planted("table-grows"):
        assert "Exchange._closed" in await growing(short, place)


# ---------------------------------------------------------------------- engines, over HTTP


async def post(made: EmulatedCluster, number: int, **more: Any) -> int:
    prompt, tokens = more.pop("prompt", prompt_of(number, 18)), more.pop("tokens", 3)
    status, _ = await made.post(prompt, tokens, **more)
    return status


async def answered_over_http(made: EmulatedCluster, number: int) -> None:
    assert await post(made, number) == 200


async def short_over_http(made: EmulatedCluster, number: int) -> None:
    assert await post(made, number, prompt=[1 + number, 2]) == 200


async def named_over_http(made: EmulatedCluster, number: int) -> None:
    """A session of its own retains its KV for a day, or ends with its only turn."""
    ends = {"done": True} if number % 2 else {"retain_s": 86_400.0}
    hints = {"session_id": f"agent-{number}", **ends}
    assert await post(made, number, vllm_xargs=hints) == 200


async def salted_over_http(made: EmulatedCluster, number: int) -> None:
    assert await post(made, 0, cache_salt=f"tenant-{number}") == 200


async def bad_over_http(made: EmulatedCluster, number: int) -> None:
    """An unknown token, several answers, an overlong prompt, an overlong salt, no JSON."""
    assert await post(made, number, prompt=[-1 - number]) == 400
    assert await post(made, number, n=2) == 400
    assert await post(made, number, prompt=[1] * 600) == 400
    assert await post(made, number, cache_salt="s" * 5000) == 400
    url = f"{made.endpoint}/v1/completions"
    kind = {"Content-Type": "application/json"}
    async with made.http.post(url, data=f"no JSON {number}", headers=kind) as response:
        assert response.status == 400


async def with_keys_over_http(made: EmulatedCluster, number: int) -> None:
    """A wrong API key, another one each time."""
    headers = {"Authorization": f"Bearer wrong-{number}"}
    url = f"{made.endpoint}/v1/completions"
    async with made.http.post(url, json={"prompt": [1]}, headers=headers) as response:
        assert response.status == 401


async def leaving_over_http(made: EmulatedCluster, number: int) -> None:
    """Its client leaves before the answer, sooner or later."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001 * (number % 8)):
            await post(made, number, tokens=40)


OVER_HTTP = [
    *(answered_over_http, short_over_http, named_over_http, salted_over_http, bad_over_http),
    *(with_keys_over_http, leaving_over_http),
]


async def counted_in_engines(made: EmulatedCluster) -> Counter[str]:
    await made.stored()
    await made.idle()
    return sizes([*made.engines.values()])


@pytest.mark.parametrize("play", OVER_HTTP)
async def test_no_table_of_engines_grows_with_requests(
    play: Callable[[EmulatedCluster, int], Awaitable[None]], tmp_path: Path
) -> None:
    keyed = RouterSettings(mode=Mode.DUALPATH, api_keys=(API_KEY,))
    router = keyed if play is with_keys_over_http else None
    buffer_bytes = BUFFER_BLOCKS * GEOMETRY.full_block_bytes
    async with emulated_cluster(
        tmp_path, Mode.DUALPATH, router=router, buffer_bytes=buffer_bytes
    ) as made:

        async def some(numbers: range) -> None:
            for first in numbers[::8]:
                several = numbers[first - numbers[0] : first - numbers[0] + 8]
                await asyncio.gather(*(play(made, number) for number in several))

        await some(range(FEW))
        before = await counted_in_engines(made)
        await some(range(FEW, 3 * FEW))
        assert growth(before, await counted_in_engines(made)) == {}
