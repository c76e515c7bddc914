"""Ray Serve LLM's classes for prefill and decode, in front of engines that are reached over HTTP.

    python ray_serve_proxy.py --port PORT --prefill URL … --decode URL …

Ray Serve runs engines inside its replicas and calls them as Python objects.  Here an ``HttpEngine``
stands for such an engine.  What is made of a request for each leg, their order, and what becomes of
the answer are Ray's (``PDOrchestratorMixin``, and its backend for a connector that it does not
know).  It runs with the Python in which Ray is installed, so it imports nothing of ours.
"""

import argparse
import itertools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorInfo,
    ErrorResponse,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import (
    PDOrchestratorMixin,
    _pd_http_response,
)

CONNECTOR = "DualPathConnector"


class HttpEngine:
    """The methods of Ray's ``LLMServer`` that take requests, of an engine at ``url``."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def completions(self, request: Any, raw: Any = None) -> AsyncGenerator[Any, None]:
        return self._answers("/v1/completions", request, CompletionResponse)

    async def chat(self, request: Any, raw: Any = None) -> AsyncGenerator[Any, None]:
        return self._answers("/v1/chat/completions", request, ChatCompletionResponse)

    async def _answers(self, path: str, request: Any, kind: Any) -> AsyncGenerator[Any, None]:
        body = request.model_dump(mode="json", exclude_unset=True)
        headers = {"X-Request-Id": request.request_id}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._url + path, json=body, headers=headers) as answer,
        ):
            if answer.status != 200:
                text = await answer.text()
                error = ErrorInfo(message=text, type="engine", code=answer.status)
                yield ErrorResponse(error=error)
            elif request.stream:
                async for piece in answer.content.iter_any():
                    yield piece.decode()
            else:
                yield kind(**await answer.json())


class Handle:
    """The ``DeploymentHandle`` of prefill engines, which it calls in turn."""

    def __init__(self, urls: list[str]) -> None:
        engines = itertools.cycle([HttpEngine(url) for url in urls])
        self.completions = SimpleNamespace(remote=lambda *a: self._call(next(engines), a))
        self.chat = SimpleNamespace(remote=lambda *a: self._call(next(engines), a))

    def options(self, **options: object) -> "Handle":
        return self

    async def _call(self, engine: HttpEngine, arguments: Any) -> AsyncGenerator[Any, None]:
        chat = isinstance(arguments[0], ChatCompletionRequest)
        method = engine.chat if chat else engine.completions
        async for chunk in await method(*arguments):
            yield chunk


class Server(PDOrchestratorMixin, HttpEngine):
    """A decode engine that has prompts prefilled, as Ray's ``PDDecodeServer`` does."""

    def __init__(self, url: str, prefill: Handle) -> None:
        super().__init__(url)
        backend = KVConnectorBackendFactory.get_backend_class(CONNECTOR)(None)
        self._llm_config = SimpleNamespace(kv_connector_backend=backend)
        self._prefill_handle = prefill

    async def chat(self, request: Any, raw: Any = None) -> Any:
        return self._pd_handle_request(request, raw)

    async def completions(self, request: Any, raw: Any = None) -> Any:
        return self._pd_handle_request(request, raw)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    args = parser.parse_args()
    prefill = Handle(args.prefill)
    servers = itertools.cycle([Server(url, prefill) for url in args.decode])
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Any:
        return await _pd_http_response(await next(servers).completions(body))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest) -> Any:
        return await _pd_http_response(await next(servers).chat(body))

    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
