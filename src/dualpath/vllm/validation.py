"""Requests that break vLLM's own validators are the client's mistake, not a defect of the server.

A validator of vLLM that looks into a field before its type is known (``structured_outputs: 5``)
raises what Python raises.  pydantic passes that on, vLLM answers 500 and logs a traceback, as often
as a client likes.  So does JSON that is nested too deep.  Whatever goes wrong while a body is being
read is said of the body.
"""

import traceback
from types import TracebackType

from fastapi import FastAPI, Request, Response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMValidationError

#: What a look into a value of another type raises; vLLM answers 400 to the other kinds.
_KINDS = (AttributeError, LookupError, RecursionError)
#: What bodies go through at FastAPI's routes and at ``/invocations``.
_READ_BODIES = frozenset({"TypeAdapter.validate_python", "Request.json"})


def blame_bodies_for_broken_validators(app: FastAPI) -> None:
    """Let the application answer 400 where one of vLLM's validators breaks."""
    for kind in _KINDS:
        app.add_exception_handler(kind, _handler)
    # vLLM has built its layers when it made the application; they are built anew at the first call.
    app.middleware_stack = None


async def _handler(request: Request, error: Exception) -> Response:
    if not _while_reading_body(error.__traceback__):
        raise error
    refused = VLLMValidationError(f"the body cannot be understood: {error}; correct it")
    return await exception_handler(request, refused)


def _while_reading_body(trace: TracebackType | None) -> bool:
    frames = (frame.f_code.co_qualname for frame, _ in traceback.walk_tb(trace))
    return not _READ_BODIES.isdisjoint(frames)
