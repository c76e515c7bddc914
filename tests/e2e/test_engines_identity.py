"""What a client gets from real engines is what one plain vLLM engine says, on every path."""

from functools import partial

import pytest

pytest.importorskip("vllm")

import numpy as np
from tests.e2e.engine_cluster import EngineCluster
from tests.e2e.plain_engine import HBM_BYTES, Round, Truth, in_parallel

from dualpath.policy import scheduler
from dualpath.policy.read_side import DE_SIDE, PE_READS, SIDES_IN_TURN, choose_reads

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def at_prefill(rule, turn, prefill, decode, hit_tokens, block_tokens):
    return choose_reads(PE_READS, turn, prefill, decode, hit_tokens, block_tokens)


def at_decode(rule, turn, prefill, decode, hit_tokens, block_tokens):
    return choose_reads(SIDES_IN_TURN, DE_SIDE, prefill, decode, hit_tokens, block_tokens)


PATHS = {"pe-path": at_prefill, "de-path": at_decode, "split": choose_reads}


@pytest.mark.parametrize("path", PATHS)
def test_agents_on_all_paths_get_a_plain_engines_tokens(
    path: str,
    engines: EngineCluster,
    agents: list[list[Round]],
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "choose_reads", PATHS[path])
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


def test_a_prompt_beyond_the_compute_quota_is_prefilled_in_chunks(
    engines: EngineCluster, truth: Truth
) -> None:
    before = engines.total("loaded_blocks")
    answer = engines.ask(truth.long_prompt, 40, "chunks")
    assert answer.token_ids == truth.long_answer[:40]
    assert answer.cached_tokens == 0
    # Without a hit, all that is loaded is what earlier chunks of the prompt have computed.
    engines.wait_idle()
    assert engines.total("loaded_blocks") - before > len(truth.long_prompt) // 64


def test_every_path_stores_the_same_bytes_as_a_computation_without_hits(
    engines: EngineCluster, agents: list[list[Round]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = agents[0][:3]
    stored: dict[str, list[bytes]] = {}
    context: list[int] = []
    for path, choose in PATHS.items():
        monkeypatch.setattr(scheduler, "choose_reads", choose)
        # One request at a time: equal batches make equal roundings.
        answers = engines.replay(rounds, f"bytes {path}")
        assert [a.cached_tokens for a in answers] == engines.expected_hits(rounds)
        pairs = zip(rounds, answers, strict=True)
        context = [t for turn, answer in pairs for t in (*turn.append, *answer.token_ids)]
        stored[path] = engines.blocks(engines.keys(context[:-1], f"bytes {path}"))
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
    infos = {info.engine_id: info for info in engines.service.engines()}
    layers = engines.storage.geometry.layers
    all_layers_tokens = HBM_BYTES // engines.storage.geometry.bytes_per_token
    null_block_tokens = engines.storage.geometry.block_tokens  # vLLM keeps one block for itself
    assert infos["de-0"].hbm_tokens == all_layers_tokens - null_block_tokens
    assert infos["pe-0"].hbm_tokens == all_layers_tokens * layers // 2 - null_block_tokens
    assert infos["pe-1"].hbm_tokens == all_layers_tokens * layers - null_block_tokens
