"""Legs as proxies of others send them, recorded, at the servers of two engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_two_leg_server import TOKENS, Engine

from dualpath.core.cluster import Role
from dualpath.core.transfers import from_transfer_params
from dualpath.router.two_legs import REQUEST_ID_HEADER, handover_name, leg_of
from dualpath.vllm.two_leg_server import PREFILL_HEADER

LEGS = json.loads((Path(__file__).parents[1] / "data/other_proxies/legs.json").read_text())
PAIRS = [
    pytest.param(pair, id=f"{name}-{'chat' if 'chat' in pair['path'] else 'completion'}")
    for name, pairs in LEGS.items()
    for pair in pairs
]
#: Of leg 1's answer, when the legs were recorded.
ANSWERED = "name-1"


@pytest.mark.parametrize("pair", PAIRS)
async def test_a_recorded_first_leg_computes_one_token(pair: dict[str, Any]) -> None:
    engine = Engine(Role.PREFILL)
    answer = await engine.post(pair["first"]["body"], pair["path"], **pair["first"]["headers"])
    assert answer.status_code == 200, answer.text
    assert answer.json()["kv_transfer_params"]["do_remote_prefill"]
    ((prompt, params, _),) = engine.legs.prompts
    assert (prompt.token_ids, params.do_remote_decode) == (TOKENS, True)
    for path, sent in engine.vllm.calls:
        assert path in (pair["path"], f"{pair['path']}/render")
        limits = {sent["max_tokens"], sent.get("max_completion_tokens", 1)}
        assert (limits, sent["stream"], "min_tokens" in sent) == ({1}, False, False)
        assert "stream_options" not in sent


@pytest.mark.parametrize("pair", PAIRS)
async def test_a_recorded_second_leg_gets_the_transfer_and_the_clients_limits(
    pair: dict[str, Any],
) -> None:
    engine = Engine(Role.DECODE)
    answer = await engine.post(pair["second"]["body"], pair["path"], **pair["second"]["headers"])
    assert (answer.status_code, answer.headers[PREFILL_HEADER]) == (200, "transferred; leg-1")
    (sent,) = engine.vllm.completed
    assert from_transfer_params(sent["kv_transfer_params"]) is not None
    chat = "chat" in pair["path"]
    assert sent.get("max_completion_tokens" if chat else "max_tokens") == 8


@pytest.mark.parametrize("pair", PAIRS)
def test_recorded_legs_of_a_request_have_one_name(pair: dict[str, Any]) -> None:
    first, second = (
        (leg_of(pair[leg]["body"], role), pair[leg]["headers"].get(REQUEST_ID_HEADER.lower(), ""))
        for leg, role in (("first", Role.PREFILL), ("second", Role.DECODE))
    )
    name = handover_name(*second)
    if name != ANSWERED:
        assert name == handover_name(*first)
        assert name
