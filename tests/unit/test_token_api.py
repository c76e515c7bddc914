"""The table from an engine's statuses to errors and from errors to a server's statuses."""

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dualpath.core.errors import (
    BadRequestError,
    BufferTooSmallError,
    DeadlineError,
    DualPathError,
    EngineLostError,
    IncompatibleError,
    OverloadedError,
    PromptTooLongError,
    TransportError,
)
from dualpath.router.token_api.client import TokenApiClient, joined
from dualpath.router.token_api.open_calls import OPEN_CALLS_PATH
from dualpath.router.token_api.statuses import api_error, engine_error, status_of
from dualpath.router.token_api.wire import (
    Choice,
    ChoiceLogprobs,
    GenerateAnswer,
    GenerateRequest,
    decode_body,
)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_only_what_concerns_the_request_is_the_clients_mistake(status):
    error = engine_error("engine pe-0", status, "prompt of 70 exceeds 64")
    assert type(error) is BadRequestError
    assert str(error) == "prompt of 70 exceeds 64"


@pytest.mark.parametrize("status", [401, 403, 404, 405, 415])
def test_an_engine_that_refuses_caller_or_route_is_not_set_up(status):
    error = engine_error("engine pe-0", status, "Unauthorized")
    assert type(error) is IncompatibleError
    assert f"engine pe-0 answered {status}: Unauthorized; start it with" in str(error)


@pytest.mark.parametrize("status", [302, 500, 501, 502, 503])
def test_any_other_status_is_a_lost_engine(status):
    assert type(engine_error("engine pe-0", status, "no")) is EngineLostError


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (BadRequestError, 400),
        (PromptTooLongError, 400),
        (BufferTooSmallError, 400),
        (OverloadedError, 429),
        (DeadlineError, 504),
        (EngineLostError, 503),
        (TransportError, 503),
        (DualPathError, 503),
        (IncompatibleError, 500),
        (KeyError, 500),
    ],
)
def test_each_error_has_one_status(kind, status):
    assert status_of(kind("why")) == status


def test_a_prompt_that_is_too_long_is_named_as_the_parameter_at_fault():
    assert api_error(PromptTooLongError("70 tokens, 64 fit")).param == "input_tokens"
    assert api_error(BadRequestError("n is 2")).param is None


def test_vllms_bodies_are_read_and_what_is_not_used_of_them_is_ignored():
    answer = decode_body(
        b'{"request_id": "r", "usage": null, "prompt_logprobs": null, "choices": [{"index": 0, '
        b'"token_ids": [7], "finish_reason": "stop", "stop_reason": 7, "logprobs": null}]}',
        GenerateAnswer,
    )
    assert answer.choices[0].token_ids == [7]
    with pytest.raises(BadRequestError, match="missing required field `token_ids`"):
        decode_body(b'{"request_id": "r"}', GenerateRequest[dict[str, Any]])


def test_tokens_that_are_ready_together_become_one_choice():
    end = Choice([4], "stop", 4)
    assert list(joined([Choice([1]), Choice([2, 3]), end])) == [Choice([1, 2, 3]), end]
    assert list(joined([Choice([1])])) == [Choice([1])]
    assert list(joined([])) == []


def test_tokens_with_logprobs_stay_apart_and_in_order():
    with_logprobs = Choice([2], logprobs=ChoiceLogprobs([]))
    assert list(joined([Choice([1]), with_logprobs, Choice([3])])) == [
        Choice([1]),
        with_logprobs,
        Choice([3]),
    ]


def test_tokens_before_an_error_come_before_it():
    def broken():
        yield Choice([1])
        yield Choice([2])
        raise EngineLostError("KV load failed")

    choices = joined(broken())
    assert next(choices) == Choice([1, 2])
    with pytest.raises(EngineLostError, match="KV load failed"):
        next(choices)


@pytest.mark.parametrize(
    ("status", "body", "calls"),
    [
        (200, b'{"calls": {"a": null, "b": 1.5}}', {"a": None, "b": 1.5}),
        (404, b"no such route", None),
        (401, b"no key", None),
        (500, b"a defect", None),
        (200, b"<html>a proxy's page</html>", None),
    ],
)
async def test_any_answer_to_an_inquiry_is_a_sign_of_life(status, body, calls):
    async with answering(status, body) as engine:
        assert await engine() == calls


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_that_does_not_reach_an_engine_is_no_sign_of_its_life(status):
    async with answering(status, b"bad gateway") as engine:
        with pytest.raises(EngineLostError, match=f"answered {status}"):
            await engine()


@asynccontextmanager
async def answering(status, body):
    """Yield a function that asks an engine, which answers this, for its open calls."""

    async def answer(request):
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_get(OPEN_CALLS_PATH, answer)
    client = TokenApiClient()
    async with TestServer(app) as server:
        engine = SimpleNamespace(engine_id="pe-0", api_url=str(server.make_url("/")), dp=None)
        yield lambda: client.open_calls(engine)  # type: ignore[arg-type]
        await client.aclose()
