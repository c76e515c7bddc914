"""Clients that leave, engines that die, blocks that rot: real engines go on, with right tokens."""

from functools import partial

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster
from tests.e2e.plain_engine import GUARD_S, Completion, Round, Truth, in_parallel, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def first_turns_are_right(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth, salt: str
) -> None:
    """Ask every agent's first turn, all at once."""
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


def test_a_rotten_block_is_computed_again_and_stored_anew(
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


def test_a_prefill_engine_killed_in_mid_prefill_is_replaced_by_the_other(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    request = prefill_under_way(engines, truth.long_prompt, 40, "pe dies")
    (note,) = engines.assignments()
    engines.kill(note.prefill_engine)
    answer = request.answer()
    assert answer.token_ids == truth.long_answer[:40]
    assert note.prefill_engine not in engines.alive()
    assert len(engines.alive()) == 3
    first_turns_are_right(engines, agents, truth, "without it")

    engines.restart(note.prefill_engine)
    engines.forget_assignments()
    first_turns_are_right(engines, agents, truth, "with it again")
    assert note.prefill_engine in {each.prefill_engine for each in engines.assignments()}
    engines.wait_idle()


def test_a_decode_engine_killed_in_mid_decode_is_replaced_by_the_other(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    engines.forget_assignments()
    request = Completion(engines.url, truth.long_prompt, 400, "de dies")
    tokens: list[int] = []
    killed = ""
    for piece in request.pieces():
        tokens += piece
        if not killed and len(tokens) >= 20:  # early: on a busy machine the rest comes in a burst
            killed = engines.assignments()[0].decode_engine
            engines.kill(killed)
    assert tokens == truth.long_answer
    assert killed not in engines.alive()
    assert len(engines.assignments()) == 2
    first_turns_are_right(engines, agents, truth, "without de")

    engines.restart(killed)
    engines.forget_assignments()
    first_turns_are_right(engines, agents, truth, "with de again")
    assert killed in {each.decode_engine for each in engines.assignments()}
    engines.wait_idle()


def test_engines_that_get_sigterm_end_what_they_have_and_nothing_is_tried_again(
    engines: EngineCluster, agents: list[list[Round]], truth: Truth
) -> None:
    engines.wait_idle()
    retries = engines.service.status()["counters"]["retries"]
    request = prefill_under_way(engines, truth.long_prompt, 40, "engines drain")
    (note,) = engines.assignments()
    draining = [note.prefill_engine, note.decode_engine]
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
    for name in draining:
        engines.restart(name)
    first_turns_are_right(engines, agents, truth, "after it")
