"""The table from errors to HTTP statuses, and from an engine's status back to an error.

    status            error of the router            what follows
    400, 413, 422     BadRequestError                final: no other engine would serve it either
    429               OverloadedError                the client may try again
    other 4xx         IncompatibleError              the engine is not set up for this router
    504               DeadlineError
    503               what may pass, a lost engine   the router tries another engine; its own
                      engine, a draining router      clients may try again
    500               wrong set-ups and defects

An engine answers 400 to what does not validate, 422 to what it understands but cannot process, and
413 where a body is too large.  vLLM 0.32 has no other 4xx that concerns the request: 401 asks for
an API key, 404 and 405 mean that the route is not there (``--enable-scale-out``), or that a proxy
stands in between.  To take those as the client's mistake would blame every request for an engine's
missing argument.
"""

from dualpath.core.errors import (
    BadRequestError,
    BufferTooSmallError,
    DeadlineError,
    DualPathError,
    EngineLostError,
    IncompatibleError,
    OverloadedError,
    PromptTooLongError,
)
from dualpath.router.api_keys import ENGINE_KEY_VARIABLE
from dualpath.router.refusals import PROMPT_PARAMETER
from dualpath.router.token_api.wire import ApiError

BAD_REQUEST = 400
NOT_FOUND = 404
#: A body came too slowly.
TIMED_OUT_BODY = 408
TOO_LARGE = 413
#: KV that an emulated engine found to be wrong: the test has failed, nothing may hide it.
UNPROCESSABLE = 422
TOO_MANY = 429
_DEFECT = 500
UNAVAILABLE = 503
_TIMED_OUT = 504

#: Statuses with a time to retry: the same request may then be served.
LATER = frozenset({TOO_MANY, UNAVAILABLE})

#: Statuses with which an engine refuses the request itself, not the caller or the route.
_REQUEST_REFUSED = frozenset({BAD_REQUEST, TOO_LARGE, UNPROCESSABLE})

_STATUS_OF: tuple[tuple[type[DualPathError], int], ...] = (
    (BadRequestError, BAD_REQUEST),
    (BufferTooSmallError, BAD_REQUEST),
    (OverloadedError, TOO_MANY),
    (DeadlineError, _TIMED_OUT),
    (IncompatibleError, _DEFECT),
    (DualPathError, UNAVAILABLE),
)


def status_of(error: Exception) -> int:
    """Return the status with which a server answers a request that ended with ``error``."""
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), _DEFECT)


def api_error(error: DualPathError) -> ApiError:
    """Return the body of that answer."""
    param = PROMPT_PARAMETER if isinstance(error, PromptTooLongError) else None
    return ApiError(str(error), status_of(error), param=param)


def engine_error(
    engine: str, status: int, message: str
) -> BadRequestError | EngineLostError | IncompatibleError:
    """Return the error for an answer with ``status``; ``engine`` is its name and address."""
    if status in _REQUEST_REFUSED:
        return BadRequestError(message)
    answered = f"{engine} answered {status}: {message}"
    if 400 <= status < 500:
        return IncompatibleError(
            f"{answered}; start it with --enable-scale-out, and the router with the engines' key, "
            f"if they have one, in {ENGINE_KEY_VARIABLE}"
        )
    return EngineLostError(f"{answered}; see its log")
