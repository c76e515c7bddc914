"""When a decode engine reports that the chain of a request is stored."""

from collections.abc import Sequence

from tests.engine_harness import GEOMETRY, ToyCluster, prompt_keys

from dualpath.core.blocks import BlockKey
from dualpath.core.control import StoredChain
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.io.persister import ChainWrites
from dualpath.engine.passes.generated import GeneratedBlock

KEYS: Sequence[BlockKey] = [bytes([number]) * 32 for number in range(8)]


def chains() -> tuple[ChainWrites, list[StoredChain]]:
    reports: list[StoredChain] = []
    return ChainWrites(reports.append), reports


def test_a_chain_is_reported_when_its_request_is_over_and_all_is_stored() -> None:
    writes, reports = chains()
    writes.begin("r", KEYS[:3], KEYS[:3])
    prompt = writes.prompt("r")
    answer = [writes.generated("r", KEYS[block], KEYS[block - 1]) for block in (3, 4)]
    answer[1](1)
    prompt(2)
    writes.over("r")
    assert reports == []
    answer[0](1)
    assert reports == [StoredChain(KEYS[2], (KEYS[3], KEYS[4]), 4)]


def test_a_request_that_ends_after_its_writes_is_reported_with_its_end() -> None:
    writes, reports = chains()
    writes.begin("r", KEYS[:3], KEYS[:3])
    writes.prompt("r")(0)
    assert reports == []
    writes.over("r")
    assert reports == [StoredChain(KEYS[2], (), 0)]


def test_a_chain_of_which_a_block_is_not_stored_is_not_reported() -> None:
    writes, reports = chains()
    writes.begin("r", KEYS[:3], KEYS[:3])
    writes.prompt("r")(3)
    writes.generated("r", KEYS[3], KEYS[2])(None)
    writes.generated("r", KEYS[4], KEYS[3])(1)
    writes.over("r")
    assert reports == []


def test_a_chain_with_a_gap_is_not_reported() -> None:
    """A block that has left a window is not written, and those behind it are."""
    writes, reports = chains()
    writes.begin("r", KEYS[:3], KEYS[:3])
    writes.prompt("r")(3)
    writes.generated("r", KEYS[4], KEYS[3])(1)
    writes.over("r")
    assert reports == []


def test_a_decode_engine_that_computes_the_append_reports_the_answer_behind_the_prompt() -> None:
    writes, reports = chains()
    writes.begin("r", KEYS[:2], KEYS[:4])
    writes.prompt("r")(0)
    for block in range(2, 6):
        writes.generated("r", KEYS[block], KEYS[block - 1])(1)
    writes.over("r")
    assert reports == [StoredChain(KEYS[3], (KEYS[4], KEYS[5]), 4)]


def test_a_request_that_the_router_has_released_is_not_reported() -> None:
    writes, reports = chains()
    writes.begin("r", KEYS[:3], KEYS[:3])
    prompt = writes.prompt("r")
    writes.drop("r")
    prompt(3)
    writes.over("r")
    assert reports == []


def test_a_request_of_a_former_session_is_not_reported() -> None:
    writes, reports = chains()
    writes.begin("r", KEYS[:3], KEYS[:3])
    prompt = writes.prompt("r")
    writes.clear()
    prompt(3)
    writes.over("r")
    assert reports == []


def test_an_engine_reports_what_a_request_has_stored_of_prompt_and_answer() -> None:
    cluster = ToyCluster()
    try:
        block_tokens = GEOMETRY.block_tokens
        keys, tokens = prompt_keys(7 * block_tokens), 5 * block_tokens
        cluster.store(keys[:2])
        prefill_transfer = cluster.load("r", keys[:5], tokens, 0, 2)
        hbm = list(range(10, 15))
        cluster.forward([(prefill_transfer, keys[:5], BlockRun(2, 3), hbm)])
        transfer = DecodeTransfer("r", tokens, prefill_transfer.de_slots, persist_from=2)
        assert cluster.fill(transfer, hbm) is None
        blocks = [GeneratedBlock(0, keys[n], keys[n - 1], "", "r") for n in (5, 6)]
        cluster.de.manager.persist_generated(blocks)
        cluster.de.manager.ended("r")
        assert cluster.de.manager.persister.drain(10.0)
        chain = cluster.de.answer(StoredChain)
        assert chain == StoredChain(keys[4], (keys[5], keys[6]), 5)
    finally:
        cluster.close()
