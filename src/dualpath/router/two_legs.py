"""A request in two legs, which another proxy sends to the engines that it has chosen.

The protocol is that of vLLM's disaggregated serving.  Both legs are the client's request, with
``kv_transfer_params`` added:

    leg 1 → PE   do_remote_decode, one token; the answer's kv_transfer_params are for leg 2
    leg 2 → DE   do_remote_prefill, and what leg 1 has answered

Each engine is the front end of its own leg, with a link to the scheduler like other front ends
(``scheduler.remote``).  Leg 1 is an attempt with a given PE: look-up, read side, reads, layerwise
prefill and persistence are as always.  Its end is not the attempt's: the attempt is offered to leg
2 under a *handover name* that both legs know, and the DE's front end takes it
(``scheduler.handovers``).  The name is the first of these that a leg carries:

    remote_request_id   of leg 1's answer, as NIXL's connector calls it
    transfer_id         as Mooncake's proxies call it; both legs may then be sent at once
    bootstrap_room      of the request's body, as SGLang's routers call it; likewise
    X-Request-Id        the header that proxies send with both legs; likewise

Leg 1's answer carries the attempt's own name as ``remote_request_id``: no other request has it.

Leg 1 names the DE of leg 2 if the proxy has chosen it by then: as ``remote_engine_id``, or by its
address in the X-Request-Id, where vLLM's router writes it.  Other proxies choose the DE after leg
1, and most of them do not read in leg 1's answer which DE has the KV.  Then the DE that got leg 2
fetches the KV from there.  If it cannot, ``take`` returns the DE that has the KV, and the DE that
got leg 2 passes it on.  Once that leg is over without that DE, ``withdraw`` releases what the
attempt holds there.

If no DE has the KV any more (``take`` raises), the DE's front end begins that leg again, as an
attempt that only this DE may serve and of which it runs the first leg itself
(``prefill_elsewhere``): what the first leg has stored are hits.

An engine reports its own calls that are silent to the scheduler, which judges by the engine's
reports whether its core still makes steps; a prefill at another engine is watched as a router does
(``requests.call_watch``).

Names come from outside, so an engine compares the prompt that it was sent with the prompt of the KV
that it is to use (``core.transfers.prompt_digest``).  What no leg uses is released after a limit.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dualpath.core.blocks import KeyExtras, StoreNamespace, holding_blocks, tenant_tag
from dualpath.core.cluster import Role
from dualpath.core.errors import (
    BadRequestError,
    DeadlineError,
    DualPathError,
    EngineLostError,
    PromptTooLongError,
    TransportError,
)
from dualpath.core.key_cache import KeyCache
from dualpath.core.kv_hints import NO_KV_HINTS, KvRequestHints, hint_results, kv_request_hints
from dualpath.core.names import name_problem
from dualpath.core.transfers import (
    DecodeTransfer,
    PrefillTransfer,
    prompt_digest,
    to_transfer_params,
)
from dualpath.engine.settings import EngineSettings
from dualpath.node.cluster_secret import load_secret
from dualpath.router.engine_calls import Job, OpenCalls
from dualpath.router.engines import EngineInfo, MissingRole
from dualpath.router.requests.call_watch import CallWatch, OpenCall
from dualpath.router.requests.request import check_salt
from dualpath.router.scheduler.remote import (
    REGISTERED_AGAIN_S,
    LinkConnection,
    RemoteAttempt,
    RemoteScheduling,
    ZmqLinkConnection,
)
from dualpath.router.scheduling import (
    AttemptEvent,
    AttemptOrder,
    HandedOver,
    Placed,
    RequestOrder,
)
from dualpath.router.settings import RouterSettings
from dualpath.router.token_api.client import TokenApi
from dualpath.router.token_api.wire import GenerateRequest
from dualpath.router.waits import run_until_broken

logger = logging.getLogger(__name__)

#: A leg does not know how many tokens will be generated; the scheduler reserves HBM for so many, or
#: for those that the context still has room for.
EXPECTED_NEW_TOKENS = 256
REQUEST_ID_HEADER = "X-Request-Id"
#: The ``kv_transfer_params`` of a request.
PARAMETERS = "kv_transfer_params"
#: Of SGLang's routers: a number that both legs of a request carry in their body.
ROOM = "bootstrap_room"
#: Of a second leg that a decode engine has passed on: the id of that engine.
PASSED_ON_HEADER = "X-DualPath-Passed-On-By"
_NAMES = ("remote_request_id", "transfer_id")
#: How vLLM's router writes the addresses of both engines into the id of a request.  The address is
#: bounded, since clients choose ids as well: each place of a long one is tried.
_DECODE_ADDRESS = re.compile(r"___decode_addr_(?P<address>[^_]{1,255})_[0-9a-f]{32}")
_LIMITS = RouterSettings()


class LegParameters(msgspec.Struct, frozen=True):
    """The ``kv_transfer_params`` of a leg, as far as they matter here."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    transfer_id: str | None = None
    remote_prefill_cached_tokens: int | None = None
    kv_hints: KvRequestHints = NO_KV_HINTS


def leg_parameters(params: Mapping[str, Any] | None) -> LegParameters:
    """Return the parameters of a leg; raises ``BadRequestError`` for a malformed value."""
    try:
        known = {key: value for key, value in (params or {}).items() if key != "kv_hints"}
        read = msgspec.convert(known, LegParameters)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise BadRequestError(
            f"kv_transfer_params: {error}; send those of vLLM's disaggregated serving, or none"
        ) from error
    return msgspec.structs.replace(read, kv_hints=kv_request_hints(params))


def leg_of(request: Mapping[str, Any], role: Role) -> LegParameters:
    """Return the parameters of the leg that an engine of this role got with this body.

    Raises ``BadRequestError`` for a malformed value.
    """
    given = request.get(PARAMETERS)
    room = request.get(ROOM)
    if not given and room is not None:
        # SGLang's routers send both legs alike, so the role of the engine says which one it is.
        first = role is Role.PREFILL
        return LegParameters(
            do_remote_decode=first, do_remote_prefill=not first, transfer_id=f"room-{room}"
        )
    return leg_parameters(given if isinstance(given, dict) else None)


def handover_name(params: LegParameters, request_id: str = "") -> str:
    """Return the name under which one leg hands over to the other; empty if it carries none.

    ``request_id`` is the request's ``X-Request-Id``.  A name that is no valid one is hashed.
    """
    name = params.remote_request_id or params.transfer_id or request_id
    if name_problem(name) is None:
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of a first leg; ``cacheable`` False requests a full computation."""

    token_ids: Sequence[int]
    cache_salt: str | None = None
    cacheable: bool = True


@contextlib.asynccontextmanager
async def _deadline(name: str) -> AsyncIterator[None]:
    """Raise ``DeadlineError`` if a prefill takes longer than a whole request may."""
    try:
        async with asyncio.timeout(_LIMITS.request_deadline_s):
            yield
    except TimeoutError as error:
        raise DeadlineError(
            f"the first leg of request {name} is not done after {_LIMITS.request_deadline_s:g} s; "
            "add engines or send fewer requests at once"
        ) from error


class SecondLeg:
    """An attempt with its prompt's KV in this DE's buffer.

    ``transfer`` is what the DE has to know, ``hit_tokens`` of the prompt were loaded instead of
    computed (None: unknown), ``origin`` is a text about where the KV comes from.  ``watch`` watches
    the call of ``engine``, the DE, until the end, when ``ended`` is called.
    """

    def __init__(
        self,
        attempt: RemoteAttempt,
        transfer: DecodeTransfer,
        hit_tokens: int | None,
        origin: str,
        watch: CallWatch,
        engine: EngineInfo,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.transfer, self.hit_tokens, self.origin = transfer, hit_tokens, origin
        self._attempt, self._watch = attempt, watch
        self._end = contextlib.ExitStack()
        self._end.callback(ended)
        self._call = self._end.enter_context(watch.watch(engine, transfer.request_id))

    def decoding_started(self) -> None:
        """The DE generates: called with each of its tokens."""
        self._call.heard()
        self._attempt.decoding_started()

    async def stalls(self) -> None:
        """Raise ``EngineLostError`` when the DE is lost and has sent nothing for a while.

        A DE that the scheduler has lost may decode all the same; one whose core hangs does not.
        """
        await asyncio.wait({self._attempt.broken})
        await _silence(self._watch, self._call)
        self._attempt.check()

    def close(self, reason: str) -> None:
        """Release everything; idempotent."""
        self._attempt.close(reason)
        self._end.close()


async def _silence(watch: CallWatch, call: OpenCall) -> None:
    """Return when nothing of a call's answer has arrived for as long as a core may be silent."""
    while (silent_s := watch.silent_s(call)) < _LIMITS.core_timeout_s:
        await asyncio.sleep(_LIMITS.core_timeout_s - silent_s)


#: Stands for the job of a call that has none: only its trace headers would be used.
_NO_JOB = Job("", (), 1, (), lambda token_ids: ())


async def prefill_at(
    api: TokenApi, prompt: Prompt, engine: EngineInfo, transfer: PrefillTransfer
) -> None:
    """Call a prefill engine for ``TwoLegs.prefill_elsewhere``, as a router does.

    Its token is discarded.
    """
    call = GenerateRequest[dict[str, Any]](
        request_id=transfer.request_id,
        token_ids=prompt.token_ids,
        sampling_params={"temperature": 0.0, "max_tokens": 1, "detokenize": False},
        cache_salt=prompt.cache_salt,
        kv_transfer_params=to_transfer_params(transfer),
    )
    await api.generate(engine, _NO_JOB, call)


class _FirstLeg:
    """The ``AttemptListener`` of a first leg: where it was placed."""

    def __init__(self) -> None:
        self.placed: Placed | None = None

    def notify(self, event: AttemptEvent) -> None:
        """Take an event of the attempt."""
        if isinstance(event, Placed):
            self.placed = event


class TwoLegs:
    """The legs that one engine gets; belongs to one event loop.

    ``engine`` are the engine's settings; its ``two_leg_scheduler`` is the scheduler's address for
    front ends.  ``connection`` and ``clock`` are the link's, by default ZMQ and the loop's clock.
    ``api`` asks other engines for their calls.  ``name`` is this process's at the scheduler, by
    default made of engine, machine and process; ``new_name`` returns one that no process has used.

    Raises ``ConfigError`` for an address that cannot be, or one of another machine without a
    cluster secret.
    """

    def __init__(
        self,
        engine: EngineSettings,
        connection: LinkConnection | None = None,
        clock: Callable[[], float] | None = None,
        api: TokenApi | None = None,
        name: str = "",
        new_name: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.engine_id = engine.engine_id
        self.role = engine.role
        connection = connection or ZmqLinkConnection(
            engine.two_leg_scheduler, load_secret(engine.cluster_secret_file)
        )
        process = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        self._new_name = new_name
        self._link = RemoteScheduling(
            connection,
            name or f"{engine.engine_id}@{process}",
            new_name(),
            clock or asyncio.get_running_loop().time,
            engine.two_leg_scheduler,
        )
        self._api = api
        self._watch = CallWatch(
            self._open_calls,
            _LIMITS.call_silence_s,
            _LIMITS.inquiry_timeout_s,
            self._link.call_waits,
            lambda: None,
        )
        self._missing_role = MissingRole(
            *(self._link.engines, self._link.membership, self._link.wait_for_engines),
            *(_LIMITS.engine_wait_s, self._link.break_unplaced),
        )
        self._keys: tuple[StoreNamespace, KeyCache] | None = None

    def start(self) -> None:
        """Register with the scheduler, and retry until it answers."""
        self._link.start()

    async def stop(self) -> None:
        """Leave the scheduler; idempotent."""
        await self._watch.stop()
        self._missing_role.stop()
        await self._link.stop()

    async def _open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """Return the calls that another engine's server has; None for the own one, which has all.

        Raises ``EngineLostError`` if that server does not answer.
        """
        if engine.engine_id == self.engine_id or self._api is None:
            return None
        return await self._api.open_calls(engine)

    @contextlib.contextmanager
    def own_call(self) -> Iterator[OpenCall | None]:
        """Watch a call that this engine serves without an attempt; None if it has not joined.

        The caller calls ``heard`` for each part of the answer, and waits for ``stalls`` as well.
        """
        alive = self._link.engines.alive(self.role)
        engine = next((one for one in alive if one.engine_id == self.engine_id), None)
        if engine is None:
            yield None
            return
        with self._watch.watch(engine, f"own-{self._new_name()}") as call:
            yield call

    async def stalls(self, call: OpenCall) -> None:
        """Raise ``EngineLostError`` when this engine is lost and sends nothing of its call."""
        await self.until_lost(call.engine)
        await _silence(self._watch, call)
        raise EngineLostError(
            f"engine {self.engine_id} is lost and has sent nothing for "
            f"{_LIMITS.core_timeout_s:g} s; see its log, and restart it"
        )

    async def ends_aborted(self) -> bool:
        """Return whether legs that fail end as aborted, because a trainer has asked for that."""
        return await self._link.ends_aborted()

    # ------------------------------------------------------------------ leg 1

    async def prefill(
        self,
        prompt: Prompt,
        params: LegParameters,
        request_id: str,
        compute: Callable[[PrefillTransfer], Awaitable[bool]],
    ) -> dict[str, Any] | None:
        """Run a first leg at this PE; return the ``kv_transfer_params`` of its answer.

        ``compute`` runs the model and returns whether it succeeded; if not, the result is None.
        ``request_id`` is the request's ``X-Request-Id``, empty without one.

        Raises ``BadRequestError`` for a prompt that no decode engine can hold, ``DeadlineError``
        after ``request_deadline_s`` and ``EngineLostError`` or ``TransportError`` if the request
        may be sent again.
        """
        self._check_role(Role.PREFILL, "first")
        order = await self._order(prompt, params.kv_hints, _LIMITS.engine_wait_s)
        order = msgspec.structs.replace(
            order,
            prefill_engine=self.engine_id,
            decode_engine=params.remote_engine_id or self._decode_engine_in(request_id),
            handover=handover_name(params, request_id) or order.attempt_id,
        )
        async with _deadline(order.handover):
            return await self._first_leg(order, compute)

    def _decode_engine_in(self, request_id: str) -> str:
        """Return the decode engine that a request id names by its address, empty if it names none.

        vLLM's router sends such ids: ``___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_HEX``.
        """
        named = _DECODE_ADDRESS.search(request_id)
        if named is None:
            return ""
        address = named["address"]
        engines = self._link.engines.alive(Role.DECODE)
        return next((e.engine_id for e in engines if urlsplit(e.api_url).netloc == address), "")

    async def _order(self, prompt: Prompt, kv_hints: KvRequestHints, wait_s: float) -> AttemptOrder:
        """Return the order of an attempt at a prompt.

        Raises ``BadRequestError`` if none can be, ``DeadlineError`` without engines in ``wait_s``.
        """
        check_salt(prompt.cache_salt)
        await self._link.wait_for_engines(1, 1, wait_s)
        keys, block_tokens = self._block_keys(prompt)
        self._check_fits(len(prompt.token_ids), block_tokens)
        if kv_hints.kv_hint is not None:
            for action, status, reason in hint_results(kv_hints.kv_hint, keys):
                logger.info(
                    "action %r (%s %s) of KV hint %r is %s: %s",
                    *(action.action_id, action.action_type, action.action_version),
                    *(kv_hints.kv_hint.message_id, status, reason),
                )
        return AttemptOrder(
            attempt_id=f"leg-{self._new_name()}",
            number=1,
            prompt_tokens=len(prompt.token_ids),
            max_new_tokens=self._expected_new_tokens(len(prompt.token_ids)),
            keys=keys,
            cacheable=prompt.cacheable,
            tenant=tenant_tag(prompt.cache_salt),
            prompt_digest=prompt_digest(keys, prompt.token_ids, block_tokens),
            max_load_tokens=kv_hints.max_load_tokens,
        )

    async def _first_leg(
        self, order: AttemptOrder, compute: Callable[[PrefillTransfer], Awaitable[bool]]
    ) -> dict[str, Any] | None:
        request = self._link.begin(RequestOrder(order.attempt_id, order.keys, order.tenant))
        reason, heard = "cancelled", _FirstLeg()
        try:
            attempt = request.attempt(order, heard)
            try:

                async def life() -> int | None:
                    transfer = (await attempt.prepare()).prefill
                    assert transfer is not None, "the PE of the first leg computes the prompt"
                    assert heard.placed is not None, "an attempt with a transfer is placed"
                    assert heard.placed.prefill is not None, "so it has a PE"
                    with self._watch.watch(heard.placed.prefill, order.attempt_id):
                        succeeded = await compute(transfer)
                    if not succeeded:
                        await attempt.prefill_aborted()
                        return None
                    hit_tokens = (await attempt.prefilled()).account.hit_tokens
                    await attempt.offer(order.attempt_id)
                    return hit_tokens

                hit_tokens = await run_until_broken(life(), attempt.broken)
                reason = "failed: the engine has refused it"
            except Exception as error:
                reason = f"failed: {error}"
                raise
            finally:
                attempt.close(reason)
        finally:
            request.end()
        if hit_tokens is None:
            return None
        assert heard.placed is not None, "an attempt is placed before it is prefilled"
        decode = heard.placed.decode
        address = urlsplit(decode.api_url)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": decode.engine_id,
            "remote_request_id": order.attempt_id,
            "remote_host": address.hostname,
            "remote_port": address.port,
            "remote_block_ids": [],
            "tp_size": 1,
            "remote_prefill_cached_tokens": hit_tokens,
        }

    def _block_keys(self, prompt: Prompt) -> tuple[tuple[bytes, ...], int]:
        """Return the keys of a prompt's full blocks, and the tokens of a block."""
        namespace = self._link.engines.namespace
        if namespace is None:
            raise EngineLostError("the scheduler knows no engine yet; send the request again")
        if self._keys is None or self._keys[0] != namespace:
            self._keys = namespace, KeyCache(namespace.geometry.block_tokens)
        keys = self._keys[1].keys(prompt.token_ids, KeyExtras(cache_salt=prompt.cache_salt))
        return tuple(keys), namespace.geometry.block_tokens

    def _expected_new_tokens(self, prompt_tokens: int) -> int:
        """Return for how many tokens that are generated HBM is reserved."""
        engines = self._link.engines.alive(Role.DECODE)
        room = [max((engine.hbm_tokens for engine in engines), default=0)]
        if (context := self._link.engines.limit("max_model_len")) is not None:
            room.append(context)
        return max(1, min(EXPECTED_NEW_TOKENS, min(room) - prompt_tokens))

    def _check_fits(self, prompt_tokens: int, block_tokens: int) -> None:
        engines = self._link.engines.alive(Role.DECODE)
        largest = max((engine.buffer_tokens for engine in engines), default=0)
        mode = self._link.engines.mode
        if mode is None or not mode.moves_bytes:
            return
        if (blocks := holding_blocks(prompt_tokens, block_tokens)) * block_tokens > largest:
            raise PromptTooLongError(
                f"the prompt has {blocks} blocks of {block_tokens} tokens, the largest buffer of a "
                f"decode engine holds {largest // block_tokens}; shorten the prompt or raise the "
                "engines' buffer_bytes"
            )

    def _check_role(self, role: Role, leg: str) -> None:
        """Raise ``BadRequestError`` for a leg that this engine cannot run."""
        if self.role is not role:
            raise BadRequestError(
                f"engine {self.engine_id} is a {self.role.value} engine; send a {leg} leg to a "
                f"{role.value} engine"
            )

    # ------------------------------------------------------------------ leg 2

    async def until_lost(self, engine: EngineInfo) -> None:
        """Return when the scheduler has lost an engine for ``REGISTERED_AGAIN_S``, or twice.

        An engine that was cut off registers again, once.  One whose core hangs does so each time
        that the scheduler loses it, as its control link lives.  While the scheduler is away, its
        engines count as alive.
        """
        known, membership = self._link.engines, self._link.membership

        def is_alive() -> bool:
            return bool(known.waits()) or known.live(engine.engine_id, engine.epoch) is not None

        async def until(alive: bool) -> None:
            while is_alive() is not alive:
                await membership.next_change()

        await until(False)
        try:
            async with asyncio.timeout(REGISTERED_AGAIN_S):
                await until(True)
        except TimeoutError:
            return
        await until(False)

    async def take(
        self, params: LegParameters, request_id: str, *, moves: bool = True
    ) -> SecondLeg | HandedOver:
        """Return the attempt that a second leg continues at this DE, or where its KV stays.

        KV at another DE is moved here, if possible and if ``moves``.  The caller calls
        ``decoding_started`` when the DE generates, and ``close`` in any case; or ``withdraw`` if
        the leg ends without the other DE.
        Raises an error of ``core.errors`` with the reason if there is none.
        """
        self._check_role(Role.DECODE, "second")
        name = handover_name(params, request_id)
        if not name:
            raise BadRequestError(
                f"the second leg has no {' or '.join(_NAMES)} in kv_transfer_params and no "
                f"{REQUEST_ID_HEADER}; send those of the first leg's answer"
            )
        # Not long: without the scheduler the prompt is computed here.
        await self._link.wait_for_engines(0, 1, _LIMITS.first_leg_timeout_s)
        attempt = await self._link.take(name, self.engine_id, moves=moves)
        if isinstance(attempt, HandedOver):
            return attempt
        try:
            attempt.check()
        except (EngineLostError, TransportError):
            attempt.close("its engine is lost")
            raise
        return SecondLeg(
            attempt,
            attempt.transfer,
            params.remote_prefill_cached_tokens,
            "; ".join(filter(None, ("transferred", attempt.order.attempt_id, attempt.note))),
            self._watch,
            attempt.engine,
        )

    def withdraw(self, handed: HandedOver, reason: str) -> None:
        """Release an attempt at another DE, unless that one has taken it; idempotent."""
        self._link.withdraw(handed, reason)

    async def release(self, params: LegParameters, request_id: str, reason: str) -> None:
        """Release what a second leg would have continued, which its DE computes without it.

        Waits for its first leg as ``take`` does.
        """
        with contextlib.suppress(DualPathError):
            leg = await self.take(params, request_id, moves=False)
            if isinstance(leg, HandedOver):
                self.withdraw(leg, reason)
            else:
                leg.close(reason)

    async def prefill_elsewhere(
        self,
        prompt: Prompt,
        params: LegParameters,
        compute: Callable[[EngineInfo, PrefillTransfer], Awaitable[None]],
    ) -> SecondLeg:
        """Have a prefill engine fill this DE's buffer, for a second leg without an attempt.

        ``compute`` calls that engine.  Raises an error of ``core.errors`` with the reason if this
        engine has to compute the prompt itself, also if it has no room for the request now.
        """
        self._check_role(Role.DECODE, "second")
        order = await self._order(prompt, params.kv_hints, _LIMITS.first_leg_timeout_s)
        order = msgspec.structs.replace(order, decode_engine=self.engine_id)
        request = self._link.begin(RequestOrder(order.attempt_id, order.keys, order.tenant))
        reason, heard, leg = "cancelled", _FirstLeg(), None
        attempt = None
        try:
            attempt = begun = request.attempt(order, heard)

            async def life() -> tuple[DecodeTransfer, int]:
                prepared, placed = await begun.prepare(), heard.placed
                assert placed is not None, "an attempt with transfers is placed"
                assert placed.prefill is not None, "an attempt with a given DE has a PE"
                assert prepared.prefill is not None, "so it has a transfer for the PE"
                with self._watch.watch(placed.prefill, order.attempt_id) as call:
                    await run_until_broken(compute(placed.prefill, prepared.prefill), call.broken)
                return prepared.decode, (await begun.prefilled()).account.hit_tokens

            async with _deadline(order.attempt_id):
                transfer, hit_tokens = await run_until_broken(life(), begun.broken)
            assert heard.placed is not None, "its KV has arrived"
            assert heard.placed.prefill is not None, "from a PE"
            origin = f"prefilled by {heard.placed.prefill.engine_id} again"
            decode, ended = heard.placed.decode, request.end
            leg = SecondLeg(begun, transfer, hit_tokens, origin, self._watch, decode, ended)
            return leg
        except Exception as error:
            reason = f"failed: {error}"
            raise
        finally:
            if leg is None:
                if attempt is not None:
                    attempt.close(reason)
                request.end()
