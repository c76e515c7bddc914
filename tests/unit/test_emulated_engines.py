"""Emulated engines under the real router: right answers, and an error for every wrong byte."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from tests.emulated_cluster import COSTS, GEOMETRY, Cluster, cluster, engine_settings
from tests.guard import GUARD_S

from dualpath.core.blocks import block_keys
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.router.settings import RouterSettings
from dualpath.storage.factory import memory_storage
from dualpath_lab.emulated.checkable_kv import CheckedAt, Seeds
from dualpath_lab.emulated.emulated_gpu import RankPasses, RunningPass
from dualpath_lab.emulated.metrics import EngineMetrics, engine_counts
from dualpath_lab.emulated.prefill import Batch, PrefillEngine, StartedPass
from dualpath_lab.emulated.process import emulated_engine

PROMPT = list(range(1, 38))


@pytest.mark.parametrize("tier", [True, False], ids=["dram", "storage"])
@pytest.mark.parametrize("mode", list(Mode))
async def test_two_turns_of_agents_hit_all_that_is_stored_and_every_byte_is_right(
    mode: Mode, tier: bool, tmp_path: Path
) -> None:
    router = RouterSettings(mode=mode, dram_tier=tier)
    async with cluster(tmp_path, mode, router=router) as made:
        prompts = [[agent, *PROMPT] for agent in range(1, 5)]
        first = await asyncio.gather(*(made.ask(prompt, 9) for prompt in prompts))
        assert [hits for _, hits in first] == [0] * 4
        await made.stored()
        # All but the last token has KV: 38 + 8 of them fill 11 blocks.
        turns = [[*p, *tokens, 7, 8] for p, (tokens, _) in zip(prompts, first, strict=True)]
        second = await asyncio.gather(*(made.ask(turn, 1) for turn in turns))
        assert [hits for _, hits in second] == [44] * 4
        await made.idle()
        assert made.counts(1) == 0
        assert (made.counts(0) > 0) == mode.moves_bytes


async def test_reports_count_the_steps_of_a_core_and_none_while_it_is_idle(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        planes = [engine.plane for engine in made.engines.values()]

        def steps() -> list[int]:
            return [plane.manager.report().steps for plane in planes]

        idle = steps()
        for prompt in range(1, 5):
            await made.ask([prompt, *PROMPT], 9)
        await made.idle()
        busy = steps()
        assert any(new > old for new, old in zip(busy, idle, strict=True))
        by_role = {plane.settings.engine.role for plane, n in zip(planes, busy, strict=True) if n}
        assert by_role == set(Role)
        assert steps() == busy


async def test_all_modes_give_the_same_answers_whatever_their_salt(tmp_path: Path) -> None:
    answers = []
    for mode in (Mode.BASIC, Mode.SPLIT, Mode.ORACLE):
        async with cluster(tmp_path / mode.value, mode) as made:
            answers.append(await made.ask(PROMPT, 12, cache_salt=mode.value))
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0][0]) == 12


async def test_blocks_that_pass_their_checksum_but_are_not_this_prompts_fail_the_request() -> None:
    storage = "memory://emulated-wrong"
    async with cluster(storage, Mode.BASIC) as made:
        namespace = next(iter(made.engines.values())).plane.settings.namespace
        stored = memory_storage("emulated-wrong", namespace)
        keys = block_keys(PROMPT, GEOMETRY.block_tokens)[:2]
        stored.write(keys, [memoryview(bytes(GEOMETRY.full_block_bytes))] * 2)
        status, body = await made.post(PROMPT, 4)
        assert status == 400
        assert "KV of 2 prompt blocks (0, 1) is wrong in pe_buffer" in body["error"]["message"]
        await made.idle()
        plane = made.engines["prefill-0"].plane
        assert plane.verifier.counts()[CheckedAt.PE_BUFFER] == (10, 10)
        counts = engine_counts(EngineMetrics(plane).exposition().decode())
        assert counts.wrong["pe_buffer"] == 10
        assert made.service.metrics.retries == 0


def spoil_loads(made: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    hbm, load = made.engines["prefill-0"].plane.hbm, LayerStream.wait_loaded

    def wait_loaded(stream: LayerStream, layer: int) -> None:
        load(stream, layer)
        hbm.layer(layer)[0][:, 0, 2, 1] ^= np.uint64(1)

    monkeypatch.setattr(LayerStream, "wait_loaded", wait_loaded)


def spoil_computation(made: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    hbm = made.engines["prefill-0"].plane.hbm
    write = hbm.write_blocks

    def write_blocks(layer: int, blocks: Sequence[int], seeds: Seeds) -> None:
        write(layer, blocks, seeds)
        hbm.layer(layer)[0][blocks[0], 0, 0] ^= np.uint64(1)

    monkeypatch.setattr(hbm, "write_blocks", write_blocks)


def spoil_decode_transfer(made: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = made.engines["decode-0"].plane
    fill = plane.manager.fill_hbm

    def fill_hbm(
        decode_transfer: DecodeTransfer, blocks: Sequence[int], done: Callable[[str | None], None]
    ) -> None:
        def copied(error: str | None) -> None:
            plane.hbm.layer(3)[0][blocks[1], 0, 2, 1] ^= np.uint64(1)
            done(error)

        fill(decode_transfer, blocks, copied)

    monkeypatch.setattr(plane.manager, "fill_hbm", fill_hbm)


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (spoil_loads, CheckedAt.PE_HBM),
        (spoil_computation, CheckedAt.DE_BUFFER),
        (spoil_decode_transfer, CheckedAt.DE_HBM),
    ],
)
async def test_corrupted_kv_is_found_at_its_place_and_fails_the_request(
    spoil: Callable[[Cluster, pytest.MonkeyPatch], None],
    place: CheckedAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        await made.ask(PROMPT, 2)
        await made.stored()
        spoil(made, monkeypatch)
        status, body = await made.post(PROMPT, 2)
        assert status == 400
        assert f"is wrong in {place.value}" in body["error"]["message"]
        counts = [e.plane.verifier.counts() for e in made.engines.values()]
        assert {p for c in counts for p, (_, wrong) in c.items() if wrong} == {place}
        await made.idle()
        assert made.service.metrics.retries == 0


@pytest.mark.parametrize("mode", [Mode.LAYERWISE, Mode.DUALPATH, Mode.ORACLE, Mode.BASIC])
async def test_the_next_pass_begins_in_the_last_layers_of_the_one_before(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the next chunk of the same prompt; mode Basic ends each pass before the next."""
    computed, begun_in_pass = RankPasses.compute, []
    begin, now = PrefillEngine._begin, set[RunningPass]()

    def compute(
        self: RankPasses, running: RunningPass, late: Callable[[], None], *, was_idle: bool
    ) -> None:
        now.add(running)
        computed(self, running, late, was_idle=was_idle)
        now.remove(running)

    def begin_noted(self: PrefillEngine, batch: Batch, before: StartedPass | None) -> StartedPass:
        begun_in_pass.append(bool(now))
        return begin(self, batch, before)

    monkeypatch.setattr(RankPasses, "compute", compute)
    monkeypatch.setattr(PrefillEngine, "_begin", begin_noted)
    async with cluster(tmp_path, mode, compute_quota_s=1e-4, layer_buffers=2) as made:
        prompts = [[agent, *PROMPT] for agent in range(1, 5)]
        first = await asyncio.gather(*(made.ask(prompt, 9) for prompt in prompts))
        await made.stored()
        turns = [[*p, *tokens, *PROMPT] for p, (tokens, _) in zip(prompts, first, strict=True)]
        await asyncio.gather(*(made.ask(turn, 1) for turn in turns))
        await made.idle()
        assert made.counts(1) == 0
        assert len(begun_in_pass) > len(prompts)
        assert any(begun_in_pass) == (mode is not Mode.BASIC)


async def test_a_client_that_disconnects_frees_all_resources(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, speedup=0.01) as made:
        url = f"{made.endpoint}/v1/completions"
        body = {"prompt": PROMPT, "max_tokens": 300, "stream": True}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            assert response.status == 200
            await response.content.readany()
        await made.idle()


async def test_requests_wait_for_hbm_in_fifo_order(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH, hbm_bytes=12 * GEOMETRY.full_block_bytes) as made:
        prompts = [[agent, *PROMPT] for agent in range(1, 7)]
        answers = await asyncio.gather(*(made.ask(prompt, 4) for prompt in prompts))
        assert [len(tokens) for tokens, _ in answers] == [4] * 6
        await made.idle()


async def test_an_engine_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    prefill_transfer = PrefillTransfer(
        request_id="x",
        prompt_tokens=600,
        hit_blocks=0,
        hit_key_tail=b"",
        hits=(),
        decode_engine="decode-0",
        decode_epoch="e",
        de_slots=(),
    )
    body = {"request_id": "x", "token_ids": [1] * 600, "sampling_params": {"max_tokens": 1}}
    long = {**body, "kv_transfer_params": to_transfer_params(prefill_transfer)}
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        url = f"{made.engines['prefill-0'].api_url}/inference/v1/generate"
        for sent, reason in (
            (body, "send it through the router"),
            (long, "needs 600 tokens, but the longest context is 512"),
            ({**long, "token_ids": [1]}, "1 tokens for a prompt of 600"),
            ({"request_id": "x"}, "missing required field"),
        ):
            async with made.http.post(url, json=sent) as response:
                assert response.status == 400
                assert reason in await response.text()


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        port = int(made.endpoint.rpartition(":")[2])
        settings = engine_settings(
            Role.DECODE,
            "x",
            made.service.scheduler.server.address,
            tmp_path,
            Mode.DUALPATH,
            port=port,
        )
        with pytest.raises(ConfigError, match=f":{port}"):
            async with asyncio.timeout(GUARD_S), emulated_engine(settings, made.surroundings):
                pass


def test_settings_are_checked(tmp_path: Path) -> None:
    def settings(**changes):
        return engine_settings(Role.DECODE, "x", "tcp://x:1", tmp_path, Mode.DUALPATH, **changes)

    for change in ({"port": -1}, {"speedup": 0.0}, {"batch_cap_tokens": 3}, {"vocab_size": 1}):
        with pytest.raises(ConfigError, match=str(next(iter(change.values())))):
            settings(**change)
    assert settings().layer_regions == COSTS.layers
