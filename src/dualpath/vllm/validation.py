"""Requests that break vLLM's own validators are the client's mistake, not a defect of the server.

A validator of vLLM that looks into a field before its type is known (``structured_outputs: 5``)
raises what Python raises.  pydantic passes that on, vLLM answers 500 and logs a traceback, as often
as a client likes.  Whatever goes wrong while a body is being validated is said of the body.
"""

import traceback
from types import TracebackType

from fastapi import FastAPI, Request, Response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMValidationError

#: What a look into a value of another type raises; vLLM answers 400 to the other kinds.
_KINDS = (AttributeError, LookupError, RecursionError)
#: pydantic's function that everything goes through, at FastAPI's routes and at ``/invocations``.
_VALIDATES = "validate_python"


def blame_bodies_for_broken_validators(app: FastAPI) -> None:
    """Let the application answer 400 where one of vLLM's validators breaks."""
    for kind in _KINDS:
        app.add_exception_handler(kind, _handler)
    # vLLM has built its layers when it made the application; they are built anew at the first call.
    app.middleware_stack = None


async def _handler(request: Request, error: Exception) -> Response:
    if not _while_validating(error.__traceback__):
        raise error
    refused = VLLMValidationError(f"a field has a value of the wrong type: {error}; correct it")
    return await exception_handler(request, refused)


def _while_validating(trace: TracebackType | None) -> bool:
    return any(frame.f_code.co_name == _VALIDATES for frame, _ in traceback.walk_tb(trace))
