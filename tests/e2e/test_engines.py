"""Real engines answer like one plain vLLM engine: on every path, and under every failure.

Four engines are started; two of them are killed and restarted, two drain at the end.  All of it
happens twice: decode engines receive prompts in their buffer, then in their HBM.
"""

import re
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("vllm")

import numpy as np
from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import (
    HBM_BYTES,
    Completion,
    Round,
    Truth,
    in_parallel,
    tiny_model,
    until,
)
from tests.guard import GUARD_S

from dualpath.core.blocks import tenant_tag
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover
from dualpath.policy import read_side
from dualpath.policy.read_side import DE_SIDE, PE_READS, SIDES_IN_TURN, choose_reads

pytestmark = pytest.mark.engine


@pytest.fixture(
    scope="module",
    params=[Handover.BUFFER, pytest.param(Handover.HBM, marks=pytest.mark.long)],
)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineCluster]:
    """2P2D in mode split; the prefill engines hold two layers of KV, and one.

    The first one shares memory with the decode engines, the second one uses NIXL.  All start while
    the plain engine computes the reference.
    """
    folder = tmp_path_factory.mktemp("engines")
    settings = tiny_cluster_settings(
        tiny_model(), folder / "storage", handover=request.param, receive_hbm_share=RECEIVE_SHARE
    )
    with EngineCluster(settings, folder) as cluster:
        names = [
            cluster.start_engine(Role.PREFILL, 0, layer_buffers=2),
            cluster.start_engine(Role.PREFILL, 1, layer_buffers=1, transport="nixl"),
            cluster.start_engine(Role.DECODE, 0, hbm_bytes=decode_hbm_bytes(cluster)),
            cluster.start_engine(Role.DECODE, 1, hbm_bytes=decode_hbm_bytes(cluster)),
        ]
        request.getfixturevalue("truth")
        cluster.wait_for(*names)
        yield cluster


def at_prefill(rule, turn, *hit, **thirds):
    return choose_reads(PE_READS, turn, *hit, **thirds)


def at_decode(rule, turn, *hit, **thirds):
    return choose_reads(SIDES_IN_TURN, DE_SIDE, *hit, **thirds)


#: Of a decode engine that receives prompts in HBM; a prompt fits it, and what is left.
RECEIVE_SHARE = 0.4


def decode_hbm_bytes(engines: EngineCluster) -> int:
    """Return the KV memory of a decode engine, which must hold two prompts to receive them."""
    return HBM_BYTES * (2 if engines.settings.handover is Handover.HBM else 1)


PATHS = {"pe-path": at_prefill, "de-path": at_decode, "split": choose_reads}


@pytest.mark.parametrize("path", PATHS)
def test_agents_on_all_paths_get_a_plain_engines_tokens(
    path: str,
    engines: EngineCluster,
    agents: list[list[Round]],
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_side, "choose_reads", PATHS[path])
    engines.forget_assignments()
    at_pe = engines.total("storage_read_bytes", "pe-0", "pe-1")
    at_de = engines.total("storage_read_bytes", "de-0", "de-1")
    answers = in_parallel(
        [partial(engines.replay, agent, f"{path} {n}") for n, agent in enumerate(agents)]
    )
    for agent, got, expected in zip(agents, answers, truth.turns, strict=True):
        assert [answer.token_ids for answer in got] == expected
        assert [answer.cached_tokens for answer in got] == engines.expected_hits(agent)
    engines.wait_idle()
    assert {note.prefill_engine for note in engines.assignments()} == {"pe-0", "pe-1"}
    assert {note.decode_engine for note in engines.assignments()} == {"de-0", "de-1"}
    assert (engines.total("storage_read_bytes", "pe-0", "pe-1") > at_pe) is (path != "de-path")
    assert (engines.total("storage_read_bytes", "de-0", "de-1") > at_de) is (path != "pe-path")
    assert engines.total("transfer_failures") == engines.total("persist_dropped_blocks") == 0
    handover = engines.settings.handover
    assert {note.handover for note in engines.assignments()} == {handover}


def test_kv_moves_through_shared_memory_except_where_nixl_is_set(engines: EngineCluster) -> None:
    shared, nixl = ((engines.folder / f"{name}.log").read_text() for name in ("pe-0", "pe-1"))
    for name in ("de-0", "de-1"):
        assert re.search(rf"this engine reaches {name}-\w+ through shared memory", shared)
    if engines.settings.handover is Handover.BUFFER:
        assert "through the network" not in shared
    assert "this engine reaches" not in nixl


def test_a_prompt_beyond_the_compute_quota_is_prefilled_in_chunks(
    engines: EngineCluster, truth: Truth
) -> None:
    before = engines.total("loaded_blocks")
    answer = engines.ask(truth.long_prompt, 40, "chunks")
    assert answer.token_ids == truth.long_answer[:40]
    assert answer.cached_tokens == 0
    # Without a hit, all loaded KV was computed by earlier chunks of the prompt.
    engines.wait_idle()
    assert engines.total("loaded_blocks") - before > len(truth.long_prompt) // 64


def test_every_path_stores_the_same_bytes_as_a_computation_without_hits(
    engines: EngineCluster, agents: list[list[Round]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = agents[0][:3]
    stored: dict[str, list[bytes]] = {}
    context: list[int] = []
    for path, choose in PATHS.items():
        monkeypatch.setattr(read_side, "choose_reads", choose)
        # One request at a time: equal batches make equal roundings.
        answers = engines.replay(rounds, f"bytes {path}")
        assert [a.cached_tokens for a in answers] == engines.expected_hits(rounds)
        pairs = zip(rounds, answers, strict=True)
        context = [t for turn, answer in pairs for t in (*turn.append, *answer.token_ids)]
        keys = engines.keys(context[:-1], f"bytes {path}")
        stored[path] = engines.blocks(keys)
        assert engines.tenants(keys) == {tenant_tag(f"bytes {path}")}, "answers as well as prompts"
    assert stored["pe-path"] == stored["de-path"] == stored["split"]

    engines.ask(context, 1, "bytes plain")
    plain = engines.blocks(engines.wait_stored(context[:-1], "bytes plain"))
    for block, recomputed in zip(stored["split"], plain, strict=True):
        layers = engines.storage.geometry.layers
        ours = np.frombuffer(block, np.float32).reshape(layers, -1)
        theirs = np.frombuffer(recomputed, np.float32).reshape(layers, -1)
        for layer in range(layers):
            np.testing.assert_allclose(ours[layer], theirs[layer], rtol=1e-3, atol=1e-3)


def test_fewer_layer_buffers_admit_more_tokens_in_the_same_memory(engines: EngineCluster) -> None:
    infos = {info.engine_id: info for info in engines.service.registry.alive()}
    layers = engines.storage.geometry.layers
    all_layers_tokens = HBM_BYTES // engines.storage.geometry.bytes_per_token
    null_block_tokens = engines.storage.geometry.block_tokens
    decode_tokens = decode_hbm_bytes(engines) // engines.storage.geometry.bytes_per_token
    share = RECEIVE_SHARE if engines.settings.handover is Handover.HBM else 0
    receiving_tokens = int(decode_tokens // null_block_tokens * share) * null_block_tokens
    assert infos["de-0"].hbm_tokens == decode_tokens - receiving_tokens - null_block_tokens
    assert infos["pe-0"].hbm_tokens == all_layers_tokens * layers // 2 - null_block_tokens
    assert infos["pe-1"].hbm_tokens == all_layers_tokens * layers - null_block_tokens


def first_turns_are_right(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth, salt: str
) -> None:
    """Send every agent's first turn, all at once, and compare the answers."""
    answers = in_parallel(
        [
            partial(engines.ask, agent[0].append, agent[0].generate, f"{salt} {n}")
            for n, agent in enumerate(agents)
        ]
    )
    assert [answer.token_ids for answer in answers] == [turns[0] for turns in truth.turns]


def prefill_under_way(engines: EngineCluster, prompt: list[int], generate: int, salt: str):
    """Send a long prompt; return once its first chunk is computed, with many to come."""
    before = engines.total("pe_to_de_bytes")
    engines.forget_assignments()
    request = Completion(engines.url, prompt, generate, salt)
    until(lambda: engines.total("pe_to_de_bytes") > before, "a computed chunk")
    return request


def test_a_client_that_leaves_in_mid_prefill_frees_everything(
    engines: EngineCluster, truth: Truth
) -> None:
    before = engines.total("pe_to_de_bytes")
    request = prefill_under_way(engines, truth.long_prompt, 8, "leaves early")
    assert not engines.idle()
    request.close()
    engines.wait_idle()
    whole_bytes = len(truth.long_prompt) * engines.storage.geometry.bytes_per_token
    assert engines.total("pe_to_de_bytes") - before < whole_bytes


def test_a_client_that_leaves_in_mid_decode_frees_everything(
    engines: EngineCluster, truth: Truth
) -> None:
    request = Completion(engines.url, truth.long_prompt, 400, "leaves late")
    pieces = request.pieces()
    tokens: list[int] = []
    while len(tokens) < 10:
        tokens += next(pieces)
    assert not engines.idle()
    request.close()
    engines.wait_idle()
    assert truth.long_answer[: len(tokens)] == tokens


def test_a_corrupt_block_is_recomputed_and_stored_again(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    first, second = agents[1][:2]
    salt = "rotten"
    answer = engines.ask(first.append, first.generate, salt)
    context = first.append + answer.token_ids
    keys = engines.wait_stored(context[:-1], salt)
    failures = engines.total("verify_failures")
    path = engines.storage.block_path(keys[2])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    answer = engines.ask(context + second.append, second.generate, salt)
    assert answer.token_ids == truth.turns[1][1]
    assert answer.cached_tokens == 2 * engines.settings.block_tokens
    until(lambda: engines.total("verify_failures") > failures, "the fault in the metrics")
    engines.wait_stored(context[:-1], salt)
    again = engines.ask(context + second.append, second.generate, salt)
    assert again.token_ids == answer.token_ids
    assert again.cached_tokens >= len(context[:-1]) // 64 * 64


def test_engines_killed_in_the_middle_are_replaced_by_the_others_and_come_back(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    request = prefill_under_way(engines, truth.long_prompt, 40, "pe dies")
    (note,) = engines.assignments()
    killed = [note.engines[0]]
    engines.kill(killed[0])
    assert request.answer().token_ids == truth.long_answer[:40]

    engines.forget_assignments()
    request = Completion(engines.url, truth.long_prompt, 400, "de dies")
    tokens: list[int] = []
    for piece in request.pieces():
        tokens += piece
        if len(killed) == 1 and len(tokens) >= 20:  # early: on a busy machine the rest is a burst
            killed.append(engines.assignments()[0].decode_engine)
            engines.kill(killed[1])
    assert tokens == truth.long_answer
    assert len(engines.assignments()) == 2
    assert engines.alive() == {"pe-0", "pe-1", "de-0", "de-1"} - set(killed)
    first_turns_are_right(engines, agents, truth, "without them")

    engines.restart(*killed)
    engines.forget_assignments()
    first_turns_are_right(engines, agents, truth, "with them again")
    assert killed[0] in {each.prefill_engine for each in engines.assignments()}
    assert killed[1] in {each.decode_engine for each in engines.assignments()}
    engines.wait_idle()


def test_engines_that_get_sigterm_end_what_they_have_and_nothing_is_tried_again(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    """The last test of these engines."""
    engines.wait_idle()
    retries = engines.service.status()["counters"]["retries"]
    request = prefill_under_way(engines, truth.long_prompt, 40, "engines drain")
    (note,) = engines.assignments()
    draining = list(note.engines)
    for name in draining:
        engines.supervisor.process(name).terminate()
    until(lambda: all(engines.paused(name) for name in draining), "engines that drain")
    first_turns_are_right(engines, agents, truth, "elsewhere")
    assert request.answer().token_ids == truth.long_answer[:40]
    for name in draining:
        assert engines.supervisor.process(name).wait(GUARD_S) == 0
    assert engines.service.status()["counters"]["retries"] == retries
    new = engines.assignments()[1:]
    assert not {n.prefill_engine for n in new} & set(draining)
    assert not {n.decode_engine for n in new} & set(draining)
    first_turns_are_right(engines, agents, truth, "after it")
