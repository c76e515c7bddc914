"""Hints about sessions that agents of a replay send in addition to their turns."""

import asyncio
import logging
from urllib.parse import quote

import aiohttp
import msgspec

from dualpath.laboratory.workload.replay.result import SentHints

#: Timeout of a hint, after which it is useless.
_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class HintSender:
    """Sends hints to an endpoint of dualpath's router.

    A failed hint is only logged, because it must not fail the turn.
    """

    def __init__(self, http: aiohttp.ClientSession, endpoint: str, given: SentHints) -> None:
        self._http = http
        self._sessions = f"{endpoint}/dualpath/v1/sessions"
        self._given = given

    def session_name(self, conversation_id: str) -> str | None:
        """Return the session name to send with a turn, None for none."""
        return None if self._given is SentHints.NONE else conversation_id

    async def tool_begins(
        self, conversation_id: str, cache_salt: str | None, runs_s: float
    ) -> None:
        """Send the hint that the next turn follows in ``runs_s`` seconds."""
        if self._given is SentHints.PAUSES:
            await self._send("POST", conversation_id, {"next_turn_s": runs_s}, cache_salt)

    async def session_ended(self, conversation_id: str, cache_salt: str | None) -> None:
        """Send the hint that the session has ended."""
        if self._given is not SentHints.NONE:
            await self._send("DELETE", conversation_id, {}, cache_salt)

    async def _send(
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
