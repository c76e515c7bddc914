"""What agents of a replay say of their sessions beside the turns themselves."""

import asyncio
import logging
from urllib.parse import quote

import aiohttp
import msgspec

from dualpath.laboratory.workload.replay.result import HintsGiven

#: A hint that takes longer is of no use.
_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Hinter:
    """Sends hints to an endpoint of dualpath's router.

    A hint that fails is logged and forgotten: it must not cost the turn.
    """

    def __init__(self, http: aiohttp.ClientSession, endpoint: str, given: HintsGiven) -> None:
        self._http = http
        self._sessions = f"{endpoint}/dualpath/v1/sessions"
        self._given = given

    def name(self, conversation_id: str) -> str | None:
        """Return the name that a turn carries, None if it carries none."""
        return None if self._given is HintsGiven.NONE else conversation_id

    async def tool_begins(
        self, conversation_id: str, cache_salt: str | None, runs_s: float
    ) -> None:
        """Say that the next turn comes in so many seconds."""
        if self._given is HintsGiven.PAUSES:
            await self._say("POST", conversation_id, {"next_turn_s": runs_s}, cache_salt)

    async def over(self, conversation_id: str, cache_salt: str | None) -> None:
        """Say that no turn follows."""
        if self._given is not HintsGiven.NONE:
            await self._say("DELETE", conversation_id, {}, cache_salt)

    async def _say(
        self, method: str, conversation_id: str, hints: dict[str, float], cache_salt: str | None
    ) -> None:
        body: dict[str, object] = {**hints}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        url = f"{self._sessions}/{quote(conversation_id, safe='')}"
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                self._http.request(method, url, data=msgspec.json.encode(body)) as answer,
            ):
                if answer.status != 200:
                    text = (await answer.text())[:200]
                    logger.warning("%s %s: status %d: %s", method, url, answer.status, text)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("%s %s: %r", method, url, error)
