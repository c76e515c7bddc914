"""Orchestrators' hints on the KV of a request: vLLM's envelope, and a bound of what is loaded."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.emulated_cluster import Cluster, cluster

from dualpath.core.blocks import block_keys
from dualpath.core.errors import BadRequestError
from dualpath.core.kv_hints import (
    NO_KV_HINTS,
    HintStatus,
    KvHintAction,
    KvHints,
    hint_results,
    kv_request_hints,
)
from dualpath.core.modes import Mode
from dualpath.router.two_legs import leg_parameters

BLOCK_TOKENS = 4
PROMPT = list(range(100, 123))
KEYS = block_keys(PROMPT, BLOCK_TOKENS)


def hashes(keys: Sequence[bytes]) -> list[int]:
    """Return keys as KV events of vLLM have them, if they are integers."""
    return [int.from_bytes(key, "big") & ((1 << 64) - 1) for key in keys]


def fetch(block_hashes: object, **payload: Any) -> dict[str, Any]:
    return {
        "action_id": "fetch-1",
        "action_type": "kv.fetch",
        "action_version": "1.0",
        "payload": {"block_hashes": block_hashes, **payload},
    }


def envelope(*actions: dict[str, Any], version: str = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def statuses(*actions: dict[str, Any], version: str = "0.1") -> list[HintStatus]:
    hints = kv_request_hints({"kv_hint": envelope(*actions, version=version)}).kv_hint
    assert hints is not None
    return [result.status for result in hint_results(hints, KEYS)]


def test_a_fetch_of_the_head_of_the_prompt_is_applied() -> None:
    hints = kv_request_hints({"kv_hint": envelope(fetch(hashes(KEYS[:3]), mode="copy"))}).kv_hint
    assert hints is not None
    (result,) = hint_results(hints, KEYS)
    assert (result.status, result.reason) == (HintStatus.APPLIED, "it names 3 of 5 blocks")


@pytest.mark.parametrize(
    "payload",
    [
        fetch([]),
        fetch("all"),
        fetch([-1]),
        fetch(hashes(KEYS), mode="move"),
        fetch(hashes(KEYS), no_retain=True),
        fetch(hashes(KEYS[1:])),
        fetch(hashes(block_keys(range(40), BLOCK_TOKENS))),
    ],
)
def test_a_fetch_that_cannot_be_carried_out_is_rejected(payload: dict[str, Any]) -> None:
    assert statuses(payload) == [HintStatus.REJECTED]


def test_unknown_actions_versions_and_protocols_are_unsupported_one_by_one() -> None:
    known = fetch(hashes(KEYS))
    unknown = {**known, "action_type": "vllm.set_priority"}
    newer = {**known, "action_version": "2.0"}
    assert statuses(unknown, known, newer) == [
        HintStatus.UNSUPPORTED,
        HintStatus.APPLIED,
        HintStatus.UNSUPPORTED,
    ]
    assert statuses(known, version="1.0") == [HintStatus.UNSUPPORTED]


@pytest.mark.parametrize(
    "params",
    [
        {"max_load_tokens": -1},
        {"max_load_tokens": "64"},
        {"max_load_tokens": True},
        {"kv_hint": "fetch"},
        {"kv_hint": {"protocol_version": "0.1", "message_id": "m"}},
        {"kv_hint": envelope({"action_type": "kv.fetch"})},
        {"kv_hint": envelope(*[fetch([1])] * 65)},
    ],
)
def test_a_malformed_limit_or_envelope_is_the_senders_mistake(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=r"kv_transfer_params: .*send max_load_tokens as"):
        kv_request_hints(params)
    with pytest.raises(BadRequestError, match="kv_transfer_params"):
        leg_parameters({"do_remote_decode": True, **params})


def test_a_request_without_hints_has_none() -> None:
    without: tuple[object, ...] = (None, {}, {"dualpath": {}}, {"max_load_tokens": None}, "text")
    for params in without:
        assert kv_request_hints(params) is NO_KV_HINTS


def test_a_leg_has_the_hints_of_its_parameters() -> None:
    params = leg_parameters({"do_remote_decode": True, "max_load_tokens": 8, "kv_hints": 7})
    assert params.kv_hints.max_load_tokens == 8


def test_the_envelope_is_that_of_the_installed_vllm() -> None:
    theirs = pytest.importorskip("vllm.v1.kv_hints")
    for our, their in ((KvHints, theirs.KvHintsEnvelope), (KvHintAction, theirs.KvHintAction)):
        assert our.__struct_fields__ == their.__struct_fields__
    sent = msgspec.convert(envelope(fetch(hashes(KEYS))), theirs.KvHintsEnvelope)
    read = kv_request_hints({"max_load_tokens": 4}, sent)
    assert read == kv_request_hints(
        {"max_load_tokens": 4, "kv_hint": envelope(fetch(hashes(KEYS)))}
    )


async def hit_tokens(made: Cluster, params: dict[str, Any] | None) -> int:
    _, hits = await made.ask(PROMPT, 1, kv_transfer_params=params)
    return hits


def samples(made: Cluster, name: str) -> dict[tuple[str, ...], float]:
    lines = made.service.exposition().decode().splitlines()
    return {
        tuple(part.split('"')[1] for part in line.split("{")[1].split("}")[0].split(",")): float(
            line.rsplit(" ", 1)[1]
        )
        for line in lines
        if line.startswith(f"{name}{{")
    }


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.DUALPATH, Mode.SPLIT])
def test_a_request_loads_only_as_much_as_it_may(tmp_path: Path, mode: Mode) -> None:
    async def ask() -> None:
        async with cluster(tmp_path, mode) as made:
            first = await made.ask(PROMPT, 1)
            await made.stored()
            await made.idle()
            bounded = [
                await hit_tokens(made, {"max_load_tokens": tokens}) for tokens in (0, 3, 9, 1000)
            ]
            assert bounded == [0, 0, 8, 20]
            # What is computed in place of a load is right, and so is the answer.
            again = await made.ask(PROMPT, 1, kv_transfer_params={"max_load_tokens": 4})
            assert (again[0], again[1]) == (first[0], 4)
            await made.idle()
            assert made.counts(1) == 0
            missed = samples(made, "dualpath:missed_tokens_total")
            assert missed[("load-limit",)] == 20 + 20 + 12 + 16

    asyncio.run(ask())


def test_hints_are_counted_and_never_fail_a_request(tmp_path: Path) -> None:
    async def ask() -> None:
        async with cluster(tmp_path, Mode.DUALPATH) as made:
            await made.ask(PROMPT, 1)
            await made.stored()
            known = fetch(hashes(KEYS), source_control_endpoint="tcp://10.0.0.1:9")
            other = {**known, "action_type": "sglang.demote"}
            hints = envelope(known, other, fetch([1]))
            assert await hit_tokens(made, {"kv_hint": hints}) == 20
            counted = samples(made, "dualpath:kv_hint_actions_total")
            assert {labels: count for labels, count in counted.items() if count} == {
                ("kv.fetch", "applied"): 1.0,
                ("other", "unsupported"): 1.0,
                ("kv.fetch", "rejected"): 1.0,
            }
            status, body = await made.post(PROMPT, 1, kv_transfer_params={"kv_hint": [1]})
            assert status == 400
            assert "kv_hint as an envelope" in body["error"]["message"]

    asyncio.run(ask())
