"""Answers 400 instead of 500 to requests that raise an error in one of vLLM's validators.

A validator of vLLM that reads a field before checking its type (``structured_outputs: 5``) raises a
plain Python error.  pydantic does not convert it, so vLLM answers 500 and logs a traceback, for as
many requests as a client sends.  The same happens with JSON that is nested too deep.  Here every
error raised while a body is read is reported as an error of the body.
"""

import traceback
from types import TracebackType

from fastapi import FastAPI, Request, Response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMValidationError

#: Errors of reading a value of the wrong type; vLLM itself answers 400 to other errors.
_KINDS = (AttributeError, LookupError, RecursionError)
#: Functions that read bodies, at FastAPI's routes and at ``/invocations``.
_READ_BODIES = frozenset({"TypeAdapter.validate_python", "Request.json"})


def answer_400_for_validator_errors(app: FastAPI) -> None:
    """Make the application answer 400 if one of vLLM's validators raises such an error."""
    for kind in _KINDS:
        app.add_exception_handler(kind, _handler)
    # vLLM built the middleware stack with the application; it is rebuilt at the first call.
    app.middleware_stack = None


async def _handler(request: Request, error: Exception) -> Response:
    if not _while_reading_body(error.__traceback__):
        raise error
    refused = VLLMValidationError(f"the request body is invalid: {error}; correct it")
    return await exception_handler(request, refused)


def _while_reading_body(trace: TracebackType | None) -> bool:
    frames = (frame.f_code.co_qualname for frame, _ in traceback.walk_tb(trace))
    return not _READ_BODIES.isdisjoint(frames)
