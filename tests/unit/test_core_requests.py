"""Calls whose request an engine's core has lost, as the engine's HTTP server finds them."""

import asyncio
import queue
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dualpath.vllm import core_requests
from dualpath.vllm.core_requests import _UTILITY, answer_for_requests, lost_calls

CALL, ID = "chat-1.2", "generate-tokens-chat-1.2-0a1b2c3d"
EXTERNAL = "generate-tokens-chat-1.2"


class Client:
    """vLLM's ``AsyncLLM`` as far as it is used, with one core or several."""

    def __init__(self, *cores: Sequence[str]) -> None:
        self.engine_core = self
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.output_processor.external_req_ids[EXTERNAL] = [ID]
        self.cores = cores
        self.meanwhile: Callable[[], object] = lambda: None

    async def call_utility_all_async(self, method: str) -> list[Sequence[str]]:
        assert method == _UTILITY
        await asyncio.sleep(0)
        self.meanwhile()
        return list(self.cores)


async def test_a_request_that_the_core_does_not_have_is_lost() -> None:
    assert await lost_calls(Client(["another"]), [CALL, "not passed on yet"]) == {CALL}


@pytest.mark.parametrize("cores", [[[ID, "another"]], [["another"], [ID]]])
async def test_a_request_that_one_of_the_servers_cores_has_is_not(cores: list[list[str]]) -> None:
    assert await lost_calls(Client(*cores), [CALL]) == set()


async def test_a_request_that_ends_while_the_core_answers_is_not() -> None:
    client = Client([])
    client.meanwhile = client.output_processor.external_req_ids.clear
    assert await lost_calls(client, [CALL]) == set()


async def test_a_core_that_does_not_answer_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_requests, "_ANSWER_S", 0.01)
    client, never = Client([]), asyncio.Event()
    monkeypatch.setattr(client, "call_utility_all_async", lambda method: never.wait())
    assert await lost_calls(client, [CALL]) == set()
    assert "has not answered which requests it has" in caplog.text


async def test_without_open_calls_the_core_is_not_asked() -> None:
    client = Client()
    del client.engine_core
    assert await lost_calls(client, []) == set()


def test_vllms_core_answers_over_its_sockets() -> None:
    answer_for_requests()
    core = object.__new__(EngineCoreProc)
    core.scheduler = type("Scheduler", (), {"requests": {ID: object()}})()
    core.output_queue, core.shutdown_state = queue.Queue(), EngineShutdownState.RUNNING
    core._handle_client_request(EngineCoreRequestType.UTILITY, (0, 7, _UTILITY, []))
    client, outputs = core.output_queue.get_nowait()
    assert client == 0
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert arrived.utility_output.call_id == 7
    assert arrived.utility_output.result.result == [ID]
    assert asyncio.iscoroutinefunction(AsyncMPClient.call_utility_all_async)
