"""A worker whose engine core loses the first request that it gets for ``LOST``, for tests."""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

#: First token of the prompt that is lost.
LOST = 499
_add = Scheduler.add_request
_lost: list[str] = []


class Forgetful:
    """Adds nothing to a worker; naming it makes the worker, and so its core, import this module."""


def _add_or_lose(self: Scheduler, request: Request) -> None:
    if not _lost and request.prompt_token_ids and request.prompt_token_ids[0] == LOST:
        _lost.append(request.request_id)
        return
    _add(self, request)


Scheduler.add_request = _add_or_lose
