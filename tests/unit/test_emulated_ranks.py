"""Emulated engines of several ranks: right answers, all slices compared, a common end."""

import asyncio
import dataclasses
import functools
import itertools
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from tests import emulated_cluster
from tests.emulated_cluster import GEOMETRY, Cluster, cluster, engine_settings
from tests.guard import GUARD_S

from dualpath.core.cluster import HostProcess, Role
from dualpath.core.errors import ConfigError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.engine.control.surroundings import Surroundings
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath_lab.emulated.checkable_kv import CheckedAt
from dualpath_lab.emulated.data_plane import BlocksHeld, BlocksReleased, DataPlane, FollowerPlane
from dualpath_lab.emulated.emulated_gpu import follow
from dualpath_lab.emulated.rank_processes import ConnectedFollower
from dualpath_lab.emulated.ranks import FollowerRank, ThreadRanks

PROMPT = list(range(1, 38))
AGENTS, LAYERS = 3, GEOMETRY.layers


class Ranks(NamedTuple):
    """Ranks of a PE and a DE, and the KV heads of their model (1 for latent KV)."""

    pe: int
    de: int
    heads: int


SHAPES = [
    *(Ranks(2, 1, 2), Ranks(1, 2, 2), Ranks(2, 2, 1), Ranks(4, 2, 2), Ranks(1, 4, 1)),
    *(Ranks(4, 2, 4), Ranks(1, 4, 4), Ranks(3, 2, 6), Ranks(4, 3, 1), Ranks(8, 1, 2)),
]


async def two_turns(made: Cluster) -> list[list[int]]:
    """Play agents that hit all that is stored with their second turn; return what was generated."""
    prompts = [[agent, *PROMPT] for agent in range(AGENTS)]
    first = await asyncio.gather(*(made.ask(prompt, 9) for prompt in prompts))
    await made.stored()
    turns = [[*p, *tokens, 7, 8] for p, (tokens, _) in zip(prompts, first, strict=True)]
    second = await asyncio.gather(*(made.ask(turn, 3) for turn in turns))
    assert [hits for _, hits in second] == [44] * AGENTS
    await made.idle()
    return [tokens for tokens, _ in (*first, *second)]


@pytest.mark.parametrize("ranks", SHAPES, ids=lambda r: f"PE{r.pe} DE{r.de} {r.heads} heads")
async def test_agents_get_the_answers_of_an_engine_of_one_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with cluster(tmp_path / "one", Mode.DUALPATH) as made:
        right = await two_turns(made)
    async with cluster(
        *(tmp_path / "several", Mode.DUALPATH),
        prefill_tp=ranks.pe,
        decode_tp=ranks.de,
        kv_heads=ranks.heads,
    ) as made:
        assert await two_turns(made) == right
        assert made.counts(1) == 0
        loaded, filled = (
            made.engines[name].plane.verifier.counts()[place][0]
            for name, place in (("prefill-0", CheckedAt.PE_HBM), ("decode-0", CheckedAt.DE_HBM))
        )
        # Every rank has compared its slice of all prompts, and of all hits before their use.
        assert filled == ranks.de * AGENTS * sum(map(GEOMETRY.blocks_for, (38, 49))) * LAYERS
        assert loaded >= ranks.pe * AGENTS * 11 * LAYERS


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.SPLIT, Mode.ORACLE])
async def test_ranks_serve_in_every_mode(mode: Mode, tmp_path: Path) -> None:
    async with cluster(tmp_path, mode, prefill_tp=2, decode_tp=2, kv_heads=2) as made:
        await two_turns(made)
        assert made.counts(1) == 0
        assert (made.counts(0) > 0) == mode.moves_bytes


async def test_engines_with_different_numbers_of_ranks_share_storage(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, prefill_tp=2, kv_heads=2) as made:
        tokens, _ = await made.ask(PROMPT, 9)
        await made.stored()
    async with cluster(tmp_path, Mode.DUALPATH, decode_tp=2, kv_heads=2) as made:
        assert (await made.ask([*PROMPT, *tokens, 5], 1))[1] == 44
        assert made.counts(1) == 0


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[FollowerPlane]:
    """The data planes of all follower ranks, in the order of their start."""
    found: list[FollowerPlane] = []
    init = FollowerPlane.__init__

    def noted(plane: FollowerPlane, *args: object) -> None:
        init(plane, *args)  # type: ignore[arg-type]
        found.append(plane)

    monkeypatch.setattr(FollowerPlane, "__init__", noted)
    return found


def spoil_loads(plane: FollowerPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    load = LayerStream.wait_loaded

    def wait_loaded(stream: LayerStream, layer: int) -> None:
        load(stream, layer)
        if stream._transfers.own_agent == plane.follower.rank.movers.transfers.own_agent:
            plane.hbm.layer(layer)[0][:, 0, 2] ^= np.uint64(1)

    monkeypatch.setattr(LayerStream, "wait_loaded", wait_loaded)


def spoil_copies(plane: FollowerPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = plane.follower.fill_hbm

    def fill_hbm(transfer, blocks, done):
        def copied(error: str | None) -> None:
            plane.hbm.layer(3)[0][blocks[1], 0, 2] ^= np.uint64(1)
            done(error)

        fill(transfer, blocks, copied)

    monkeypatch.setattr(plane.follower, "fill_hbm", fill_hbm)


@pytest.mark.parametrize(
    ("role", "spoil", "place"),
    [(Role.PREFILL, spoil_loads, "pe_hbm"), (Role.DECODE, spoil_copies, "de_hbm")],
)
async def test_wrong_kv_of_a_follower_rank_fails_the_request(
    role: Role,
    spoil: Callable[[FollowerPlane, pytest.MonkeyPatch], None],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    followers: list[FollowerPlane],
) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, prefill_tp=2, decode_tp=2, kv_heads=2) as made:
        await made.ask(PROMPT, 2)
        await made.stored()
        (plane,) = (p for p in followers if p.settings.engine.role is role)
        spoil(plane, monkeypatch)
        status, body = await made.post(PROMPT, 2)
        assert status == 400
        assert f"is wrong in {place} of rank 1" in body["error"]["message"]
        assert made.counts(1) > 0
        await made.idle()


async def test_a_failed_copy_of_a_follower_rank_fails_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followers: list[FollowerPlane]
) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, decode_tp=2, kv_heads=2) as made:
        agent = followers[0].follower.rank.movers.transfers.own_agent
        made.fabric.fail_next("injected", agent=agent)
        assert len((await made.ask(PROMPT, 3))[0]) == 3
        assert made.service.metrics.retries == 1
        await made.idle()


async def test_hbm_that_another_rank_may_still_write_is_not_allocated(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, prefill_tp=2, kv_heads=2) as made:
        plane = made.engines["prefill-0"].plane
        (block,) = plane.hbm.allocate(1) or ()
        plane._on_event(1, BlocksHeld((block,)))
        plane.hbm.free((block,))
        assert plane.hbm.free_tokens == plane.manager.hbm_tokens - plane.geometry.block_tokens
        plane._on_event(1, BlocksReleased((block,)))
        await made.idle()


async def test_every_rank_uses_the_process_of_its_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation runs as its own processes; the router gets their ids."""
    numbers = itertools.count(100)
    monkeypatch.setattr(
        emulated_cluster,
        "Surroundings",
        functools.partial(Surroundings, this_process=lambda: HostProcess("sim", next(numbers))),
    )
    async with cluster(tmp_path, Mode.DUALPATH, prefill_tp=2, kv_heads=2) as made:
        process = made.service.registry.alive(Role.PREFILL)[0].process
        assert {p.host for p in (process, *process.ranks)} == {"sim"}
        assert len(process.ranks) == 1


async def test_an_engine_that_loses_a_rank_reports_it_and_ends(tmp_path: Path) -> None:
    """Fails while the engine waits for work, when no rank sends to another."""
    ended = threading.Event()
    async with cluster(tmp_path, Mode.DUALPATH, prefill_tp=2, kv_heads=2) as made:
        plane = made.engines["prefill-0"].plane
        plane.membership._surroundings = dataclasses.replace(
            made.surroundings, end_process=ended.set
        )
        leader = plane._ranks
        leader._shared.fail("rank 1 (process 7) has ended, by SIGKILL")  # type: ignore[attr-defined]
        assert await asyncio.to_thread(ended.wait, GUARD_S)
        assert plane.manager.health() == "rank 1 (process 7) has ended, by SIGKILL"
        assert made.service.status()["engines"][0]["alive"] is False


def test_a_rank_that_cannot_start_ends_its_engine(tmp_path: Path) -> None:
    settings = engine_settings(Role.PREFILL, "pe", "tcp://127.0.0.1:1", tmp_path, Mode.DUALPATH)
    settings = msgspec.structs.replace(settings, tensor_parallel_size=2, kv_heads=2)
    fabric, ranks = InProcessFabric(), ThreadRanks(2)
    surroundings = Surroundings(open_transport=lambda name, *_: InProcessTransport(name, fabric))
    ranks.rank_ended("rank 1 has ended: no device")
    with pytest.raises(EngineLostError, match="rank 1 has ended: no device"):
        DataPlane(settings, surroundings, ranks.leader)


def thread_follower() -> FollowerRank:
    """A rank as a thread, after its leader could not start."""
    ranks = ThreadRanks(2)
    ranks.leader.end()
    return ranks.followers[0]


def process_follower() -> FollowerRank:
    """A rank as a process, after its leader could not start."""
    leaders, own = multiprocessing.Pipe()
    leaders.send(None)
    return ConnectedFollower(1, 2, own)


@pytest.mark.parametrize("follower", [thread_follower, process_follower])
def test_a_rank_ends_with_a_reason_if_the_first_one_cannot_start(
    follower: Callable[[], FollowerRank], tmp_path: Path
) -> None:
    settings = engine_settings(Role.PREFILL, "pe", "tcp://127.0.0.1:1", tmp_path, Mode.DUALPATH)
    settings = msgspec.structs.replace(settings, tensor_parallel_size=2, kv_heads=2)
    fabric = InProcessFabric()
    surroundings = Surroundings(open_transport=lambda name, *_: InProcessTransport(name, fabric))
    with pytest.raises(EngineLostError, match="the engine's first rank has ended"):
        follow(settings, follower(), surroundings)
    with pytest.raises(EngineLostError, match="the engine's first rank has ended"):
        follower().gather("its address")
    assert follower().work() is None, "between two pieces of work it is the end of work"


@pytest.mark.parametrize(("ranks", "heads"), [(2, 3), (3, 2)])
def test_ranks_that_cannot_share_heads_are_refused(ranks: int, heads: int, tmp_path: Path) -> None:
    settings = engine_settings(Role.PREFILL, "pe", "tcp://127.0.0.1:1", tmp_path, Mode.DUALPATH)
    with pytest.raises(ConfigError, match=rf"{ranks} ranks for {heads} KV heads"):
        msgspec.structs.replace(settings, tensor_parallel_size=ranks, kv_heads=heads)
