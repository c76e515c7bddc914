"""Finds calls whose request the engine's core has lost, while the core computes others.

vLLM's HTTP server knows the requests that it has passed to the core and that have not ended; of
the core it knows only how many it has.  A call that the core has lost would look to the router like
one that waits.  So the core is asked for the ids of its requests, by a utility call of vLLM's: it
arrives at the core behind every request that the server has passed on before, and its answer comes
back behind all of these requests' outputs.  A request that the server has, and the core has not, is
lost.  The last outputs of a request may have arrived and not been processed: a caller believes a
loss only if it is found twice.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

log = logging.getLogger(__name__)

#: Of the core's method; vLLM looks a utility up by its name.
_UTILITY = "dualpath_request_ids"
#: How vLLM's token API begins the name of a request; the name of its call follows.
_PREFIX = "generate-tokens-"
#: Limit of the core's answer, shorter than that of an inquiry (``inquiry_timeout_s``).  A core that
#: is in a long step answers the next time.
_ANSWER_S = 2.0


def answer_for_requests() -> None:
    """Let the cores of this process answer with their requests; idempotent."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, _UTILITY, _request_ids)


def _request_ids(core: "EngineCore") -> list[str]:
    return list(core.scheduler.requests)


async def lost_calls(client: Any, calls: Collection[str]) -> set[str]:  # noqa: ANN401 - vLLM's
    """Return those of the open ``calls`` whose request the core of this server does not have.

    ``client`` is vLLM's ``AsyncLLM``.  Nothing is returned if the core does not answer in time:
    whether it hangs is judged by the steps that it reports.
    """
    before = _passed_on(client, calls)
    ask = getattr(getattr(client, "engine_core", None), "call_utility_all_async", None)
    if not before or ask is None:
        return set()
    try:
        async with asyncio.timeout(_ANSWER_S):
            answers = await ask(_UTILITY)
    except Exception as error:  # a time-out, or vLLM's own errors of a core that has ended
        log.warning("the engine's core has not answered which requests it has: %r", error)
        return set()
    known = {request_id for answer in answers for request_id in answer}
    after = _passed_on(client, calls)
    return {
        call
        for call, request_ids in before.items()
        if after.get(call) == request_ids and known.isdisjoint(request_ids)
    }


def _passed_on(client: Any, calls: Collection[str]) -> dict[str, tuple[str, ...]]:  # noqa: ANN401
    """Return vLLM's ids of the requests of these calls that the server has passed to the core."""
    processor = getattr(client, "output_processor", None)
    known = getattr(processor, "external_req_ids", {})
    found = {call: known.get(f"{_PREFIX}{call}") for call in calls}
    return {call: tuple(ids) for call, ids in found.items() if ids}
